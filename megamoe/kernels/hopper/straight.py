"""Grouped GEMM for many tokens per expert: tokens are wgmma's M, 256 weight rows its N, in FP8.

A tile is 128 tokens x 256 weight rows; two math warpgroups take 64 tokens each, or 128 rows each
where there are only 64 tokens, and scale every 128 of K in FP32: the same products in the same
order as `swapped`, so the same bits. E4M3 weights come by TMA. FP4 images are decoded by a
warpgroup of its own: per tile, into the stage, where few tiles share their weights; or once for all
tiles of a wave (`ahead`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megamoe.kernels.hopper.ahead import (
    Ahead,
    decode_ahead,
    load_decoded,
    tell_read,
    tell_rest,
)
from megamoe.kernels.hopper.deal import end_item, tile_at
from megamoe.kernels.hopper.decode import e4m3_values, read_slab
from megamoe.kernels.hopper.ring import (
    advance,
    allow_next_launch,
    barriers,
    pin,
    record,
    wait_for_launch,
)
from megamoe.kernels.hopper.straight_epilogue import (
    ROWS,
    SLABS,
    TOKENS,
    activated,
    beside,
    finish_gated,
    finish_linear,
    halves,
    largest,
    mma_layout,
)


@record
class Work:
    """One launch: operands in memory, the rings, and the epilogue's tensors (see `swapped`)."""

    w: tma.tensor_descriptor
    w_scale: tma.tensor_descriptor
    x: tma.tensor_descriptor
    x_scale: tma.tensor_descriptor
    w_bufs: gl.shared_memory_descriptor
    image: gl.shared_memory_descriptor
    image_scale: gl.shared_memory_descriptor
    x_bufs: gl.shared_memory_descriptor
    xs_bufs: gl.shared_memory_descriptor
    amax: gl.shared_memory_descriptor
    turn: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    image_full: gl.shared_memory_descriptor
    image_empty: gl.shared_memory_descriptor
    met: gl.shared_memory_descriptor
    factor: gl.tensor
    bias: gl.tensor
    row_weight: gl.tensor
    row_dest: gl.tensor
    out: gl.tensor
    out_scale: gl.tensor
    tiles: gl.tensor
    num_tiles: gl.tensor
    items: gl.tensor  # DEALT: who does which tile (`deal`)
    ahead: Ahead
    pool_rows: gl.tensor
    steps: gl.tensor
    num_outputs: gl.tensor
    num_biases: gl.tensor
    out_width: gl.tensor
    factor_rows: gl.tensor
    factor_cols: gl.tensor
    clamp: gl.tensor
    DECODED: gl.constexpr  # weights are FP4: a factor per row
    DEALT: gl.constexpr
    GATED: gl.constexpr
    HAS_BIAS: gl.constexpr
    WEIGHTED: gl.constexpr
    ACTIVATION: gl.constexpr
    STAGES: gl.constexpr
    IMAGES: gl.constexpr  # stages of the ring of FP4 images
    SPAN: gl.constexpr
    WIDTH: gl.constexpr  # weight rows of one product: two of them stand beside the sums


@gluon.jit
def load_weights(p):
    """E4M3 rows into the stages, or FP4 images into their own ring."""
    idx = 0
    phase = 1
    for item in range(gl.program_id(0), end_item(p), gl.num_programs(0)):
        expert, row, end, across = tile_at(p, item)
        for k in range(p.steps):
            if p.DECODED:
                ready = p.image_full.index(idx)
                mbarrier.wait(p.image_empty.index(idx), phase)
                mbarrier.expect(ready, SLABS * (4096 + 256))
                slab = across * SLABS
                tma.async_copy_global_to_shared(
                    p.w, [expert, slab, k * 4, 0], ready, p.image.index(idx)
                )
                tma.async_copy_global_to_shared(
                    p.w_scale, [expert, slab, k * 64], ready, p.image_scale.index(idx)
                )
                idx, phase = advance(idx, phase, p.IMAGES)
            else:
                ready = p.full.index(idx)
                mbarrier.wait(p.empty.index(idx), phase)
                mbarrier.expect(ready, ROWS * 128)
                if p.GATED:
                    tma.async_copy_global_to_shared(
                        p.w, [expert, across * 16, 0, 0, k * 128], ready, p.w_bufs.index(idx)
                    )
                else:
                    tma.async_copy_global_to_shared(
                        p.w, [expert, across * ROWS, k * 128], ready, p.w_bufs.index(idx)
                    )
                idx, phase = advance(idx, phase, p.STAGES)


@gluon.jit
def load_tokens(p):
    """Tokens of each tile, and their scales; tells what has been read of weights decoded ahead."""
    idx = 0
    phase = 1
    block = 1 - p.STAGES  # K blocks that have left the stages, over all tiles
    wait_for_launch()
    for item in range(gl.program_id(0), end_item(p), gl.num_programs(0)):
        expert, row, end, across = tile_at(p, item)
        for k in range(p.steps):
            ready = p.full.index(idx)
            mbarrier.wait(p.empty.index(idx), phase)
            mbarrier.expect(ready, TOKENS * 128 + TOKENS * 4)
            tma.async_copy_global_to_shared(p.x, [row, k * 128], ready, p.x_bufs.index(idx))
            tma.async_copy_global_to_shared(
                p.x_scale, [k * p.pool_rows + row], ready, p.xs_bufs.index(idx)
            )
            idx, phase = advance(idx, phase, p.STAGES)
            if p.ahead.DEPTH:
                tell_read(p, block)
                block += 1
    if p.ahead.DEPTH:
        tell_rest(p, block, idx, phase)


