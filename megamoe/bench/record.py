"""Rows of a benchmark and the files made of them: JSON and CSV. Standard library only."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from io import StringIO
from pathlib import Path
from typing import TextIO

from megamoe.bench.cells import AT, FEWEST
from megamoe.bench.floors import Ceilings, Cost
from megamoe.bench.peers import BEST, Peers
from megamoe.bench.stats import Line, Timing, geomean, line_through
from megamoe.errors import FileError
from megamoe.files import writable_folder, write_atomic

OK, WRONG, FAILED, ABSENT = "ok", "WRONG", "failed", "absent"
RAISED = 70  # exit code: a contestant of ours raised, as `sysexits.h` has it


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant in one cell. There are times only where the result was checked and right."""

    cell: str
    contestant: str
    recipe: str
    ours: bool
    status: str  # ok, WRONG (not timed), failed (raised), absent (cannot run here)
    note: str  # why not, or what to know
    provenance: str
    touched: int = 0  # experts that some token uses, or groups
    how: str = ""  # "graph" or "eager"
    count: int = 0  # timed calls
    us: float | None = None  # median, L2 flushed
    low_us: float | None = None
    spread: float | None = None  # between rounds
    tflops: float | None = None
    gbs: float | None = None
    weight_gbs: float | None = None  # the weights alone
    flops: int = 0
    num_bytes: int = 0  # touched weights + tokens in and out
    weight_bytes: int = 0
    floor_us: float | None = None
    floor_by: str = ""
    of_floor: float | None = None  # us / floor_us
    read_us: float | None = None  # one launch that reads the touched weights
    of_read: float | None = None
    error: float | None = None  # relative Frobenius
    bound: float | None = None
    versus: dict[str, float] = field(default_factory=dict)  # us / recorded or other's time

    @property
    def label(self) -> str:
        """Contestant and recipe in one word."""
        return f"{self.contestant} {self.recipe}".strip() if self.ours else self.contestant


@dataclass(frozen=True, slots=True)
class Measured:
    """What turns a checked contestant into a row with figures."""

    cost: Cost
    timing: Timing
    read: Timing | None
    ceilings: Ceilings

    def columns(self) -> dict[str, object]:
        us = self.timing.us
        floor_us, floor_by = self.cost.floor(self.ceilings)
        read_us = None if self.read is None else self.read.us
        return {
            "how": self.timing.how,
            "count": self.timing.count,
            "us": us,
            "low_us": self.timing.low_us,
            "spread": self.timing.spread,
            "tflops": self.cost.flops / us / 1e6,
            "gbs": self.cost.num_bytes / us / 1e3,
            "weight_gbs": self.cost.weight_bytes / us / 1e3,
            "flops": self.cost.flops,
            "num_bytes": self.cost.num_bytes,
            "weight_bytes": self.cost.weight_bytes,
            "floor_us": floor_us,
            "floor_by": floor_by,
            "of_floor": us / floor_us,
            "read_us": read_us,
            "of_read": None if read_us is None else us / read_us,
        }


@dataclass(frozen=True, slots=True)
class FixedCost:
    """What a call costs before any expert: the line through its times over the experts touched."""

    cell: str  # without the experts
    contestant: str
    recipe: str
    line: Line  # microseconds over experts touched
    worst_us: float  # of the point that is farthest from the line
    expert_bytes: int
    points: tuple[tuple[int, float], ...]
    read: Line | None = None  # of one launch that reads the same weights

    @classmethod
    def of(cls, cell: str, rows: Sequence[Row]) -> FixedCost:
        """The line of one contestant's rows, which differ in the experts touched."""
        points = tuple((r.touched, r.us) for r in rows if r.us is not None)
        line = line_through(points)
        worst = max((us - line.at(touched) for touched, us in points), key=abs)
        first, last = rows[0], rows[-1]
        each = (last.weight_bytes - first.weight_bytes) // (last.touched - first.touched)
        reads = [(r.touched, r.read_us) for r in rows if r.read_us is not None]
        read = line_through(reads) if len(reads) == len(rows) else None
        return cls(cell, first.contestant, first.recipe, line, worst, each, points, read)

    @property
    def us(self) -> float:
        return self.line.intercept

    @property
    def gbs(self) -> float | None:
        """What the slope means: an expert's weights over its time; None where it has none."""
        return self.expert_bytes / self.line.slope / 1e3 if self.line.slope > 0 else None

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "gbs": self.gbs}


