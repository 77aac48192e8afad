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
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.kernels.gluon.pipeline import bounded_wait
from megamoe.kernels.gluon.pool import ROW_ALIGN
from megamoe.kernels.gluon.tile_scheduler import GIVEN_UP_WORD

# Unless $1 >= $2: the word at $3 becomes 1, and the one at $4 -1.
GIVE_UP = gl.constexpr("""{
.reg .pred p;
setp.ge.s32 p, $1, $2;
@p bra done;
st.relaxed.gpu.global.b32 [$3], 1;
red.relaxed.gpu.global.min.s32 [$4], -1;
done:
mov.b32 $0, 0;
}""")


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


@gluon.jit
def tile_word(words, row_begin):
    """The word of the tile that begins with a row."""
    return words + row_begin // ROW_ALIGN


@gluon.jit
def wait_for_tile(gemm, tile, error):
    """Wait until the tokens of a tile are in memory; all threads of a role call it."""
    want = tile.row_end - tile.row_begin
    if not gemm.GATED:
        want = gemm.l1_n_tiles
    given_up = gemm.num_tiles + GIVEN_UP_WORD
    bound_ns = gl.to_tensor(1000).to(gl.int64) * gemm.bound_us
    word = tile_word(gemm.follows, tile.row_begin)
    reached = bounded_wait(word, want, given_up, bound_ns, "gpu", "ge")
    gl.inline_asm_elementwise(
        GIVE_UP, "=r,r,r,l,l", [reached, want, given_up.to(gl.int64), error.to(gl.int64)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
