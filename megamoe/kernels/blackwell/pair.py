"""What a pair of CTAs needs beside one CTA: shared mbarriers, layouts, parts of tensors.

Gluon runs a kernel of two CTAs as one program whose tensors both hold together; its layouts say
which CTA has what. Triton 3.8 and newer: below, `formats.check_tile` refuses.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
)
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from megamoe.kernels.gluon.compat import allocate_mbarrier
from megamoe.kernels.gluon.pipeline import barriers

BY_ROWS = ((1, 0),)  # the first half of the rows is the first CTA's
BOTH = ((0, 0),)  # each CTA has all


@gluon.jit
def barriers_of(NUM: gl.constexpr, COUNT: gl.constexpr, IS_SHARED: gl.constexpr):
    """NUM mbarriers for each CTA, or IS_SHARED: for both, in the first, of twice the arrivals."""
    bars = allocate_mbarrier(batch=NUM, two_ctas=IS_SHARED)
    for i in gl.static_range(NUM):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def ring_barriers(
    NUM: gl.constexpr, COUNT: gl.constexpr, PAIR: gl.constexpr, IS_SHARED: gl.constexpr = False
):
    """Barriers of a launch, of pairs or not."""
    if PAIR:  # noqa: SIM108  Gluon would compile both sides of an expression
        allocated = barriers_of(NUM, COUNT, IS_SHARED)
    else:
        allocated = barriers(NUM, COUNT)
    return allocated


@gluon.jit
def part_of(NUM: gl.constexpr, LAYOUT: gl.constexpr):
    """0 to NUM - 1 along an axis that a pair of CTAs shares: each CTA has its part of them."""
    return gl.arange(0, NUM, LAYOUT)


@gluon.constexpr_function
def sums_layout(columns, pair):
    """Tensor memory of [128, columns], or of [256, columns] in two CTAs."""
    if pair:
        return TensorMemoryLayout((128, columns), col_stride=1, cga_layout=BY_ROWS, two_ctas=True)
    return TensorMemoryLayout((128, columns), col_stride=1)


@gluon.constexpr_function
def scales_layout(pair, is_shared):
    """Scales in tensor memory: of 256 weight rows in two CTAs; IS_SHARED: of tokens, in both."""
    if pair:
        return TensorMemoryScalesLayout(cga_layout=BOTH if is_shared else BY_ROWS)
    return TensorMemoryScalesLayout()


@gluon.constexpr_function
def rows_layout(col_threads, vec, num_warps, pair):
    """Rows of tokens, 16 bytes a thread; a pair's CTAs have half of the columns each."""
    threads = [32 // col_threads, col_threads]
    if pair:
        return gl.BlockedLayout([1, vec], threads, [num_warps, 1], [1, 0], cga_layout=[[0, 1]])
    return gl.BlockedLayout([1, vec], threads, [num_warps, 1], [1, 0])