@dataclass(frozen=True, slots=True)
class Report:
    """All rows of a run, with what is needed to believe or repeat them."""

    title: str
    provenance: str
    method: str
    ceilings: Ceilings
    rows: tuple[Row, ...]
    peers: Peers | None = None

    @property
    def exit_code(self) -> int:
        """1: a wrong result; 70: one of our backends raised; 3: nothing could be timed; else 0."""
        if any(r.status == WRONG for r in self.rows):
            return 1
        if any(r.ours and r.status == FAILED for r in self.rows):
            return RAISED
        return 0 if any(r.status == OK for r in self.rows) else 3

    @property
    def rivals(self) -> tuple[str, ...]:
        """Whom `versus` compares with: the peers recorded in every cell, or who ran beside ours."""
        if self.peers is not None:
            return (BEST, *self.peers.common)
        return tuple(dict.fromkeys(name for r in self.rows for name in r.versus))

    def geomeans(self) -> dict[str, dict[str, tuple[float, int]]]:
        """Per contestant: geometric mean of each ratio, and over how many cells it was taken."""
        means: dict[str, dict[str, tuple[float, int]]] = {}
        ratios = {"x floor": "of_floor", "x read": "of_read"}
        for label in dict.fromkeys(r.label for r in self.rows if r.status == OK):
            rows = [r for r in self.rows if r.label == label and r.status == OK]
            values = {
                name: [v for r in rows if (v := getattr(r, column)) is not None]
                for name, column in ratios.items()
            }
            values |= {f"/ {n}": [r.versus[n] for r in rows if n in r.versus] for n in self.rivals}
            means[label] = {n: (geomean(v), len(v)) for n, v in values.items() if v}
        return means

    def fixed_costs(self) -> tuple[FixedCost, ...]:
        """Of every contestant that was timed with several numbers of experts touched."""
        groups: dict[tuple[str, str], list[Row]] = {}
        for r in self.rows:
            cell, at, _ = r.cell.partition(AT)
            if at and r.status == OK:
                groups.setdefault((cell, r.label), []).append(r)
        return tuple(
            FixedCost.of(cell, rows) for (cell, _), rows in groups.items() if len(rows) >= FEWEST
        )

    def best_of_ours(self) -> dict[str, Row]:
        """The fastest checked row of ours in each cell."""
        best: dict[str, Row] = {}
        for r in self.rows:
            if r.ours and r.status == OK and r.us is not None:
                old = best.get(r.cell)
                if old is None or old.us is None or r.us < old.us:
                    best[r.cell] = r
        return best

    def as_dict(self) -> dict[str, object]:
        peers = None if self.peers is None else asdict(self.peers)
        return {
            "title": self.title,
            "provenance": self.provenance,
            "method": self.method,
            "ceilings": asdict(self.ceilings),
            "rows": [asdict(r) for r in self.rows],
            "geomeans": {
                label: {n: {"mean": mean, "cells": cells} for n, (mean, cells) in means.items()}
                for label, means in self.geomeans().items()
            },
            "fixed": [cost.as_dict() for cost in self.fixed_costs()],
            "peers": peers,
            "exit_code": self.exit_code,
        }


def write(report: Report, folder: str | Path, name: str) -> list[Path]:
    """Write `name`.json and `name`.csv into `folder`, which is made if it is missing."""
    where = writable_folder(folder)
    as_json, as_csv = where / f"{name}.json", where / f"{name}.csv"
    write_atomic(as_json, json.dumps(report.as_dict(), indent=1) + "\n")
    table = StringIO()
    write_csv(report.rows, table)
    write_atomic(as_csv, table.getvalue())
    return [as_json, as_csv]


NOT_ITS_OWN = (OSError, ValueError, KeyError, TypeError, AttributeError)  # what reading raises


def no_record(error: Exception, path: str | Path, of: str) -> FileError:
    """The error of a file that is no record: which of its parts is missing, or that it is none.

    >>> str(no_record(KeyError("rows"), "a.json", "megamoe bench"))
    "the record must be a JSON file of megamoe bench; got a.json: it has no 'rows'"
    """
    if isinstance(error, OSError):
        return FileError(f"the record must be readable; got {error}")
    if isinstance(error, KeyError):
        why = f"it has no {error.args[0]!r}"
    else:
        why = f"no JSON, {error}" if isinstance(error, ValueError) else "its contents are others"
    return FileError(f"the record must be a JSON file of {of}; got {path}: {why}")


def read(path: str | Path, peers: Peers | None = None) -> Report:
    """The report that `write` left as JSON; `peers`, if given, take the place of its own."""
    try:
        data = json.loads(Path(path).read_text())
        rows = [Row(**row) for row in data["rows"]]
        if peers is not None:
            rows = [replace(r, versus=peers.ratios(r.cell, r.us)) if r.us else r for r in rows]
        elif data["peers"] is not None:
            peers = Peers(**data["peers"])
        ceilings = Ceilings(**data["ceilings"])
        return Report(
            data["title"], data["provenance"], data["method"], ceilings, tuple(rows), peers
        )
    except NOT_ITS_OWN as error:
        raise no_record(error, path, "megamoe bench") from error


def write_csv(rows: Sequence[Row], file: TextIO) -> None:
    """One line per row; ratios to recorded peers get a column each, provenance stands last."""
    writer = csv.writer(file, lineterminator="\n")
    names = [f.name for f in fields(Row) if f.name not in ("versus", "provenance")]
    peers = list(dict.fromkeys(peer for r in rows for peer in r.versus))
    writer.writerow([*names, *(f"vs_{peer}" for peer in peers), "provenance"])
    for r in rows:
        values = ["" if (v := getattr(r, name)) is None else v for name in names]
        writer.writerow([*values, *(r.versus.get(peer, "") for peer in peers), r.provenance])
