"""Grids over tiles of rows and columns: CUDA ends every axis but the first at 65 535 programs.

The column tiles of a row tile come one after the other, so programs that run together read whole
rows. All on one axis would do as well, but the NVFP4 quantiser took 58 us for 8192 tokens then, and
53 to 55 this way.
"""

import triton
import triton.language as tl

MAX_BLOCKS = tl.constexpr(65_535)


def tiles(rows: int, cols: int) -> tuple[int, int, int]:
    """The grid of so many row tiles x column tiles; the third axis has what the second lacks.

    >>> tiles(100, 7), tiles(65_536, 7)
    ((7, 100, 1), (7, 65535, 2))
    """
    return cols, min(rows, MAX_BLOCKS.value), triton.cdiv(rows, MAX_BLOCKS.value)


def is_deep(rows: int) -> bool:
    """Whether so many row tiles need the third axis: kernels are compiled for it."""
    return rows > MAX_BLOCKS.value


@triton.jit
def row_tile(IS_DEEP: tl.constexpr):
    """The row tile of this program; beyond the last ones in the third axis' last layer."""
    tile = tl.program_id(1)
    if IS_DEEP:
        tile += tl.program_id(2) * MAX_BLOCKS
    return tile
