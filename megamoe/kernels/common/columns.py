"""Where the columns of a pooled row stand, if a thread's FP4 weights shall share a scale.

Of a K block of 128, wgmma (E4M3) gives thread t of four the places 32 step + 16 half + 4 t + v, so
with columns in their own order it has values of all four groups of 32 in every row. A product is
the same in any order that both operands share: the image of the weights and the pool put column
32 t + 8 step + 4 half + v there. A thread then needs one scale of a row and block: 60 instructions
to decode them, not 80.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = tl.constexpr(128)  # columns that the order is about


def by_group(tokens: Tensor) -> Tensor:
    """Bytes [T, blocks of 128] in the order of a pooled row, on the host."""
    return tokens.unflatten(1, (-1, 4, 8, 4)).transpose(2, 3).flatten(1)


@triton.jit
def token_column(place):
    """Which column of a token stands at a place of its row."""
    return place // BLOCK * BLOCK + place // 4 % 4 * 32 + place // 16 % 8 * 4 + place % 4


@triton.jit
def pool_place(column):
    """Where in its row a column of a token stands: the inverse."""
    return column // BLOCK * BLOCK + column // 4 % 8 * 16 + column // 32 % 4 * 4 + column % 4
