"""Tiles of `straight` that CTAs draw, one after another, and L2 that follows L1 tile by tile.

A CTA of L2 takes the SM of one of L1 that has no tile left. The word behind a tile of tokens in the
list counts L1's row tiles that are in memory; L2 waits for all of them, not for the launch.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from megamoe.kernels.hopper.gemm.decode_per_wave import await_word
from megamoe.kernels.hopper.gemm.notes import told_tile
from megamoe.kernels.hopper.gemm.tile_scheduler import ITEM
from megamoe.kernels.hopper.mega.sync import publish_stores

TICKETS = gl.constexpr(1)  # words behind the number of tiles: L1's and L2's, and
GIVEN_UP = gl.constexpr(3)  # whether a wait was given up


@gluon.jit
def draw(p, num):
    """The next of `num` items; the first one of a CTA is its own.

    All CTAs together draw `num` times, whatever num is: the last of them leaves a zero behind.
    """
    counter = p.num_tiles + TICKETS + (0 if p.GATED else 1)
    ticket = gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
    if ticket == num - 1:
        gl.store(counter, 0)
    return gl.num_programs(0) + ticket


@gluon.jit
def drawn_tile(p, done):
    """load_weights: (expert, row tile) of the CTA's tile number `done`, once it is drawn."""
    mbarrier.wait(p.drawn.index(done & 1), (done >> 1) & 1)
    expert, across, _, _ = told_tile(p, done)
    return expert, across


@gluon.jit
def arrive_last(p, idx, phase):
    """A loader: a stage without data, with which math reads the last letter."""
    mbarrier.wait(p.empty.index(idx), phase)
    mbarrier.arrive(p.full.index(idx), count=1)


@gluon.jit
def rows_counter(p, item):
    """Where the row tiles of an item's tokens are counted."""
    return p.tiles + gl.load(p.items + item * ITEM + 6) * 4 + 3


@gluon.jit
def publish_rows(p, done, counter):
    """L1: one more row tile is in memory, once all warpgroups are done with tile `done`."""
    mbarrier.wait(p.notes.read.index(done & 1), (done >> 1) & 1)
    publish_stores()
    gl.atomic_add(counter, 1, sem="release", scope="gpu")


@gluon.jit
def await_rows(p, counter):
    """L2: until a tile's activations are in memory."""
    await_word(p, counter, p.awaited, p.num_tiles + GIVEN_UP)
