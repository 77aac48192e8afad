"""`megamoe bench sweep`: Hopper's staged layer with every candidate tile beside the table's.

Each candidate is a contestant of `bench.layer`: checked, captured, and timed in turns with the
others. Where the table's tile is slower than the best by more than the rounds differ, a row of
`planner/tables/hopper.py` wants an edit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from multiprocessing import get_context

import torch
from torch import Tensor

from megamoe.bench.cells import Cell
from megamoe.bench.contestants import Contestant, Entry, Factory
from megamoe.bench.inputs import Job, normal
from megamoe.bench.layer import Progress, Settings, measure
from megamoe.bench.record import OK, WRONG, Report, Row
from megamoe.engine import backends
from megamoe.engine.call import Call
from megamoe.engine.planning import plan_for, traits_of
from megamoe.engine.status import DeviceStatus
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import NotAvailable, RangeError, require
from megamoe.formats.spec import recipe_named
from megamoe.planner.hopper import candidates, label, pick
from megamoe.planner.launches import Tile
from megamoe.planner.numerics import narrowest_mma
from megamoe.planner.plan import with_tile
from megamoe.problem import Options
from megamoe.routing.samplers import sample_routing

TINY = (4, 256, 512, 2)  # experts, intermediate, hidden, top_k: cubins do not depend on them


@dataclass(frozen=True, slots=True)
class Choice:
    """One cell: what the table picks, and all that was timed, the fastest first."""

    cell: str
    rows_per_expert: float
    picked: str
    why: str  # the table's reason
    timed: tuple[Row, ...]

    @property
    def worse_by(self) -> float | None:
        """How much slower the table's tile is than the best one; 0.0 where it is the best."""
        times = {row.contestant: row.us for row in self.timed if row.us is not None}
        return times[self.picked] / min(times.values()) - 1 if self.picked in times else None

    def as_dict(self) -> dict[str, object]:
        us = {row.contestant: row.us for row in self.timed}
        columns = {name: value for name, value in asdict(self).items() if name != "timed"}
        return {**columns, "worse_by": self.worse_by, "us": us}


@dataclass(frozen=True, slots=True)
class Sweep:
    """The choices of a run, and the report they are read from."""

    recipe: str
    report: Report
    choices: tuple[Choice, ...]

    @property
    def exit_code(self) -> int:
        """1: a wrong result; 3: nothing could be timed; else 0. Not every tile must compile."""
        if any(row.status == WRONG for row in self.report.rows):
            return 1
        return 0 if any(row.status == OK for row in self.report.rows) else 3

    def as_dict(self) -> dict[str, object]:
        data = self.report.as_dict()
        choices = [choice.as_dict() for choice in self.choices]
        return {**data, "recipe": self.recipe, "choices": choices, "exit_code": self.exit_code}


def sweep(
    cells: Sequence[Cell],
    recipe: str,
    settings: Settings,
    *,
    budget_s: float = 600.0,
    workers: int = 8,
    progress: Progress = lambda step, done, of: None,
) -> Sweep:
    """Time the layer in every cell with every candidate tile; none is begun after `budget_s`.

    workers  processes that compile the candidates first, side by side; 0: each when it is met
    """
    recipe_named(recipe)
    require(budget_s > 0, "the budget must be positive", got=budget_s, kind=RangeError)
    device = torch.device(settings.device)
    backends.resolve("hopper", "staged", device)
    deadline = time.monotonic() + budget_s
    fields = {cell.name: field_of(cell, recipe, deadline) for cell in cells}
    if workers:
        wanted = {(tile, cell.shape.options) for cell in cells for tile in tiles_at(cell, recipe)}
        compile_ahead(recipe, wanted, settings.device, workers, budget_s / 2, progress)
    report = measure(cells, settings, field=lambda cell: fields[cell.name], progress=progress)
    return Sweep(recipe, report, tuple(choice_of(cell, recipe, report) for cell in cells))


def load_of(cell: Cell) -> float:
    """Mean rows of an expert: what the table goes by."""
    return cell.num_pairs / cell.shape.num_experts


