"""From a plan and counts to the ranks that the event loop runs: pools, queues, what is left."""

from __future__ import annotations

from collections.abc import Sequence

from megamoe.studies.deep_gemm.blocks import L1, L2, Block
from megamoe.simulator.events import Queue, Rank
from megamoe.studies.deep_gemm.plan import Plan
from megamoe.simulator.sample import Counts
from megamoe.simulator.traffic import local_rows, row_blocks


def rank_of(plan: Plan, counts: Counts, rank: int, *, only: str | None = None) -> Rank:
    """One rank before its launch. `only` keeps the blocks of one phase: a launch of its own.

    Fused has one queue on all SMs; split has one of L1 and one of L2, each on its partition.
    """
    local = plan.problem.num_local_experts
    rows = local_rows(counts, rank, local)
    order = tuple(plan.blocks(rows))
    grid, sms = plan.grid, plan.num_sms
    pool = row_blocks(counts, rank, local, grid.block_m)
    offsets = grid.pool_offsets(rows)
    first_use = {offsets[b.expert] + b.m: b.wave for b in order if b.phase == L1 and b.n == 0}
    queues, queue_of = _queues(plan, order, only)
    is_static = plan.deal == "static"
    sizes = [queue_of.count(which) for which in range(len(queues))]
    return Rank(
        idx=rank,
        pool=pool,
        offsets=offsets,
        waves=first_use,
        pulls=tuple(first_use),
        queues=queues,
        queue_of=queue_of,
        places=[list(range(size)) if is_static else [0] for size in sizes],
        strides=tuple(size if is_static else 1 for size in sizes),
        seats=_seats(queue_of) if is_static else (0,) * sms,
        arrived_us=[None] * len(pool),
        l1_left=[grid.num_l1_n] * len(pool),
        l2_left=[grid.num_l2_n] * len(pool),
        l1_done_us=[0.0] * len(pool),
        l2_done_us=[0.0] * len(pool),
        loads_us=[0.0] * sms,
        stores_us=[0.0] * sms,
    )


def _queues(
    plan: Plan, order: Sequence[Block], only: str | None
) -> tuple[tuple[Queue, ...], tuple[int, ...]]:
    if only is not None:
        return (tuple(b for b in order if b.phase == only),), (0,) * plan.num_sms
    if plan.mode != "split":
        return (tuple(order),), (0,) * plan.num_sms
    k1 = plan["k1_sms"]
    assert isinstance(k1, int)
    parts = tuple(tuple(b for b in order if b.phase == phase) for phase in (L1, L2))
    return parts, tuple(int(sm >= k1) for sm in range(plan.num_sms))


def _seats(queue_of: tuple[int, ...]) -> tuple[int, ...]:
    taken = dict.fromkeys(queue_of, 0)
    seats = []
    for which in queue_of:
        seats.append(taken[which])
        taken[which] += 1
    return tuple(seats)
