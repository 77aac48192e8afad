"""The fused launch's tile scheduler: tickets, what they mean, and the queue to the other roles.

All CTAs of a rank count tickets together. Every CTA has two of its own (its number, and that plus
the number of CTAs); further ones come from the counter TICKET. Tickets stand for all L1 tiles, then
all L2 tiles; a ticket only waits for lower ones, and the grid is resident, so no wait is circular.

With a ring the pool holds two pool waves at a time. Rows of all experts in order would fill a long
pool; a tile belongs to the pool wave in which its first row lies there, `wave_rows` to a wave. A
wave takes one half of the ring, which holds its rows and those of a last tile that reaches beyond
it. Tickets then come in this order:

    L1(0) L1(1) | L2(0) fill(2) L1(2) | L2(1) fill(3) L1(3) | ...

fill(w) overwrites the half of pool wave w - 2, so it waits until L2(w - 2) has read it (its rows,
their destinations, and the activations that L1(w) overwrites); L1(w) waits for fill(w).

Records
  tile list  int32 [tiles, TILE_WORDS] of each CTA in global memory: expert, row_begin, row_end,
             pool wave; its last WAVE_TABLE words: tiles before each pool wave
  work item  `WorkItem`, two of them in shared memory (the queue)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from megamoe.kernels.gluon.mega.events import FILL, L1, L2
from megamoe.kernels.gluon.mega.state import (
    QUEUE_EXPERT,
    QUEUE_KIND,
    QUEUE_N_TILE,
    QUEUE_ROW_BEGIN,
    QUEUE_ROW_END,
    QUEUE_TICKET,
    QUEUE_TILE,
    QUEUE_WORDS,
    num_parts,
)
from megamoe.kernels.gluon.mega.sync import (
    EXIT,
    EXIT_TICKET,
    FILLED,
    L1_DONE,
    LAST_CALL,
    POOL,
    TICKET,
    WAIT_POOL,
    WAIT_TICKETS,
    WAIT_WAVE,
    expect_equal,
    own,
    signal_done,
    wait_for,
    wait_for_done,
)
from megamoe.kernels.gluon.pipeline import GROUPS, Tile, fast_div, record
from megamoe.kernels.gluon.pool import TILE_WAVE, TILE_WORDS, num_n_tiles, read_tile_list
from megamoe.planner.tables.hopper import MAX_WAVES

WAVES = gl.constexpr(MAX_WAVES)
WAVE_TABLE = gl.constexpr(64)  # words after a CTA's tile list
NO_ITEM = gl.constexpr(-1)  # the kind of the last item: no work is left


# -- the queue from `schedule_tiles` to the other roles of a CTA -----------------------------------


@record
class WorkItem:
    """What a ticket means: a tile of L1 or L2, or a part of the fill of a pool wave."""

    kind: gl.tensor  # L1, L2, FILL or NO_ITEM
    ticket: gl.tensor
    tile_idx: gl.tensor  # in the tile list; FILL: the pool wave
    tile: Tile  # FILL: n_tile_idx is the number of the part


@gluon.jit
def _push(cta, i, item):
    """schedule_tiles: item number i, once a slot of the queue is empty."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot = i & 1
    mbarrier.wait(cta.item_empty.index(slot), ((i >> 1) & 1) ^ 1)
    begin = slot * QUEUE_WORDS
    zero = gl.zeros([1], gl.int32, LAYOUT)
    cta.queue.index(begin + QUEUE_KIND).store(zero + item.kind)
    cta.queue.index(begin + QUEUE_TICKET).store(zero + item.ticket)
    cta.queue.index(begin + QUEUE_TILE).store(zero + item.tile_idx)
    cta.queue.index(begin + QUEUE_N_TILE).store(zero + item.tile.n_tile_idx)
    cta.queue.index(begin + QUEUE_EXPERT).store(zero + item.tile.expert)
    cta.queue.index(begin + QUEUE_ROW_BEGIN).store(zero + item.tile.row_begin)
    cta.queue.index(begin + QUEUE_ROW_END).store(zero + item.tile.row_end)
    mbarrier.arrive(cta.item_full.index(slot), count=1)


@gluon.jit
def _wait_until_popped(cta, i):
    """schedule_tiles: until all roles have item i, so that its tile has begun."""
    mbarrier.wait(cta.item_empty.index(i & 1), (i >> 1) & 1)


