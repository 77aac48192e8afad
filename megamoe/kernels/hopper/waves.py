"""The pool as a ring: tiles of tokens in waves, two of which have room at a time.

Rows of all experts in order would fill a long pool; a tile belongs to the wave in which its first
row lies there, `wave_rows` to a wave. A wave takes one half of the ring, which holds its rows and
those of a last tile that reaches beyond it. Tickets come in this order, so that one only waits for
lower ones:
    L1(0) L1(1) | L2(0) fill(2) L1(2) | L2(1) fill(3) L1(3) | ...
fill(w) waits for L2(w - 2), the last to read what it replaces (rows' destinations, and activations
that L1(w) will replace); L1(w) waits for fill(w).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.kernels.hopper.stamps import FILL, FIRST, SECOND
from megamoe.planner.tables.hopper import MAX_WAVES

WAVES = gl.constexpr(MAX_WAVES)
TABLE = gl.constexpr(64)  # words behind a CTA's list: tiles before each wave


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def running_sum(v):
    """Of each and all before it."""
    return gl.associative_scan(v, 0, _plus)


@gluon.jit
def ring_row(c, row, start):
    """(row in the ring, wave) of a row in the long pool, whose tile begins at `start`."""
    wave = start // c.wave_rows
    half = c.rows_per_rank // 2
    return (wave & 1) * half + row - wave * c.wave_rows, wave


@gluon.jit
def write_table(c, private, tiles):
    """Tiles before each wave, of tiles [WAVES] in each."""
    before = running_sum(tiles) - tiles
    wave = gl.arange(0, WAVES, tiles.type.layout)
    table = private + (c.private_stride - TABLE)
    gl.store(table + wave, before)
    gl.store(table + WAVES, gl.sum(tiles, 0))


@gluon.jit
def tiles_before(m, wave):
    """Tiles of all waves before `wave`; of all where there is no such wave."""
    return gl.load(m.private + (m.call.private_stride - TABLE + gl.minimum(wave, WAVES)))


@gluon.jit
def tiles_of(m, wave):
    """Tiles of a wave."""
    return tiles_before(m, wave + 1) - tiles_before(m, wave)


@gluon.jit
def segment(m, number, num_fills, first_across, second_across):
    """(kind, wave, tickets) of a run of tickets that mean the same."""
    place = gl.maximum(number - 2, 0)
    is_late = number >= 2
    part = place % 3
    wave = gl.where(is_late, place // 3 + gl.where(part == 0, 0, 2), number)
    kind = gl.where(is_late, gl.where(part == 0, SECOND, gl.where(part == 1, FILL, FIRST)), FIRST)
    tiles = tiles_of(m, wave)
    across = gl.where(kind == SECOND, second_across, first_across)
    return kind, wave, gl.where(kind == FILL, gl.where(tiles > 0, num_fills, 0), tiles * across)


@gluon.jit
def num_filled_later(m, num_tiles, num_fills):
    """Tickets of all fills: of waves from the third on."""
    last = gl.load(m.private + gl.maximum(num_tiles - 1, 0) * 4 + 3)
    return gl.where(num_tiles > 0, gl.maximum(last - 1, 0), 0) * num_fills
