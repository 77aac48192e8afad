"""Shared memory of a fused launch on Hopper: stages and operands that both linears use."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from megamoe.kernels.gluon.compat import reinterpret
from megamoe.kernels.gluon.pipeline import FLAT_SHARED, GROUPS, barriers, record
from megamoe.kernels.hopper.gemm.epilogue import EpilogueOperands, allocate_operands
from megamoe.kernels.hopper.gemm.swap_ab import SwapAbGemm, allocate_stages


@record
class Linear:
    """One of the two products: what `SwapAbGemm` has of its own for each."""

    w: tma.tensor_descriptor
    w_scale: tma.tensor_descriptor
    x: tma.tensor_descriptor
    x_scale: tma.tensor_descriptor
    factor: gl.tensor
    bias: gl.tensor
    acts_factor: gl.tensor
    out: gl.tensor
    out_scale: gl.tensor
    steps: gl.tensor
    num_outputs: gl.tensor
    num_bias: gl.tensor
    factor_rows: gl.tensor
    factor_cols: gl.tensor
    ACTS: gl.constexpr
    GATED: gl.constexpr


@record
class Shape:
    """What only Hopper's tiles have: how weights are read, and the ring of stages."""

    WEIGHTS: gl.constexpr
    SLABS: gl.constexpr
    DEPTH: gl.constexpr
    STAGES: gl.constexpr
    IN_FLIGHT: gl.constexpr  # as in `SwapAbGemm`


@record
class Shared:
    """Shared memory and barriers of a CTA that both linears use."""

    w_l1: gl.shared_memory_descriptor  # the stages' weights, as each linear sees them
    w_l2: gl.shared_memory_descriptor
    w_scale: gl.shared_memory_descriptor
    x: gl.shared_memory_descriptor
    x_scale: gl.shared_memory_descriptor
    amax: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    amax_full: gl.shared_memory_descriptor
    epilogue: EpilogueOperands


@gluon.jit
def allocate_shared(args, shape, l1, l2):
    """The stage ring and what epilogues need; weights of both linears lie in the same stages."""
    w_l1, w_scale, x, x_scale = allocate_stages(
        l1.w, l1.w_scale, l1.x, l1.x_scale, shape.WEIGHTS, args.PROMOTED, args.TOKENS, shape.SLABS,
        shape.DEPTH, shape.STAGES,
    )  # fmt: skip
    w_l2 = w_l1
    if not shape.WEIGHTS.DECODED:
        bufs: gl.constexpr = [shape.STAGES * shape.DEPTH] + l2.w.block_type.shape
        w_l2 = reinterpret(w_l1, l2.w.dtype, bufs, l2.w.layout)
    amax = gl.allocate_shared_memory(gl.int32, [2 * GROUPS * 4, args.TOKENS], FLAT_SHARED)
    gl.static_assert(args.TOKENS < 64, "wider tiles are transposed in memory that is not here")
    full = barriers(shape.STAGES, 2, LOOP=True)
    empty = barriers(shape.STAGES, GROUPS, LOOP=True)
    amax_full = full
    if args.PROMOTED:
        amax_full = barriers(2, GROUPS)
    epilogue = allocate_operands(args.row_dest, args.ROWS, args.TOKENS, args.FACTOR, args.HAS_BIAS)
    return Shared(
        w_l1=w_l1, w_l2=w_l2, w_scale=w_scale, x=x, x_scale=x_scale, amax=amax, full=full,
        empty=empty, amax_full=amax_full, epilogue=epilogue,
    )  # fmt: skip


@gluon.jit
def gemm_of(args, shape, linear, w_bufs, shared, tile_list):
    """One linear over the CTA's ring, as the swap-AB GEMM computes it."""
    out_width = linear.num_outputs
    if args.RANKS > 1 and not linear.GATED:
        out_width = gl.to_tensor(1)  # destinations are offsets: rows go to other ranks too
    return SwapAbGemm(
        w=linear.w, w_scale=linear.w_scale, x=linear.x, x_scale=linear.x_scale, w_bufs=w_bufs,
        ws_bufs=shared.w_scale, x_bufs=shared.x, xs_bufs=shared.x_scale, amax=shared.amax,
        transpose_smem=shared.amax, full=shared.full, empty=shared.empty,
        amax_full=shared.amax_full, epilogue=shared.epilogue, factor=linear.factor,
        bias=linear.bias, acts_factor=linear.acts_factor, row_factor=args.row_factor,
        row_weight=args.row_weight, row_dest=args.row_dest, out=linear.out,
        out_scale=linear.out_scale, tiles=tile_list, num_tiles=tile_list,
        pool_rows=args.pool_rows, steps=linear.steps, num_outputs=linear.num_outputs,
        num_bias=linear.num_bias, out_width=out_width, factor_rows=linear.factor_rows,
        factor_cols=linear.factor_cols, clamp=args.clamp, WEIGHTS=shape.WEIGHTS, ACTS=linear.ACTS,
        GATED=linear.GATED, PROMOTED=args.PROMOTED, FACTOR=args.FACTOR, HAS_BIAS=args.HAS_BIAS,
        WEIGHTED=args.WEIGHTED, ACTIVATION=args.ACTIVATION, TOKENS=args.TOKENS, IS_STREAM=True,
        SLABS=shape.SLABS, DEPTH=shape.DEPTH, STAGES=shape.STAGES, SPAN=1,
        IN_FLIGHT=shape.IN_FLIGHT, IS_FAR=args.RANKS > 1,
        FOLLOWS=False, PUBLISHES=False, follows=tile_list, publishes=tile_list,
        l1_n_tiles=linear.steps, error=tile_list, bound_us=linear.steps,
    )  # fmt: skip
