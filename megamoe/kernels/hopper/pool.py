"""The expert-sorted pool: what `route` fills and the GEMMs read."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Pool(NamedTuple):
    """Tokens sorted by expert, and what the GEMMs ask about each row; `planner.hopper.num_rows`."""

    data: Tensor  # [R, width]: E4M3 or BF16, zero beyond the tokens' width
    scale: Tensor  # FP32 [width / 128, R], where the format has them
    dest: Tensor  # int32 [R]: row of the combine buffer; int64: offset there, over ranks
    weight: Tensor  # FP32 [R]
    factor: Tensor  # FP32 [R]: NVFP4's global scale of the token
    tiles: Tensor  # int32 [max_tiles, 4]: expert, first row, end row, and a count (`draw`)
    num_tiles: Tensor  # int32 [4]: how many, and counters (`draw`)
