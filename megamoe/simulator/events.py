"""The event loop of the simulator: SMs take blocks, blocks wait, load, multiply and leave.

One heap for all ranks. Each rank has an HBM queue, two link queues (in and out) and a pool of tiles
of tokens; each serves in order of request. A block waits for its rows (L1) or for the L1 blocks of
its tile of tokens (L2), and its loads run ahead of its math by what the ring of stages holds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megamoe.simulator.blocks import L1, L2, Block
from megamoe.simulator.constants import Constants
from megamoe.simulator.costs import Costs
from megamoe.simulator.timeline import RESULTS_OUT, ROWS_IN, Span, merged
from megamoe.simulator.traffic import RowBlock

SHORT_US = 0.02  # waits below are not worth a span
LANE_GAP_US = 2.0  # a lane's pauses below are not worth a span either
_FREE, _RUN, _PULL = 0, 1, 2  # kinds of events
_REPORT = 4096  # blocks between two reports of progress
PULL_ROWS = 8  # that a CTA of the chain's pull copies at a time

Queue = tuple[Block, ...]


@dataclass(slots=True)
class Rank:
    """One rank while the loop runs."""

    idx: int
    pool: tuple[RowBlock, ...]
    offsets: tuple[int, ...]  # first tile of tokens of each expert
    waves: dict[int, int]  # tile of tokens -> wave
    pulls: tuple[int, ...]  # tiles of tokens in the order of their first use
    waits_for: tuple[int, ...]  # tile of tokens -> the one whose L2 makes room for it; -1: none
    queues: tuple[Queue, ...]
    queues_of: tuple[tuple[int, ...], ...]  # SM -> its queues, one after the other
    places: list[dict[int, int]]  # queue -> by SM its next place; by -1 that of all (tickets)
    strides: tuple[int, ...]
    arrived_us: list[float | None]
    l1_left: list[int]
    l2_left: list[int]
    l1_done_us: list[float]
    l2_done_us: list[float]
    loads_us: list[float]  # SM -> end of its last load
    stores_us: list[float]  # SM -> end of its last epilogue
    hbm_us: float = 0.0
    in_us: float = 0.0
    out_us: float = 0.0
    pull_us: float = 0.0  # until when the SMs that pull are busy
    end_us: float = 0.0
    next_pull: int = 0
    blocked_on: int = -1  # tile of tokens whose room the next pull needs
    pooled: list[int] = field(default_factory=list)  # pulled, but L1 waits for the whole wave
    pooled_us: float = 0.0
    parked: dict[int, list[tuple[float, int, Block]]] = field(default_factory=dict)
    moved: dict[str, list[tuple[float, float, int]]] = field(default_factory=dict)
    hbm_bytes: float = 0.0
    in_bytes: float = 0.0

    def take(self, sm: int) -> Block | None:
        """The SM's next block."""
        for which in self.queues_of[sm]:
            queue, places = self.queues[which], self.places[which]
            seat = sm if sm in places else -1
            place = places[seat]
            if place < len(queue):
                places[seat] = place + self.strides[which]
                return queue[place]
        return None

    def through_hbm(self, at_us: float, num_bytes: float, us_per_byte: float) -> float:
        """Queue bytes at HBM; when they are through."""
        self.hbm_bytes += num_bytes
        self.hbm_us = max(self.hbm_us, at_us) + num_bytes * us_per_byte
        return self.hbm_us


