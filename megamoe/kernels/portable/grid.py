"""Grids over tiles of rows and columns: CUDA ends every axis but the first at 65 535 programs.

The column tiles of a row tile come one after the other, so programs that run together read whole
rows. All on one axis would do as well, but the NVFP4 quantiser took 58 us for 8192 tokens then, and
53 to 55 this way.
"""

import triton
import triton.language as tl

MAX_BLOCKS = tl.constexpr(65_535)


@triton.jit
def row_tile(IS_DEEP: tl.constexpr):
    """The row tile of this program; beyond the last ones in the third axis' last layer."""
    tile = tl.program_id(1)
    if IS_DEEP:
        tile += tl.program_id(2) * MAX_BLOCKS
    return tile