@gluon.jit
def decode(p):
    """One warpgroup: FP4 images to E4M3 rows of the stage."""
    DOT: gl.constexpr = gl.DotOperandLayout(0, mma_layout(64), 4)
    NUM: gl.constexpr = p.IMAGES * SLABS
    idx = 0
    phase = 1
    at = 0
    at_phase = 0
    for item in range(gl.program_id(0), end_item(p), gl.num_programs(0)):
        for k in range(p.steps):
            mbarrier.wait(p.image_full.index(at), at_phase)
            mbarrier.wait(p.empty.index(idx), phase)
            stage = p.w_bufs.index(idx)
            for slab in gl.static_range(SLABS):
                w, s = read_slab(p.image, p.image_scale, at * SLABS + slab, NUM, gl.uint8)
                stage.slice(slab * 64, 64, 0).store(e4m3_values(w, s, DOT))
            fence_async_shared()
            mbarrier.arrive(p.full.index(idx), count=1)
            mbarrier.arrive(p.image_empty.index(at), count=1)
            idx, phase = advance(idx, phase, p.STAGES)
            at, at_phase = advance(at, at_phase, p.IMAGES)


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


@gluon.jit(do_not_specialize=["pool_rows", "steps", "factor_rows", "factor_cols"])
def straight_kernel(
    w, w_scale, x, x_scale, factor, bias, row_weight, row_dest, out, out_scale, tiles, num_tiles,
    items, fp4, fp4_scale, ring, error,
    pool_rows, steps, num_outputs, out_width, factor_rows, factor_cols, clamp, num_biases,
    DECODED: gl.constexpr, DEALT: gl.constexpr, DEPTH: gl.constexpr, CHUNK: gl.constexpr,
    GATED: gl.constexpr, HAS_BIAS: gl.constexpr, WEIGHTED: gl.constexpr,
    ACTIVATION: gl.constexpr, STAGES: gl.constexpr, IMAGES: gl.constexpr, SPAN: gl.constexpr,
    WIDTH: gl.constexpr, MATH_REGS: gl.constexpr, DECODE_REGS: gl.constexpr,
    LOAD_REGS: gl.constexpr,
):  # fmt: skip
    """Two math warpgroups (the first is the launch's own), the decoder if any, two loaders."""
    plain: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    IN_STAGE: gl.constexpr = DECODED and not DEPTH
    if IN_STAGE:
        w_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, 128], plain)
        image = gl.allocate_shared_memory(gl.int32, [IMAGES, 1, SLABS, 4, 256], w.layout)
        image_scale = gl.allocate_shared_memory(gl.int32, [IMAGES, 1, SLABS, 64], w_scale.layout)
    else:
        shape: gl.constexpr = [STAGES] + w.block_type.shape
        w_bufs = gl.allocate_shared_memory(gl.float8e4nv, shape, w.layout)
        image = w_bufs
        image_scale = w_bufs
    x_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TOKENS, 128], x.layout)
    xs_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, TOKENS], x_scale.layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    amax = gl.allocate_shared_memory(gl.int32, [4, 64], flat)
    COLS: gl.constexpr = 16 if GATED else 64  # as BF16
    rows: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    turn = gl.allocate_shared_memory(gl.bfloat16, [2, 64, COLS], rows)
    full = barriers(STAGES, 2)
    empty = barriers(STAGES, 2)
    image_full = full
    image_empty = empty
    met = full
    if IN_STAGE:
        image_full = barriers(IMAGES, 1)
        image_empty = barriers(IMAGES, 1)
    if GATED:
        met = barriers(2, 2)
    if GATED or DEALT:
        wait_for_launch()
    allow_next_launch()
    ahead = Ahead(fp4, fp4_scale, ring, error, DEPTH, CHUNK)
    p = Work(
        w, w_scale, x, x_scale, w_bufs, image, image_scale, x_bufs, xs_bufs, amax, turn, full,
        empty, image_full, image_empty, met, factor, bias, row_weight, row_dest, out, out_scale,
        tiles, num_tiles, items, ahead, pool_rows, steps, num_outputs, num_biases, out_width,
        factor_rows, factor_cols, clamp, DECODED, DEALT, GATED, HAS_BIAS, WEIGHTED, ACTIVATION,
        STAGES, IMAGES, SPAN, WIDTH,
    )  # fmt: skip
    if DEPTH:
        gl.warp_specialize(
            [(math, (p, 0)), (math, (p, 1)), (decode_ahead, (p,)),
             (load_decoded, (p,)), (load_tokens, (p,))],
            [4, 4, 1, 1], [MATH_REGS, DECODE_REGS, LOAD_REGS, LOAD_REGS],
        )  # fmt: skip
    elif DECODED:
        gl.warp_specialize(
            [(math, (p, 0)), (math, (p, 1)), (decode, (p,)), (load_weights, (p,)),
             (load_tokens, (p,))],
            [4, 4, 1, 1], [MATH_REGS, DECODE_REGS, LOAD_REGS, LOAD_REGS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(math, (p, 0)), (math, (p, 1)), (load_weights, (p,)), (load_tokens, (p,))],
            [4, 1, 1], [MATH_REGS, LOAD_REGS, LOAD_REGS],
        )  # fmt: skip
