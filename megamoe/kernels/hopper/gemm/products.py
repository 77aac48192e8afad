"""Products of `swapped`: operands from the ring, wgmma, and FP32 sums that take their scales."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megamoe.kernels.hopper.pipeline import GROUPS, advance


@gluon.jit
def operand(p, idx, j: gl.constexpr, slab: gl.constexpr, DOT: gl.constexpr):
    """Slab `slab` of K block j of a stage, as wgmma's A."""
    SLABS: gl.constexpr = GROUPS * p.SLABS
    if p.WEIGHTS.DECODED:
        NUM: gl.constexpr = p.STAGES * SLABS * p.DEPTH
        return p.WEIGHTS.decode(p.w_bufs, p.ws_bufs, (idx * SLABS + slab) * p.DEPTH + j, NUM, DOT)
    else:
        block = p.w_bufs.index(idx * p.DEPTH + j).reshape([SLABS * 64, 128])
        return block.slice(slab * 64, 64, 0)


@gluon.jit
def block_factors(p, expert, slab, k, ROW: gl.constexpr):
    """FP32 scales of E4M3 weights at K block k, for the rows of a slab and of the one after it.

    Both lie in one 128x128 block, but for L1, where gate and up have one each.
    """
    k = gl.minimum(k, p.factor_cols - 1)
    if p.GATED:
        n = gl.minimum(slab // 4, p.factor_rows - 1)
        gate = gl.load(p.factor + (expert * 2 * p.factor_rows + n) * p.factor_cols + k)
        up = gl.load(p.factor + ((expert * 2 + 1) * p.factor_rows + n) * p.factor_cols + k)
        factors = gl.where(gl.arange(0, 64, ROW) % 16 < 8, gate, up)
    else:
        n = gl.minimum(slab // 2, p.factor_rows - 1)
        factors = gl.load(p.factor + (expert * p.factor_rows + n) * p.factor_cols + k)
    return factors


@gluon.jit
def token_scales(p, factors, at, MMA: gl.constexpr):
    """Scales of the tokens of a stage, times those of the weights."""
    scale = p.xs_bufs.index(at).slice(0, p.TOKENS, 0).load(gl.SliceLayout(0, MMA))
    if p.FACTOR == "block" and not p.GATED:
        scale = scale * factors
    scale = gl.expand_dims(scale, 0)
    if p.FACTOR == "block" and p.GATED:
        scale = scale * gl.expand_dims(factors, 1)
    return scale


@gluon.jit
def token_block(p, idx, j: gl.constexpr):
    """K block j of a stage's tokens, as wgmma's B."""
    return p.x_bufs.index(idx * p.DEPTH + j).permute((1, 0))


@gluon.jit
def release(p, idx):
    """The stage may be written again."""
    # Reads of the stage come before the copies that follow: without the fence a few of thousands
    # of launches have a wrong row.
    fence_async_shared()
    mbarrier.arrive(p.empty.index(idx), count=1)


@gluon.jit
def _begin(p, a, x, part):
    """A product, alone where it takes scales, else on top of the sums; nobody waits for it here."""
    return warpgroup_mma(a, x, part, use_acc=not p.PROMOTED, is_async=True)


@gluon.jit
def _end(p, sums, part, scale):
    """(sums, part) once the product is there."""
    part = warpgroup_mma_wait(0, deps=[part])
    if p.PROMOTED:
        sums += part * scale
    return sums, part


@gluon.jit
def _one_slab(p, steps, idx, phase, WG: gl.constexpr, MMA: gl.constexpr):
    """One slab a warpgroup: decoding and products follow each other."""
    gl.static_assert(not p.PROMOTED, "128 outputs share a scale: 256 rows")
    DOT: gl.constexpr = gl.DotOperandLayout(0, MMA, p.WEIGHTS.K_WIDTH)
    sums = gl.zeros([64, p.TOKENS], gl.float32, MMA)
    for _ in range(steps):
        mbarrier.wait(p.full.index(idx), phase)
        for j in gl.static_range(p.DEPTH):
            sums = _begin(p, operand(p, idx, j, WG, DOT), token_block(p, idx, j), sums)
            sums = warpgroup_mma_wait(0, deps=[sums])
        release(p, idx)
        idx, phase = advance(idx, phase, p.STAGES)
    return sums, idx, phase


@gluon.jit
def _two_slabs(p, steps, expert, slab, idx, phase, WG: gl.constexpr, MMA: gl.constexpr):
    """Two slabs a warpgroup: each operand but a stage's first is decoded under the product before.

    The assembler takes the instructions of the one into the other, given registers for two operands
    and two products.
    """
    DOT: gl.constexpr = gl.DotOperandLayout(0, MMA, p.WEIGHTS.K_WIDTH)
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    low = gl.zeros([64, p.TOKENS], gl.float32, MMA)
    high = gl.zeros([64, p.TOKENS], gl.float32, MMA)
    one = gl.zeros([64, p.TOKENS], gl.float32, MMA)
    two = gl.zeros([64, p.TOKENS], gl.float32, MMA)
    factors = 1.0
    if p.FACTOR == "block":
        factors = block_factors(p, expert, slab, 0, ROW)
    for k in range(steps):
        mbarrier.wait(p.full.index(idx), phase)
        scale = 1.0
        for j in gl.static_range(p.DEPTH):
            x = token_block(p, idx, j)
            a = operand(p, idx, j, WG * 2, DOT)
            if j > 0:
                high, two = _end(p, high, two, scale)
            one = _begin(p, a, x, one)
            if p.PROMOTED:
                scale = token_scales(p, factors, idx * p.DEPTH + j, MMA)
            b = operand(p, idx, j, WG * 2 + 1, DOT)
            one = warpgroup_mma_wait(0, deps=[one])
            two = _begin(p, b, x, two)
            if p.PROMOTED:
                low += one * scale
            if p.FACTOR == "block":
                factors = block_factors(p, expert, slab, k * p.DEPTH + j + 1, ROW)
        high, two = _end(p, high, two, scale)
        release(p, idx)
        idx, phase = advance(idx, phase, p.STAGES)
    if not p.PROMOTED:
        low = one
        high = two
    return low, high, idx, phase


@gluon.constexpr_function
def _layout(tokens, instr_k):
    """Of sums [64, tokens]."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, tokens, instr_k]
    )


@gluon.jit
def multiply(p, steps, expert, slab, idx, phase, WG: gl.constexpr):
    """The sums of one tile over `steps` stages: [64, tokens] of one slab, or of two."""
    MMA: gl.constexpr = _layout(p.TOKENS, p.WEIGHTS.INSTR_K)
    if p.SLABS == 2:
        low, high, idx, phase = _two_slabs(p, steps, expert, slab, idx, phase, WG, MMA)
    else:
        low, idx, phase = _one_slab(p, steps, idx, phase, WG, MMA)
        high = low
    return low, high, idx, phase
