"""How a CTA of a fused launch begins: its queue and barriers, and over ranks the exchange."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.kernels.gluon.mega.inbox import SOURCES, limits_agree, num_inbox_tokens
from megamoe.kernels.gluon.mega.push import push_tokens
from megamoe.kernels.gluon.mega.state import QUEUE_WORDS, CtaState
from megamoe.kernels.gluon.mega.sync import own, wait_for_ranks
from megamoe.kernels.gluon.pipeline import FLAT_SHARED, GROUPS, barriers


@gluon.jit
def begin_cta(
    args, rank, local_rank, cta_idx, num_ctas, tile_list, READERS: gl.constexpr,
    STORERS: gl.constexpr,
):  # fmt: skip
    """Queue, barriers and memory for the routing; over several ranks, what peers push is here then.

    READERS  roles that pop work items
    STORERS  math warpgroups that store a part of each tile, for `publish` to count; 0: the
             warpgroup that stores a tile counts it
    """
    SLOTS: gl.constexpr = args.SLOTS
    queue = gl.allocate_shared_memory(gl.int32, [2 * QUEUE_WORDS, 1], FLAT_SHARED)
    item_full = barriers(2, 1)
    item_empty = barriers(2, READERS)
    tile_stored = item_full
    tile_counted = item_full
    if STORERS > 0:
        tile_stored = barriers(2, STORERS)
        tile_counted = barriers(2, 1)
    own_done = barriers(1, GROUPS).index(0)
    all_done = barriers(1, 1).index(0)
    if args.RANKS == 1:
        chunk_shape: gl.constexpr = [SLOTS // args.SLOT_CHUNK, args.SLOT_CHUNK]
        slot_expert = gl.allocate_shared_memory(gl.int16, chunk_shape, FLAT_SHARED)
        expert_row_begin = gl.allocate_shared_memory(gl.int32, [args.EXPERTS], FLAT_SHARED)
    else:
        expert_row_begin = gl.allocate_shared_memory(gl.int32, [SOURCES, args.EXPERTS], FLAT_SHARED)
        slot_expert = expert_row_begin
    num_tiles = gl.allocate_shared_memory(gl.int32, [1], FLAT_SHARED)
    routed = barriers(1, 1).index(0)
    own_filled = barriers(1, 1).index(0)
    pool_filled = barriers(1, 1).index(0)
    num_tokens = args.num_slots
    if args.RANKS > 1:
        push_tokens(args, rank, cta_idx, num_ctas)
        num_tokens = 0 * args.num_slots
        if wait_for_ranks(args, rank, num_ctas):  # noqa: SIM102  Gluon evaluates both of an `and`
            if limits_agree(args, rank):
                num_tokens = num_inbox_tokens(args, rank)
    return CtaState(
        args=args, rank=rank, local_rank=local_rank, cta_idx=cta_idx, num_ctas=num_ctas,
        num_tokens=num_tokens, tile_list=tile_list, counters=own(args, args.counters, rank),
        slot_expert=slot_expert, expert_row_begin=expert_row_begin, num_tiles=num_tiles,
        routed=routed, own_filled=own_filled, pool_filled=pool_filled, queue=queue,
        item_full=item_full, item_empty=item_empty, tile_stored=tile_stored,
        tile_counted=tile_counted, own_done=own_done, all_done=all_done,
    )  # fmt: skip