def tiles_at(cell: Cell, recipe: str) -> tuple[Tile, ...]:
    """The candidates of a cell, the table's tile first."""
    return candidates(recipe, pick(recipe, load_of(cell))[0])


def field_of(cell: Cell, recipe: str, deadline: float) -> list[Contestant]:
    return [
        Contestant(label(tile), recipe, True, _timely(layer_with(recipe, tile), deadline))
        for tile in tiles_at(cell, recipe)
    ]


def choice_of(cell: Cell, recipe: str, report: Report) -> Choice:
    tile, why = pick(recipe, load_of(cell))
    rows = [row for row in report.rows if row.cell == cell.name and row.status == OK]
    timed = sorted(rows, key=lambda row: row.us or float("inf"))
    return Choice(cell.name, load_of(cell), label(tile), why, tuple(timed))


def layer_with(recipe: str, tile: Tile) -> Factory:
    """The staged layer with this tile in both linears."""

    def make(job: Job) -> Entry:
        job.require_no_shared("sweeps")
        weights = job.weights[recipe]
        run = layer_call(
            (job.x, job.topk_idx, job.topk_weights), weights, job.cell.shape.options, tile
        )
        return Entry(
            run=run,
            backend="hopper",
            expert_bytes=weights.nbytes // weights.num_experts,
            mma=narrowest_mma(recipe),
            judged_as=recipe,
            bound=recipe_named(recipe).tolerance,
        )

    return make


def layer_call(
    inputs: tuple[Tensor, Tensor, Tensor], weights: ExpertWeights, options: Options, tile: Tile
) -> Callable[[], Tensor]:
    from megamoe.engine.hopper import HOPPER

    call = Call(*inputs, weights, options, None, DeviceStatus(weights.device))
    traits = traits_of("hopper", weights, None)
    overrides = (("backend", "hopper"), ("mode", "staged"))
    num_tokens, top_k = inputs[1].shape
    plan = plan_for(
        weights, options, traits, num_tokens=num_tokens, top_k=top_k, overrides=overrides
    )
    swept = with_tile(plan, tile)
    return lambda: HOPPER.run(call, swept)


def _timely(make: Factory, deadline: float) -> Factory:
    def make_or_not(job: Job) -> Entry:
        require(
            time.monotonic() < deadline,
            "a sweep begins no candidate after its budget",
            got="no time left",
            fix="raise --budget or name fewer cells",
            kind=NotAvailable,
        )
        return make(job)

    return make_or_not


def compile_ahead(
    recipe: str,
    wanted: set[tuple[Tile, Options]],
    device: str,
    workers: int,
    limit_s: float,
    progress: Progress,
) -> None:
    """Fill the compiler's cache from several processes; what fails here fails again when timed."""
    progress("compile", 0, len(wanted))
    done = 0

    def count(_: object) -> None:
        nonlocal done
        done += 1
        progress("compile", done, len(wanted))

    # spawn: a forked process cannot use the parent's CUDA
    with ProcessPoolExecutor(min(workers, len(wanted)), get_context("spawn")) as pool:
        futures = [pool.submit(compile_one, recipe, *one, device) for one in wanted]
        for future in futures:
            future.add_done_callback(count)
        wait(futures, timeout=limit_s)
        pool.shutdown(cancel_futures=True)


def compile_one(recipe: str, tile: Tile, options: Options, device: str) -> None:
    """One small call: its cubins are those of any shape."""
    where = torch.device(device)
    experts, intermediate, hidden, top_k = TINY
    weights = ExpertWeights.quantize(
        normal(where, 0, experts, 2 * intermediate, hidden).bfloat16() / hidden**0.5,
        normal(where, 1, experts, hidden, intermediate).bfloat16() / intermediate**0.5,
        recipe,
    )
    idx, gates = sample_routing(8, experts, top_k, seed=0)
    inputs = normal(where, 2, 8, hidden).bfloat16(), idx.to(where), gates.to(where)
    with torch.no_grad():
        layer_call(inputs, weights, options, tile)()
    if where.type == "cuda":
        torch.cuda.synchronize(where)
