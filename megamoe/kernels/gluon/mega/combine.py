"""The end of a fused launch: combine adds up the rows of each token."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from megamoe.kernels.common.quantise import round_to_format
from megamoe.kernels.gluon.arithmetic import times
from megamoe.kernels.gluon.mega.dispatch import read_slots
from megamoe.kernels.gluon.mega.sync import num_own_tokens, own
from megamoe.kernels.gluon.pipeline import GROUPS, fast_div

COMBINE_COLS = gl.constexpr(1024)  # columns of a token that a warpgroup adds up at a time


@gluon.jit
def _share(cta, WG: gl.constexpr):
    """First item of a warpgroup and the step to its next: CTAs first, then their warpgroups."""
    return cta.cta_idx + WG * cta.num_ctas, GROUPS * cta.num_ctas


@gluon.jit
def _used_slots(cta, item, parts):
    """Bit j: whether slot j of the item's token counts. The first bad slot goes to `error`."""
    args = cta.args
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    local = fast_div(item, parts)
    number = gl.arange(0, args.K_SLOTS, LANES)
    token = local + 0 * number
    if args.RANKS == 1:  # rank 0
        token = cta.rank * args.tokens_per_rank + token
    slots = token * args.TOP_K + number
    expert, _, bad = read_slots(args, cta.rank, slots, token, number < args.TOP_K)
    bits = gl.sum(gl.where(expert >= 0, 1, 0) << number, 0)
    first_bad = gl.min(gl.where(bad, number, args.TOP_K), 0)
    if first_bad < args.TOP_K:
        slot = args.first_slot + local * (args.TOP_K - args.SHARED) + first_bad
        gl.atomic_min(args.error + cta.local_rank, slot, sem="relaxed")
    return bits


@gluon.jit
def _requantised(row, A: gl.constexpr):
    """FP32 [COMBINE_COLS]: the row's values once it is rounded to the format of combine."""
    x = row.reshape([COMBINE_COLS // A.GROUP, A.GROUP])
    value = round_to_format(x, A).reshape([COMBINE_COLS])
    return gl.convert_layout(value, row.type.layout)


@gluon.jit
def combine(cta, WG: gl.constexpr):
    """One warpgroup's share of this rank's tokens: slots in ascending order, FP32, rounded once."""
    args = cta.args
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    parts = (args.hidden + COMBINE_COLS - 1) // COMBINE_COLS
    rows = own(args, args.rows, cta.rank)
    weights = own(args, args.topk_weights, cta.rank)
    num_tokens = args.tokens_per_rank
    if args.RANKS > 1:
        num_tokens = num_own_tokens(args, cta.rank)
    begin, step = _share(cta, WG)
    for item in range(begin, num_tokens * parts, step):
        bits = _used_slots(cta, item, parts)
        mbarrier.wait(cta.all_done, 0)  # now all rows are in memory
        token = fast_div(item, parts)
        col = (item - token * parts) * COMBINE_COLS + gl.arange(0, COMBINE_COLS, LAYOUT)
        token = token.to(gl.int64)
        inside = col < args.hidden
        total = gl.zeros([COMBINE_COLS], gl.float32, LAYOUT)
        for j in gl.static_range(args.TOP_K):
            slot = token * args.TOP_K + j
            mask = inside & ((bits >> j & 1) != 0)
            row = gl.load(rows + slot * args.hidden + col, mask=mask, other=0.0).to(gl.float32)
            if args.ROWS_AS.STORED_AS != "plain":
                row = _requantised(row, args.ROWS_AS)
            if not args.WEIGHTED and j < args.TOP_K - args.SHARED:
                weight = gl.load(weights + (slot - token * args.SHARED))
                row = times(row, gl.zeros([COMBINE_COLS], gl.float32, LAYOUT) + weight)
                total = gl.where(mask, total + row, total)  # a weight may be NaN
            else:
                total += row  # zeros change nothing: a sum that begins with 0 is never -0
        y = args.y + (cta.local_rank * args.tokens_per_rank + token) * args.hidden + col
        gl.store(y, total.to(gl.bfloat16), mask=inside)
