"""`megamoe bench layer`: every contestant in every cell, checked, then timed side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megamoe.bench import ceilings as ceilings_of
from megamoe.bench.cells import SEED, Cell
from megamoe.bench.contestants import Contestant, Entry, contestants
from megamoe.bench.floors import Ceilings, layer_cost
from megamoe.bench.gate import Gate, Verdict
from megamoe.bench.inputs import Job, Weights, make_job
from megamoe.bench.peers import Peers
from megamoe.bench.provenance import provenance
from megamoe.bench.reading import Reader
from megamoe.bench.record import ABSENT, FAILED, OK, WRONG, Measured, Report, Row
from megamoe.bench.timer import Prepared, Timer
from megamoe.errors import NotAvailable, RangeError, require

Progress = Callable[[str, int, int], None]  # step, done, of
Field = Callable[[Cell], Sequence[Contestant]]


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure; what is measured are the cells."""

    backends: tuple[str, ...] = ("auto",)
    recipes: tuple[str, ...] = ("w4a8_block",)
    device: str = "cpu"
    repeats: int = 25
    rounds: int = 3
    flush: str = "memset"
    eager: bool = False  # time calls without CUDA graphs
    graph_calls: int = 1  # calls in a graph, each after a dense product
    seed: int = SEED

    def __post_init__(self) -> None:
        require(
            0 <= self.seed < 2**32,
            "seed must lie between 0 and 2**32 - 1",
            got=self.seed,
            kind=RangeError,
        )


def measure(
    cells: Sequence[Cell],
    settings: Settings,
    *,
    peers: Peers | None = None,
    field: Sequence[Contestant] | Field | None = None,
    progress: Progress = lambda step, done, of: None,
    on_cell: Callable[[Report], None] = lambda so_far: None,
) -> Report:
    """Check and time every contestant in every cell.

    field    the contestants, instead of those that `settings` names, or what gives a cell its own
    on_cell  called with the report so far after every cell, so that an interrupted run leaves one
    """
    device = torch.device(settings.device)
    chosen = contestants(settings.backends, settings.recipes, device) if field is None else field
    timer = Timer(
        device, flush=settings.flush, repeats=settings.repeats, rounds=settings.rounds,
        graph_calls=settings.graph_calls,
    )  # fmt: skip
    reader = Reader(device)
    progress("cells", 0, len(cells))
    report = Report(
        title="one layer: dispatch, L1, activation, L2, combine",
        provenance=provenance(device),
        method=timer.method,
        ceilings=ceilings_of.measure(device, reader),
        rows=(),
        peers=peers,
    )
    weights: Weights | None = None
    for done, cell in enumerate(cells, 1):
        if weights is None or weights.shape != cell.shape:
            weights = Weights(cell.shape, device, settings.seed)  # made when they are asked for
        job = make_job(cell, weights, settings.seed)
        here = chosen(cell) if callable(chosen) else chosen
        rows = _Race(job, settings, timer, reader, report).run(here, progress)
        report = replace(report, rows=report.rows + tuple(rows))
        on_cell(report)
        progress("cells", done, len(cells))
    return report


class _Race:
    """One cell: contestants are made and checked one by one, then timed in turns."""

    def __init__(
        self, job: Job, settings: Settings, timer: Timer, reader: Reader, report: Report
    ) -> None:
        self.job, self.settings, self.timer, self.reader = job, settings, timer, reader
        self.ceilings: Ceilings = report.ceilings
        self.peers, self.provenance = report.peers, report.provenance
        self.gate = Gate(job)
        self.touched = self.job.touched

    def run(self, field: Sequence[Contestant], progress: Progress) -> list[Row]:
        rows: dict[str, Row] = {}
        entries: dict[str, tuple[Entry, Prepared]] = {}
        for done, one in enumerate(field):
            progress("check", done, len(field))
            key = f"{one.name} {one.recipe}"
            try:
                entry = one.make(self.job)
                verdict, prepared = self._check(entry)
            except NotAvailable as error:
                rows[key] = self._row(one, ABSENT, str(error))
            except Exception as error:
                rows[key] = self._row(one, FAILED, first_line(error))
            else:
                status = OK if verdict.ok else WRONG
                rows[key] = self._row(
                    one, status, verdict.why or entry.note, error=verdict.error, bound=verdict.bound
                )
                if prepared is not None:
                    entries[key] = entry, prepared
        progress("check", len(field), len(field))
        return [*self._timed(rows, entries).values()]

    def _check(self, entry: Entry) -> tuple[Verdict, Prepared | None]:
        """Judge a direct call, then the very thing that will be timed."""
        verdict = self.gate.eager(entry.run, entry.judged_as, entry.bound, self.timer)
        if not verdict.ok:
            return verdict, None
        capture = entry.capturable and not self.settings.eager
        prepared = self.timer.prepare(entry.run, capture=capture)
        verdict = self.gate.replay(prepared, entry.judged_as, entry.bound, self.timer)
        return verdict, prepared if verdict.ok else None

    def _timed(
        self, rows: dict[str, Row], entries: dict[str, tuple[Entry, Prepared]]
    ) -> dict[str, Row]:
        """The rows with figures; a read of the same weights takes part for every size."""
        costs = {
            key: layer_cost(self.job.cell, self.touched, entry.expert_bytes, entry.mma)
            for key, (entry, _) in entries.items()
        }
        sizes = {cost.weight_bytes for cost in costs.values()}
        reads = {
            f"read {n}": self.reader.prepare(n, self.timer)
            for n in sorted(sizes)
            if self.settings.device != "cpu"  # a CPU's read is no floor of its calls
        }
        ready = {key: prepared for key, (_, prepared) in entries.items()}
        try:
            times = self.timer.time(ready | reads)
        except Exception as error:  # the device is lost, or memory ran out: no figure is kept
            why = f"raised while being timed beside the others: {first_line(error)}"
            return rows | {
                key: replace(rows[key], status=FAILED, note=why) for key in entries
            }  # fmt: skip
        for key, cost in costs.items():
            entry, prepared = entries[key]
            after = self.gate.replay(prepared, entry.judged_as, entry.bound, self.timer)
            if not after.ok:
                why = f"right before the timing, wrong after it: {after.why}"
                rows[key] = replace(rows[key], status=WRONG, note=why, error=after.error)
                continue
            read = times.get(f"read {cost.weight_bytes}")
            columns: dict[str, Any] = Measured(cost, times[key], read, self.ceilings).columns()
            row = replace(rows[key], **columns)
            if self.peers is not None:
                row = replace(row, versus=self.peers.ratios(row.cell, times[key].us))
            rows[key] = row
        return rows

    def _row(self, one: Contestant, status: str, note: str, **more: Any) -> Row:
        return Row(
            cell=self.job.cell.name, contestant=one.name, recipe=one.recipe, ours=one.ours,
            status=status, note=note, provenance=self.provenance, touched=self.touched, **more,
        )  # fmt: skip


def first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no text'}"
