"""The chain: a GEMM that waits for the rows of each tile instead of for the launch before it.

Words stand by a tile's first row (`gluon/pull.py`): L1 waits for the rows that `pull_kernel` has
brought, L2 for the n tiles that L1 has in memory. Every launch lets the next one begin when all its
CTAs run, and waits only for launches before it, whose CTAs therefore run or have ended: nothing
waits in a circle. A wait beyond the layer's bound is given up and leaves the layer's word, as those
between decoders do.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.kernels.gluon.pipeline import bounded_wait
from megamoe.kernels.gluon.pool import ROW_ALIGN
from megamoe.kernels.gluon.tile_scheduler import GIVEN_UP
from megamoe.kernels.hopper.gemm.decode_per_wave import GIVE_UP


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
    given_up = gemm.num_tiles + GIVEN_UP
    bound_ns = gl.to_tensor(1000).to(gl.int64) * gemm.bound_us
    word = tile_word(gemm.follows, tile.row_begin)
    seen = bounded_wait(word, want, given_up, bound_ns, "gpu", "ge")
    gl.inline_asm_elementwise(
        GIVE_UP, "=r,r,r,l,l", [seen, want, given_up.to(gl.int64), error.to(gl.int64)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
