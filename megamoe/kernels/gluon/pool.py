"""The expert-sorted pool: what `dispatch` fills and the GEMMs read."""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.kernels.gluon.pipeline import Tile
from megamoe.planner.tables import hopper as tables

ROW_ALIGN = tl.constexpr(tables.ROW_ALIGN)  # an expert's first row

# An entry of the tile list: int32 [TILE_WORDS].
TILE_WORDS = tl.constexpr(4)
TILE_EXPERT = tl.constexpr(0)
TILE_ROW_BEGIN = tl.constexpr(1)
TILE_ROW_END = tl.constexpr(2)
TILE_L1_DONE = tl.constexpr(3)  # staged: finished L1 tiles of these rows (dynamic scheduling)
TILE_WAVE = tl.constexpr(3)  # fused, with a ring: the pool wave of these rows


class Pool(NamedTuple):
    """Tokens sorted by expert, and what the GEMMs need of each of its R rows."""

    data: Tensor  # [R, width]: E4M3 or BF16, zero beyond the tokens' width
    scale: Tensor  # FP32 [width / 128, R], where the format has them
    dest: Tensor  # int32 [R]: row of the combine buffer; int64: offset there, over ranks
    weight: Tensor  # FP32 [R]
    factor: Tensor  # FP32 [R]: NVFP4's global scale of the token
    tiles: Tensor  # int32 [max_tiles, TILE_WORDS]: the tile list
    num_tiles: Tensor  # int32 [4]: its length, and the counters of dynamic scheduling


@gluon.jit
def num_n_tiles(gemm, ROWS: gl.constexpr):
    """N tiles of one tile of tokens; L1's weight rows are twice its outputs."""
    outputs: gl.constexpr = ROWS // 2 if gemm.GATED else ROWS
    return (gemm.num_outputs + outputs - 1) // outputs


@gluon.jit
def read_tile_list(tiles, tile_idx, n_tile_idx):
    """The tile of an entry of the tile list."""
    at = tiles + tile_idx * TILE_WORDS
    return Tile(
        expert=gl.load(at + TILE_EXPERT),
        n_tile_idx=n_tile_idx,
        row_begin=gl.load(at + TILE_ROW_BEGIN),
        row_end=gl.load(at + TILE_ROW_END),
    )
