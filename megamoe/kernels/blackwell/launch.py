"""Launchers of Blackwell's GEMM. Configurations come from the plan; nothing is chosen here.

What the compiler would take in silence is refused here by name (`formats.check_tile`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megamoe.formats.spec import Scale, recipe_named
from megamoe.kernels.blackwell.formats import FORMATS, check_tile, operand_layout
from megamoe.kernels.blackwell.gemm import gemm_tmem_kernel
from megamoe.kernels.blackwell.weights import ROW_BLOCK, Placed
from megamoe.kernels.common.numbers import Kind
from megamoe.kernels.gluon.follow import NO_CHAIN, Chain
from megamoe.kernels.gluon.pipeline import scale_width
from megamoe.kernels.gluon.pool import Pool
from megamoe.kernels.portable.acts import CODES, PLACED, PLAIN
from megamoe.layout.regions import align_up, ceil_div
from megamoe.planner.blackwell import max_tiles, num_rows
from megamoe.planner.launches import GemmTmem, Launch
from megamoe.planner.numerics import numerics
from megamoe.planner.tables.blackwell import WIDTH
from megamoe.problem import Options


def _scales(*cga_layout: list[int]) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(
        swizzle_byte_width=0, element_bitwidth=8, rank=5, cga_layout=list(cga_layout)
    )


# Placed scales in shared memory, by the CTAs that share a product.
SCALES_BY_ROWS = {1: _scales(), 2: _scales([0, 1, 0, 0, 0])}
SCALES_OF_BOTH = {1: _scales(), 2: _scales([0, 0, 0, 0, 0])}
BYTES = torch.uint8
DEST_UNIT = 1  # values of a unit of a destination on another rank


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How Blackwell computes one recipe: one arithmetic, whatever the tiles."""

    kind: Kind  # what the MMA multiplies
    acts: Kind
    dtype: torch.dtype  # of pooled activations
    scale_dtype: torch.dtype | None  # of their scales
    to_e4m3: bool = False  # FP4 weights are multiplied as they are, or decoded to BF16

    @property
    def pack(self) -> int:
        """Activations in an element of the pool."""
        return 2 if self.kind.X_BITS.value == 4 else 1


def arithmetic(recipe: str) -> Arithmetic:
    """The row of `planner.numerics` as the kernels take it."""
    row, contract = recipe_named(recipe), numerics("blackwell", recipe)
    kind = FORMATS[recipe]
    dtypes = {4: BYTES, 8: torch.float8_e4m3fn, 16: torch.bfloat16}
    dtype = dtypes[row.acts.element.bits]
    if contract.acts == "plain":
        return Arithmetic(kind, PLAIN, dtype, None)
    if contract.acts == "codes":
        return Arithmetic(kind, CODES[row.acts.name], dtype, torch.float32)
    scale = BYTES if row.acts.scale is Scale.E8M0 else torch.float8_e4m3fn
    return Arithmetic(kind, PLACED[row.acts.name], dtype, scale)