@gluon.jit
def pop_item(cta, i):
    """Every other role: item number i of its CTA."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot = i & 1
    begin = slot * QUEUE_WORDS
    mbarrier.wait(cta.item_full.index(slot), (i >> 1) & 1)
    kind = gl.max(cta.queue.index(begin + QUEUE_KIND).load(LAYOUT), 0)
    ticket = gl.max(cta.queue.index(begin + QUEUE_TICKET).load(LAYOUT), 0)
    tile_idx = gl.max(cta.queue.index(begin + QUEUE_TILE).load(LAYOUT), 0)
    n_tile_idx = gl.max(cta.queue.index(begin + QUEUE_N_TILE).load(LAYOUT), 0)
    expert = gl.max(cta.queue.index(begin + QUEUE_EXPERT).load(LAYOUT), 0)
    row_begin = gl.max(cta.queue.index(begin + QUEUE_ROW_BEGIN).load(LAYOUT), 0)
    row_end = gl.max(cta.queue.index(begin + QUEUE_ROW_END).load(LAYOUT), 0)
    mbarrier.arrive(cta.item_empty.index(slot), count=1)
    tile = Tile(expert=expert, n_tile_idx=n_tile_idx, row_begin=row_begin, row_end=row_end)
    return WorkItem(kind=kind, ticket=ticket, tile_idx=tile_idx, tile=tile)


# -- pool waves ----------------------------------------------------------------------------------


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def running_sum(v):
    """Sums along the first dimension: of each and all before it."""
    return gl.associative_scan(v, 0, _plus)


@gluon.jit
def ring_row(args, row, tile_begin):
    """(row in the ring, pool wave) of a row in the long pool whose tile begins at `tile_begin`."""
    wave = tile_begin // args.wave_rows
    half = args.rows_per_rank // 2
    return (wave & 1) * half + row - wave * args.wave_rows, wave


@gluon.jit
def wave_of(cta, tile_idx):
    """RING: the pool wave of a tile."""
    return gl.load(cta.tile_list + tile_idx * TILE_WORDS + TILE_WAVE)


@gluon.jit
def write_wave_table(args, tile_list, tiles):
    """Tiles before each pool wave, of int32 [WAVES] tiles in each."""
    before = running_sum(tiles) - tiles
    wave = gl.arange(0, WAVES, tiles.type.layout)
    table = tile_list + (args.tile_list_stride - WAVE_TABLE)
    gl.store(table + wave, before)
    gl.store(table + WAVES, gl.sum(tiles, 0))


@gluon.jit
def _tiles_before(cta, wave):
    """Tiles of all pool waves before `wave`; of all where there is no such wave."""
    table = cta.args.tile_list_stride - WAVE_TABLE
    return gl.load(cta.tile_list + (table + gl.minimum(wave, WAVES)))


@gluon.jit
def tiles_of_wave(cta, wave):
    """Tiles of a pool wave."""
    return _tiles_before(cta, wave + 1) - _tiles_before(cta, wave)


@gluon.jit
def _segment(cta, number, num_fills, l1_n_tiles, l2_n_tiles):
    """(kind, pool wave, tickets) of segment `number`: a run of tickets of one kind and wave."""
    place = gl.maximum(number - 2, 0)
    is_late = number >= 2
    part = place % 3
    wave = gl.where(is_late, place // 3 + gl.where(part == 0, 0, 2), number)
    kind = gl.where(is_late, gl.where(part == 0, L2, gl.where(part == 1, FILL, L1)), L1)
    tiles = tiles_of_wave(cta, wave)
    n_tiles = gl.where(kind == L2, l2_n_tiles, l1_n_tiles)
    return kind, wave, gl.where(kind == FILL, gl.where(tiles > 0, num_fills, 0), tiles * n_tiles)


@gluon.jit
def _num_fills(cta):
    """Tickets of one wave's fill: a part of a token for every warpgroup."""
    return (num_parts(cta.args, cta.num_tokens) + GROUPS - 1) // GROUPS


@gluon.jit
def _num_fill_tickets(cta, num_tiles, num_fills):
    """Tickets of all fills: of pool waves from the third on."""
    last = wave_of(cta, gl.maximum(num_tiles - 1, 0))
    return gl.where(num_tiles > 0, gl.maximum(last - 1, 0), 0) * num_fills


# -- waits for the pool ----------------------------------------------------------------------------


@gluon.jit
def wait_for_pool(cta):
    """One warp: until all tokens are in the pool; the CTA's other roles wait for `pool_filled`."""
    want = num_parts(cta.args, cta.num_tokens)
    wait_for(cta, cta.counters + POOL, want, WAIT_POOL, cta.rank)
    mbarrier.arrive(cta.pool_filled, count=1)


@gluon.jit
def wait_for_wave(cta, tile_idx):
    """RING: until the tile's pool wave is in the pool; `wait_for_pool` waits for the first two."""
    if cta.args.RING:
        wave = wave_of(cta, tile_idx)
        if wave >= 2:
            want = num_parts(cta.args, cta.num_tokens)
            wait_for(cta, cta.counters + FILLED + wave, want, WAIT_WAVE, wave)


# -- tickets -------------------------------------------------------------------------------------


