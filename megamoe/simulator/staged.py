"""Staged calls: one launch after the other, every byte of communication in the open."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from megamoe.simulator.blocks import L1, L2
from megamoe.simulator.constants import Constants
from megamoe.simulator.costs import Costs, costs
from megamoe.simulator.events import Machine, Rank
from megamoe.simulator.ranks import rank_of, shared_counts, with_shared
from megamoe.simulator.sample import Counts
from megamoe.simulator.schedule import Schedule, Step
from megamoe.simulator.timeline import RESULTS_OUT, ROWS_IN, Span

Report = Callable[[int], None] | None  # called with how many more blocks were played


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

    def combine(self, how: Schedule, counts: Counts, work: Costs, start_us: float) -> float:
        """Read every result of a rank's own tokens, write the tokens in BF16."""
        tokens = how.problem.num_tokens
        shared = how.shared.num_local if how.shared is not None else 0
        out = 2 * tokens * how.problem.hidden
        last = start_us
        for rank, sent in enumerate(counts):
            size = (sum(sent) + shared * tokens) * work.rows.results + out
            end = start_us + size * work.move
            self.on_rank(rank, "combine", start_us, end, "combine")
            self.hbm_bytes += size
            last = max(last, end)
        return last


def run_staged(
    how: Schedule, counts: Counts, constants: Constants, progress: Report = None
) -> Stages:
    """All launches of one call. Ranks wait for each other only where rows cross the links."""
    num_ranks = how.problem.num_ranks
    stages = Stages(how.num_sms, num_ranks, [])
    start = how.hardware.launch_us.value + constants.start_us
    stages.everywhere("launch", 0.0, start, "launch")
    stages.steps.append(("launch", start))
    call = StagedCall.of(how, counts, constants, stages, progress)
    now = [start] * num_ranks
    is_launched = True  # the call's launch is the first one's
    for step in how.steps:
        if step.kind in ("send", "return"):
            now = call.links(now, is_home=step.kind == "return")
            is_launched = False
            continue
        if not is_launched:
            now = call.gap(now)
        is_launched = False
        if step.kind == "combine":
            end = stages.combine(how, call.counts, call.work, max(now))
            stages.steps.append(("combine", end - max(now)))
        elif step.kind == "gemm":
            now = call.gemm(now, step)
        else:
            now = call.move(now, step)
    return stages


@dataclass(frozen=True, slots=True)
class StagedCall:
    """The launches of one call; times are one per rank, steps those of the slowest."""

    how: Schedule
    counts: Counts  # shared experts of the routed launches included
    routed: Counts
    work: Costs
    shared_work: Costs | None
    constants: Constants
    stages: Stages
    progress: Report

    @staticmethod
    def of(
        how: Schedule, counts: Counts, constants: Constants, stages: Stages, progress: Report
    ) -> StagedCall:
        """Before its first launch."""
        return StagedCall(
            how=how,
            counts=with_shared(how, counts),
            routed=counts,
            work=costs(how, constants),
            shared_work=costs(how, constants, how.shared) if how.shared is not None else None,
            constants=constants,
            stages=stages,
            progress=progress,
        )

    def gap(self, now: list[float]) -> list[float]:
        """From one launch to the next."""
        after = [t + self.constants.gap_us for t in now]
        for rank, (start, end) in enumerate(zip(now, after, strict=True)):
            self.stages.on_rank(rank, "launch", start, end, "launch")
        self.stages.steps.append(("gaps", self.constants.gap_us))
        return after

    def move(self, now: list[float], step: Step) -> list[float]:
        """A launch without a matrix product: rows through HBM, or the row of every slot."""
        received = self._received_rows(step)
        tokens, sorting = self.how.problem.num_tokens, self.constants.route_us * step.sorts
        after = []
        for rank, (start, rows) in enumerate(zip(now, received, strict=True)):
            size = rows * step.row_bytes + tokens * step.token_bytes
            after.append(start + sorting + size * self.work.move)
            role = "stage" if size else "route"
            self.stages.on_rank(rank, role, start, after[-1], step.name)
            self.stages.hbm_bytes += size
        self.stages.steps.append((step.name, max(after) - max(now)))
        return after

    def _received_rows(self, step: Step) -> list[int]:
        if step.is_shared and self.how.shared is not None:
            p = self.how.problem
            return [p.num_tokens * self.how.shared.num_local] * p.num_ranks
        return [sum(row) for row in _received(self.counts)]

    def links(self, now: list[float], *, is_home: bool) -> list[float]:
        """All rows cross at once, when every rank is ready: the fullest direction decides."""
        start, stages, link = max(now), self.stages, self.work.link
        by_owner = _received(self.routed)
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
        stages.steps.append(("results sent" if is_home else "rows sent", end - start))
        stages.steps.append(("barrier", met - end))
        return [met] * len(now)

    def gemm(self, now: list[float], step: Step) -> list[float]:
        """One launch of one linear on every rank; L2 that follows L1 is played with it."""
        if step.follows:
            return now
        experts, counts, work = self.how.experts, self.counts, self.work
        if step.is_shared and self.how.shared is not None:
            assert self.shared_work is not None
            experts, counts, work = self.how.shared, shared_counts(self.how), self.shared_work
        is_both = any(s.follows for s in self.how.steps if s.is_shared == step.is_shared)
        after = []
        for idx, start in enumerate(now):
            rank = rank_of(self.how, experts, counts, idx, only=None if is_both else step.name)
            num = len(rank.pool)
            rank.arrived_us = [start] * num
            if step.name == L2:
                rank.l1_left, rank.l1_done_us = [0] * num, [start] * num
            rank.loads_us = [start] * self.how.num_sms
            machine = Machine(
                {idx: rank}, work, self.constants, is_staged=True, progress=self.progress
            )
            machine.run(start)
            after.append(max(rank.end_us, start))
            self.stages.spans += machine.spans
            self.stages.count([rank])
        name = f"{L1} and {L2}" if is_both else step.name
        self.stages.steps.append((name, max(after) - max(now)))
        return after


def _received(counts: Counts) -> list[list[int]]:
    """[owner][source]: rows that each rank gets from each."""
    local = len(counts[0]) // len(counts)
    ranks = range(len(counts))
    return [[sum(counts[s][r * local : (r + 1) * local]) for s in ranks] for r in ranks]
