"""Who does which tile of `straight`, written down before the launch: waves of one tile a CTA.

Tiles of an expert come together under each row tile, so that a wave reads few weights. A tile with
64 rows at most takes half the time; such tiles go round the CTAs, so that all get as many of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.kernels.hopper.ring import num_items, place
from megamoe.planner.tables.hopper import MAX_CTAS, ROW_ALIGN

# An item is 8 ints: expert (-1: none), first row, end row, row tile; and for `ahead` its place in
# the wave (run | runs of the wave << 10 | place << 20), the first slab of the run that has the
# item's number in the wave, and two counters. Item 0's last counter is not one: it tells that a
# wait was given up. Of items that are drawn the first counter is the number of the tile of tokens.
ITEM = tl.constexpr(8)
ALIGN = tl.constexpr(ROW_ALIGN)  # rows: where an expert's first may lie
BLOCK = tl.constexpr(128)  # rows of a tile
HALF = tl.constexpr(64)  # rows that a wgmma takes; a tile may have no more


class Width(NamedTuple):
    """One linear: row tiles under each token tile, and slabs of 64 rows of an expert's weights."""

    across: int
    slabs: int


@dataclass(frozen=True, slots=True)
class Hand:
    """The items of one or two linears, to be dealt over the CTAs: int32 [waves * ctas, 8] of each.

    span      tiles of an expert that come together, at most
    is_drawn  CTAs will draw them: they stay in their order
    """

    items: Tensor
    widths: Sequence[Width]
    waves: Sequence[int]  # of each linear
    ctas: int
    span: int
    is_drawn: bool

    @staticmethod
    def empty(
        some: Tensor,
        widths: Sequence[Width],
        ctas: int,
        span: int,
        max_tiles: int,
        *,
        is_drawn: bool = False,
    ) -> Hand:
        """Room for up to `max_tiles` tiles of tokens, where `some` is."""
        assert ctas <= MAX_CTAS
        waves = [triton.cdiv(max_tiles * width.across, ctas) for width in widths]
        items = some.new_empty(sum(waves) * ctas, ITEM.value)
        return Hand(items, widths, waves, ctas, span, is_drawn)

    def each(self) -> list[Tensor]:
        """The items of each linear."""
        return list(self.items.split([num * self.ctas for num in self.waves]))

    def arguments(self) -> tuple[Tensor | int, ...]:
        """What `deal_wave` is told, between the rows per expert and its sizes."""
        first, second = self.widths[0], self.widths[-1]
        return self.items, *first, *second, self.waves[0], self.ctas, self.span


@triton.jit
def first_rows(count):
    """Where the rows of each expert begin."""
    aligned = (count + ALIGN - 1) // ALIGN * ALIGN
    return tl.cumsum(aligned, 0) - aligned


@triton.jit
def first_above(ends, numbers):
    """Of each number the first of the ascending `ends` that is greater; some where none is."""
    SIZE: tl.constexpr = ends.shape[0]
    found = numbers * 0
    step = SIZE // 2
    while step > 0:
        found += tl.where(tl.gather(ends, found + step - 1, 0) <= numbers, step, 0)
        step //= 2
    return found


