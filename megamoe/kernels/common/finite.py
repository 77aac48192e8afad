"""Which of several runs of words hold NaN or Inf: all tensors in one launch, 16 bytes a load,
nothing written where all is well.

| words of `flags`, of n experts | what                                                      |
| ------------------------------ | --------------------------------------------------------- |
| 0                              | not 0: what writes after this must write nothing          |
| 1 to 2n                        | of each expert of a first and a second matrix: BAD, facts |
| 2n + 1, 2n + 2                 | of two biases: BAD                                        |
| 2n + 3 to 4n + 2               | groups of zeros of each expert of both matrices           |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BAD = 1  # what is or-ed into a flag
WORDS, WARPS = 4096, 4  # of a program: 16 KB
REST = 3  # flags that are not an expert's


class Rule(NamedTuple):
    """How a word shows a bad value: (word & bits) + one carries into a bit of `carry`.

    is_own  that bit must be set in the word too
    """

    bits: int
    one: int
    carry: int
    is_own: bool = False


NAN_E8M0 = Rule(0x7F7F7F7F, 0x01010101, 0x80808080, is_own=True)
NAN_E4M3 = Rule(0x7F7F7F7F, 0x01010101, 0x80808080)
NAN_FP32 = Rule(0x7FFFFFFF, 0x007FFFFF, 0x80000000)  # Inf is none
NOT_FINITE = {
    torch.float32: Rule(0x7F800000, 0x00800000, 0x80000000),
    torch.bfloat16: Rule(0x7F807F80, 0x00800080, 0x80008000),
    torch.float16: Rule(0x7C007C00, 0x04000400, 0x80008000),
}


class Words(NamedTuple):
    """A tensor that is to be looked at, as the kernel sees it."""

    words: Tensor
    per_run: int


class Look(NamedTuple):
    """A tensor that `is_readable`, and what it belongs to.

    owner  0 or 1: experts of the first or second matrix; 2 or 3: a bias, one run
    """

    t: Tensor
    rule: Rule
    owner: int


def cdiv(a: int, b: int) -> int:
    """Upwards; Triton's own is made for kernels, and slow where the host calls it."""
    return -(-a // b)


def is_a_run(experts: Sequence[int]) -> bool:
    """Whether experts follow each other."""
    run = range(experts[0], experts[0] + len(experts))
    return experts == run if isinstance(experts, range) else tuple(experts) == tuple(run)


@triton.jit(do_not_specialize=["num_experts"])
def _bad_words_kernel(
    tensors, flags, num_experts, RULES: tl.constexpr, OWNERS: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """Some words of one run of one tensor; its flag is set if one of them is bad."""
    block = tl.program_id(0)
    for i in tl.static_range(len(OWNERS)):
        t = tensors[i]
        per_run = tl.cdiv(t.per_run, WORDS)
        num = per_run
        if OWNERS[i] < 2:
            num = per_run * num_experts
        if (block >= 0) & (block < num):
            run, at = block // per_run, (block % per_run) * WORDS + tl.arange(0, WORDS)
            start = t.words + run.to(tl.int64) * t.per_run
            word = tl.load(start + at, mask=at < t.per_run, other=0).to(tl.uint32, bitcast=True)
            bad = ((word & RULES[i][0]) + RULES[i][1]) & RULES[i][2]
            if RULES[i][3]:
                bad &= word
            if tl.max((bad != 0).to(tl.int32), 0) > 0:
                flag = 1 + OWNERS[i] * num_experts + run
                if OWNERS[i] == 3:
                    flag = 2 + 2 * num_experts
                tl.atomic_or(flags + flag, 1)
                tl.atomic_or(flags, 1)
        block -= num


def is_readable(t: Tensor, num: int) -> bool:
    """Whether `t` is `num` runs of whole words."""
    return (
        t.is_contiguous()
        and t.numel() > 0
        and t.storage_offset() * t.element_size() % 4 == 0
        and t.nbytes % (4 * num) == 0
        and t.nbytes // (4 * num) < 2**31 - WORDS
    )


def new_flags(num: int, device: torch.device) -> Tensor:
    """Zeros, for `num` experts."""
    return torch.zeros(4 * num + REST, dtype=torch.int32, device=device)


def launch(checks: Sequence[Look], num: int, flags: Tensor) -> None:
    """Or BAD into the flags of `num` experts, or of a bias, that are bad, and then into the first.

    checks  tensors that are runs of the same experts, or biases
    """
    tensors = tuple(
        Words(words, len(words) // (num if owner < 2 else 1))
        for words, owner in ((one.t.view(-1).view(torch.int32), one.owner) for one in checks)
    )
    owners = tuple(one.owner for one in checks)
    blocks = [cdiv(t.per_run, WORDS) for t in tensors]
    grid = sum(n * (num if owner < 2 else 1) for n, owner in zip(blocks, owners, strict=True))
    _bad_words_kernel[(grid,)](
        tensors=tensors, flags=flags, num_experts=num, RULES=tuple(tuple(o.rule) for o in checks),
        OWNERS=owners, WORDS=WORDS, num_warps=WARPS,
    )  # fmt: skip
