"""The order of K in which FP4 weights are multiplied: stored bytes become MMA operands as they lie.

An MMA sums over K in any order that both operands share. In steps of 16, lane t of four holds of a
row of weights the columns 2t, 2t+1, 2t+8 and 2t+9. If it is given instead 16 bytes in one piece, 32
columns of each block of 128, they decode where they are: no shuffle, no shared memory, one scale of
MXFP4. Tokens and acts then lie in the order in which those columns come:

  position 32 i + 16 z + 8 h + 2 t + b   of a block holds   column 32 t + 8 i + 4 b + 2 z + h

where i is the lane's word of eight codes and b, z, h count the codes within it. Rows are stored in
whole blocks; what lies past their end is zero.
"""

import triton
import triton.language as tl

BLOCK = tl.constexpr(128)


def position(column):
    """Where a column is stored; of ints, torch and Triton tensors."""
    inside = ((column & 24) << 2) | ((column & 3) << 3) | ((column & 96) >> 4)
    return (column & -128) | inside | ((column & 4) >> 2)


position_of = triton.jit(position)


def stored_width(width):
    """Columns of a stored row: whole blocks."""
    return (width + 127) // 128 * 128


stored_cols = triton.jit(stored_width)


@triton.jit
def tile_in_order(x):
    """A tile [r, c] of whole blocks as it is stored, or of half a block: see `tile_positions`."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    LANES: tl.constexpr = C // 32 if C < BLOCK else 4
    parts = tl.reshape(x, (R, C // (32 * LANES), LANES, 4, 2, 2, 2))  # t, i, b, z, h
    return tl.reshape(tl.permute(parts, (0, 1, 3, 5, 6, 2, 4)), (R, C))


@triton.jit
def tile_positions(first_col, COLS: tl.constexpr):
    """Where the columns of `tile_in_order` are stored, for a tile that begins at `first_col`."""
    RUN: tl.constexpr = COLS // 16 if COLS < BLOCK else 8  # neighbours, of each eight positions
    j = tl.arange(0, COLS)
    if RUN == 8:
        return first_col + j
    else:
        return first_col // BLOCK * BLOCK + first_col % BLOCK // 16 + j // RUN * 8 + j % RUN
