"""Shared and tensor memory of a fused launch on Blackwell: stages and sums of both linears."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import tensor_memory_descriptor, tma

from megamoe.kernels.blackwell.gemm import TmemGemm
from megamoe.kernels.blackwell.memory import DECODES, allocate_stages, allocate_tmem
from megamoe.kernels.gluon.pipeline import GROUPS, barriers, record

HALVES = gl.constexpr(2)  # of 128 weight rows in a tile


@record
class TmemLinear:
    """One of the two products: what `TmemGemm` has of its own for each."""

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
    num_blocks: gl.tensor
    factor_cols: gl.tensor
    ACTS: gl.constexpr
    GATED: gl.constexpr


@record
class TmemTile:
    """What only Blackwell's tiles have: the MMA's format, stages, and sums in tensor memory."""

    FORMAT: gl.constexpr
    BLOCK_K: gl.constexpr
    STAGES: gl.constexpr
    SUMS: gl.constexpr
    CHUNK: gl.constexpr


@record
class Shared:
    """Memory and barriers of a CTA that both linears use, as in `TmemGemm`."""

    w: gl.shared_memory_descriptor
    w_scale: gl.shared_memory_descriptor
    x: gl.shared_memory_descriptor
    x_scale: gl.shared_memory_descriptor
    sums: tensor_memory_descriptor
    scales: tensor_memory_descriptor
    ones: tensor_memory_descriptor
    decoded: tensor_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    summed: gl.shared_memory_descriptor
    taken: gl.shared_memory_descriptor
    decoded_full: gl.shared_memory_descriptor
    decoded_empty: gl.shared_memory_descriptor


@gluon.jit
def allocate_shared(args, shape, linear):
    """The stage ring, the sums and their barriers; both linears have blocks of one shape."""
    FORMAT: gl.constexpr = shape.FORMAT
    gl.static_assert(shape.SUMS % GROUPS == 0, "a math warpgroup has sums of its own")
    w, w_scale, x, _, x_scale = allocate_stages(
        linear.w, linear.w_scale, linear.x, linear.x_scale, FORMAT, "pool", HALVES, args.TOKENS,
        shape.STAGES,
    )  # fmt: skip
    sums, scales, ones, decoded = allocate_tmem(
        FORMAT, HALVES, args.TOKENS, shape.BLOCK_K, shape.STAGES, shape.SUMS
    )
    full = barriers(shape.STAGES, 2, LOOP=True)
    READERS: gl.constexpr = 2 if FORMAT.PROMOTED or FORMAT.DECODED else 1
    empty = barriers(shape.STAGES, READERS, LOOP=True)
    summed = barriers(shape.SUMS, 1)
    taken = barriers(shape.SUMS, 1)
    decoded_full = full
    decoded_empty = full
    if FORMAT.DECODED:
        decoded_full = barriers(DECODES, 1)
        decoded_empty = barriers(DECODES, 1)
    return Shared(
        w=w, w_scale=w_scale, x=x, x_scale=x_scale, sums=sums, scales=scales, ones=ones,
        decoded=decoded, full=full, empty=empty, summed=summed, taken=taken,
        decoded_full=decoded_full, decoded_empty=decoded_empty,
    )  # fmt: skip


@gluon.jit
def gemm_of(args, shape, linear, shared, tile_list):
    """One linear over the CTA's ring, as the staged GEMM computes it."""
    return TmemGemm(
        w=linear.w, w_scale=linear.w_scale, x=linear.x, x_scale=linear.x_scale, w_bufs=shared.w,
        ws_bufs=shared.w_scale, x_bufs=shared.x, x_parts=shared.x, xs_bufs=shared.x_scale,
        sums=shared.sums, scales=shared.scales, ones=shared.ones, decoded=shared.decoded,
        full=shared.full, empty=shared.empty, summed=shared.summed, taken=shared.taken,
        decoded_full=shared.decoded_full, decoded_empty=shared.decoded_empty, posted=shared.full,
        posted_full=shared.full, posted_empty=shared.full, factor=linear.factor, bias=linear.bias,
        acts_factor=linear.acts_factor, row_factor=args.row_factor, row_weight=args.row_weight,
        row_dest=args.row_dest, row_source=args.row_dest, out=linear.out,
        out_scale=linear.out_scale, tiles=tile_list, num_tiles=tile_list,
        pool_rows=args.pool_rows, steps=linear.steps, num_outputs=linear.num_outputs,
        num_bias=linear.num_bias, num_blocks=linear.num_blocks, factor_cols=linear.factor_cols,
        clamp=args.clamp, follows=tile_list, publishes=tile_list, l1_n_tiles=linear.steps,
        error=tile_list, bound_us=linear.steps, FOLLOWS=False, PUBLISHES=False,
        FORMAT=shape.FORMAT, ACTS=linear.ACTS, GATED=linear.GATED,
        HAS_BIAS=args.HAS_BIAS, WEIGHTED=args.WEIGHTED, ACTIVATION=args.ACTIVATION,
        SOURCE="pool", STORE="pool" if linear.GATED else "rows", DYNAMIC=False, HALVES=HALVES,
        TOKENS=args.TOKENS, BLOCK_K=shape.BLOCK_K, STAGES=shape.STAGES, SUMS=shape.SUMS,
        CHUNK=shape.CHUNK, SPAN=1, NUM_WARPS=4, ACCUM_STEP=GROUPS, IS_FAR=args.RANKS > 1,
        PAIR=False, CTAS=1,
    )  # fmt: skip
