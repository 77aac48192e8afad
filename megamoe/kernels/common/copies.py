"""Experts copied to where others lie, all tensors in one launch, unless a flag forbids it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.kernels.common.finite import cdiv, is_a_run

WORDS, WARPS = 4096, 4  # of a program: 16 KB, eight loads of 16 bytes in flight a thread


class Words(NamedTuple):
    """A tensor of experts as the kernel sees it."""

    source: Tensor
    into: Tensor
    per_expert: int


@triton.jit(do_not_specialize=["first_expert"])
def _copy_experts_kernel(
    tensors, flags, experts, first_expert, NUM: tl.constexpr, LISTED: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Some words of one tensor of one expert."""
    block, which = tl.program_id(0), tl.program_id(1).to(tl.int64)
    expert = first_expert + which
    if LISTED:
        expert = tl.load(experts + which)
    is_allowed = tl.load(flags) == 0
    for i in tl.static_range(NUM):
        t = tensors[i]
        num = tl.cdiv(t.per_expert, WORDS)
        if (block >= 0) & (block < num):
            at = block * WORDS + tl.arange(0, WORDS)
            is_word = at < t.per_expert
            word = tl.load(t.source + which * t.per_expert + at, mask=is_word, other=0)
            tl.store(t.into + expert * t.per_expert + at, word, mask=is_word & is_allowed)
        block -= num


def launch(pairs: Sequence[tuple[Tensor, Tensor]], experts: Sequence[int], flags: Tensor) -> None:
    """Copy experts [n, ...] of the first tensor of each pair to places of the second, if the first
    flag is 0.

    pairs  of one shape but for how many experts, both `finite.is_readable`
    """
    num = len(experts)
    is_run = is_a_run(experts)
    places = flags
    if not is_run:
        places = torch.tensor(list(experts), dtype=torch.int64, device=flags.device)
    both = [(a.view(-1).view(torch.int32), b.view(-1).view(torch.int32)) for a, b in pairs]
    tensors = tuple(Words(a, b, len(a) // num) for a, b in both)
    _copy_experts_kernel[(sum(cdiv(t.per_expert, WORDS) for t in tensors), num)](
        tensors=tensors, flags=flags, experts=places, first_expert=experts[0], NUM=len(tensors),
        LISTED=not is_run, WORDS=WORDS, num_warps=WARPS,
    )  # fmt: skip
