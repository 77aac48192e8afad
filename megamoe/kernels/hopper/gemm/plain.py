"""Grouped GEMM for many tokens per expert: tokens are wgmma's M, 256 weight rows its N, in FP8.

A tile is 128 tokens x 256 weight rows; two math warpgroups take 128 rows each, in two waves of 64
tokens, and scale every 128 of K in FP32: the same products in the same order as `swapped`, so the
same bits. E4M3 weights come by TMA. FP4 images are decoded by a warpgroup of its own: per tile,
into the stage, where few tiles share their weights; or once for all tiles of a wave (`ahead`).
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

from megamoe.kernels.common.numbers import abs_bits
from megamoe.kernels.hopper.gemm.decode_per_tile import decode, load_images
from megamoe.kernels.hopper.gemm.decode_per_wave import (
    LETTER,
    Ahead,
    decode_ahead,
    load_decoded,
    load_jobs,
    tell_jobs,
)
from megamoe.kernels.hopper.gemm.notes import (
    Notes,
    allocate_notes,
    have_read,
    told_tile,
    wait_for_notes,
)
from megamoe.kernels.hopper.gemm.straight_epilogue import (
    MMA,
    ROWS,
    SLABS,
    TOKENS,
    activated,
    finish_gated,
    finish_linear,
    halves,
)
from megamoe.kernels.hopper.gemm.straight_load import draw_tokens, load_tokens, load_weights
from megamoe.kernels.hopper.gemm.tile_scheduler import HALF, end_item
from megamoe.kernels.hopper.mega.sync import publish_stores
from megamoe.kernels.hopper.pipeline import (
    advance,
    allow_next_launch,
    barriers,
    pin,
    record,
    wait_for_launch,
)
from megamoe.kernels.hopper.weights.decode import PAIR_WORDS


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
    drawn: gl.shared_memory_descriptor  # a letter is there for who brings weights
    notes: Notes
    factor: gl.tensor
    bias: gl.tensor
    row_weight: gl.tensor
    row_dest: gl.tensor
    out: gl.tensor
    out_scale: gl.tensor
    tiles: gl.tensor
    num_tiles: gl.tensor
    awaited: gl.tensor  # L2, DRAWN: row tiles of L1
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
    DRAWN: gl.constexpr  # CTAs draw their tiles
    GATED: gl.constexpr
    HAS_BIAS: gl.constexpr
    WEIGHTED: gl.constexpr
    ACTIVATION: gl.constexpr
    STAGES: gl.constexpr
    IMAGES: gl.constexpr  # stages of the ring of FP4 images
    SPAN: gl.constexpr


@gluon.jit
def block_factors(p, expert, across, k, WG: gl.constexpr):
    """FP32 scales of E4M3 weights at K block k: gate's and up's, or twice the same."""
    k = gl.minimum(k, p.factor_cols - 1)
    if p.GATED:
        n = gl.minimum(across, p.factor_rows - 1)
        one = gl.load(p.factor + (expert * 2 * p.factor_rows + n) * p.factor_cols + k)
        two = gl.load(p.factor + ((expert * 2 + 1) * p.factor_rows + n) * p.factor_cols + k)
    else:
        n = gl.minimum(across * 2 + WG, p.factor_rows - 1)
        one = gl.load(p.factor + (expert * p.factor_rows + n) * p.factor_cols + k)
        two = one
    return one, two


@gluon.jit
def promoted(p, one, two, part, scale, factor_one, factor_two):
    """The sums plus part times the scales; gate and up are held apart where theirs differ."""
    if p.DECODED:
        one = pin(one + part * gl.expand_dims(scale, 1))
    elif p.GATED:
        gate, up = halves(part)
        one = pin(one + gate * gl.expand_dims(scale * factor_one, 1))
        two = pin(two + up * gl.expand_dims(scale * factor_two, 1))
    else:
        one = pin(one + part * gl.expand_dims(scale * factor_one, 1))
    return one, two


@gluon.jit
def multiply(p, expert, across, idx, phase, BOTH: gl.constexpr, WG: gl.constexpr):
    """Sums of 64 tokens x 128 rows, or of BOTH halves of the tile."""
    part = gl.zeros([64, 128], gl.float32, MMA)
    if p.GATED and not p.DECODED:
        low, low_up = halves(part)
        high, high_up = halves(part)
    else:
        low = gl.zeros([64, 128], gl.float32, MMA)
        high = gl.zeros([64, 128], gl.float32, MMA)
        low_up = low
        high_up = high
    KEPT: gl.constexpr = low.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, KEPT)
    one = 1.0
    two = 1.0
    if not p.DECODED:
        one, two = block_factors(p, expert, across, 0, WG)
    for k in range(p.steps):
        if not p.DECODED:
            next_one, next_two = block_factors(p, expert, across, k + 1, WG)
        w = p.w_bufs.index(idx).reshape([ROWS, 128]).slice(WG * 128, 128, 0).permute((1, 0))
        scales = p.xs_bufs.index(idx)
        mbarrier.wait(p.full.index(idx), phase)
        part = warpgroup_mma(p.x_bufs.index(2 * idx), w, part, use_acc=False, is_async=True)
        scale_low = scales.slice(0, 64, 0).load(ROW)
        scale_high = scales.slice(64, 64, 0).load(ROW)
        part = warpgroup_mma_wait(0, deps=[part])
        low, low_up = promoted(p, low, low_up, part, scale_low, one, two)
        if BOTH:
            part = warpgroup_mma(p.x_bufs.index(2 * idx + 1), w, part, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=[part])
        fence_async_shared()
        mbarrier.arrive(p.empty.index(idx), count=1)
        if BOTH:
            high, high_up = promoted(p, high, high_up, part, scale_high, one, two)
        if not p.DECODED:
            one = next_one
            two = next_two
        idx, phase = advance(idx, phase, p.STAGES)
    return low, low_up, high, high_up, idx, phase


@gluon.jit
def compute(p, done, expert, across, first, end, idx, phase, WG: gl.constexpr):
    """The CTA's tile number `done`, from the stages to memory."""
    if first + 64 < end:
        low, low_up, high, high_up, idx, phase = multiply(p, expert, across, idx, phase, True, WG)
    else:
        low, low_up, high, high_up, idx, phase = multiply(p, expert, across, idx, phase, False, WG)
    wait_for_notes(p, done)
    if p.GATED:
        low = activated(p, low, low_up, expert, across, first, end, 0, WG)
        high = activated(p, high, high_up, expert, across, first, end, 1, WG)
        low_bits = gl.max(abs_bits(low), 1)
        high_bits = gl.max(abs_bits(high), 1)
        turn = done & 1
        mine = p.amax.index(turn * 2 + WG)
        mine.slice(0, 64, 0).store(low_bits)
        mine.slice(64, 64, 0).store(high_bits)
        mbarrier.arrive(p.met.index(turn), count=1)
        mbarrier.wait(p.met.index(turn), (done >> 1) & 1)
        LAYOUT: gl.constexpr = low_bits.type.layout
        other = p.amax.index(turn * 2 + 1 - WG)
        low_bits = gl.maximum(low_bits, other.slice(0, 64, 0).load(LAYOUT))
        high_bits = gl.maximum(high_bits, other.slice(64, 64, 0).load(LAYOUT))
        finish_gated(p, low, low_bits, across, first, end, 0, WG)
        finish_gated(p, high, high_bits, across, first, end, 1, WG)
        if p.DRAWN:
            publish_stores()
            gl.thread_barrier()
    else:
        finish_linear(p, low, across, first, end, 0, WG)
        finish_linear(p, high, across, first, end, 1, WG)
    have_read(p, done)
    return idx, phase


