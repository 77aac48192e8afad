"""The expert-sorted pool: what `route` fills and the GEMMs read."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megamoe.kernels.hopper.gemm.tile_scheduler import ALIGN
from megamoe.layout.regions import align_up


class Pool(NamedTuple):
    """Tokens sorted by expert, and what the GEMMs ask about each row; `num_rows` rows."""

    data: Tensor  # [R, width]: E4M3 or BF16, zero beyond the tokens' width
    scale: Tensor  # FP32 [width / 128, R], where the format has them
    dest: Tensor  # int32 [R]: row of the combine buffer; int64: offset there, over ranks
    weight: Tensor  # FP32 [R]
    factor: Tensor  # FP32 [R]: NVFP4's global scale of the token
    tiles: Tensor  # int32 [max_tiles, 4]: expert, first row, end row, and a count (`draw`)
    num_tiles: Tensor  # int32 [4]: how many, and counters (`draw`)


def num_rows(slots: int, experts: int) -> int:
    """Rows of a pool that any routing fits, gaps before experts included."""
    return align_up(slots + min(slots, experts) * (ALIGN.value - 1), ALIGN.value)


def max_tiles(slots: int, experts: int, block: int) -> int:
    """Tiles of `block` rows that any routing can ask for."""
    return max(min(slots, slots // block + experts), 1)
