"""State of a fused launch: its arguments, one CTA's place, queue and barriers, the two linears."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.kernels.gluon.pipeline import record

PART_COLS = gl.constexpr(2048)  # columns of a part of a token: what is quantised at a time
PAIR_SLOTS = gl.constexpr(128)  # slots that a token's slots are compared with at a time
FLAT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# [slots of a token, other slots]: every warp compares its own slots with all others, so that no sum
# leaves the warp, and code is short.
PAIRS = gl.constexpr(gl.BlockedLayout([1, PAIR_SLOTS.value // 32], [1, 32], [4, 1], [1, 0]))
# Words of a work item in the queue.
QUEUE_WORDS = gl.constexpr(7)
QUEUE_KIND = gl.constexpr(0)
QUEUE_TICKET = gl.constexpr(1)
QUEUE_TILE = gl.constexpr(2)
QUEUE_N_TILE = gl.constexpr(3)
QUEUE_EXPERT = gl.constexpr(4)
QUEUE_ROW_BEGIN = gl.constexpr(5)
QUEUE_ROW_END = gl.constexpr(6)


@record
class KernelArgs:
    """One launch: its tensors, sizes and constants, the same for every CTA."""

    x: gl.tensor
    x_stride: gl.tensor
    g: gl.tensor  # NVFP4: global scale of the tokens
    g_stride: gl.tensor
    topk_idx: gl.tensor
    topk_weights: gl.tensor
    num_valid: gl.tensor
    error: gl.tensor
    stats: gl.tensor
    y: gl.tensor
    pool: gl.tensor
    pool_scale: gl.tensor
    row_dest: gl.tensor
    row_weight: gl.tensor
    row_factor: gl.tensor
    rows: gl.tensor  # BF16 [slots, hidden]: what combine adds
    counters: gl.tensor
    signals: gl.tensor  # int32 [32], several ranks: `sync`
    peers: gl.tensor  # int64 [ranks]: bytes from a pointer of this launch to the same of a rank
    inbox: gl.tensor  # several ranks, what peers push (`push`): tokens [RANKS, tokens, width],
    inbox_scale: gl.tensor  # their scales,
    inbox_slots: gl.tensor  # int32 [RANKS, tokens, K_SLOTS],
    inbox_weights: gl.tensor  # topk weights, likewise,
    inbox_counts: gl.tensor  # int32 [RANKS, EXPERTS + 4]
    report: gl.tensor
    trace: gl.tensor
    bound_ns: gl.tensor
    weights_ahead: gl.tensor  # steps of a CTA's first tile that do not wait for the whole pool
    absent_rank: gl.tensor  # a rank that never signals its end, as `megamoe certify` asks; -1: none
    first_slot: gl.tensor  # of the call: where this launch's slots begin, on each rank
    num_slots: gl.tensor  # one rank: of the call
    tokens_per_rank: gl.tensor
    num_experts: gl.tensor  # of one rank
    rows_per_rank: gl.tensor
    pool_rows: gl.tensor
    wave_rows: gl.tensor  # RING: rows (of all experts in order) of a pool wave
    tile_list_stride: gl.tensor
    num_counters: gl.tensor
    hidden: gl.tensor
    width: gl.tensor  # of a pooled token
    clamp: gl.tensor
    ACTS: gl.constexpr
    BY_GROUP: gl.constexpr  # how columns stand in the pool (`common.columns`)
    FACTOR: gl.constexpr
    HAS_BIAS: gl.constexpr
    ACTIVATION: gl.constexpr
    PROMOTED: gl.constexpr
    WEIGHTED: gl.constexpr
    HAS_COUNT: gl.constexpr
    HAS_STATS: gl.constexpr
    RANKS: gl.constexpr
    LOCAL: gl.constexpr  # ranks of this launch
    EXPERTS: gl.constexpr  # num_experts to the next power of two
    SLOTS: gl.constexpr  # num_slots to the next size that kernels are compiled for
    SLOT_CHUNK: gl.constexpr  # slots of which one warpgroup reads the routing at a time
    TOP_K: gl.constexpr  # slots of a token, those of shared experts included
    SHARED: gl.constexpr  # shared experts: the last experts, in the last slots of every token
    K_SLOTS: gl.constexpr  # TOP_K to the next power of two
    TOKENS: gl.constexpr
    ROWS: gl.constexpr  # weight rows of a tile
    ALIGN: gl.constexpr  # rows of the pool at whose multiples experts begin
    TRACE: gl.constexpr
    RING: gl.constexpr  # the pool holds two pool waves at a time, not all rows
    ROWS_AS: gl.constexpr  # the format that combine rounds rows to


@gluon.jit
def num_parts(args, num_tokens):
    """Parts of tokens, of all ranks; `num_tokens`: of several ranks."""
    if args.RANKS == 1:
        num_tokens = args.num_slots // args.TOP_K
    return num_tokens * ((args.width + PART_COLS - 1) // PART_COLS)


@record
class CtaState:
    """One CTA: its place, its tile list, its work queue, its barriers."""

    args: KernelArgs
    rank: gl.tensor
    local_rank: gl.tensor  # among the ranks of this launch
    cta_idx: gl.tensor  # within the rank
    num_ctas: gl.tensor  # of the rank
    num_tokens: gl.tensor  # several ranks: of all; 0 where this CTA did not see all of them
    tile_list: gl.tensor  # this CTA's
    counters: gl.tensor  # this rank's
    # One rank: int16 [SLOTS / SLOT_CHUNK, SLOT_CHUNK], each slot's expert or -1; int32 [EXPERTS].
    # Several: no slots; int32 [sources, EXPERTS], the first row of each source's slots.
    slot_expert: gl.shared_memory_descriptor
    expert_row_begin: gl.shared_memory_descriptor
    num_tiles: gl.shared_memory_descriptor  # int32 [1]: length of the tile list
    routed: gl.shared_memory_descriptor
    own_filled: gl.shared_memory_descriptor
    pool_filled: gl.shared_memory_descriptor
    queue: gl.shared_memory_descriptor  # int32 [2 * QUEUE_WORDS, 1]: two work items
    item_full: gl.shared_memory_descriptor
    item_empty: gl.shared_memory_descriptor
    tile_stored: gl.shared_memory_descriptor
    tile_counted: gl.shared_memory_descriptor
    own_done: gl.shared_memory_descriptor
    all_done: gl.shared_memory_descriptor