@triton.jit
def deal_wave(
    wave, count, first_row, items, across1, slabs1, across2, slabs2, first_waves, ctas, span,
    CTAS: tl.constexpr, IS_DRAWN: tl.constexpr,
):  # fmt: skip
    """One program: a wave of the first linear or of the second, from rows [E] and first rows.

    IS_DRAWN: CTAs will draw the items, so they stay in their order.
    """
    is_second = wave >= first_waves
    across = tl.where(is_second, across2, across1)
    slabs = tl.where(is_second, slabs2, slabs1)
    wave = tl.where(is_second, wave - first_waves, wave)
    items += tl.where(is_second, first_waves * ctas * ITEM, 0)
    blocks = (count + BLOCK - 1) // BLOCK
    ends_half = ((count > 0) & (count - (blocks - 1) * BLOCK <= HALF)).to(tl.int32)
    last = tl.cumsum(blocks, 0)
    place = tl.arange(0, CTAS)
    item = wave * ctas + place
    used = (place < ctas) & (item < tl.sum(blocks, 0) * across)
    own = tl.where(used, item // across, 0)  # a tile of the same expert
    expert = first_above(last, own)
    rows = tl.gather(count, expert, 0)
    size = tl.maximum(tl.cdiv(rows, BLOCK), 1)
    first = tl.gather(last, expert, 0) - size
    begin_row = tl.gather(first_row, expert, 0)
    width = tl.cdiv(size, tl.cdiv(size, span))  # tiles that go together, evenly cut
    begin = first + (own - first) // width * width
    width = tl.minimum(width, first + size - begin)
    inside_part = item - begin * across
    row_tile = inside_part // width
    tile = begin + inside_part % width
    row = begin_row + (tile - first) * BLOCK
    # Only an expert's last tile may be half, the last of its run.
    has_half = used & (rows - (size - 1) * BLOCK <= HALF) & (begin + width == first + size)
    halves = tl.gather(tl.cumsum(ends_half, 0) - ends_half, expert, 0) * across
    halves += tl.where(has_half, row_tile, 0)
    is_half = has_half & (tile == first + size - 1)
    base = tl.sum(tl.where(place == 0, halves, 0))
    halves = tl.where(used, halves, base + tl.sum(is_half.to(tl.int32)))
    whole = place - (halves - base)  # whole tiles of the wave before this one
    cta = tl.where(is_half, halves % ctas, (base % ctas + 2 * ctas - 1 - whole) % ctas)
    if IS_DRAWN:
        cta = place
    begins = used & ((inside_part % width == 0) | (place == 0))
    run = tl.maximum(tl.cumsum(begins.to(tl.int32), 0) - 1, 0)
    num_runs = tl.sum(begins.to(tl.int32))
    mask = place < ctas
    at = items + (wave * ctas + cta) * ITEM
    tl.store(at, tl.where(used, expert, -1), mask=mask)
    tl.store(at + 1, row, mask=mask)
    tl.store(at + 2, tl.minimum(row + BLOCK, begin_row + rows), mask=mask)
    tl.store(at + 3, row_tile, mask=mask)
    tl.store(at + 4, run | num_runs << 10 | place << 20, mask=mask)
    slab = expert * slabs + row_tile * 4
    tl.store(items + (wave * ctas + run) * ITEM + 5, slab, mask=begins)
    zero = tl.zeros([CTAS], tl.int32)
    tl.store(items + item * ITEM + 6, tile if IS_DRAWN else zero, mask=mask)
    tl.store(items + item * ITEM + 7, zero, mask=mask)


@triton.jit(
    do_not_specialize=["across1", "slabs1", "across2", "slabs2", "first_waves", "ctas", "span"]
)
def _deal_kernel(
    counts, num_experts, items, across1, slabs1, across2, slabs2, first_waves, ctas, span,
    CTAS: tl.constexpr, IS_DRAWN: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, E)
    count = tl.load(counts + expert, mask=expert < num_experts, other=0)
    deal_wave(
        tl.program_id(0), count, first_rows(count), items, across1, slabs1, across2, slabs2,
        first_waves, ctas, span, CTAS, IS_DRAWN,
    )  # fmt: skip


def deal(hand: Hand, counts: Tensor) -> None:
    """Deal the tiles of experts that have so many rows, in a launch of its own."""
    _deal_kernel[(sum(hand.waves),)](
        counts, len(counts), *hand.arguments(), CTAS=triton.next_power_of_2(hand.ctas),
        IS_DRAWN=hand.is_drawn, E=max(triton.next_power_of_2(len(counts)), 2), num_warps=4,
    )  # fmt: skip


@gluon.jit
def num_waves(p):
    """Waves of the launch; some CTAs have no tile in the last."""
    return (num_items(p, 256) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def end_item(p):
    """Behind the last item of this CTA, which takes every num_programs-th."""
    end = num_items(p, 256)
    if p.DEALT:
        last = gl.maximum(num_waves(p) - 1, 0) * gl.num_programs(0) + gl.program_id(0)
        end = last + gl.where(gl.load(p.items + last * ITEM) < 0, 0, 1)
    return end


@gluon.jit
def tile_at(p, item):
    """(expert, first row, end row, row tile) of an item."""
    if p.DEALT:
        at = p.items + item * ITEM
        across = gl.load(at + 3)
    else:
        tile, across = place(p, item, 256)
        at = p.tiles + tile * 4
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), across


@gluon.jit
def tiles_of_wave(p, wave):
    """CTAs that have a tile in the wave that begins with item `wave`."""
    return gl.minimum(num_items(p, 256) - wave, gl.num_programs(0))


@gluon.jit
def place_of(p, item):
    """(run, runs of the wave, place in the wave) of an item."""
    packed = gl.load(p.items + item * ITEM + 4)
    # Known to be short, it would be divided by in a subroutine.
    runs = gl.inline_asm_elementwise(
        "bfe.u32 $0, $1, 10, 10;", "=r,r", [packed], dtype=gl.int32, is_pure=True, pack=1
    )
    return packed & 1023, runs, packed >> 20
