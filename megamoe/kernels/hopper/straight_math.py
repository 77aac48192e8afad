"""What the math warpgroups of `straight` do: products of 64 tokens, their sums, the epilogue."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megamoe.kernels.hopper.deal import end_item, tile_at
from megamoe.kernels.hopper.ring import advance, pin, wait_for_launch
from megamoe.kernels.hopper.straight_epilogue import (
    ROWS,
    SLABS,
    activated,
    beside,
    finish_gated,
    finish_linear,
    halves,
    largest,
    mma_layout,
)


@gluon.jit
def block_factors(p, expert, across, k):
    """FP32 scales of E4M3 weights at K block k: gate's and up's, or those of both halves."""
    k = gl.minimum(k, p.factor_cols - 1)
    if p.GATED:
        n = gl.minimum(across, p.factor_rows - 1)
        one = gl.load(p.factor + (expert * 2 * p.factor_rows + n) * p.factor_cols + k)
        two = gl.load(p.factor + ((expert * 2 + 1) * p.factor_rows + n) * p.factor_cols + k)
    else:
        n = gl.minimum(across * 2, p.factor_rows - 1)
        one = gl.load(p.factor + (expert * p.factor_rows + n) * p.factor_cols + k)
        n = gl.minimum(across * 2 + 1, p.factor_rows - 1)
        two = gl.load(p.factor + (expert * p.factor_rows + n) * p.factor_cols + k)
    return one, two


@gluon.jit
def promoted(p, one, two, part, scale, factor_one, factor_two, ROW: gl.constexpr):
    """The sums plus part times the scales; gate and up are held apart where theirs differ."""
    if p.DECODED:
        one = pin(one + part * gl.expand_dims(scale, 1))
    elif p.GATED:
        gate, up = halves(part)
        one = pin(one + gate * gl.expand_dims(scale * factor_one, 1))
        two = pin(two + up * gl.expand_dims(scale * factor_two, 1))
    else:
        factor = factor_one if ROW < 128 else factor_two
        one = pin(one + part * gl.expand_dims(scale * factor, 1))
    return one, two


@gluon.jit
def no_sums(p, NUM: gl.constexpr):
    """Zeros for NUM products."""
    zeros = gl.zeros([64, p.WIDTH], gl.float32, mma_layout(p.WIDTH))
    ones = ()
    twos = ()
    for i in gl.static_range(NUM):
        if p.GATED and not p.DECODED:
            one, two = halves(zeros)
        else:
            one = zeros
            two = zeros
        ones = ones + (one,)
        twos = twos + (two,)
    return zeros, ones, twos


@gluon.jit
def weight_rows(p, idx, N: gl.constexpr):
    """The N-th WIDTH rows of a stage's weights, as wgmma's B."""
    w = p.w_bufs.index(idx).reshape([ROWS, 128])
    return w.slice(N * p.WIDTH, p.WIDTH, 0).permute((1, 0))


@gluon.jit
def multiply(p, expert, across, idx, phase, ROW: gl.constexpr, NUM: gl.constexpr, AT: gl.constexpr):
    """Sums of the 64 tokens from AT on x NUM weight rows from ROW on, WIDTH rows each.

    Tokens are read into registers once, since shared memory is the limit. While one product is
    scaled and added, the next one is computed.
    """
    DOT: gl.constexpr = gl.DotOperandLayout(0, mma_layout(p.WIDTH), 4)
    N: gl.constexpr = NUM // p.WIDTH
    FIRST: gl.constexpr = ROW // p.WIDTH
    part, ones, twos = no_sums(p, N)
    spare = part
    LAYOUT: gl.constexpr = gl.SliceLayout(1, ones[0].type.layout)
    one = 1.0
    two = 1.0
    if not p.DECODED:
        one, two = block_factors(p, expert, across, 0)
    for k in range(p.steps):
        if not p.DECODED:
            next_one, next_two = block_factors(p, expert, across, k + 1)
        mbarrier.wait(p.full.index(idx), phase)
        x = p.x_bufs.index(idx).slice(AT, 64, 0).load(DOT)
        scale = p.xs_bufs.index(idx).slice(AT, 64, 0).load(LAYOUT)
        part = warpgroup_mma(x, weight_rows(p, idx, FIRST), part, use_acc=False, is_async=True)
        new_ones = ()
        new_twos = ()
        for n in gl.static_range(N):
            if n + 1 < N:
                w = weight_rows(p, idx, FIRST + n + 1)
                spare = warpgroup_mma(x, w, spare, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(1, deps=[part])
            else:
                part = warpgroup_mma_wait(0, deps=[part])
                fence_async_shared()
                mbarrier.arrive(p.empty.index(idx), count=1)
            sums, up = promoted(p, ones[n], twos[n], part, scale, one, two, ROW + n * p.WIDTH)
            new_ones = new_ones + (sums,)
            new_twos = new_twos + (up,)
            if n + 1 < N:
                part, spare = spare, part
        ones = new_ones
        twos = new_twos
        if not p.DECODED:
            one = next_one
            two = next_two
        idx, phase = advance(idx, phase, p.STAGES)
    return ones, twos, idx, phase


@gluon.jit
def slab(p, parts, SLAB: gl.constexpr):
    """The sums of 64 weight rows, or those of gate or up among them."""
    if p.WIDTH == 64:
        return parts[SLAB]
    else:
        return beside(parts[2 * SLAB], parts[2 * SLAB + 1])


@gluon.jit
def whole_tile(p, expert, first, end, across, idx, phase, WG: gl.constexpr):
    """64 tokens of a tile of more than 64, all its rows."""
    sums, ups, idx, phase = multiply(p, expert, across, idx, phase, 0, ROWS, WG * 64)
    first += WG * 64
    if p.GATED:
        a = activated(p, slab(p, sums, 0), slab(p, ups, 0), expert, across, first, end, 0)
        b = activated(p, slab(p, sums, 1), slab(p, ups, 1), expert, across, first, end, 1)
        c = activated(p, slab(p, sums, 2), slab(p, ups, 2), expert, across, first, end, 2)
        d = activated(p, slab(p, sums, 3), slab(p, ups, 3), expert, across, first, end, 3)
        bits = gl.maximum(largest(a, b), largest(c, d))
        finish_gated(p, a, bits, across, first, end, 0, WG)
        finish_gated(p, b, bits, across, first, end, 1, WG)
        finish_gated(p, c, bits, across, first, end, 2, WG)
        finish_gated(p, d, bits, across, first, end, 3, WG)
    else:
        for n in gl.static_range(SLABS):
            finish_linear(p, slab(p, sums, n), expert, across, first, end, n, WG)
    return idx, phase


@gluon.jit
def half_tile(p, expert, first, end, across, done, idx, phase, WG: gl.constexpr):
    """A tile of up to 64 tokens, half of its rows; `done` half tiles came before it."""
    sums, ups, idx, phase = multiply(p, expert, across, idx, phase, WG * 128, 128, 0)
    S: gl.constexpr = WG * 2
    if p.GATED:
        a = activated(p, slab(p, sums, 0), slab(p, ups, 0), expert, across, first, end, S)
        b = activated(p, slab(p, sums, 1), slab(p, ups, 1), expert, across, first, end, S + 1)
        bits = largest(a, b)
        turn = done & 1
        p.amax.index(turn * 2 + WG).store(bits)
        mbarrier.arrive(p.met.index(turn), count=1)
        mbarrier.wait(p.met.index(turn), (done >> 1) & 1)
        bits = gl.maximum(bits, p.amax.index(turn * 2 + 1 - WG).load(bits.type.layout))
        finish_gated(p, a, bits, across, first, end, S, WG)
        finish_gated(p, b, bits, across, first, end, S + 1, WG)
    else:
        finish_linear(p, slab(p, sums, 0), expert, across, first, end, S, WG)
        finish_linear(p, slab(p, sums, 1), expert, across, first, end, S + 1, WG)
    return idx, phase


@gluon.jit
def math(p, WG: gl.constexpr):
    """One warpgroup: 64 tokens, or 128 weight rows, of every tile of this CTA."""
    idx = 0
    phase = 0
    done = 0
    wait_for_launch()
    stop = end_item(p)
    if p.DEALT:
        next_expert, next_first, next_end, next_across = tile_at(p, gl.program_id(0))
    for item in range(gl.program_id(0), stop, gl.num_programs(0)):
        if p.DEALT:  # read a tile ahead
            expert = next_expert
            first = next_first
            end = next_end
            across = next_across
            after = gl.minimum(item + gl.num_programs(0), stop - 1)
            next_expert, next_first, next_end, next_across = tile_at(p, after)
        else:
            expert, first, end, across = tile_at(p, item)
        if first + 64 < end:
            idx, phase = whole_tile(p, expert, first, end, across, idx, phase, WG)
        else:
            idx, phase = half_tile(p, expert, first, end, across, done, idx, phase, WG)
            done += 1
