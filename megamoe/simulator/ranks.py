"""From a schedule and counts to the ranks that the event loop runs: pools, queues, what is left."""

from __future__ import annotations

from collections.abc import Sequence

from megamoe.simulator.blocks import L1, L2, Block, pool_offsets
from megamoe.simulator.events import Queue, Rank
from megamoe.simulator.sample import Counts
from megamoe.simulator.schedule import Experts, Schedule
from megamoe.simulator.traffic import local_rows, row_blocks


def with_shared(how: Schedule, counts: Counts) -> Counts:
    """Counts with a column of all tokens for each shared expert that the routed launches have."""
    if not how.num_joined:
        return counts
    return tuple((*sent, *(how.problem.num_tokens,) * how.num_joined) for sent in counts)


def shared_counts(how: Schedule) -> Counts:
    """Counts of shared experts in launches of their own: each sees all tokens of its rank."""
    assert how.shared is not None
    ranks, num = range(how.problem.num_ranks), how.shared.num_local
    tokens = how.problem.num_tokens
    return tuple(tuple(tokens * (r == at // num) for at in range(len(ranks) * num)) for r in ranks)


def num_blocks(experts: Experts, counts: Counts) -> int:
    """Blocks of both linears over all ranks."""
    num_n = experts.l1.num_n + experts.l2.num_n
    rows = (
        local_rows(counts, rank, experts.num_local)
        for rank in range(len(counts[0]) // experts.num_local)
    )
    return sum(pool_offsets(own, experts.block_m)[-1] * num_n for own in rows)


def rank_of(
    how: Schedule, experts: Experts, counts: Counts, rank: int, *, only: str | None = None
) -> Rank:
    """One rank before its launch. `only` keeps the blocks of one phase: a launch of its own.

    There is one queue for all SMs; split has one of L1 and one of L2, each on its partition.
    """
    rows = local_rows(counts, rank, experts.num_local)
    order = tuple(how.order.blocks(experts, rows))
    sms = how.num_sms
    pool = row_blocks(counts, rank, experts.num_local, experts.block_m, peels=how.peels)
    offsets = pool_offsets(rows, experts.block_m)
    first_use = {offsets[b.expert] + b.m: b.wave for b in order if b.phase == L1 and b.n == 0}
    queues, queue_of = _queues(how, order, only)
    is_static = how.assignment == "static"
    sizes = [queue_of.count(which) for which in range(len(queues))]
    return Rank(
        idx=rank,
        pool=pool,
        offsets=offsets,
        waves=first_use,
        pulls=tuple(first_use),
        waits_for=how.order.waits_for(experts, rows),
        queues=queues,
        queue_of=queue_of,
        places=[list(range(size)) if is_static else [0] for size in sizes],
        strides=tuple(size if is_static else 1 for size in sizes),
        seats=_seats(queue_of) if is_static else (0,) * sms,
        arrived_us=[None] * len(pool),
        l1_left=[experts.l1.num_n] * len(pool),
        l2_left=[experts.l2.num_n] * len(pool),
        l1_done_us=[0.0] * len(pool),
        l2_done_us=[0.0] * len(pool),
        loads_us=[0.0] * sms,
        stores_us=[0.0] * sms,
    )


def _queues(
    how: Schedule, order: Sequence[Block], only: str | None
) -> tuple[tuple[Queue, ...], tuple[int, ...]]:
    if only is not None:
        return (tuple(b for b in order if b.phase == only),), (0,) * how.num_sms
    if how.l1_sms is None:
        return (tuple(order),), (0,) * how.num_sms
    parts = tuple(tuple(b for b in order if b.phase == phase) for phase in (L1, L2))
    return parts, tuple(int(sm >= how.l1_sms) for sm in range(how.num_sms))


def _seats(queue_of: tuple[int, ...]) -> tuple[int, ...]:
    taken = dict.fromkeys(queue_of, 0)
    seats = []
    for which in queue_of:
        seats.append(taken[which])
        taken[which] += 1
    return tuple(seats)
