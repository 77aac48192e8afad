"""Launchers of the grouped GEMMs. Tiles come from the caller; nothing is chosen here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megamoe.errors import RangeError, require
from megamoe.formats.quantized import Quantized
from megamoe.formats.spec import recipe_named
from megamoe.kernels.device.numbers import Kind
from megamoe.kernels.portable import gemm
from megamoe.kernels.portable.acts import CODES, PLAIN, SCALED, VALUES
from megamoe.kernels.portable.operands import TOKENS, WEIGHTS
from megamoe.kernels.portable.sort import Order
from megamoe.problem import Options
from megamoe.schedule.heuristics.portable import Tile


class Held(NamedTuple):
    """Activations in memory as the GEMM loads them."""

    data: Tensor
    scale: Tensor | None


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How the portable backend computes one recipe: one arithmetic, whatever the tiles."""

    weights: Kind
    tokens: Kind
    acts: Kind
    data_dtype: torch.dtype  # of held activations
    has_scale: bool

    def hold(self, rows: int, width: int, device: torch.device) -> Held:
        """Room for activations [rows, width]."""
        data = torch.empty(rows, width, dtype=self.data_dtype, device=device)
        scale = None
        if self.has_scale:
            scale = torch.empty(rows, triton.cdiv(width, 128), device=device)
        return Held(data, scale)


def arithmetic(recipe: str, *, has_fp8: bool = True) -> Arithmetic:
    """The operand kinds of a recipe. Without an FP8 MMA, E4M3 is multiplied as BF16: exact too."""
    row = recipe_named(recipe)
    weights, acts = WEIGHTS[row.weights.name], row.acts.name
    if recipe == "w8a8":
        weights = weights if has_fp8 else WEIGHTS["upcast"]
        return Arithmetic(weights, TOKENS["scaled"], CODES[acts], torch.float8_e4m3fn, True)
    if recipe == "w4a8_block":
        return Arithmetic(weights, TOKENS["scaled"], SCALED[acts], torch.bfloat16, True)
    kind = PLAIN if acts == "bf16" else VALUES[acts]
    return Arithmetic(weights, TOKENS["plain"], kind, torch.bfloat16, False)


