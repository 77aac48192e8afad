"""The end of a fused launch: combine adds up the rows of each token."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from megamoe.kernels.common.numbers import INF_BITS, abs_bits
from megamoe.kernels.hopper.gemm.epilogue import times
from megamoe.kernels.hopper.mega.dispatch import read_slots
from megamoe.kernels.hopper.mega.sync import of_rank
from megamoe.kernels.hopper.pipeline import GROUPS, quotient

COLS = gl.constexpr(1024)  # of a token, that a warpgroup adds up together


@gluon.jit
def _share(m, WG: gl.constexpr):
    """First item of a warpgroup and the step to its next: CTAs first, then their warpgroups."""
    return m.cta + WG * m.num_ctas, GROUPS * m.num_ctas


@gluon.jit
def slots_used(m, item, parts):
    """Bit j: whether slot j of the item's token counts. The first bad slot is noted."""
    c = m.call
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    local = quotient(item, parts)
    number = gl.arange(0, c.K_SLOTS, LANES)
    token = m.rank * c.tokens_per_rank + local + 0 * number
    expert, _, bad = read_slots(c, token * c.TOP_K + number, token, number < c.TOP_K)
    bits = gl.sum(gl.where(expert >= 0, 1, 0) << number, 0)
    first = gl.min(gl.where(bad, number, c.TOP_K), 0)
    if first < c.TOP_K:
        slot = c.first_slot + local * (c.TOP_K - c.SHARED) + first
        gl.atomic_min(c.error + m.local, slot, sem="relaxed")
    return bits


@gluon.jit
def _requantised(row, A: gl.constexpr):
    """The values that a row has once it is rounded to the format of rows on their way home."""
    x = row.reshape([COLS // A.GROUP, A.GROUP])
    _, scale, step = A.scale(gl.max(abs_bits(x), 1), 1.0, A.EXPONENT, A.MANTISSA)
    dead = abs_bits(step) >= INF_BITS
    step = gl.expand_dims(gl.where(dead, 1.0, step), 1)
    ratio = gl.where(gl.expand_dims(dead, 1), 0.0, A.divide(x, step))
    value = (A.round(ratio) * gl.expand_dims(scale, 1)).reshape([COLS])
    return gl.convert_layout(value, row.type.layout)


@gluon.jit
def combine(m, WG: gl.constexpr):
    """One warpgroup's share of this rank's tokens: slots in ascending order, FP32, rounded once."""
    c = m.call
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    parts = (c.hidden + COLS - 1) // COLS
    rows = of_rank(c, c.rows, m.rank)
    weights = of_rank(c, c.weights, m.rank)
    begin, step = _share(m, WG)
    for item in range(begin, c.tokens_per_rank * parts, step):
        bits = slots_used(m, item, parts)
        mbarrier.wait(m.all_done, 0)  # now all rows are there
        token = quotient(item, parts)
        col = (item - token * parts) * COLS + gl.arange(0, COLS, LAYOUT)
        token = token.to(gl.int64)
        inside = col < c.hidden
        total = gl.zeros([COLS], gl.float32, LAYOUT)
        for j in gl.static_range(c.TOP_K):
            slot = token * c.TOP_K + j
            mask = inside & ((bits >> j & 1) != 0)
            row = gl.load(rows + slot * c.hidden + col, mask=mask, other=0.0).to(gl.float32)
            if c.ROWS_AS.HOLD != "plain":
                row = _requantised(row, c.ROWS_AS)
            if not c.WEIGHTED and j < c.TOP_K - c.SHARED:
                weight = gl.load(weights + (slot - token * c.SHARED))
                row = times(row, gl.zeros([COLS], gl.float32, LAYOUT) + weight)
                total = gl.where(mask, total + row, total)  # a weight may be no number
            else:
                total += row  # zeros change nothing: a sum that begins with 0 is never -0
        y = c.y + (m.local * c.tokens_per_rank + token) * c.hidden + col
        gl.store(y, total.to(gl.bfloat16), mask=inside)
