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
from megamoe.errors import NotAvailable, require

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
    chain: int = 1  # calls one behind the other, of two sets of weights
    seed: int = SEED


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
        chain=settings.chain,
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
    seeds = range(settings.seed, settings.seed + (2 if settings.chain > 1 else 1))
    jobs: list[Job] = []
    for done, cell in enumerate(cells, 1):
        weights = [job.weights for job in jobs]
        jobs.clear()
        if not weights or weights[0].shape != cell.shape:
            weights.clear()  # free the last shape's before making the next one's
            weights += [Weights(cell.shape, device, seed) for seed in seeds]
        jobs = [make_job(cell, each, settings.seed) for each in weights]
        here = chosen(cell) if callable(chosen) else chosen
        rows = _Race(jobs, settings, timer, reader, report).run(here, progress)
        report = replace(report, rows=report.rows + tuple(rows))
        on_cell(report)
        progress("cells", done, len(cells))
    return report


class _Race:
    """One cell: contestants are made and checked one by one, then timed in turns."""

    def __init__(
        self, jobs: Sequence[Job], settings: Settings, timer: Timer, reader: Reader, report: Report
    ) -> None:
        """jobs  one, and in a chain another that takes turns with it"""
        self.jobs, self.settings, self.timer, self.reader = jobs, settings, timer, reader
        self.job = jobs[0]
        self.ceilings: Ceilings = report.ceilings
        self.peers, self.provenance = report.peers, report.provenance
        self.gates = [Gate(each) for each in jobs]
        self.gate = self.gates[0]
        self.touched = self.job.touched

    def run(self, field: Sequence[Contestant], progress: Progress) -> list[Row]:
        rows: dict[str, Row] = {}
        entries: dict[str, tuple[Entry, Prepared]] = {}
        for done, one in enumerate(field):
            progress("check", done, len(field))
            key = f"{one.name} {one.recipe}"
            try:
                entry = one.make(self.job)
                self._require_cold(entry)
                twins = [one.make(job) for job in self.jobs[1:]]
                verdict, prepared = self._check(entry, twins)
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

    def _require_cold(self, entry: Entry) -> None:
        """In a chain nothing is flushed between calls: their weights must not stay in L2."""
        num_bytes = entry.expert_bytes * self.touched
        if self.timer.on_gpu and len(self.jobs) > 1:
            cache = torch.cuda.get_device_properties(self.job.device).L2_cache_size
            require(
                num_bytes >= 2 * cache,
                f"a call of a chain must read twice as much as L2 holds ({2 * cache >> 20} MiB)",
                got=f"{num_bytes >> 20} MiB of weights",
                fix="touch more experts, or time one call after a flush",
                kind=NotAvailable,
            )

    def _check(self, entry: Entry, twins: Sequence[Entry]) -> tuple[Verdict, Prepared | None]:
        """Judge a direct call, then the very thing that will be timed."""
        for gate, each in zip(self.gates, [entry, *twins], strict=True):
            verdict = gate.eager(each.run, each.judged_as, each.bound, self.timer)
            if not verdict.ok:
                return verdict, None
        capture = entry.capturable and not self.settings.eager
        twin = twins[0].run if twins else None
        prepared = self.timer.prepare(entry.run, capture=capture, twin=twin)
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
        reads = {f"read {n}": self.reader.prepare(n, self.timer) for n in sorted(sizes)}
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
            read = times[f"read {cost.weight_bytes}"]
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
