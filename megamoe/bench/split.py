"""`megamoe bench split`: L1 and L2 side by side on two parts of the SMs, beside other modes.

Every cell is timed in mode staged, in fused where one launch takes it, and in split for every
partition that is asked for: tokens x widths x partitions, the sweep of the published split kernels.
Staged is held against the reference, all others have its bits, and single calls are shuffled: in
blocks, a contestant gains up to 15% by what stands before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from megamoe.bench.cells import SEED, Cell, Shape
from megamoe.bench.gate import Gate, poisoned_call, poisoned_memory
from megamoe.bench.inputs import Job, Weights, make_job
from megamoe.bench.layer import Progress
from megamoe.bench.provenance import provenance
from megamoe.bench.stats import Timing
from megamoe.bench.timer import Run, Timer
from megamoe.engine import backends
from megamoe.engine.layer import MoE
from megamoe.errors import MegaMoEError, RangeError, require
from megamoe.formats.spec import recipe_named
from megamoe.planner.choice import Value
from megamoe.planner.plan import Plan

STAGED = "staged"


@dataclass(frozen=True, slots=True)
class SplitRow:
    """One contestant in one cell."""

    cell: str
    recipe: str
    intermediate: int
    num_experts: int
    rows: int  # that the experts compute
    contestant: str  # "staged", "fused" or "split 88 + 44"
    tile: str
    us: float | None  # None: it was not timed
    spread: float | None
    staged_us: float
    tflops: float | None
    hbm_gbs: float | None  # weights that are touched, tokens in and out
    why: str  # "" where the bits are right
    provenance: str

    @property
    def ratio(self) -> float | None:
        """Its time over that of staged launches."""
        return None if self.us is None else self.us / self.staged_us

    def as_dict(self) -> dict[str, object]:
        """With what follows from it."""
        return {**asdict(self), "ratio": self.ratio}


def measure(
    cells: Sequence[Cell],
    recipes: Sequence[str],
    *,
    device: str,
    partitions: Sequence[int | None] = (None,),
    flush: str = "memset",
    repeats: int = 25,
    rounds: int = 3,
    progress: Progress = lambda step, done, of: None,
    on_row: Callable[[SplitRow], None] = lambda row: None,
) -> list[SplitRow]:
    """Check and time every cell in every recipe.

    partitions  SMs of L1; None: those of the plan
    """
    where = torch.device(device)
    for recipe in recipes:
        recipe_named(recipe)
    require(len(partitions) > 0, "there must be a partition", got="none", kind=RangeError)
    backends.resolve("hopper", "split", where)
    timer = Timer(where, flush=flush, repeats=repeats, rounds=rounds)
    rows: list[SplitRow] = []
    jobs = [(cell, recipe) for recipe in recipes for cell in cells]
    current: tuple[Shape, str, Weights] | None = None
    for done, (cell, recipe) in enumerate(jobs):
        progress("cells", done, len(jobs))
        if current is None or current[:2] != (cell.shape, recipe):
            current = None  # one shape's experts at a time
            current = cell.shape, recipe, Weights(cell.shape, where, SEED)
        for row in _cell(make_job(cell, current[2], SEED), recipe, partitions, timer):
            rows.append(row)
            on_row(row)
        if timer.on_gpu:
            torch.cuda.empty_cache()
    progress("cells", len(jobs), len(jobs))
    return rows


def _cell(job: Job, recipe: str, partitions: Sequence[int | None], timer: Timer) -> list[SplitRow]:
    """All contestants of a cell; those with other bits than staged launches are not timed."""
    layers = _layers(job, recipe, partitions)
    runs = {name: _run(layer, job) for name, layer in layers.items()}
    verdict = Gate(job).eager(runs[STAGED], recipe, recipe_named(recipe).tolerance, timer)
    require(verdict.ok, f"{job.cell.name} staged must be right", got=verdict.why, kind=MegaMoEError)
    with poisoned_memory():
        wanted = runs[STAGED]().clone()
    ready = {name: timer.prepare(run) for name, run in runs.items()}
    why = {
        name: "" if torch.equal(poisoned_call(one, timer), wanted) else "other bits than staged"
        for name, one in ready.items()
    }
    times = timer.time({name: one for name, one in ready.items() if not why[name]})
    for layer in layers.values():
        layer.check()
    require(STAGED in times, "a replay of staged launches must have their bits", got=why[STAGED])
    plans = {name: layer.plan(job.cell.num_tokens) for name, layer in layers.items()}
    about = provenance(timer.device)
    return [
        _row(job, recipe, name, plan, times.get(name), times[STAGED].us, why[name], about)
        for name, plan in plans.items()
    ]


def _layers(job: Job, recipe: str, partitions: Sequence[int | None]) -> dict[str, MoE]:
    """By name: staged, fused where the plan takes it, and split for every partition."""

    def layer(mode: str, **overrides: Value) -> MoE:
        shape, o = job.cell.shape, job.cell.shape.options
        return MoE(
            job.weights[recipe], shape.num_experts, shape.top_k, activation=o.activation,
            clamp=o.clamp, weight_at=o.weight_at, combine=o.combine, backend="hopper", mode=mode,
            overrides=overrides,
        )  # fmt: skip

    layers = {STAGED: layer(STAGED)}
    num = job.cell.num_tokens
    if layer("auto").plan(num).mode == "fused":
        layers["fused"] = layer("fused")
    for l1_sms in partitions:
        overrides: Mapping[str, Value] = {} if l1_sms is None else {"l1_sms": l1_sms}
        one = layer("split", **overrides)
        plan = one.plan(num)
        layers[f"split {plan['l1_sms']} + {plan['l2_sms']}"] = one
    return layers


def _run(layer: MoE, job: Job) -> Run:
    return lambda: layer(job.x, job.topk_idx, job.topk_weights)


def _row(
    job: Job, recipe: str, name: str, plan: Plan, timing: Timing | None, staged_us: float,
    why: str, about: str,
) -> SplitRow:  # fmt: skip
    s, rows, tokens = job.cell.shape, job.cell.num_rows, job.cell.num_tokens
    us = None if timing is None else timing.us
    weights = job.weights[recipe]
    moved = job.touched * (weights.nbytes // weights.num_experts) + 4 * tokens * s.hidden
    return SplitRow(
        cell=job.cell.name, recipe=recipe, intermediate=s.intermediate, num_experts=s.num_experts,
        rows=rows, contestant=name, tile=str(plan.tile), us=us,
        spread=None if timing is None else timing.spread, staged_us=staged_us,
        tflops=None if us is None else 6 * rows * s.hidden * s.intermediate / us / 1e6,
        hbm_gbs=None if us is None else moved / us / 1e3, why=why,
        provenance=about,
    )  # fmt: skip
