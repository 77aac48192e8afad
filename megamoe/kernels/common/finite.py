"""Which of several runs of words hold NaN or Inf, in one pass: 16 bytes a load, nothing written
where all is well."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BAD = 1  # what is or-ed into a flag
WORDS, WARPS = 4096, 4  # of a program: 16 KB


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


@triton.jit(do_not_specialize=["first"])
def _bad_words_kernel(
    words, flags, first, per_run,
    BITS: tl.constexpr, ONE: tl.constexpr, CARRY: tl.constexpr, OWN: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Some words of one run; its flag is set if one of them is bad."""
    run = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    word = tl.load(words + run * per_run + at, mask=at < per_run, other=0)
    word = word.to(tl.uint32, bitcast=True)
    bad = ((word & BITS) + ONE) & CARRY
    if OWN:
        bad &= word
    if tl.max((bad != 0).to(tl.int32), 0) > 0:
        tl.atomic_or(flags + first + run, 1)


def is_readable(t: Tensor, num: int) -> bool:
    """Whether `t` is `num` runs of whole words."""
    return (
        t.is_contiguous()
        and t.numel() > 0
        and t.storage_offset() * t.element_size() % 4 == 0
        and t.nbytes % (4 * num) == 0
        and t.nbytes // (4 * num) < 2**31 - WORDS
    )


def launch(t: Tensor, num: int, rule: Rule, flags: Tensor, first: int) -> None:
    """Or BAD into the flags [first, first + num) of those of `num` runs of `t` that are bad.

    t      `is_readable`
    flags  int32
    """
    words = t.view(-1).view(torch.int32)
    per_run = len(words) // num
    _bad_words_kernel[(triton.cdiv(per_run, WORDS), num)](
        words=words, flags=flags, first=first, per_run=per_run,
        BITS=rule.bits, ONE=rule.one, CARRY=rule.carry, OWN=rule.is_own, WORDS=WORDS,
        num_warps=WARPS,
    )  # fmt: skip
