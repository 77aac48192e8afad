"""Where a block-scaled MMA's scales lie in memory: `layout.tiles.placed_scales`, in kernels.

128 rows x 4 scales are a block of 512 bytes, which tcgen05.cp.32x128b.warpx4 brings to tensor
memory as it is: byte 16 (r % 32) + 4 (r // 32) + j of a block is scale j of row r. Blocks of the
same rows follow each other along K. Tokens have 128 rows a tile, however few they are.
"""

import triton
import triton.language as tl

PLACED_ROWS = tl.constexpr(128)  # of a block
PLACED_COLS = tl.constexpr(4)  # scales of a row in a block
BLOCK_BYTES = tl.constexpr(512)


@triton.jit
def placed_row(row):
    """Byte of a block at which row 0 .. 127 begins."""
    return row % 32 * 16 + row // 32 * 4


@triton.jit
def placed_group(group):
    """Byte at which a row's scale `group` lies, from where the row begins in its first block."""
    return group // PLACED_COLS * BLOCK_BYTES + group % PLACED_COLS
