"""Staged mode: one launch after the other, every byte of communication in the open.

Two pipelines. Our own: dispatch, L1 with the activation, L2, results home, combine. That of a
library of grouped GEMMs (`is_grouped`): permute, L1, activation, L2, combine, where L1 leaves gate
and up in BF16.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from megamoe.studies.deep_gemm.blocks import L1, L2
from megamoe.simulator.constants import Constants
from megamoe.simulator.costs import Costs
from megamoe.simulator.events import Machine, Rank
from megamoe.studies.deep_gemm.plan import Plan
from megamoe.simulator.ranks import rank_of
from megamoe.simulator.sample import Counts
from megamoe.simulator.timeline import RESULTS_OUT, ROWS_IN, Span


@dataclass(slots=True)
class Stages:
    """Spans, steps and sums while a call is put together."""

    num_sms: int
    num_ranks: int
    spans: list[Span]
    steps: list[tuple[str, float]] = field(default_factory=list)
    hbm_bytes: float = 0.0
    in_bytes: float = 0.0

    def on_rank(self, rank: int, role: str, start_us: float, end_us: float, phase: str) -> None:
        """The same span on every SM of a rank; nothing if it is empty."""
        if end_us > start_us:
            self.spans += [
                Span(rank, sm, role, start_us, end_us, phase) for sm in range(self.num_sms)
            ]

    def everywhere(self, role: str, start_us: float, end_us: float, phase: str) -> None:
        """The same span on every SM of every rank."""
        for rank in range(self.num_ranks):
            self.on_rank(rank, role, start_us, end_us, phase)

    def count(self, ranks: Iterable[Rank]) -> None:
        """Add what the event loop moved."""
        for rank in ranks:
            self.hbm_bytes += rank.hbm_bytes
            self.in_bytes += rank.in_bytes

    def combine(self, plan: Plan, counts: Counts, work: Costs, start_us: float) -> float:
        """Read every result of a rank's own tokens, write the tokens in BF16."""
        out = 2 * plan.problem.num_tokens * plan.problem.hidden
        last = start_us
        for rank, sent in enumerate(counts):
            size = sum(sent) * work.rows.results + out
            end = start_us + size * work.move
            self.on_rank(rank, "combine", start_us, end, "combine")
            self.hbm_bytes += size
            last = max(last, end)
        return last


def run_staged(
    plan: Plan, counts: Counts, work: Costs, constants: Constants, *, is_grouped: bool
) -> Stages:
    """All launches of one call. Ranks meet only where rows cross the links."""
    num_ranks = plan.problem.num_ranks
    stages = Stages(plan.num_sms, num_ranks, [])
    start = plan.hardware.launch_us.value + constants.start_us
    stages.everywhere("launch", 0.0, start, "launch")
    stages.steps.append(("launch", start))
    received = [sum(row) for row in _received(plan, counts)]
    call = _Call(plan, counts, work, constants, stages)
    now = call.move([start] * num_ranks, [2.0 * n * work.rows.tokens for n in received], "permute")
    if num_ranks > 1:
        now = call.links(now, is_home=False)
    now = call.linear(call.gap(now), L1)
    if is_grouped:
        size = 4 * plan.problem.intermediate + work.rows.acts
        now = call.move(call.gap(now), [float(n * size) for n in received], "activation")
    now = call.linear(call.gap(now), L2)
    if num_ranks > 1:
        now = call.links(now, is_home=True)
    now = call.gap(now)
    end = stages.combine(plan, counts, work, max(now))
    stages.steps.append(("combine", end - max(now)))
    return stages


def _received(plan: Plan, counts: Counts) -> list[list[int]]:
    """[owner][source]: rows that each rank gets from each."""
    local = plan.problem.num_local_experts
    ranks = range(plan.problem.num_ranks)
    return [[sum(counts[s][r * local : (r + 1) * local]) for s in ranks] for r in ranks]


@dataclass(frozen=True, slots=True)
class _Call:
    """The launches of one call; times are one per rank, steps those of the slowest."""

    plan: Plan
    counts: Counts
    work: Costs
    constants: Constants
    stages: Stages

    def gap(self, now: list[float]) -> list[float]:
        """From one launch to the next."""
        after = [t + self.constants.gap_us for t in now]
        for rank, (start, end) in enumerate(zip(now, after, strict=True)):
            self.stages.on_rank(rank, "launch", start, end, "launch")
        self.stages.steps.append(("gaps", self.constants.gap_us))
        return after

    def move(self, now: list[float], sizes: list[float], phase: str) -> list[float]:
        """A launch that only moves rows through HBM."""
        after = []
        for rank, (start, size) in enumerate(zip(now, sizes, strict=True)):
            after.append(start + size * self.work.move)
            self.stages.on_rank(rank, "stage", start, after[-1], phase)
        self.stages.hbm_bytes += sum(sizes)
        self.stages.steps.append((phase, max(after) - max(now)))
        return after

    def links(self, now: list[float], *, is_home: bool) -> list[float]:
        """All rows cross at once, when every rank is ready: the fullest direction decides."""
        start, stages, link = max(now), self.stages, self.work.link
        by_owner = _received(self.plan, self.counts)
        ranks = range(len(by_owner))
        size = self.work.rows.results if is_home else self.work.rows.tokens
        come = [sum(by_owner[r]) - by_owner[r][r] for r in ranks]
        go = [sum(by_owner[o][r] for o in ranks) - by_owner[r][r] for r in ranks]
        end = start + max(map(max, come, go)) * size * link + self.constants.link_us
        met = end + self.constants.barrier_us
        lane = ("scatter", RESULTS_OUT, "l2") if is_home else ("pull", ROWS_IN, "dispatch")
        for rank in ranks:
            stages.on_rank(rank, "wait", now[rank], start, "ranks")
            busy = come[rank] * size * link
            if busy:
                stages.spans.append(Span(rank, lane[1], lane[0], start, start + busy, lane[2]))
        stages.everywhere("wait", start, end, "results" if is_home else "rows")
        stages.everywhere("wait", end, met, "barrier")
        stages.in_bytes += sum(come) * size
        stages.steps.append(("results home" if is_home else "dispatch", end - start))
        stages.steps.append(("barrier", met - end))
        return [met] * len(now)

    def linear(self, now: list[float], phase: str) -> list[float]:
        """One launch of the blocks of one linear on every rank."""
        after = []
        for idx, start in enumerate(now):
            rank = rank_of(self.plan, self.counts, idx, only=phase)
            num = len(rank.pool)
            rank.arrived_us = [start] * num
            if phase == L2:
                rank.l1_left, rank.l1_done_us = [0] * num, [start] * num
            rank.loads_us = [start] * self.plan.num_sms
            machine = Machine(
                {idx: rank}, self.work, self.constants, ring_blocks=None, is_staged=True
            )
            machine.run(start)
            after.append(max(rank.end_us, start))
            self.stages.spans += machine.spans
            self.stages.count([rank])
        self.stages.steps.append((phase, max(after) - max(now)))
        return after
