"""Dispatch: tokens into the activation format, routing checked and padded, in one launch (D007)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.formats.quantized import (
    DATA_DTYPE,
    SCALE_DTYPE,
    Quantized,
    data_shape,
    scale_shape,
)
from megamoe.formats.spec import format_named
from megamoe.kernels.common.compat import after_previous, overlap
from megamoe.kernels.common.numbers import Kind
from megamoe.kernels.portable.acts import CODES, store_acts
from megamoe.kernels.portable.grid import is_deep, row_tile, tiles
from megamoe.kernels.portable.pack import can_pack, pack
from megamoe.kernels.portable.routing import Routing, check_routing, routing_arguments


@triton.jit
def _dispatch_kernel(
    x, x_stride, g, out, out_scale, topk_idx, topk_weights, idx_out, weights_out, num_valid, error,
    num_tokens, hidden, num_experts,
    ACTS: tl.constexpr, HAS_TOKENS: tl.constexpr, HAS_ROUTING: tl.constexpr,
    HAS_COUNT: tl.constexpr, HAS_G: tl.constexpr,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    IS_DEEP: tl.constexpr,
):  # fmt: skip
    after_previous()
    row = row_tile(IS_DEEP) * ROWS + tl.arange(0, ROWS)
    inside = row < num_tokens
    if HAS_TOKENS:
        first_col = tl.program_id(0) * COLS
        col = first_col + tl.arange(0, COLS)
        mask = inside[:, None] & (col < hidden)[None, :]
        place = row.to(tl.int64)[:, None] * x_stride + col[None, :]
        tile = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        factor = tl.load(g) if HAS_G else 1.0
        store_acts(tile, factor, out, out_scale, row, inside, first_col, hidden, ACTS, ROWS, COLS)
    if HAS_ROUTING:
        check_routing(
            topk_idx, topk_weights, idx_out, weights_out, num_valid, error, row, inside,
            num_experts, HAS_COUNT, TOP_K, SLOTS,
        )  # fmt: skip


# Tile and warps of a program where (2, 1024) and 2 are not the best or near it, from a sweep on one
# H200 at 8192 x 7168 (docs/measurements/portable.md).
BLOCKS = {"codes-nvfp4": ((4, 512), 1), "codes-mxfp4": ((2, 1024), 1)}


def dispatch(
    x: Tensor | None,
    out: Tensor | None,
    out_scale: Tensor | None,
    acts: Kind,
    *,
    g: Tensor | None = None,
    routing: Routing | None = None,
    num_experts: int = 0,
    block: tuple[int, int] | None = None,
    num_warps: int | None = None,
    pdl: bool = False,
) -> None:
    """Quantise `x` [T, H], if any, into `out` and `out_scale`; check and copy the routing too.

    An id out of range or a weight that is not finite becomes a masked slot and is noted in `error`;
    the slots of padding rows become -1. `block` and `num_warps` are those of BLOCKS unless given.
    """
    shape = x.shape if x is not None else (routing.idx.shape[0], 1) if routing else (0, 1)
    num_tokens, hidden = shape
    if num_tokens == 0:
        return
    best_block, best_warps = BLOCKS.get(acts.name, ((2, 1024), 2))
    rows, cols = block or best_block
    cols, num_warps = min(cols, max(triton.next_power_of_2(hidden), 128)), num_warps or best_warps
    if x is not None and out is not None and can_pack(x, acts):
        assert out_scale is not None
        pack(
            x, out, out_scale, acts, g=g, routing=routing, num_experts=num_experts,
            block=(rows, cols), num_warps=num_warps, pdl=pdl,
        )  # fmt: skip
        return
    unused = next(t for t in (x, routing and routing.idx) if t is not None)
    tensors, constants = routing_arguments(routing, unused)
    num_tiles = triton.cdiv(num_tokens, rows)
    _dispatch_kernel[tiles(num_tiles, triton.cdiv(hidden, cols))](
        unused, 0 if x is None else x.stride(0), unused if g is None else g,
        unused if out is None else out, unused if out_scale is None else out_scale, *tensors,
        num_tokens, hidden, num_experts, ACTS=acts, HAS_TOKENS=x is not None, HAS_G=g is not None,
        ROWS=rows, COLS=cols, IS_DEEP=is_deep(num_tiles), num_warps=num_warps,
        **constants, **overlap(pdl),
    )  # fmt: skip


def quantize(x: Tensor, format: str, *, g: Tensor | None = None) -> Quantized:
    """`formats.quantize` of rows [T, k] as one launch: the same bytes, for the 1-row formats."""
    fmt = format_named(format)
    shape = tuple(x.shape)
    data = torch.empty(data_shape(shape, fmt), dtype=DATA_DTYPE[fmt.element.name], device=x.device)
    scale = torch.empty(scale_shape(shape, fmt), dtype=SCALE_DTYPE[fmt.scale], device=x.device)
    if fmt.has_global:
        g = torch.ones((), device=x.device) if g is None else g
    raw = scale if scale.dtype == torch.float32 else scale.view(torch.uint8)
    dispatch(x, data.view(torch.uint8), raw, CODES[format], g=g)
    return Quantized(data, scale, format, shape, g if fmt.has_global else None)
