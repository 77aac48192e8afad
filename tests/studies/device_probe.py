"""A kernel that calls the schedule's integer functions, to prove that a device compiles them."""

import triton
import triton.language as tl

from megamoe.studies.deep_gemm import blocks

num_m_blocks = triton.jit(blocks.num_m_blocks)
block_mn = triton.jit(blocks.block_mn)
valid_m = triton.jit(blocks.valid_m)
interleaved = triton.jit(blocks.interleaved)


@triton.jit
def probe(out, rows, idx, lag):
    m, n = block_mn(idx, 8)
    is_l2, place, column = interleaved(idx, num_m_blocks(rows, 64), 8, 4, lag)
    tl.store(out, m)
    tl.store(out + 1, n)
    tl.store(out + 2, valid_m(rows, m, 64))
    tl.store(out + 3, is_l2)
    tl.store(out + 4, place)
    tl.store(out + 5, column)
