"""`megamoe bench calls`: what one call costs the host, made eagerly and replayed from CUDA graphs.

Calls follow each other without a synchronisation, few enough for the GPU's queue to take them, and
the clock stops when the last one has returned: that is Python, the launches and nothing else.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.bench.cells import SEED, Cell
from megamoe.bench.inputs import Job, Weights, make_job
from megamoe.bench.job import Progress
from megamoe.bench.provenance import provenance
from megamoe.engine.graph_pool import MAX_TOKENS, GraphPool
from megamoe.engine.graphs import Gpu
from megamoe.engine.layer import MoE
from megamoe.engine.replay_queue import SLOTS
from megamoe.errors import RangeError, require
from megamoe.formats.spec import recipe_named
from megamoe.planner.buckets import bucket_of

CALLS = 20  # of a round: some launches each, of the thousand that a queue holds

Call = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Row:
    """One way to make the calls of a cell; times are microseconds of one call."""

    cell: str
    backend: str
    recipe: str
    how: str
    host_us: float  # median of the rounds
    low_us: float  # of the fastest round
    wall_us: float  # until the GPU is done
    has_same_bits: bool  # as the eager call
    provenance: str


def measure(
    cells: Sequence[Cell],
    recipe: str,
    *,
    device: str,
    backend: str = "auto",
    rounds: int = 25,
    seed: int = SEED,
    progress: Progress = lambda step, done, of: None,
) -> list[Row]:
    """Time the host in every cell; eager and replayed calls take turns."""
    recipe_named(recipe)
    require(rounds >= 1, "there must be at least one round", got=rounds, kind=RangeError)
    where = torch.device(device)
    made_at = provenance(where)
    rows: list[Row] = []
    weights: Weights | None = None
    for done, cell in enumerate(cells):
        progress("cells", done, len(cells))
        if weights is None or weights.shape != cell.shape:
            weights = None  # free the last shape's before making the next one's
            weights = Weights(cell.shape, where, seed)
        job = make_job(cell, weights, seed)
        eager = _layer(job, recipe, backend, cuda_graphs=False)
        calls = _calls(job, eager, _layer(job, recipe, backend, cuda_graphs=True))
        wanted = calls["eager"]()
        same = {how: torch.equal(call(), wanted) for how, call in calls.items()}
        times = _times(calls, where, rounds)
        for how, samples in times.items():
            host, wall = ([1e6 * t / CALLS for t in part] for part in zip(*samples, strict=True))
            rows.append(
                Row(
                    cell=cell.name,
                    backend=eager.backend,
                    recipe=recipe,
                    how=how,
                    host_us=statistics.median(host),
                    low_us=min(host),
                    wall_us=statistics.median(wall),
                    has_same_bits=same[how],
                    provenance=made_at,
                )
            )
    progress("cells", len(cells), len(cells))
    return rows


def _layer(job: Job, recipe: str, backend: str, *, cuda_graphs: bool) -> MoE:
    shape = job.cell.shape
    o = shape.options
    return MoE(
        job.weights[recipe], shape.num_experts, shape.top_k, activation=o.activation,
        clamp=o.clamp, weight_at=o.weight_at, combine=o.combine, backend=backend,
        cuda_graphs=cuda_graphs, shared=job.weights.shared(recipe),
    )  # fmt: skip


def _calls(job: Job, eager: MoE, graphed: MoE) -> dict[str, Call]:
    """The ways to make a call, by name; replays where there are graphs that serve it."""
    inputs = job.x, job.topk_idx, job.topk_weights
    calls: dict[str, Call] = {"eager": lambda: eager(*inputs)}
    graphs = graphed._graphs
    if graphs is not None and graphs.serves(job.x):
        calls["graph"] = lambda: graphed(*inputs)
        calls["graph, own output"] = lambda: graphed(*inputs, copy=False)
        calls["its launch and output alone"] = _bare(job, graphed)  # the rest is our Python
    return calls


def _bare(job: Job, graphed: MoE) -> Call:
    """A replay and an allocation, and no Python of ours around them.

    It has a GPU's side of its own, whose replay_queue holds the same note in every slot.
    """
    parts = graphed._captured_parts()
    gpu = Gpu(parts.weights.device, GraphPool())
    one = gpu.capture(bucket_of(len(job.x), MAX_TOKENS), parts)
    y = torch.empty_like(one.rows(len(job.x)))
    addresses = (t.data_ptr() for t in (job.x, job.topk_idx, job.topk_weights, y))
    note = *addresses, job.x.stride(0), len(job.x), job.topk_idx.dtype == torch.int64
    for _ in range(SLOTS):
        gpu.replay_queue.send(note, lambda: None)

    def call() -> Tensor:
        torch.empty_like(y)
        one.graph.replay()
        return y

    return call


def _times(
    calls: dict[str, Call], device: torch.device, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of CALLS calls: until the last returns, and until the GPU is done."""
    times: dict[str, list[tuple[float, float]]] = {how: [] for how in calls}
    for _ in range(rounds):
        for how, call in calls.items():
            call()
            _synchronize(device)
            began = time.perf_counter()
            for _ in range(CALLS):
                call()
            host = time.perf_counter() - began
            _synchronize(device)
            times[how].append((host, time.perf_counter() - began))
    return times


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
