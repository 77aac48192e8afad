"""The chain: a GEMM that waits for the rows of each tile instead of for the launch before it.

Words stand by a tile's first row (`tile_word`):

  word     of a tile                                 added to by             awaited by
  arrived  its rows that are in the pool             pull_kernel, by rows    L1
  l1_done  its n tiles that L1 has in memory         L1, by one each         L2 that follows by tile

Both are added to with a release and awaited with an acquire. Every launch lets the next one begin
when all its CTAs run, and waits only for launches before it, whose CTAs therefore run or have
ended: nothing waits in a circle. A wait beyond the layer's bound is given up and leaves the layer's
word, as those between decoders do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Chain(NamedTuple):
    """How a GEMM follows the launch before it, and writes."""

    follows: Tensor | None = None  # words by tile that its tiles wait for; None: for the launch
    publishes: Tensor | None = None  # L1: words by tile that it counts in
    dest_unit: int = 0  # L2: values of a unit of `dest`; 0: a row
    after: Any = None  # L2: weights of the L1 that was launched before it
    begun: Tensor | None = None  # int64 [1]: when it began
    row_scale: Tensor | None = None  # L2 of FP8 rows: uint8 [blocks of 128, rows of the pool]
    bound_s: float = 0.0  # of a wait for a tile

    @property
    def bound_us(self) -> int | None:
        """The bound as kernels take it; None where nothing is awaited."""
        assert self.follows is None or self.bound_s > 0, "a wait without a bound"
        return None if self.follows is None else round(self.bound_s * 1e6)


NO_CHAIN = Chain()
