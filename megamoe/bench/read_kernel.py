"""One launch that reads a buffer once: the practical floor of a call bound by its weights."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _read_kernel(words, sums, num_words, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    # All loads of a program stand before the first use, so that they are in flight together. They
    # leave L2 as usual: where they leave it first, lines to be written back go one by one, all the
    # time, and 943 MB after a memset take 225 us instead of 215.
    first = tl.program_id(0).to(tl.int64) * (CHUNKS * CHUNK)
    lanes = tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK], tl.int32)
    for chunk in tl.static_range(CHUNKS):
        at = first + chunk * CHUNK + lanes
        total += tl.load(words + at, mask=at < num_words, other=0)
    tl.store(sums + tl.program_id(0), tl.sum(total))


def read(words: Tensor, sums: Tensor, *, chunks: int, chunk: int, num_warps: int) -> Tensor:
    """Sum int32 [n] into int32 [ceil(n / (chunks * chunk))], one number per program."""
    grid = (triton.cdiv(words.numel(), chunks * chunk),)
    _read_kernel[grid](
        words=words, sums=sums, num_words=words.numel(), CHUNKS=chunks, CHUNK=chunk,
        num_warps=num_warps,
    )  # fmt: skip
    return sums[: grid[0]]
