"""Tickets of a fused launch: who does which tile, and the end, when all are done."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from megamoe.kernels.hopper.edges import num_parts, num_tiles
from megamoe.kernels.hopper.meet import (
    CALL,
    EXIT,
    READY,
    TICKET,
    WAIT_TICKETS,
    expect,
    send,
    tell_done,
    wait_for_done,
    wait_until_read,
)
from megamoe.kernels.hopper.ring import GROUPS, quotient, tiles_across
from megamoe.kernels.hopper.stamps import FILL, FIRST, SECOND
from megamoe.kernels.hopper.waves import num_filled_later, segment, tiles_before


@gluon.jit
def _draw(m):
    """A ticket of the counter."""
    return gl.atomic_add(m.counters + TICKET, 1, sem="relaxed", scope="gpu")


@gluon.jit
def _num_tickets(m, first_across, second_across):
    """Of all CTAs of the rank: L1 tiles, L2 tiles, and fills of later waves."""
    tiles = num_tiles(m)
    num = tiles * (first_across + second_across)
    if m.call.RING:
        num += num_filled_later(m, tiles, _num_fills(m))
    return num


@gluon.jit
def _num_fills(m):
    """Tickets of one wave's fill: a part of a token for every warpgroup."""
    return (num_parts(m.call) + GROUPS - 1) // GROUPS


@gluon.jit
def _meet_all(m, tiles, num):
    """Every rank learns that this CTA is done; wait for all.

    The last CTA out cleans up, and looks whether all did `num` tiles together, of which this one
    did `tiles`.
    """
    mbarrier.wait(m.own_done, 0)
    tell_done(m)
    wait_for_done(m)
    mbarrier.arrive(m.all_done, count=1)
    mbarrier.wait(m.filled, 0)  # without a tile nobody else knows whether load_tokens still polls
    out = gl.atomic_add(m.counters + EXIT, tiles * 1024 + 1, sem="acq_rel", scope="gpu")
    if out % 1024 == m.num_ctas - 1:
        expect(m.call, m.rank, out // 1024 + tiles, num, WAIT_TICKETS, m.rank)
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        word = gl.arange(0, 32, LAYOUT)
        zero = gl.zeros([32], gl.int32, LAYOUT)
        for start in range(0, READY + num_tiles(m), 32):
            gl.store(m.counters + start + word, zero, mask=start + word < m.call.num_counters)
        if m.call.RANKS > m.call.LOCAL:
            gl.store(m.call.signals + CALL, gl.load(m.call.signals + CALL) + 1)


@gluon.jit
def deal(m, one, two):
    """Draw tickets and tell all roles what they mean, a tile ahead of them.

    The first two tickets of a CTA are its own. The next one is drawn as its last tile begins: drawn
    earlier, a slow CTA would hold a ticket for which others wait at the end. Nobody waits for what
    takes long here: the counter, the list, divisions, code that is fetched once a tile.
    """
    first_across = tiles_across(one, m.call.ROWS)
    second_across = tiles_across(two, m.call.ROWS)
    num = _num_tickets(m, first_across, second_across)
    num_first = num_tiles(m) * first_across
    number = 0
    begin = 0
    wave = 0
    size = num_first
    kind = gl.to_tensor(FIRST)
    if m.call.RING:
        kind, wave, size = segment(m, number, _num_fills(m), first_across, second_across)
    i = 0
    ticket = m.cta
    while (ticket >= 0) & (ticket < num):  # a poisoned counter deals no tile; it is reported
        if m.call.RING:
            while ticket >= begin + size:
                begin += size
                number += 1
                kind, wave, size = segment(m, number, _num_fills(m), first_across, second_across)
            item = ticket - begin
        else:
            kind = gl.where(ticket >= num_first, SECOND, FIRST)
            item = gl.where(ticket >= num_first, ticket - num_first, ticket)
        across = gl.where(kind == SECOND, second_across, first_across)
        tile = quotient(item, across)
        across = item - tile * across
        if m.call.RING:
            across = gl.where(kind == FILL, item, across)
            tile = gl.where(kind == FILL, wave, tiles_before(m, wave) + tile)
        at = m.private + tile * 4
        expert = gl.load(at)
        send(m, i, kind, ticket, tile, across, expert, gl.load(at + 1), gl.load(at + 2))
        if i == 0:
            ticket += m.num_ctas
        else:
            wait_until_read(m, i)
            ticket = 2 * m.num_ctas + _draw(m)
        i += 1
    send(m, i, -1, -1, 0, 0, 0, 0, 0)
    _meet_all(m, i, num)
