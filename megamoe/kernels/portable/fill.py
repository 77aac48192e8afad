"""Fill: the inputs of a call into the buffers that a CUDA graph reads, in one launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

COLS = 1024  # columns of a program


class Inputs(NamedTuple):
    """Where a captured call finds its tokens; rows from `count` on are padding."""

    x: Tensor  # bf16 [B, H]
    topk_idx: Tensor  # int32 [B, k]
    topk_weights: Tensor  # float32 [B, k]
    count: Tensor  # int32 [1]

    @classmethod
    def empty(cls, num_tokens: int, hidden: int, top_k: int, device: torch.device) -> Inputs:
        """Room for `num_tokens` tokens, none of which is there."""
        return cls(
            torch.zeros(num_tokens, hidden, dtype=torch.bfloat16, device=device),
            torch.full((num_tokens, top_k), -1, dtype=torch.int32, device=device),
            torch.zeros(num_tokens, top_k, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )


# Nothing is specialised on addresses or sizes: one cubin serves every call.
@triton.jit(
    do_not_specialize=["num_tokens", "hidden"],
    do_not_specialize_on_alignment=["x", "idx", "weights", "x_stride"],
)
def _fill_kernel(
    x, x_stride: tl.int64, idx, weights, x_out, idx_out, weights_out, count, num_tokens, hidden,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    col = part * COLS + tl.arange(0, COLS)
    inside = col < hidden
    row = tl.load(x + token * x_stride + col, mask=inside)
    tl.store(x_out + token * hidden + col, row, mask=inside)
    if part == 0:
        slot = tl.arange(0, SLOTS)
        at = token * TOP_K + slot
        used = slot < TOP_K
        given = tl.load(idx + at, mask=used, other=-1)
        expert = tl.where((given < -1) | (given > 2147483647), -2, given)  # a fault is told later
        tl.store(idx_out + at, expert.to(tl.int32), mask=used)
        tl.store(weights_out + at, tl.load(weights + at, mask=used), mask=used)
        if token == 0:
            tl.store(count, num_tokens)


_MADE: dict[tuple[Any, ...], Any] = {}  # compiled kernels: calling one skips the JIT's own 8 us


def fill(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, into: Inputs) -> None:
    """Copy T tokens, int32 or int64 ids and weights to the first T rows, and T to the count."""
    num_tokens, hidden = x.shape
    top_k = topk_idx.shape[1]
    cols = min(_power_of_2(hidden), COLS)
    grid = (num_tokens, -(-hidden // cols), 1)
    args = (x, x.stride(0), topk_idx, topk_weights, *into, num_tokens, hidden)
    constants = (top_k, _power_of_2(top_k), cols)
    key = (x.device, topk_idx.dtype, *constants)
    made = _MADE.get(key)
    if made is None:
        _MADE[key] = _fill_kernel[grid](*args, *constants, num_warps=4)
    else:
        made[grid](*args, *constants)


def _power_of_2(n: int) -> int:
    """As Triton's own, which takes 2 us."""
    return 1 << (n - 1).bit_length()
