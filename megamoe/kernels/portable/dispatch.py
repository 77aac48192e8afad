"""Dispatch: tokens into the activation format, routing checked and padded, in one launch (D007)."""

from typing import NamedTuple

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
from megamoe.kernels.device.compat import after_previous, overlap
from megamoe.kernels.device.numbers import Kind
from megamoe.kernels.portable.acts import CODES, store_acts
from megamoe.kernels.portable.pack import can_pack, pack


@triton.jit
def _dispatch_kernel(
    x, x_stride, g, out, out_scale, topk_idx, topk_weights, idx_out, weights_out, num_valid, error,
    num_tokens, hidden, num_experts,
    ACTS: tl.constexpr, HAS_TOKENS: tl.constexpr, HAS_ROUTING: tl.constexpr,
    HAS_COUNT: tl.constexpr, HAS_G: tl.constexpr,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    after_previous()
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = row < num_tokens
    if HAS_TOKENS:
        first_col = tl.program_id(0) * COLS
        col = first_col + tl.arange(0, COLS)
        mask = inside[:, None] & (col < hidden)[None, :]
        place = row.to(tl.int64)[:, None] * x_stride + col[None, :]
        tile = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        factor = tl.load(g) if HAS_G else 1.0
        store_acts(tile, factor, out, out_scale, row, inside, first_col, hidden, ACTS, ROWS, COLS)
    if HAS_ROUTING:  # noqa: SIM102  known at compile time, unlike the program's number
        if tl.program_id(0) == 0:
            slot = tl.arange(0, SLOTS)
            at = row[:, None] * TOP_K + slot[None, :]
            used = inside[:, None] & (slot < TOP_K)[None, :]
            idx = tl.load(topk_idx + at, mask=used, other=-1).to(tl.int32)
            weight = tl.load(topk_weights + at, mask=used, other=0.0)
            if HAS_COUNT:
                idx = tl.where((row < tl.load(num_valid))[:, None], idx, -1)  # pad fill
            finite = tl.abs(weight) < float("inf")
            bad = (idx < -1) | (idx >= num_experts) | ((idx >= 0) & (finite == 0))
            first = tl.min(tl.where(bad & used, at, 2147483647).to(tl.int32))
            if first < 2147483647:
                tl.atomic_min(error, first)
            keep = (idx >= 0) & (bad == 0)
            tl.store(idx_out + at, tl.where(keep, idx, -1), mask=used)
            tl.store(weights_out + at, tl.where(keep, weight, 0.0), mask=used)


class Routing(NamedTuple):
    """The routing as it comes and as kernels read it: every id legal or -1, every weight finite."""

    topk_idx: Tensor  # int32 or int64 [T, k]
    topk_weights: Tensor  # float32 [T, k]
    idx: Tensor  # int32 [T, k], out
    weights: Tensor  # float32 [T, k], out
    error: Tensor  # int32 [1]: the least token * k + slot that was not legal
    num_valid: Tensor | None  # int32 [1] on the device: rows from there on are padding


def dispatch(
    x: Tensor | None,
    out: Tensor | None,
    out_scale: Tensor | None,
    acts: Kind,
    *,
    g: Tensor | None = None,
    routing: Routing | None = None,
    num_experts: int = 0,
    block: tuple[int, int] = (2, 1024),
    num_warps: int = 2,
    pdl: bool = False,
) -> None:
    """Quantise `x` [T, H], if any, into `out` and `out_scale`; check and copy the routing too.

    An id out of range or a weight that is not finite becomes a masked slot and is noted in `error`;
    the slots of padding rows become -1. `block` and `num_warps` are the best or near it in a sweep
    on one H200 (docs/measurements/portable.md).
    """
    shape = x.shape if x is not None else (routing.idx.shape[0], 1) if routing else (0, 1)
    num_tokens, hidden = shape
    if num_tokens == 0:
        return
    rows, cols = block[0], min(block[1], max(triton.next_power_of_2(hidden), 128))
    if x is not None and out is not None and routing is None and can_pack(x, acts):
        assert out_scale is not None
        pack(x, out, out_scale, acts, g=g, block=(rows, cols), num_warps=num_warps)
        return
    some = next(t for t in (x, routing and routing.idx) if t is not None)
    r = routing or Routing(some, some, some, some, some, None)
    top_k = r.idx.shape[1] if routing else 1
    _dispatch_kernel[(triton.cdiv(hidden, cols), triton.cdiv(num_tokens, rows))](
        some, 0 if x is None else x.stride(0), some if g is None else g,
        some if out is None else out, some if out_scale is None else out_scale,
        r.topk_idx, r.topk_weights, r.idx, r.weights,
        some if r.num_valid is None else r.num_valid, r.error, num_tokens, hidden, num_experts,
        ACTS=acts, HAS_TOKENS=x is not None, HAS_ROUTING=routing is not None,
        HAS_COUNT=r.num_valid is not None, HAS_G=g is not None, TOP_K=top_k,
        SLOTS=triton.next_power_of_2(top_k), ROWS=rows, COLS=cols, num_warps=num_warps,
        **overlap(pdl),
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
    block, num_warps = ((1, 1024), 1) if format == "nvfp4" else ((2, 1024), 2)  # a sweep's best
    dispatch(x, data.view(torch.uint8), raw, CODES[format], g=g, block=block, num_warps=num_warps)
    return Quantized(data, scale, format, shape, g if fmt.has_global else None)
