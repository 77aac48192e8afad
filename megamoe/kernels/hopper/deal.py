"""Who does which tile of `straight`, written down before the launch: waves of one tile a CTA.

Tiles of an expert come together under each row tile, so that a wave reads few weights. A tile with
64 rows at most takes half the time; such tiles go round the CTAs, so that all get as many of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.kernels.hopper.ring import num_items, place

# An item is 8 ints: expert (-1: none), first row, end row, row tile; and for `ahead` its place in
# the wave (run | runs of the wave << 10 | place << 20), the first slab of the run that has the
# item's number in the wave, and two counters. Item 0's last counter is not one: it tells that a
# wait was given up.
ITEM = tl.constexpr(8)
MOST_CTAS = 1 << 10
HALF = tl.constexpr(64)  # rows


@triton.jit(do_not_specialize=["across", "ctas", "span", "slabs"])
def _deal_kernel(
    tiles, num_tiles, items, across, ctas, span, slabs,
    CTAS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Program: a wave."""
    wave = tl.program_id(0)
    place = tl.arange(0, CTAS)
    num = tl.load(num_tiles)
    item = wave * ctas + place
    used = (place < ctas) & (item < num * across)
    own = tl.where(used, item // across, 0)  # a tile of the same expert
    expert = tl.load(tiles + own * 4, mask=used, other=-1)
    first = tl.zeros([CTAS], tl.int32)
    size = tl.zeros([CTAS], tl.int32)
    halves = tl.zeros([CTAS], tl.int32)
    for start in tl.range(0, num, TILES):
        tile = start + tl.arange(0, TILES)
        inside = tile < num
        other = tl.load(tiles + tile * 4, mask=inside, other=2147483647)
        rows = tl.load(tiles + tile * 4 + 2, mask=inside, other=0)
        rows -= tl.load(tiles + tile * 4 + 1, mask=inside, other=0)
        before = other[None, :] < expert[:, None]
        first += tl.sum(before.to(tl.int32), 1)
        size += tl.sum((other[None, :] == expert[:, None]).to(tl.int32), 1)
        halves += tl.sum((before & (rows <= HALF)[None, :]).to(tl.int32), 1)
    size = tl.maximum(size, 1)
    width = tl.cdiv(size, tl.cdiv(size, span))  # tiles that go together, evenly cut
    begin = first + (own - first) // width * width
    width = tl.minimum(width, first + size - begin)
    inside_part = item - begin * across
    row_tile = inside_part // width
    tile = begin + inside_part % width
    row = tl.load(tiles + tile * 4 + 1, mask=used, other=0)
    end = tl.load(tiles + tile * 4 + 2, mask=used, other=0)
    # Only an expert's last tile may be half, the last of its run.
    last = tl.where(used, first + size - 1, 0)
    rows = tl.load(tiles + last * 4 + 2, mask=used, other=0)
    rows -= tl.load(tiles + last * 4 + 1, mask=used, other=0)
    has_half = used & (rows <= HALF) & (begin + width == first + size)
    halves = halves * across + tl.where(has_half, row_tile, 0)  # before this item
    is_half = has_half & (tile == last)
    base = tl.sum(tl.where(place == 0, halves, 0))
    halves = tl.where(used, halves, base + tl.sum(is_half.to(tl.int32)))
    whole = place - (halves - base)  # whole tiles of the wave before this one
    cta = tl.where(is_half, halves % ctas, (base % ctas + 2 * ctas - 1 - whole) % ctas)
    begins = used & ((inside_part % width == 0) | (place == 0))
    run = tl.maximum(tl.cumsum(begins.to(tl.int32), 0) - 1, 0)
    num_runs = tl.sum(begins.to(tl.int32))
    mask = place < ctas
    at = items + (wave * ctas + cta) * ITEM
    tl.store(at, expert, mask=mask)
    tl.store(at + 1, row, mask=mask)
    tl.store(at + 2, end, mask=mask)
    tl.store(at + 3, row_tile, mask=mask)
    tl.store(at + 4, run | num_runs << 10 | place << 20, mask=mask)
    slab = expert * slabs + row_tile * 4
    tl.store(items + (wave * ctas + run) * ITEM + 5, slab, mask=begins)
    zero = tl.zeros([CTAS], tl.int32)
    tl.store(items + item * ITEM + 6, zero, mask=mask)
    tl.store(items + item * ITEM + 7, zero, mask=mask)


def deal(tiles: Tensor, num_tiles: Tensor, across: int, ctas: int, span: int, slabs: int) -> Tensor:
    """int32 [waves * ctas, 8]: the items of `tiles` x `across` row tiles, CTA by CTA.

    Up to `span` tiles of an expert come together; its weights have `slabs` of 64 rows.
    """
    assert ctas < MOST_CTAS
    waves = triton.cdiv(tiles.shape[0] * across, ctas)
    items = torch.empty(waves * ctas, ITEM.value, dtype=torch.int32, device=tiles.device)
    _deal_kernel[(waves,)](
        tiles, num_tiles, items, across, ctas, span, slabs,
        CTAS=triton.next_power_of_2(ctas), TILES=64, num_warps=8,
    )  # fmt: skip
    return items


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