class Machine:
    """All ranks of one launch. `run` fills `spans` and each rank's end."""

    def __init__(
        self,
        ranks: Mapping[int, Rank],
        costs: Costs,
        constants: Constants,
        *,
        pools_at_once: bool = False,
        is_staged: bool = False,
        late_sms: int = 0,
        late_end: int | None = None,
        pull_us: tuple[float, float] = (0.0, 0.0),
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.ranks, self.costs, self.constants = ranks, costs, constants
        self.pools_at_once, self.is_staged, self.progress = pools_at_once, is_staged, progress
        # Those before `late_end`, or the last ones of each rank: they pull first, then take blocks.
        self.late_sms, self.late_end = late_sms, late_end
        # Of all SMs that pull together, local rows too: a group of PULL_ROWS, and a byte.
        self.group_us, self.pull_byte_us = pull_us
        self._num_run = 0
        self.spans: list[Span] = []
        self._heap: list[tuple[float, int, int, int, int, Block | None, float]] = []
        self._tick = 0
        self._now = 0.0
        self.results_us = 0.0  # when the last result is home

    def _push(
        self,
        at_us: float,
        kind: int,
        rank: int,
        sm: int = 0,
        block: Block | None = None,
        start_us: float = 0.0,
    ) -> None:
        self._tick += 1
        heapq.heappush(self._heap, (at_us, self._tick, kind, rank, sm, block, start_us))

    def run(self, start_us: float, *, pulls_us: float | None = None) -> None:
        """Run every block; SMs start at `start_us`, pulls at `pulls_us` if there are any."""
        for rank in self.ranks.values():
            if pulls_us is not None and rank.pulls:
                self._push(pulls_us, _PULL, rank.idx)
            late = self._late(rank) if rank.pulls else range(0)
            for sm in range(len(rank.queues_of)):
                if sm not in late:
                    self._push(start_us, _FREE, rank.idx, sm)
        heap, ranks = self._heap, self.ranks
        while heap:
            now, _, kind, which, sm, block, start = heapq.heappop(heap)
            self._now, rank = now, ranks[which]
            if kind == _PULL:
                self._pull(rank, now)
            elif kind == _RUN:
                assert block is not None
                self._run(rank, sm, block, start)
            else:
                if block is not None:
                    self._scatter(rank, sm, block, now)
                block = rank.take(sm)
                if block is not None:
                    self._begin(rank, sm, block, now)
        for rank in ranks.values():
            assert not rank.parked, "every block must run"
        self._report(self._num_run % _REPORT)
        self._lanes()

    def _late(self, rank: Rank) -> range:
        end = len(rank.queues_of) if self.late_end is None else self.late_end
        return range(end - self.late_sms, end)

    def _report(self, num: int) -> None:
        if self.progress is not None and num:
            self.progress(num)

    def _begin(self, rank: Rank, sm: int, block: Block, since: float) -> None:
        """Start the block when what it reads is there; park it while that is not known."""
        pool = rank.offsets[block.expert] + block.m
        if block.phase == L1:
            rows = rank.pool[pool]
            is_own = rows.by_rank[rank.idx] == rows.rows
            ready, what = rank.arrived_us[pool], "tokens" if is_own else "rows"
        else:
            ready, what = (None if rank.l1_left[pool] else rank.l1_done_us[pool]), "l1"
        if ready is None:
            rank.parked.setdefault(pool, []).append((since, sm, block))
            return
        start = max(since, ready)
        if start - since > SHORT_US:
            self.spans.append(
                Span(
                    rank=rank.idx,
                    sm=sm,
                    role="wait",
                    start_us=since,
                    end_us=start,
                    phase=what,
                    wave=block.wave,
                    expert=block.expert,
                    m=block.m,
                )
            )
        early = start - self.costs.of(block.phase).lead_us
        if early > self._now:
            self._push(early, _RUN, rank.idx, sm, block, start)
        else:
            self._run(rank, sm, block, start)

    def _wake(self, rank: Rank, pool: int, phase: str) -> None:
        waiting = rank.parked.get(pool)
        if not waiting:
            return
        rank.parked[pool] = [one for one in waiting if one[2].phase != phase]
        if not rank.parked[pool]:
            del rank.parked[pool]
        for since, sm, block in waiting:
            if block.phase == phase:
                self._begin(rank, sm, block, since)

    def _run(self, rank: Rank, sm: int, block: Block, start: float) -> None:
        """Load, multiply, leave: fixes when the block ends and when its SM is free."""
        costs = self.costs
        wave, phase, expert, m, n = block
        cost = costs.of(phase)
        self._num_run += 1
        if self._num_run % _REPORT == 0:
            self._report(_REPORT)
        pool = rank.offsets[expert] + m
        rows = rank.pool[pool].rows
        weights = cost.weight_bytes
        moved = (weights if m == 0 else weights * cost.again) + rows * cost.row_out_bytes
        if n == 0:
            moved += rows * cost.row_in_bytes
        asked = max(rank.loads_us[sm], start - cost.lead_us)
        loaded = rank.through_hbm(asked, moved, costs.hbm)
        loaded = max(loaded, asked + (weights + rows * cost.row_in_bytes) * costs.port)
        rank.loads_us[sm] = loaded
        math = cost.math(rows)
        if cost.decode_us:
            math += cost.decode_us / (rank.offsets[expert + 1] - rank.offsets[expert])
        done = max(start + math / costs.clock(start) + costs.block_us, loaded)
        free = end = done + cost.epilogue(rows)
        if costs.is_overlapped:
            end = max(done, rank.stores_us[sm]) + cost.epilogue(rows)
            free = max(done, rank.stores_us[sm])
            rank.stores_us[sm] = end
        self.spans.append(
            Span(
                rank=rank.idx,
                sm=sm,
                role="math",
                start_us=start,
                end_us=free,
                phase=phase,
                wave=wave,
                expert=expert,
                m=m,
                n=n,
            )
        )
        rank.end_us = max(rank.end_us, end)
        self._push(free, _FREE, rank.idx, sm, block)
        if phase == L1:
            rank.l1_left[pool] -= 1
            rank.l1_done_us[pool] = max(rank.l1_done_us[pool], end)
            if rank.l1_left[pool] == 0:
                self._wake(rank, pool, L2)
        else:
            rank.l2_left[pool] -= 1
            rank.l2_done_us[pool] = max(rank.l2_done_us[pool], end)
            if rank.l2_left[pool] == 0 and rank.blocked_on == pool:
                rank.blocked_on = -1
                self._push(rank.l2_done_us[pool], _PULL, rank.idx)

    def _pull(self, rank: Rank, now: float) -> None:
        """Ask for the rows of the next tile of tokens, if there is room for them."""
        if rank.next_pull == len(rank.pulls):
            return
        pool = rank.pulls[rank.next_pull]
        last = rank.waits_for[pool]
        if last >= 0 and (rank.l2_left[last] > 0 or rank.l2_done_us[last] > now):
            if rank.l2_left[last] > 0:
                rank.blocked_on = last
            else:
                self._push(rank.l2_done_us[last], _PULL, rank.idx)
            return
        rank.next_pull += 1
        block, costs = rank.pool[pool], self.costs
        size, link = costs.rows.tokens, costs.link
        remote = block.rows - block.by_rank[rank.idx]
        # Rows of others are read from their ranks' memory, which may be this one.
        own = (block.rows - (0 if costs.is_shared else remote)) * size
        came = rank.through_hbm(now, block.rows * costs.rows.tokens + own, costs.hbm)
        if remote:
            began = max(now, rank.in_us)
            rank.in_us = drained = began + remote * size * link
            rank.in_bytes += remote * size
            for source, rows in enumerate(block.by_rank):
                if rows and source != rank.idx:
                    peer = self.ranks[source]
                    peer.out_us = max(peer.out_us, now) + rows * size * link
                    drained = max(drained, peer.out_us)
            rank.moved.setdefault("pull", []).append((began, drained, rank.waves[pool]))
            came = max(came, drained + self.constants.link_us)
            following = max(rank.in_us, drained - self.constants.window_us)
        else:
            following = came
        if self.pull_byte_us:
            groups = -(-block.rows // PULL_ROWS)
            copied = groups * self.group_us + block.rows * size * self.pull_byte_us
            began = max(rank.pull_us, now)
            rank.pull_us = began + copied
            rank.moved.setdefault("copy", []).append((began, rank.pull_us, rank.waves[pool]))
            came, following = max(came, rank.pull_us), max(following, rank.pull_us)
        self._arrive(rank, pool, came)
        if rank.next_pull == len(rank.pulls):
            for sm in self._late(rank):
                self._push(came, _FREE, rank.idx, sm)
        self._push(following, _PULL, rank.idx)

    def _arrive(self, rank: Rank, pool: int, at_us: float) -> None:
        """L1 of a tile may begin when its rows are there, or those of its whole wave."""
        rank.pooled.append(pool)
        rank.pooled_us = max(rank.pooled_us, at_us)
        wave, at = rank.waves[pool], rank.next_pull
        if self.pools_at_once and at < len(rank.pulls) and rank.waves[rank.pulls[at]] == wave:
            return
        arrived, rank.pooled = rank.pooled, []
        for one in arrived:
            rank.arrived_us[one] = rank.pooled_us if self.pools_at_once else at_us
        for one in arrived:
            self._wake(rank, one, L1)

    def _scatter(self, rank: Rank, sm: int, block: Block, now: float) -> None:
        """Send a finished L2 block home: a piece of every row, to the rank each came from.

        An SM holds one tile of results on their way: where epilogues have warps of their own, the
        next one begins when the links have taken this one. So no queue grows without bound.
        """
        if block.phase == L1:
            return
        costs = self.costs
        owner = rank.pool[rank.offsets[block.expert] + block.m]
        size = costs.result_bytes
        own = owner.by_rank[rank.idx]
        if own:
            rank.through_hbm(now, own * size, costs.hbm)
        remote = owner.rows - own
        if self.is_staged:  # results stay here until the launch that sends them home
            rank.through_hbm(now, remote * size, costs.hbm)
            return
        if not remote:
            return
        began = max(now, rank.out_us)
        rank.out_us = last = began + remote * size * costs.link
        for home, rows in enumerate(owner.by_rank):
            if rows and home != rank.idx:
                peer, num_bytes = self.ranks[home], rows * size
                peer.in_us = max(peer.in_us, now) + num_bytes * costs.link
                peer.in_bytes += num_bytes
                last = max(last, peer.in_us)
                peer.through_hbm(now, num_bytes, costs.hbm)
        rank.moved.setdefault("scatter", []).append((began, last, block.wave))
        if costs.is_overlapped:
            rank.stores_us[sm] = max(rank.stores_us[sm], last)
        self.results_us = max(self.results_us, last + self.constants.link_us)

    def _lanes(self) -> None:
        for rank in self.ranks.values():
            for start, end, wave in merged(rank.moved.get("copy", []), SHORT_US):
                for sm in self._late(rank):
                    self.spans.append(Span(rank.idx, sm, "stage", start, end, "pull", wave))
            for role, sm, phase in (("pull", ROWS_IN, "dispatch"), ("scatter", RESULTS_OUT, "l2")):
                for start, end, wave in merged(_clipped(rank.moved.get(role, [])), LANE_GAP_US):
                    self.spans.append(Span(rank.idx, sm, role, start, end, phase, wave))


def _clipped(intervals: list[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """Cut each interval at the start of the next, so that a lane does one thing at a time."""
    nexts = [start for start, _, _ in [*intervals[1:], (float("inf"), 0.0, 0)]]
    return [(s, max(s, min(e, n)), w) for (s, e, w), n in zip(intervals, nexts, strict=False)]
