"""`megamoe bench overlap`: how much of a chain's communication hides under its arithmetic.

Ranks share one GPU: each has its part of the SMs and links that are paced to the same part of
NVLink, so that arithmetic and links stand to each other as on as many GPUs. Three graphs of the
same call are timed, their replays shuffled:

    compute  links as fast as the GPU's memory
    links    paced links without the GEMMs: tokens come, rows go home, nothing is computed
    both     the call over paced links

    hidden = (compute + links - both) / min(compute, links)

All three are whole calls: quantising, sorting, the exchange and combine are in each, and `links`
has the pull at what its SMs copy, which may be less than the links bring. What the bytes alone take
at the links' pace is `overlap_model.wire_us`.

Every call's bits are those of one rank first. What one GPU cannot show: a link's packets, and order
between GPUs; its latency is waited for where it is given, in the pull alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import megamoe as mm
from megamoe.bench.cells import Cell
from megamoe.bench.inputs import Weights, make_job
from megamoe.bench.layer import Progress
from megamoe.bench.provenance import provenance
from megamoe.bench.spans import recorded
from megamoe.bench.timer import Prepared, Timer
from megamoe.engine import backends
from megamoe.engine.chain import Links
from megamoe.engine.local import MAX_LATENCY_US, LocalRanks
from megamoe.engine.planning import hardware_of
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import NotAvailable, RangeError, require
from megamoe.formats.spec import recipe_named
from megamoe.planner.chain import num_pull_sms, sms_of
from megamoe.planner.choice import Value

Parts = list[list[Tensor]]

DISTINCT = 8  # experts that are made; the others are copies of them
BAR_HIDDEN, BAR_SLOWER = 0.85, 1.10
SEED = 127


@dataclass(frozen=True, slots=True)
class Overlap:
    """One cell: tokens are those of each rank, experts those of all."""

    cell: str
    recipe: str
    num_ranks: int
    sms: int  # of each rank
    pull_sms: int
    tile: str
    links_gbs: float
    compute_us: float
    links_us: float
    both_us: float
    same_bits: bool  # as one rank that has all tokens
    provenance: str
    latency_us: float = 0.0  # of a trip to a peer, at least

    @property
    def hidden(self) -> float:
        """The share of the shorter of compute and links that the call does not take longer by."""
        least = min(self.compute_us, self.links_us)
        return (self.compute_us + self.links_us - self.both_us) / least

    @property
    def slower(self) -> float:
        """The call over paced links over that over unpaced ones."""
        return self.both_us / self.compute_us


OnTrace = Callable[[Overlap, dict[str, Any]], None]


def measure(
    cells: Sequence[Cell],
    recipes: Sequence[str],
    *,
    device: str,
    num_ranks: int = 8,
    links_gbs: float | None = None,
    latency_us: float = 0.0,
    overrides: Mapping[str, Value] | None = None,
    repeats: int = 9,
    rounds: int = 2,
    progress: Progress = lambda step, done, of: None,
    on_row: Callable[[Overlap], None] = lambda row: None,
    on_trace: OnTrace | None = None,
) -> list[Overlap]:
    """Check and time every cell in every recipe.

    links_gbs  of a rank; None: its part of NVLink
    latency_us  of a trip to a peer, at least
    overrides  of the plan's tile
    on_trace   gets each cell and the profiler's trace of one call over paced links
    """
    where = torch.device(device)
    for recipe in recipes:
        recipe_named(recipe)
    require(
        (links_gbs is None or links_gbs > 0) and 0 <= latency_us <= MAX_LATENCY_US,
        f"links must have a bandwidth, and a latency of 0 to {MAX_LATENCY_US:.0f} us",
        got=f"{links_gbs} GB/s, {latency_us} us", kind=RangeError,
    )  # fmt: skip
    backends.resolve("hopper", "chain", where)
    speed = links_gbs or hardware_of(where).nvlink_gbs.reached.value / num_ranks
    timer = Timer(where, flush="none", repeats=repeats, rounds=rounds)
    overlaps: list[Overlap] = []
    jobs = [(cell, recipe) for recipe in recipes for cell in cells]
    current: tuple[str, str, ExpertWeights] | None = None
    for done, (cell, recipe) in enumerate(jobs):
        progress("cells", done, len(jobs))
        if current is None or current[:2] != (cell.shape.name, recipe):
            current = None  # one shape's experts at a time
            current = cell.shape.name, recipe, _experts(cell, recipe, num_ranks, where)
        ranks, parts, wanted = _call_of(cell, current[2], num_ranks, overrides)
        links = Links(speed * 1e9, latency_s=latency_us / 1e6)
        overlaps.append(_row(cell, recipe, ranks, parts, wanted, links, timer))
        if on_trace is not None:
            with _paced(ranks, links):
                on_trace(overlaps[-1], recorded(partial(ranks, *parts)))
        ranks = parts = wanted = None  # type: ignore[assignment]  # before the next one's
        on_row(overlaps[-1])
        _let_go(where)
    progress("cells", len(jobs), len(jobs))
    return overlaps


def _experts(cell: Cell, recipe: str, num_ranks: int, device: torch.device) -> ExpertWeights:
    """The experts of all ranks: a few of their own, and copies."""
    num = cell.shape.num_experts * num_ranks
    shape = replace(cell.shape, num_experts=min(DISTINCT, num), num_shared=0)
    few = Weights(shape, device, SEED)[recipe]
    return few.take([expert % few.num_experts for expert in range(num)])


def _call_of(
    cell: Cell, weights: ExpertWeights, num_ranks: int, overrides: Mapping[str, Value] | None
) -> tuple[LocalRanks, Parts, Tensor]:
    """(ranks, what each is called with, the result of one rank that has all tokens)."""
    shape = replace(cell.shape, num_experts=weights.num_experts)
    options = shape.options
    all_tokens = replace(cell, shape=shape, num_tokens=cell.num_tokens * num_ranks)
    job = make_job(all_tokens, Weights(shape, weights.device, SEED), SEED)
    inputs = job.x, job.topk_idx, job.topk_weights
    wanted = mm.moe(
        *inputs, weights, backend="hopper", mode="staged", activation=options.activation,
        clamp=options.clamp, weight_at=options.weight_at,
    )  # fmt: skip
    _let_go(weights.device)
    ranks = LocalRanks(weights, num_ranks, options, mode="chain", overrides=overrides)
    return ranks, [list(t.split(cell.num_tokens)) for t in inputs], wanted


def _row(
    cell: Cell, recipe: str, ranks: LocalRanks, parts: Parts, wanted: Tensor, paced: Links,
    timer: Timer,
) -> Overlap:  # fmt: skip
    def call() -> list[Tensor]:
        return ranks(*parts)

    links = {"compute": None, "links": paced._replace(is_alone=True), "both": paced}
    same, prepared = True, {}
    pool = torch.cuda.graph_pool_handle() if timer.on_gpu else None
    for name, one in links.items():
        with _paced(ranks, one):
            call()
            replay, y = _captured(call, pool, timer.device)
        replay()
        ranks.check()
        if name != "links":
            same = same and torch.equal(torch.cat(y), wanted)
        del y
        prepared[name] = Prepared(_returning(replay, wanted), "graph")
    times = timer.time(prepared)
    ranks.check()
    us = {name: t.us for name, t in times.items()}
    plan = ranks.plan(cell.num_tokens, cell.shape.top_k)
    tile = str(plan.passes[-1]["l1"].config)
    sms = sms_of(plan.call, plan.hardware.num_sms, dict(plan.overrides))
    return Overlap(
        cell=cell.name,
        recipe=recipe,
        num_ranks=ranks.num_ranks,
        sms=sms,
        pull_sms=num_pull_sms(sms),
        tile=tile,
        links_gbs=paced.bytes_per_s / 1e9,
        compute_us=us["compute"],
        links_us=us["links"],
        both_us=us["both"],
        same_bits=same,
        provenance=provenance(timer.device),
        latency_us=round(1e6 * paced.latency_s, 3),
    )


@contextmanager
def _paced(ranks: LocalRanks, links: Links | None) -> Iterator[None]:
    """The same ranks over other links: memory is the same."""
    chain = ranks._chain
    require(chain is not None, "ranks must be a chain", got=ranks.num_ranks, kind=NotAvailable)
    assert chain is not None
    had, chain.links = chain.links, links
    try:
        yield
    finally:
        chain.links = had


def _let_go(device: torch.device) -> None:
    """Memory that the next cell or graph may want."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _captured(
    call: Callable[[], list[Tensor]], pool: Any, device: torch.device
) -> tuple[Callable[[], object], list[Tensor]]:
    """(a call's replay from a graph, its results); graphs take turns in one pool of memory."""
    _let_go(device)
    if device.type != "cuda":
        return call, call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        y = call()
    return graph.replay, y


def _returning(replay: Callable[[], object], output: Tensor) -> Callable[[], Tensor]:
    def run() -> Tensor:
        replay()
        return output

    return run
