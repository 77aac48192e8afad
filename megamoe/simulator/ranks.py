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
    how: Schedule,
    experts: Experts,
    counts: Counts,
    rank: int,
    *,
    only: str | None = None,
    pulls: bool = False,
) -> Rank:
    """One rank before its launch. `only` keeps the blocks of one phase: a launch of its own.

    There is one queue for all SMs; split has one of L1 and one of L2, each on its partition. Where
    some SMs pull first and L1's blocks go round robin, L1 has the others, and then L2 all of them.
    """
    rows = local_rows(counts, rank, experts.num_local)
    order = tuple(how.order.blocks(experts, rows))
    pool = row_blocks(counts, rank, experts.num_local, experts.block_m, peels=how.peels)
    offsets = pool_offsets(rows, experts.block_m)
    first_use = {offsets[b.expert] + b.m: b.wave for b in order if b.phase == L1 and b.n == 0}
    queues, queues_of = _queues(how, order, only, pulls=pulls)
    is_static = how.assignment == "static"
    users = [[sm for sm, of in enumerate(queues_of) if q in of] for q in range(len(queues))]
    return Rank(
        idx=rank,
        pool=pool,
        offsets=offsets,
        waves=first_use,
        pulls=tuple(first_use),
        waits_for=how.order.waits_for(experts, rows),
        queues=queues,
        queues_of=queues_of,
        places=[{sm: i for i, sm in enumerate(of)} if is_static else {-1: 0} for of in users],
        strides=tuple(len(of) if is_static else 1 for of in users),
        arrived_us=[None] * len(pool),
        l1_left=[experts.l1.num_n] * len(pool),
        l2_left=[experts.l2.num_n] * len(pool),
        l1_done_us=[0.0] * len(pool),
        l2_done_us=[0.0] * len(pool),
        loads_us=[0.0] * how.num_sms,
        stores_us=[0.0] * how.num_sms,
    )


def _queues(
    how: Schedule, order: Sequence[Block], only: str | None, *, pulls: bool
) -> tuple[tuple[Queue, ...], tuple[tuple[int, ...], ...]]:
    """(queues, which of them each SM takes from)."""
    sms = range(how.num_sms)
    end = how.num_sms if how.l1_sms is None else how.l1_sms
    pullers = range(end - how.pull_sms, end) if pulls and not how.pullers_take else range(0)
    if only is not None:
        left_out = pullers if only == L1 else range(0)
        own = tuple(b for b in order if b.phase == only)
        return (own,), tuple(() if sm in left_out else (0,) for sm in sms)
    if how.l1_sms is None and not pullers:
        return (tuple(order),), ((0,),) * how.num_sms
    parts = tuple(tuple(b for b in order if b.phase == phase) for phase in (L1, L2))
    if how.l1_sms is None:
        return parts, tuple((1,) if sm in pullers else (0, 1) for sm in sms)
    on_l1 = {sm: () if sm in pullers else (0,) for sm in range(how.l1_sms)}
    return parts, tuple(on_l1.get(sm, (1,)) for sm in sms)
