"""Products of `swapped`: operands from the ring, wgmma, and FP32 sums that take their scales."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megamoe.kernels.hopper.ring import advance, pin


@gluon.jit
def operand(p, idx, j: gl.constexpr, slab: gl.constexpr, DOT: gl.constexpr):
    """Slab `slab` of K block j of a stage, as wgmma's A."""
    SLABS: gl.constexpr = p.GROUPS * p.SLABS
    if p.WEIGHTS.DECODED:
        NUM: gl.constexpr = p.STAGES * SLABS * p.DEPTH
        return p.WEIGHTS.decode(p.w_bufs, p.ws_bufs, (idx * SLABS + slab) * p.DEPTH + j, NUM, DOT)
    else:
        block = p.w_bufs.index(idx * p.DEPTH + j).reshape([SLABS * 64, 128])
        return block.slice(slab * 64, 64, 0)


@gluon.jit
def block_factors(p, expert, slab, k, ROW: gl.constexpr):
    """FP32 scales of E4M3 weights at K block k, for the rows of a slab.

    A slab lies in one 128x128 block, but for L1, where gate and up have one each.
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
def token_scales(p, factors, at, N: gl.constexpr, MMA: gl.constexpr):
    """Scales of the tokens of a stage, times those of the weights."""
    scale = p.xs_bufs.index(at).slice(0, N, 0).load(gl.SliceLayout(0, MMA))
    if p.FACTOR == "block" and not p.GATED:
        scale = scale * factors
    scale = gl.expand_dims(scale, 0)
    if p.FACTOR == "block" and p.GATED:
        scale = scale * gl.expand_dims(factors, 1)
    return scale


@gluon.jit
def promote(acc, part, scale, IS_WIDE: gl.constexpr):
    """acc + part * scale; wide sums are pinned, or they spill."""
    acc += part * scale
    if IS_WIDE:
        acc = pin(acc)
    return acc


@gluon.jit
def keep_above(p, idx, phase):
    """A wait that is over already: no instruction crosses its branch.

    Otherwise the assembler puts the decoding of the next operand behind the product it hides in.
    """
    if p.WEIGHTS.DECODED:
        mbarrier.wait(p.full.index(idx), phase)


@gluon.jit
def token_block(p, idx, j: gl.constexpr, N: gl.constexpr):
    """K block j of a stage's first N tokens, as wgmma's B."""
    return p.x_bufs.index(idx * p.DEPTH + j).slice(0, N, 0).permute((1, 0))


@gluon.jit
def release(p, idx):
    """The stage may be written again."""
    # Reads of the stage come before the copies that follow: without the fence a few of thousands
    # of launches have a wrong row.
    fence_async_shared()
    mbarrier.arrive(p.empty.index(idx), count=1)


@gluon.jit
def promoted(p, steps, expert, slab, idx, phase, N: gl.constexpr, WG: gl.constexpr,
             MMA: gl.constexpr):  # fmt: skip
    """Sums that take the scales of every 128 of K in FP32."""
    DOT: gl.constexpr = gl.DotOperandLayout(0, MMA, p.WEIGHTS.K_WIDTH)
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    IS_WIDE: gl.constexpr = N >= 64
    low = gl.zeros([64, N], gl.float32, MMA)
    high = gl.zeros([64, N], gl.float32, MMA)
    part = gl.zeros([64, N], gl.float32, MMA)
    factors = 1.0
    if p.FACTOR == "block":
        factors = block_factors(p, expert, slab, 0, ROW)
    for k in range(steps):
        mbarrier.wait(p.full.index(idx), phase)
        for j in gl.static_range(p.DEPTH):
            at = idx * p.DEPTH + j
            x = token_block(p, idx, j, N)
            a = operand(p, idx, j, WG * p.SLABS, DOT)
            part = warpgroup_mma(a, x, part, use_acc=False, is_async=True)
            if not IS_WIDE:  # read under the product; wide tiles lack the registers
                scale = token_scales(p, factors, at, N, MMA)
            if p.SLABS == 2:  # decoded under it too
                a = operand(p, idx, j, WG * p.SLABS + 1, DOT)
                keep_above(p, idx, phase)
            part = warpgroup_mma_wait(0, deps=[part])
            if IS_WIDE:
                scale = token_scales(p, factors, at, N, MMA)
            low = promote(low, part, scale, IS_WIDE)
            if p.SLABS == 2:
                part = warpgroup_mma(a, x, part, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, deps=[part])
                scale = token_scales(p, factors, at, N, MMA)
                high = promote(high, part, scale, IS_WIDE)
            if p.FACTOR == "block":
                factors = block_factors(p, expert, slab, k * p.DEPTH + j + 1, ROW)
        release(p, idx)
        idx, phase = advance(idx, phase, p.STAGES)
    return low, high, idx, phase


@gluon.jit
def plain(p, steps, idx, phase, N: gl.constexpr, WG: gl.constexpr, MMA: gl.constexpr):
    """Sums that stay in wgmma's accumulators."""
    DOT: gl.constexpr = gl.DotOperandLayout(0, MMA, p.WEIGHTS.K_WIDTH)
    low = gl.zeros([64, N], gl.float32, MMA)
    high = gl.zeros([64, N], gl.float32, MMA)
    for _ in range(steps):
        mbarrier.wait(p.full.index(idx), phase)
        for j in gl.static_range(p.DEPTH):
            x = token_block(p, idx, j, N)
            a = operand(p, idx, j, WG * p.SLABS, DOT)
            low = warpgroup_mma(a, x, low, is_async=True)
            if p.SLABS == 2:
                a = operand(p, idx, j, WG * p.SLABS + 1, DOT)
                high = warpgroup_mma(a, x, high, is_async=True)
                high = warpgroup_mma_wait(0, deps=[high])
            low = warpgroup_mma_wait(0, deps=[low])
        release(p, idx)
        idx, phase = advance(idx, phase, p.STAGES)
    return low, high, idx, phase


@gluon.constexpr_function
def _layout(tokens, instr_k):
    """Of sums [64, tokens]."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, tokens, instr_k]
    )


@gluon.jit
def multiply(p, steps, expert, slab, idx, phase, N: gl.constexpr, WG: gl.constexpr):
    """The sums of one tile's first N tokens over `steps` stages: [64, N] of one slab, or of two."""
    MMA: gl.constexpr = _layout(N, p.WEIGHTS.INSTR_K)
    if p.PROMOTED:
        low, high, idx, phase = promoted(p, steps, expert, slab, idx, phase, N, WG, MMA)
    else:
        low, high, idx, phase = plain(p, steps, idx, phase, N, WG, MMA)
    return low, high, idx, phase