@gluon.jit
def _num_tiles(cta):
    """Length of the tile list, once the routing is read."""
    mbarrier.wait(cta.routed, 0)
    return gl.max(cta.num_tiles.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def _next_ticket(cta):
    return gl.atomic_add(cta.counters + TICKET, 1, sem="relaxed", scope="gpu")


@gluon.jit
def _num_tickets(cta, l1_n_tiles, l2_n_tiles):
    """Of all CTAs of the rank: L1 tiles, L2 tiles, and fills of later pool waves."""
    num_tiles = _num_tiles(cta)
    num = num_tiles * (l1_n_tiles + l2_n_tiles)
    if cta.args.RING:
        num += _num_fill_tickets(cta, num_tiles, _num_fills(cta))
    return num


@gluon.jit
def _finish(cta, num_own, num_tickets):
    """Signal every rank that this CTA is done, and wait for all.

    The last CTA out zeroes the counters, and checks that all had `num_tickets` together, of which
    this one had `num_own`.
    """
    args = cta.args
    mbarrier.wait(cta.own_done, 0)
    signal_done(cta)
    wait_for_done(cta)
    mbarrier.arrive(cta.all_done, count=1)
    mbarrier.wait(cta.pool_filled, 0)  # load_tokens of a CTA without a tile may still poll POOL
    out = gl.atomic_add(cta.counters + EXIT, num_own * EXIT_TICKET + 1, sem="acq_rel", scope="gpu")
    if out % EXIT_TICKET == cta.num_ctas - 1:
        expect_equal(
            args, cta.rank, out // EXIT_TICKET + num_own, num_tickets, WAIT_TICKETS, cta.rank
        )
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        word = gl.arange(0, 32, LAYOUT)
        zero = gl.zeros([32], gl.int32, LAYOUT)
        for start in range(0, L1_DONE + _num_tiles(cta), 32):
            gl.store(cta.counters + start + word, zero, mask=start + word < args.num_counters)
        if args.RANKS > 1:
            signals = own(args, args.signals, cta.rank)
            gl.store(signals + LAST_CALL, gl.load(signals + LAST_CALL) + 1)


@gluon.jit
def schedule_tiles(cta, l1, l2):
    """One warp: take tickets and push what they mean, one work item ahead of the other roles.

    The next ticket is taken when the CTA's last tile begins: taken earlier, a slow CTA would have a
    ticket for which others wait at the end. The other roles do not wait for what takes long here:
    the counter, the tile list, divisions, code that is fetched once a tile.
    """
    l1_n_tiles = num_n_tiles(l1, cta.args.ROWS)
    l2_n_tiles = num_n_tiles(l2, cta.args.ROWS)
    num_tickets = _num_tickets(cta, l1_n_tiles, l2_n_tiles)
    num_l1 = _num_tiles(cta) * l1_n_tiles
    number = 0
    begin = 0
    wave = 0
    size = num_l1
    kind = gl.to_tensor(L1)
    if cta.args.RING:
        kind, wave, size = _segment(cta, number, _num_fills(cta), l1_n_tiles, l2_n_tiles)
    i = 0
    ticket = cta.cta_idx
    while (ticket >= 0) & (ticket < num_tickets):  # a poisoned counter gives no tile: reported
        if cta.args.RING:
            while ticket >= begin + size:
                begin += size
                number += 1
                kind, wave, size = _segment(cta, number, _num_fills(cta), l1_n_tiles, l2_n_tiles)
            item = ticket - begin
        else:
            kind = gl.where(ticket >= num_l1, L2, L1)
            item = gl.where(ticket >= num_l1, ticket - num_l1, ticket)
        n_tiles = gl.where(kind == L2, l2_n_tiles, l1_n_tiles)
        tile_idx = fast_div(item, n_tiles)
        n_tile_idx = item - tile_idx * n_tiles
        if cta.args.RING:
            n_tile_idx = gl.where(kind == FILL, item, n_tile_idx)
            tile_idx = gl.where(kind == FILL, wave, _tiles_before(cta, wave) + tile_idx)
        tile = read_tile_list(cta.tile_list, tile_idx, n_tile_idx)
        _push(cta, i, WorkItem(kind=kind, ticket=ticket, tile_idx=tile_idx, tile=tile))
        if i == 0:
            ticket += cta.num_ctas
        else:
            _wait_until_popped(cta, i)
            ticket = 2 * cta.num_ctas + _next_ticket(cta)
        i += 1
    none = gl.to_tensor(NO_ITEM)
    zero = gl.to_tensor(0)
    tile = Tile(expert=zero, n_tile_idx=zero, row_begin=zero, row_end=zero)
    _push(cta, i, WorkItem(kind=none, ticket=none, tile_idx=zero, tile=tile))
    _finish(cta, i, num_tickets)
