"""Finished tiles: math stores them, one warp counts them for other CTAs.

  mbarrier      n  arrived by                                awaited by
  tile_stored   2  math: its part of the tile is in memory   publish
  tile_counted  2  publish: it is counted                    math

L1 tiles are counted, with a ring L2 tiles too.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from megamoe.kernels.gluon.mega.events import L1
from megamoe.kernels.gluon.mega.scheduler import tiles_of_wave, wave_of
from megamoe.kernels.gluon.mega.sync import L1_DONE, L2_DONE
from megamoe.kernels.gluon.pipeline import fence_stores


@gluon.jit
def arrive_stored(cta, num_stored):
    """math: let `publish` count the CTA's stored tile number `num_stored`."""
    fence_stores()
    mbarrier.wait(cta.tile_counted.index(num_stored & 1), ((num_stored >> 1) & 1) ^ 1)
    gl.thread_barrier()
    mbarrier.arrive(cta.tile_stored.index(num_stored & 1), count=1)


@gluon.jit
def count_tile(cta, item, num_counted):
    """publish: wait until the CTA's tile number `num_counted` is stored, and count it."""
    mbarrier.wait(cta.tile_stored.index(num_counted & 1), (num_counted >> 1) & 1)
    fence_stores()
    if item.kind == L1:
        counter = cta.counters + L1_DONE + item.tile_idx
        gl.atomic_add(counter, 1, sem="release", scope="gpu")
    else:
        wave = wave_of(cta, item.tile_idx)
        if tiles_of_wave(cta, wave + 2) > 0:  # else the count could come after cleaning
            counter = cta.counters + L2_DONE + wave
            gl.atomic_add(counter, 1, sem="release", scope="gpu")
    mbarrier.arrive(cta.tile_counted.index(num_counted & 1), count=1)