@gluon.jit
def math(p, WG: gl.constexpr):
    """One warpgroup: 128 weight rows of every tile of this CTA."""
    idx = 0
    phase = 0
    done = 0
    if p.DRAWN:
        mbarrier.wait(p.full.index(idx), phase)
        expert, across, first, end = told_tile(p, done)
        while expert >= 0:
            idx, phase = compute(p, done, expert, across, first, end, idx, phase, WG)
            done += 1
            mbarrier.wait(p.full.index(idx), phase)
            expert, across, first, end = told_tile(p, done)
    else:
        wait_for_launch()
        for _ in range(gl.program_id(0), end_item(p), gl.num_programs(0)):
            mbarrier.wait(p.full.index(idx), phase)
            expert, across, first, end = told_tile(p, done)
            idx, phase = compute(p, done, expert, across, first, end, idx, phase, WG)
            done += 1


@gluon.jit(do_not_specialize=["awaited", "pool_rows", "steps", "factor_rows", "factor_cols"])
def straight_kernel(
    w, w_scale, x, x_scale, factor, bias, row_weight, row_dest, out, out_scale, tiles, num_tiles,
    awaited, items, fp4, fp4_scale, ring, error,
    pool_rows, steps, num_outputs, out_width, factor_rows, factor_cols, clamp, num_biases,
    DECODED: gl.constexpr, DEALT: gl.constexpr, DRAWN: gl.constexpr, DEPTH: gl.constexpr,
    CHUNK: gl.constexpr, GATED: gl.constexpr, HAS_BIAS: gl.constexpr, WEIGHTED: gl.constexpr,
    ACTIVATION: gl.constexpr, STAGES: gl.constexpr, IMAGES: gl.constexpr, SPAN: gl.constexpr,
    MATH_REGS: gl.constexpr, DECODE_REGS: gl.constexpr, LOAD_REGS: gl.constexpr,
):  # fmt: skip
    """Two math warpgroups (the first is the launch's own), a decoder or none, 2 or 4 warps."""
    plain: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    IN_STAGE: gl.constexpr = DECODED and not DEPTH
    if IN_STAGE:
        w_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, 128], plain)
        image = gl.allocate_shared_memory(gl.int32, [IMAGES, 1, SLABS, 4, 256], w.layout)
        shape: gl.constexpr = [IMAGES, 1, SLABS, PAIR_WORDS]
        image_scale = gl.allocate_shared_memory(gl.int32, shape, w_scale.layout)
    else:
        shape: gl.constexpr = [STAGES] + w.block_type.shape
        w_bufs = gl.allocate_shared_memory(gl.float8e4nv, shape, w.layout)
        image = w_bufs
        image_scale = w_bufs
    x_bufs = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, HALF, 128], x.layout)
    xs_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, TOKENS], x_scale.layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    amax = gl.allocate_shared_memory(gl.int32, [4, TOKENS], flat)
    COLS: gl.constexpr = 32 if GATED else 64  # as BF16
    rows: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    turn = gl.allocate_shared_memory(gl.bfloat16, [2, 64, COLS], rows)
    full = barriers(STAGES, 2)
    empty = barriers(STAGES, 2)
    image_full = full
    image_empty = empty
    met = full
    if DEPTH:
        words: gl.constexpr = [IMAGES, 1, 4 * CHUNK, 256]
        ahead = Ahead(
            fp4, fp4_scale, ring, error,
            gl.allocate_shared_memory(gl.int32, words, fp4.layout),
            gl.allocate_shared_memory(gl.int32, [IMAGES, 1, CHUNK * PAIR_WORDS], fp4_scale.layout),
            gl.allocate_shared_memory(gl.int32, [IMAGES * LETTER, 1], flat),
            barriers(IMAGES, 2), barriers(IMAGES, 1), barriers(IMAGES, 2), DEPTH, CHUNK, IMAGES,
        )  # fmt: skip
    else:
        ahead = Ahead(
            w, w, ring, error, w_bufs, w_bufs, w_bufs, full, full, full, DEPTH, CHUNK, IMAGES
        )
    if IN_STAGE:
        image_full = barriers(IMAGES, 1)
        image_empty = barriers(IMAGES, 1)
    if GATED:
        met = barriers(2, 2)
    drawn = full
    if DRAWN:
        drawn = barriers(2, 1)
    FACTOR: gl.constexpr = "row" if DECODED else "none"
    # L1's biases, gate's and up's apart, would take a register more than there is.
    notes = allocate_notes(row_dest, ROWS, TOKENS, FACTOR, HAS_BIAS and not GATED)
    if GATED or DEPTH:  # else only weights and items are read before roles wait
        wait_for_launch()
    allow_next_launch()
    p = Work(
        w, w_scale, x, x_scale, w_bufs, image, image_scale, x_bufs, xs_bufs, amax, turn, full,
        empty, image_full, image_empty, met, drawn, notes, factor, bias, row_weight, row_dest, out,
        out_scale, tiles, num_tiles, awaited, items, ahead, pool_rows, steps, num_outputs,
        num_biases, out_width, factor_rows, factor_cols, clamp, DECODED, DEALT, DRAWN, GATED,
        HAS_BIAS, WEIGHTED, ACTIVATION, STAGES, IMAGES, SPAN,
    )  # fmt: skip
    if DEPTH:
        gl.warp_specialize(
            [(math, (p, 0)), (math, (p, 1)), (decode_ahead, (p,)),
             (load_decoded, (p,)), (load_tokens, (p,)), (load_jobs, (p,)), (tell_jobs, (p,))],
            [4, 4, 1, 1, 1, 1], [MATH_REGS, DECODE_REGS] + [LOAD_REGS] * 4,
        )  # fmt: skip
    elif DECODED:
        gl.warp_specialize(
            [(math, (p, 0)), (math, (p, 1)), (decode, (p,)), (load_images, (p,)),
             (load_tokens, (p,))],
            [4, 4, 1, 1], [MATH_REGS, DECODE_REGS, LOAD_REGS, LOAD_REGS],
        )  # fmt: skip
    elif DRAWN:
        gl.warp_specialize(
            [(math, (p, 0)), (math, (p, 1)), (load_weights, (p,)), (draw_tokens, (p,))],
            [4, 1, 1], [MATH_REGS, LOAD_REGS, LOAD_REGS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(math, (p, 0)), (math, (p, 1)), (load_weights, (p,)), (load_tokens, (p,))],
            [4, 1, 1], [MATH_REGS, LOAD_REGS, LOAD_REGS],
        )  # fmt: skip