def pool(arithmetic: Arithmetic, slots: int, width: int, experts: int, block: int,
         device: torch.device, tiles: Pool | None = None, ranks: int = 1, *, is_far: bool = False,
         rows: int | None = None) -> Pool:  # fmt: skip
    """Memory for `slots` slots on each rank; the routing is that of `tiles` if there is one.

    is_far  rows may go to other ranks: destinations are offsets, not numbers of rows
    rows    of a ring on each rank, instead of what the worst routing needs
    """
    wide, rows = align_up(width, WIDTH), ranks * (rows or num_rows(slots, experts, block))

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    data = new(rows, wide // arithmetic.pack, dtype=arithmetic.dtype)
    if arithmetic.scale_dtype is None:
        scale = new(1)
    elif arithmetic.scale_dtype is torch.float32:
        scale = new(wide // ROW_BLOCK, rows)
    else:
        groups = wide // arithmetic.kind.VEC.value
        scale = new(1, rows // block, groups // 4, 2, 256, dtype=arithmetic.scale_dtype)
    if tiles is not None:
        return tiles._replace(data=data, scale=scale)
    dest = new(rows, dtype=torch.int64 if is_far else torch.int32)
    return Pool(
        data, scale, dest, new(rows), new(rows),
        new(max_tiles(slots, experts, block), 4, dtype=torch.int32), new(4, dtype=torch.int32),
    )  # fmt: skip


def gated(x: Pool, w: Placed, out: Pool, step: Launch, arithmetic: Arithmetic, options: Options,
          *, bias: Tensor | None = None, acts_factor: Tensor | None = None,
          error: Tensor | None = None, use_pdl: bool = False,
          chain: Chain = NO_CHAIN) -> None:  # fmt: skip
    """L1 with activation, weight and format: pool [R, hidden] -> pool [R, intermediate].

    error  is set to -1 by a wait for a tile that is given up
    chain  it waits for the rows of each tile
    """
    data, scale = as_bytes(out.data), as_bytes(out.scale)
    run(
        x, w, step, arithmetic, bias, acts_factor, out=data, out_scale=scale,
        num_outputs=out.data.shape[1] * arithmetic.pack, clamp=float(options.limit),
        ACTS=arithmetic.acts, ACTIVATION=options.activation,
        WEIGHTED=options.weight_at == "l1", STORE="pool",
        launch_pdl=use_pdl, chain=chain, error=error,
    )  # fmt: skip


def linear(x: Pool, w: Placed, out: Tensor, step: Launch, arithmetic: Arithmetic, options: Options,
           *, bias: Tensor | None = None, acts_factor: Tensor | None = None,
           error: Tensor | None = None, use_pdl: bool = False,
           chain: Chain = NO_CHAIN) -> None:  # fmt: skip
    """L2: pool [R, intermediate] -> BF16 rows of `out` [.., hidden] at each row's destination.

    chain  the L1 before it; of ranks, rows go where `x.dest` says in values, also to other ranks
    """
    assert chain.row_scale is None, "rows go to other ranks in BF16"
    run(
        x, w, step, arithmetic, bias, acts_factor, out=out, out_scale=out,
        num_outputs=w.num_outputs, clamp=0.0, ACTS=PLAIN, ACTIVATION="swiglu",
        WEIGHTED=options.weight_at == "l1",
        STORE="rows", launch_pdl=use_pdl, chain=chain, error=error,
    )  # fmt: skip


def run(x: Pool, w: Placed, step: Launch, arithmetic: Arithmetic, bias: Tensor | None,
         acts_factor: Tensor | None, *, source: Tensor | None = None, SOURCE: str = "pool",
         chain: Chain = NO_CHAIN, error: Tensor | None = None, **rest: Any) -> None:  # fmt: skip
    """source: int32 [R], where the rows of the pool stand in x, by way of SOURCE (`gemm`)."""
    tile = step.config
    assert isinstance(tile, GemmTmem) and chain.dest_unit in (0, DEST_UNIT)
    unused, follows = x.num_tiles, chain.follows is not None
    assert not (follows and error is None)
    # Arguments that are None are none of the kernel's.
    rest |= {
        "follows": chain.follows, "publishes": chain.publishes, "begun": chain.begun,
        "bound_us": chain.bound_us, "error": error if follows else None,
        "l1_n_tiles": (chain.after.num_blocks if chain.after else 0) if follows else None,
    }  # fmt: skip
    if chain.dest_unit:
        rest["IS_FAR"] = True
    descriptors = operands(x, w, tile, arithmetic, gathers=SOURCE == "gather")
    gemm_tmem_kernel[step.grid](
        **descriptors, factor=or_unused(w.factor, unused), bias=or_unused(bias, unused),
        acts_factor=or_unused(acts_factor, unused), row_factor=x.factor, row_weight=x.weight,
        row_dest=x.dest, row_source=or_unused(source, unused), tiles=x.tiles,
        num_tiles=x.num_tiles, pool_rows=len(x.dest),
        steps=ceil_div(x.data.shape[1] * arithmetic.pack, tile.block_k), num_bias=w.num_outputs,
        num_blocks=w.num_blocks, factor_cols=factor_cols(w),
        FORMAT=arithmetic.kind, GATED=w.is_gated, HAS_BIAS=bias is not None, SOURCE=SOURCE, **rest,
        **tile.constants(),
    )  # fmt: skip


def operands(x: Pool, w: Placed, tile: GemmTmem, arithmetic: Arithmetic,
             gathers: bool = False) -> dict[str, TensorDescriptor]:  # fmt: skip
    """TMA over weights, tokens and their scales; refuses what the MMA would read otherwise.

    gathers  copies name each row of a tile: a block of theirs is one row
    """
    kind, k, ctas = arithmetic.kind, tile.block_k, tile.num_ctas
    w_layout = operand_layout(kind, ctas * ROW_BLOCK, k, kind.W_BITS.value, ctas)
    check_tile(kind, tile, w_layout, is_gated=w.is_gated, gathers=gathers)
    rows = [ctas * ROW_BLOCK, k * kind.W_BITS.value // max(kind.W_BITS.value, 8)]
    data = _tma(w.data, rows, w_layout)
    x_layout = operand_layout(kind, tile.block_m, k, kind.X_BITS.value, ctas)
    tokens = _tma(x.data, [1 if gathers else tile.block_m, k // arithmetic.pack], x_layout)
    words = k // (4 * kind.VEC.value)
    w_scale, x_scale = data, tokens
    if w.scale is not None:
        w_scale = _tma(w.scale, [1, ctas, words, 2, 256], SCALES_BY_ROWS[ctas])
    if kind.X_SCALED.value:
        x_scale = _tma(x.scale, [1, 1, words, 2, 256], SCALES_OF_BOTH[ctas])
    elif kind.PROMOTED.value:
        flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
        x_scale = _tma(x.scale.view(-1), [scale_width(tile.block_m)], flat)
    return {"w": data, "w_scale": w_scale, "x": tokens, "x_scale": x_scale}


def factor_cols(w: Placed) -> int:
    """128-blocks of K that `factor` has."""
    return 1 if w.factor is None or w.factor.ndim < 2 else w.factor.shape[-1]


def _tma(t: Tensor, block: list[int], layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), block, layout)


def as_bytes(t: Tensor) -> Tensor:
    """What threads store codes to."""
    return t.view(BYTES) if t.element_size() == 1 else t


def or_unused(t: Tensor | None, unused: Tensor) -> Tensor:
    """`t`, or any tensor where the kernel does not look."""
    return unused if t is None else t