def gated(
    x: Held,
    w13: Quantized,
    order: Order,
    topk_weights: Tensor,
    out: Held,
    tile: Tile,
    how: Arithmetic,
    options: Options,
    *,
    top_k: int,
    x_global: Tensor | None = None,
    acts_global: Tensor | None = None,
    bias: Tensor | None = None,
    gather: bool = True,
    fast_math: bool = False,
) -> None:
    """L1, activation, weight and quantisation: x [T, H] (or permuted rows) -> out [rows, I]."""
    intermediate, hidden = w13.shape[2:]
    _check_tile(tile, how, order)
    tiles = order.tile_idx_to_group_idx.numel()
    some = x.data
    gemm._gated_kernel[(tiles * triton.cdiv(intermediate, tile.block_n),)](
        x.data, _or(x.scale, some), _rows(w13, tile), _scales(w13, some), _halves(w13, some),
        _or(x_global, some), _or(bias, some), topk_weights, as_bytes(out.data),
        _or(out.scale, some), _or(acts_global, some), order.permuted_idx_to_expanded_idx,
        order.tile_idx_to_group_idx, order.tile_idx_to_mn_limit, order.num_non_exiting_tiles,
        hidden, intermediate, float(options.limit),
        TOKENS=how.tokens, WEIGHTS=how.weights, ACTS=how.acts,
        ACTIVATION=options.activation, FAST_MATH=fast_math, WEIGHTED=options.weight_at == "l1",
        HAS_BIAS=bias is not None, HAS_GLOBAL=w13.global_scale is not None, GATHER=gather,
        TOP_K=top_k, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        GROUP_M=tile.group_m, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def linear(
    x: Held,
    w: Quantized,
    order: Order,
    out: Tensor,
    tile: Tile,
    how: Arithmetic,
    *,
    top_k: int = 1,
    store: str = "rows",
    out_scale: Tensor | None = None,
    first_slot: int = 0,
    topk_weights: Tensor | None = None,
    weighted: bool = False,
    bias: Tensor | None = None,
    weight_bias: bool = False,
    x_global: Tensor | None = None,
) -> None:
    """One linear over permuted rows: the plain grouped GEMM ("rows"), or L2 finalising.

    store      "rows": out [rows, N]; "slots": out [T, slots, N] from `first_slot` on, BF16, or FP8
               bytes with `out_scale`; "atomic": out FP32 [T, N], added in no fixed order, so the
               result is not deterministic
    weighted   with "atomic": multiply by the topk weight here
    """
    num_cols, width = w.shape[1:]
    _check_tile(tile, how, order)
    require(
        out_scale is None or tile.block_n == 128,
        "one scale of FP8 combine is one block of 128 columns",
        got=f"block_n {tile.block_n}",
        kind=RangeError,
    )
    require(
        store in ("rows", "slots", "atomic"),
        "store is rows, slots or atomic",
        got=store,
        kind=RangeError,
    )
    tiles = order.tile_idx_to_group_idx.numel()
    some = x.data
    gemm._linear_kernel[(tiles * triton.cdiv(num_cols, tile.block_n),)](
        x.data, _or(x.scale, some), _rows(w, tile), _scales(w, some), _or(w.global_scale, some),
        _or(x_global, some), _or(bias, some), _or(topk_weights, some), as_bytes(out),
        _or(out_scale, some), order.permuted_idx_to_expanded_idx, order.tile_idx_to_group_idx,
        order.tile_idx_to_mn_limit, order.num_non_exiting_tiles, width, num_cols, first_slot,
        out.shape[1] if store == "slots" else 1,
        TOKENS=how.tokens, WEIGHTS=how.weights,
        ACTS=PLAIN if out_scale is None else CODES["fp8_combine"], STORE=store, WEIGHTED=weighted,
        WEIGHT_BIAS=weight_bias, HAS_BIAS=bias is not None, HAS_GLOBAL=w.global_scale is not None,
        TOP_K=top_k, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        GROUP_M=tile.group_m, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _check_tile(tile: Tile, how: Arithmetic, order: Order) -> None:
    require(
        tile.block_m == order.tile_m,
        "the token tile must be the one the slots were sorted for",
        got=f"block_m {tile.block_m}, sorted for {order.tile_m}",
        kind=RangeError,
    )
    require(
        tile.block_k == 128 or not how.has_scale,
        "one step of K must be one 1x128 scale",
        got=f"block_k {tile.block_k}",
        kind=RangeError,
    )
    require(
        tile.block_n == 128 or how.acts.HOLD.value not in ("codes", "scaled"),
        "a block of 128 columns must lie in one program",
        got=f"block_n {tile.block_n}",
        kind=RangeError,
    )


def _rows(w: Quantized, tile: Tile) -> TensorDescriptor:
    """A descriptor over the rows of all experts; its block is one tile of stored elements."""
    flat = w.data.flatten(0, -2)
    depth = tile.block_k // 2 if w.spec.element.bits == 4 else tile.block_k
    return TensorDescriptor.from_tensor(flat, [tile.block_n, depth])


def _scales(w: Quantized, some: Tensor) -> Tensor:
    return some if w.scale is None else as_bytes(w.scale)


def _or(t: Tensor | None, some: Tensor) -> Tensor:
    """`t`, or any tensor where the kernel does not look."""
    return some if t is None else t


def as_bytes(t: Tensor) -> Tensor:
    """E4M3 as bytes, which is how kernels write it."""
    return t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t


def _halves(w13: Quantized, some: Tensor) -> Tensor:
    """The global scales of gate and up of every expert, [E, 2]."""
    g = w13.global_scale
    if g is None:
        return some
    return g if g.ndim == 2 else g[:, None].expand(-1, 2).contiguous()
