"""Tensor memory and stages of a CTA of Blackwell's GEMM, as `gemm` has them at its head."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
)

from megamoe.kernels.blackwell.fences import fence_before_arrival
from megamoe.kernels.blackwell.pair import sums_layout
from megamoe.kernels.gluon.compat import get_tmem_reg_layout, reinterpret

GATHERED = gl.constexpr(16)  # rows of one gather
DECODES = gl.constexpr(2)  # stages whose decoded weights stand in tensor memory
E8M0_ONE = gl.constexpr(127)  # E8M0


@gluon.jit
def allocate_tmem(
    FORMAT: gl.constexpr, HALVES: gl.constexpr, TOKENS: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, SUMS: gl.constexpr, PAIR: gl.constexpr = False,
):  # fmt: skip
    """(sums, scales, ones, decoded) in tensor memory; what a format lacks stands for `sums`."""
    NUM: gl.constexpr = BLOCK_K // FORMAT.VEC
    LANES: gl.constexpr = 256 if PAIR else 128
    layout: gl.constexpr = sums_layout(TOKENS, PAIR)
    sums = allocate_tensor_memory(gl.float32, [SUMS * HALVES, LANES, TOKENS], layout)
    scales = sums
    ones = sums
    decoded = sums
    if FORMAT.SCALED:
        columns: gl.constexpr = sums_layout(NUM, PAIR)
        scales = allocate_tensor_memory(gl.float32, [STAGES * (HALVES + 1), LANES, NUM], columns)
        if not FORMAT.X_SCALED:
            rows: gl.constexpr = TensorMemoryScalesLayout()
            REGS: gl.constexpr = get_tmem_reg_layout(gl.uint8, (128, NUM), rows, gl.num_warps())
            ones = allocate_tensor_memory(gl.uint8, [128, NUM], rows)
            ones.store(gl.full([128, NUM], E8M0_ONE, gl.uint8, REGS))
            fence_before_arrival()  # entering warp_specialize is one
    if FORMAT.DECODED:
        halves: gl.constexpr = TensorMemoryLayout((128, BLOCK_K), col_stride=1)
        decoded = allocate_tensor_memory(gl.bfloat16, [DECODES * HALVES, 128, BLOCK_K], halves)
    return sums, scales, ones, decoded


@gluon.jit
def allocate_stages(
    w, w_scale, x, x_scale, FORMAT: gl.constexpr, SOURCE: gl.constexpr, HALVES: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """(w_bufs, ws_bufs, x_bufs, x_parts, xs_bufs) in shared memory; unused ones are others."""
    NUM: gl.constexpr = STAGES * HALVES
    w_bufs = gl.allocate_shared_memory(w.dtype, [NUM] + w.block_type.shape, w.layout)
    PART: gl.constexpr = min(TOKENS, GATHERED) if SOURCE == "gather" else TOKENS
    WIDTH: gl.constexpr = x.block_type.shape[1]  # of a gather's block: one row
    x_parts = gl.allocate_shared_memory(x.dtype, [STAGES * TOKENS // PART, PART, WIDTH], x.layout)
    x_bufs = x_parts
    if PART < TOKENS:  # rows are one swizzled line each, so parts follow each other
        x_bufs = reinterpret(x_parts, x.dtype, [STAGES, TOKENS, WIDTH], x.layout)
    ws_bufs = w_bufs
    xs_bufs = x_bufs
    if FORMAT.SCALED or FORMAT.DECODED:
        ws_bufs = gl.allocate_shared_memory(
            w_scale.dtype, [NUM] + w_scale.block_type.shape, w_scale.layout
        )
    if FORMAT.X_SCALED or FORMAT.PROMOTED:
        xs_bufs = gl.allocate_shared_memory(
            x_scale.dtype, [STAGES] + x_scale.block_type.shape, x_scale.layout
        )
    return w_bufs, ws_bufs, x_bufs, x_parts, xs_bufs
