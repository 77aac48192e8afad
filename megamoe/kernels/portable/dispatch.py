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
from megamoe.kernels.portable.grid import row_tile
from megamoe.kernels.portable.pack import pack
from megamoe.kernels.portable.routing import Routing, check_routing, routing_arguments
from megamoe.planner.launches import Launch, Quantize


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


def dispatch(
    x: Tensor | None,
    out: Tensor | None,
    out_scale: Tensor | None,
    acts: Kind,
    *,
    g: Tensor | None = None,
    routing: Routing | None = None,
    step: Launch,
    num_experts: int = 0,
    pdl: bool = False,
) -> None:
    """Quantise `x` [T, H], if any, into `out` and `out_scale`; check and copy the routing too.

    An id out of range or a weight that is not finite becomes a masked slot and is noted in `error`;
    the slots of padding rows become -1.
    """
    shape = x.shape if x is not None else (routing.idx.shape[0], 1) if routing else (0, 1)
    num_tokens, hidden = shape
    if num_tokens == 0:
        return
    config = step.config
    assert isinstance(config, Quantize)
    if config.group:
        assert x is not None and out is not None and out_scale is not None
        pack(
            x, out, out_scale, acts, g=g, routing=routing, num_experts=num_experts, step=step,
            pdl=pdl,
        )  # fmt: skip
        return
    unused = next(t for t in (x, routing and routing.idx) if t is not None)
    _dispatch_kernel[step.grid](
        x=unused, x_stride=0 if x is None else x.stride(0), g=unused if g is None else g,
        out=unused if out is None else out, out_scale=unused if out_scale is None else out_scale,
        num_tokens=num_tokens, hidden=hidden, num_experts=num_experts, ACTS=acts,
        HAS_TOKENS=x is not None, HAS_G=g is not None, **config.constants(),
        **routing_arguments(routing, unused), **overlap(pdl),
    )  # fmt: skip


def quantize(x: Tensor, format: str, *, g: Tensor | None = None, step: Launch | None) -> Quantized:
    """`formats.quantize` of rows [T, k] as one launch: the same bytes, for the 1-row formats.

    step  None where there are no rows
    """
    fmt = format_named(format)
    shape = tuple(x.shape)
    data = torch.empty(data_shape(shape, fmt), dtype=DATA_DTYPE[fmt.element.name], device=x.device)
    scale = torch.empty(scale_shape(shape, fmt), dtype=SCALE_DTYPE[fmt.scale], device=x.device)
    if fmt.has_global:
        g = torch.ones((), dtype=torch.float32, device=x.device) if g is None else g
    raw = scale if scale.dtype == torch.float32 else scale.view(torch.uint8)
    if step is not None:
        dispatch(x, data.view(torch.uint8), raw, CODES[format], g=g, step=step)
    assert step is not None or len(x) == 0, "rows are quantised by a planned launch"
    return Quantized(data, scale, format, shape, g if fmt.has_global else None)
