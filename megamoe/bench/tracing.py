"""`megamoe trace`: one fused launch with stamps, cold, and what the stamps cost.

The same call is prepared twice, without stamps and with them; both must give the same bits. They
take turns under the bench's timer, then some flushed launches are stamped and the median is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.bench.cells import Cell
from megamoe.bench.inputs import Job, Weights, make_job
from megamoe.bench.layer import Progress, Settings
from megamoe.bench.provenance import provenance
from megamoe.bench.timer import Prepared, Timer
from megamoe.engine import backends
from megamoe.engine.call import Call
from megamoe.engine.planning import plan_for, traits_of
from megamoe.engine.status import DeviceStatus
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import NotAvailable, require
from megamoe.formats.spec import recipe_named
from megamoe.layout.regions import align_up, ceil_div
from megamoe.planner.launches import GemmSwapAb, Launch, Mega
from megamoe.planner.tables.hopper import WIDTH
from megamoe.problem import Problem
from megamoe.trace.stamps import Recording, events_of, first_ns, since

LAUNCHES = 9  # stamped ones; the median is kept


def record(
    cell: Cell, recipe: str, settings: Settings, progress: Progress = lambda step, done, of: None
) -> tuple[Recording, bool]:
    """(the stamped launch, whether both builds gave the same bits)."""
    recipe_named(recipe)
    device = torch.device(settings.device)
    check_device(device)
    timer = Timer(device, flush=settings.flush, repeats=settings.repeats, rounds=settings.rounds)
    steps = ("weights", "compile", "time", "stamp")
    progress("trace", 0, len(steps))
    job = make_job(cell, Weights(cell.shape, device, settings.seed), settings.seed)
    job.require_no_shared("traces")
    weights = job.weights[recipe]
    progress("trace", 1, len(steps))
    call = _Call(job, weights)
    stamps = call.buffer()
    capture = not settings.eager
    plain = timer.prepare(call, capture=capture)
    traced = timer.prepare(lambda: call(stamps), capture=capture)
    is_same = torch.equal(plain.call(), traced.call())
    progress("trace", 2, len(steps))
    times = timer.time({"plain": plain, "traced": traced})
    progress("trace", 3, len(steps))
    recording = call.recording(
        _stamped(timer, traced, stamps), times["plain"].us, times["traced"].us
    )
    call.status.check(cell.shape.top_k)
    progress("trace", 4, len(steps))
    return recording, is_same


def check_device(device: torch.device) -> None:
    """Refuse a machine that has no fused launch, and say what it can do instead."""
    why = next(b for b in backends.BACKENDS if b.name == "hopper").why_not(device)
    require(
        not why,
        "megamoe trace runs one fused launch of the hopper backend",
        got=f"{device}: {why}",
        fix="run it on such a GPU, then render what it saved here: megamoe trace stamps.json",
        kind=NotAvailable,
    )


class _Call:
    """The fused call of a job, with or without stamps."""

    def __init__(self, job: Job, weights: ExpertWeights) -> None:
        from megamoe.engine import fused  # its kernels load only where they can run

        self._fused, self.job, self.weights = fused, job, weights
        options, shape = job.cell.shape.options, job.cell.shape
        self.plan = plan_for(
            weights, options, traits_of("hopper", weights, None), num_tokens=job.cell.num_tokens,
            top_k=shape.top_k, overrides=(("backend", "hopper"), ("mode", "fused")),
        )  # fmt: skip
        self.status = DeviceStatus(job.device)  # its counters too: both builds share them
        inputs = job.x, job.topk_idx, job.topk_weights
        self.call = Call(*inputs, weights, options, None, self.status)

    def __call__(self, stamps: Tensor | None = None) -> Tensor:
        return self._fused.run(self.call, self.step, trace=stamps)

    @property
    def step(self) -> Launch:
        """The launch."""
        return self.plan.launch("mega")

    def buffer(self) -> Tensor:
        """Memory for the stamps of every CTA, all zero."""
        from megamoe.kernels.gluon.mega.events import EVENTS, ROLES

        shape = self.step.num_ctas, ROLES.value, EVENTS.value, 4
        return torch.zeros(shape, dtype=torch.int32, device=self.job.device)

    def recording(self, stamps: Tensor, plain_us: float, traced_us: float) -> Recording:
        """The stamps with all that is needed to read them."""
        shape, job, config = self.job.cell.shape, self.job, self.step.config
        assert isinstance(config, Mega)
        tile, rows = config.tile, config.tile.block_n
        acts = align_up(self.weights.intermediate, WIDTH)
        counts = torch.bincount(job.topk_idx.flatten(), minlength=shape.num_experts)
        return Recording(
            name=job.cell.name,
            problem=Problem(
                job.cell.num_tokens, shape.hidden, shape.intermediate, shape.num_experts,
                shape.top_k, 1, self.weights.recipe,
            ),
            counts=(tuple(counts.tolist()),),
            block_m=tile.block_m,
            block_n=rows,
            block_k=tile.block_k,
            num_stages=tile.num_stages,
            tile=tile if isinstance(tile, GemmSwapAb) else None,
            num_n_tiles=(ceil_div(acts, rows // 2), ceil_div(shape.hidden, rows)),
            num_ctas=len(stamps),
            events=events_of(stamps),
            plain_us=plain_us,
            traced_us=traced_us,
            provenance=provenance(job.device),
        )  # fmt: skip


def _stamped(timer: Timer, traced: Prepared, stamps: Tensor) -> Tensor:
    """The stamps of some cold launches: those of the launch with the median time."""
    stamped = []
    for _ in range(LAUNCHES):
        stamps.zero_()
        timer.cold(traced)
        stamped.append(stamps.to("cpu", copy=True))
    return sorted(stamped, key=_total_ns)[LAUNCHES // 2]


def _total_ns(stamps: Tensor) -> int:
    events = events_of(stamps)
    first = first_ns(events)
    return max((since(event.end, first) for event in events), default=0)
