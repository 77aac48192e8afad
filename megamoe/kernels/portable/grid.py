"""Grids over tiles of rows and columns, on one axis: CUDA ends all others at 65 535 programs.

The column tiles of a row tile come one after the other, so programs that run together read whole
rows.
"""

import triton
import triton.language as tl


def tiles(rows: int, cols: int) -> tuple[int]:
    """The grid of so many row tiles x column tiles."""
    return (rows * cols,)


@triton.jit
def tile_of_program(num_cols):
    """(row tile, column tile) of this program."""
    program = tl.program_id(0)
    return program // num_cols, program % num_cols
