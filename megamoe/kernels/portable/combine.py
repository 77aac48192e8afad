"""Combine: the slots of each token added in ascending order in FP32, rounded once (A018)."""

import triton
import triton.language as tl
from torch import Tensor

from megamoe.kernels.common.compat import after_previous, overlap, to_bf16
from megamoe.kernels.portable.acts import combine_value
from megamoe.kernels.portable.grid import row_tile
from megamoe.planner.launches import Launch


@triton.jit
def _combine_kernel(
    rows, row_scale, idx, weights, y, num_tokens, hidden,
    TOP_K: tl.constexpr, EXTRA: tl.constexpr, WEIGHTED: tl.constexpr, IS_FP8: tl.constexpr,
    COLS: tl.constexpr, IS_DEEP: tl.constexpr, PITCH: tl.constexpr = 0,
):  # fmt: skip
    """EXTRA slots follow the routed ones in `rows`: shared experts, always there, weight 1.

    PITCH  bytes from a row to the next where FP8 rows and their scales lie together; 0: apart
    """
    after_previous()
    token = row_tile(IS_DEEP).to(tl.int64)
    if IS_DEEP:
        token = tl.minimum(token, num_tokens - 1)  # the last one again, with the same bits
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = col < hidden
    total = tl.zeros([COLS], tl.float32)
    for slot in tl.static_range(TOP_K + EXTRA):
        is_used = True
        if slot < TOP_K:
            is_used = tl.load(idx + token * TOP_K + slot) >= 0
        at = token * (TOP_K + EXTRA) + slot
        mask = inside & is_used
        if IS_FP8:
            width = PITCH if PITCH else hidden
            blocks = PITCH if PITCH else tl.cdiv(hidden, 128)
            code = tl.load(rows + at * width + col, mask=mask, other=0)
            block = tl.load(row_scale + at * blocks + col // 128, mask=mask, other=127)
            row = combine_value(code, block)
        else:
            row = tl.load(rows + at * hidden + col, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED and slot < TOP_K:
            row = row * tl.load(weights + token * TOP_K + slot)
        total = tl.where(mask, total + row, total)
    tl.store(y + token * hidden + col, to_bf16(total), mask=inside)


def combine(
    rows: Tensor,
    row_scale: Tensor | None,
    idx: Tensor,
    weights: Tensor,
    y: Tensor,
    *,
    step: Launch,
    weighted: bool,
    pdl: bool = False,
) -> None:
    """rows [T, k + extra, H] -> y [T, H]; FP8 bytes where `row_scale` is given, maybe beside it."""
    num_tokens, slots, hidden = rows.shape
    top_k = idx.shape[1]
    if num_tokens == 0:
        return
    # No fused multiply-add: the product is rounded before it is added.
    _combine_kernel[step.grid](
        rows=rows, row_scale=row_scale if row_scale is not None else rows, idx=idx,
        weights=weights, y=y, num_tokens=num_tokens, hidden=hidden, TOP_K=top_k,
        EXTRA=slots - top_k, WEIGHTED=weighted, IS_FP8=row_scale is not None,
        PITCH=0 if rows.is_contiguous() else rows.stride(1),
        enable_fp_fusion=False, **step.config.constants(), **overlap(pdl),
    )  # fmt: skip
