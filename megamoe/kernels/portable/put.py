"""The inputs of a fused call into the memory that its launches read, in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from megamoe.planner.launches import Launch


@triton.jit(do_not_specialize=["num_tokens", "each", "passes"])
def _put_kernel(
    x, idx, weights, x_out, idx_out, weights_out, num_valid, num_tokens, each, passes, x_stride,
    hidden, TOP_K: tl.constexpr, SLOTS: tl.constexpr, PASSES: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Program (token, block of columns). The first one also counts the tokens of each launch."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if (token == 0) & (part == 0):
        number = tl.arange(0, PASSES)
        left = tl.minimum(tl.maximum(num_tokens - number * each, 0), each)
        tl.store(num_valid + number, left, mask=number < passes)
    if token < num_tokens:
        col = part * COLS + tl.arange(0, COLS)
        inside = col < hidden
        row = tl.load(x + token * x_stride + col, mask=inside)
        tl.store(x_out + token * hidden + col, row, mask=inside)
        if part == 0:
            slot = tl.arange(0, SLOTS)
            at = token * TOP_K + slot
            used = slot < TOP_K
            expert = tl.load(idx + at, mask=used)
            tl.store(idx_out + at, expert.to(idx_out.dtype.element_ty), mask=used)
            tl.store(weights_out + at, tl.load(weights + at, mask=used), mask=used)


def put(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, into: tuple[Tensor, Tensor, Tensor],
    num_valid: Tensor, *, step: Launch,
) -> None:  # fmt: skip
    """T tokens, ids and weights to the first T rows of `into`; each launch's share to num_valid.

    x          bf16 [T, H], rows at any stride; ids int32 or int64, and FP32 weights: contiguous
    num_valid  int32 [launches], each of which takes an equal part of the memory
    step       the planned launch: `planner.copies.put`
    """
    num, hidden = x.shape
    capacity, top_k, passes = len(into[0]), topk_idx.shape[1], len(num_valid)
    _put_kernel[step.grid](
        x=x, idx=topk_idx, weights=topk_weights, x_out=into[0], idx_out=into[1],
        weights_out=into[2], num_valid=num_valid, num_tokens=num, each=capacity // passes,
        passes=passes, x_stride=x.stride(0), hidden=hidden, TOP_K=top_k,
        **step.config.constants(),
    )  # fmt: skip
