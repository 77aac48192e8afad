"""What decides which image an expert of MXFP4 can be, for many experts in one launch.

Nearly always the scales say it. Where they do not (wide exponents, or odd scales that groups of
zeros may have), a program looks at the codes of its rows too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.formats.quantized import Quantized
from megamoe.kernels.common.finite import BAD
from megamoe.kernels.hopper.weights.pack import MAX_PLACED, MAX_RELATIVE, MIN_RELATIVE, Facts

NOT_E4M3, NOT_BF16, NOT_PLACED = 2, 4, 8  # bits of a flag, beside BAD
ROWS, GROUPS, WARPS = 32, 64, 4  # of a program: scales that are looked at together
_SPREAD, _LARGEST = tl.constexpr(MAX_RELATIVE - MIN_RELATIVE), tl.constexpr(MAX_PLACED)
_BAD, _E4M3 = tl.constexpr(BAD), tl.constexpr(NOT_E4M3)
_BF16, _PLACED = tl.constexpr(NOT_BF16), tl.constexpr(NOT_PLACED)


@triton.jit(do_not_specialize=["first"])
def _facts_kernel(
    codes, scales, flags, first, num_rows, num_groups, ROWS: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    """Some rows of one expert; bits of its flag are set for what they forbid."""
    expert = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    is_row = row < num_rows
    first_scale = expert * num_rows * num_groups + row * num_groups
    high, low = tl.zeros((ROWS,), tl.int32), tl.full((ROWS,), 255, tl.int32)
    for start in range(0, num_groups, GROUPS):
        group = start + tl.arange(0, GROUPS)[None, :]
        there = is_row & (group < num_groups)
        scale = tl.load(scales + first_scale + group, mask=there, other=0).to(tl.int32)
        high = tl.maximum(high, tl.max(scale, 1))
        low = tl.minimum(low, tl.min(tl.where(there, scale, 255), 1))
    is_wide = (high - low > _SPREAD) | (low == 0) | (high > _LARGEST)
    if tl.max(is_wide.to(tl.int32), 0) > 0:
        high, low = tl.zeros((ROWS,), tl.int32), tl.full((ROWS,), 255, tl.int32)
        nan = tl.zeros((ROWS,), tl.int32)
        for start in range(0, num_groups, GROUPS):
            group = start + tl.arange(0, GROUPS)[None, :]
            there = is_row & (group < num_groups)
            at = first_scale + group
            scale = tl.load(scales + at, mask=there, other=0).to(tl.int32)
            some = tl.zeros((ROWS, GROUPS), tl.int32)
            for j in tl.static_range(4):
                some |= tl.load(codes + 4 * at + j, mask=there, other=0) & 0x77777777
            nan = tl.maximum(nan, tl.max(scale, 1))
            high = tl.maximum(high, tl.max(tl.where(some != 0, scale, 0), 1))
            low = tl.minimum(low, tl.min(tl.where(some != 0, scale, 255), 1))
        is_wide = (high - low > _SPREAD) | (high == 255)
        found = tl.where(tl.max(is_wide.to(tl.int32), 0) > 0, _E4M3, 0)
        found |= tl.where(tl.max(nan, 0) == 255, _BAD, 0)
        found |= tl.where(tl.min(low, 0) == 0, _BF16, 0)
        found |= tl.where(tl.max(high, 0) > _LARGEST, _PLACED, 0)
        if found > 0:
            tl.atomic_or(flags + first + expert, found)


def launch(w: Quantized, flags: Tensor, first: int) -> None:
    """Or what forbids images of MXFP4 experts `w` [n, ...] into int32 flags [first, first + n).

    w  contiguous, and words of codes begin at words of its memory
    """
    assert w.scale is not None
    num_groups = w.scale.shape[-1]
    num_rows = w.scale[0].numel() // num_groups
    _facts_kernel[(triton.cdiv(num_rows, ROWS), len(w))](
        codes=w.data.view(torch.int32), scales=w.scale, flags=flags, first=first,
        num_rows=num_rows, num_groups=num_groups, ROWS=ROWS, GROUPS=GROUPS, num_warps=WARPS,
    )  # fmt: skip


def facts_of_flag(flag: int) -> Facts:
    """What a flag says of an expert that is finite."""
    return Facts(not flag & NOT_E4M3, not flag & NOT_BF16, not flag & NOT_PLACED)
