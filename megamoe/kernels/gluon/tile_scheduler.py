"""Tile schedulers of the staged GEMMs: which CTA computes which tile, in which order.

Three ways, from the simplest:
  round robin   CTA c takes the work items c, c + num_ctas, ...; `tile_at` derives the tile of one
  static        work items are written before the launch (`schedule_wave`), a wave after another;
                a wave is one tile of every CTA. Tiles of an expert stand together under each n
                tile, so that a wave reads few weights. A tile of 64 rows at most takes half the
                time; such tiles rotate over the CTAs, so that each gets its share of them.
  dynamic       the same items in their own order; a CTA takes the next one from an atomic counter

The tiles of an expert are cut evenly into parts of `span` at most. Items of a part run over its
tiles first, then over n tiles: with two tiles a and b and three n tiles

    item    a0 b0 a1 b1 a2 b2          a run is a0 b0, a1 b1 or a2 b2: the same weights

Static: half tiles take CTA after CTA from where those of the wave before ended, whole ones fill the
other CTAs downwards.

A work item, int32 [ITEM_WORDS]:

  word            meaning
  ITEM_EXPERT     expert, or -1: no tile for this CTA in this wave
  ITEM_ROW_BEGIN  first row of the tile in the pool
  ITEM_ROW_END    end of its rows
  ITEM_N_TILE     n tile: 256 weight rows of the expert
  ITEM_PLACE      run | runs of the wave << 10 | place in the wave << 20; a run is the tiles of a
                  wave that share their weights
  ITEM_SLAB       of the run that has this item's number in the wave: its first slab of 64 rows
  ITEM_STORED     counter: decoded jobs of this CTA in the wave (`decode_per_wave`)
  ITEM_TILE       dynamic: index in the tile list instead
  ITEM_READ       counter: CTAs that have read a chunk of K; of item 0: a wait was given up
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

from megamoe.kernels.gluon.pipeline import Tile, bounded_wait, fence_stores
from megamoe.kernels.gluon.pool import (
    ROW_ALIGN,
    TILE_L1_DONE,
    TILE_WORDS,
    num_n_tiles,
    read_tile_list,
)
from megamoe.planner.tables.hopper import MAX_CTAS

ITEM_WORDS = tl.constexpr(8)
ITEM_EXPERT = tl.constexpr(0)
ITEM_ROW_BEGIN = tl.constexpr(1)
ITEM_ROW_END = tl.constexpr(2)
ITEM_N_TILE = tl.constexpr(3)
ITEM_PLACE = tl.constexpr(4)
ITEM_SLAB = tl.constexpr(5)
ITEM_STORED = tl.constexpr(6)
ITEM_TILE = tl.constexpr(6)
ITEM_READ = tl.constexpr(7)
PLACE_BITS = tl.constexpr(10)  # of each of the three numbers in ITEM_PLACE
PLACE_MASK = tl.constexpr(1023)

# The tile of the plain GEMM.
PLAIN_TOKENS = tl.constexpr(128)  # rows of the pool
PLAIN_HALF = tl.constexpr(64)  # rows that a wgmma takes; a tile may have no more
PLAIN_ROWS = tl.constexpr(256)  # weight rows
PLAIN_SLABS = tl.constexpr(4)  # of 64 weight rows

# Words after the number of tiles.
NEXT_ITEM = gl.constexpr(1)  # L1's counter of taken items, then L2's
TIMEOUT_WORD = gl.constexpr(3)  # 1 once a wait was given up
BOUND_NS = gl.constexpr(2_000_000_000)  # of a wait for other CTAs of the launch
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


# Arguments of kernels that write items; num_ctas would be an option of Triton's.
SIZES = ("l1_n_tiles", "l1_slabs", "l2_n_tiles", "l2_slabs", "l1_waves", "wave_ctas", "span")


# -- on the host: memory for work items ------------------------------------------------------------


class LinearTiles(NamedTuple):
    """One linear: n tiles of a tile of tokens, and slabs of 64 rows of an expert's weights."""

    num_n_tiles: int
    slabs: int


@dataclass(frozen=True, slots=True)
class WorkItems:
    """The work items of one or two linears: int32 [waves * ctas, ITEM_WORDS] of each.

    span        tiles of an expert that stand together, at most
    is_dynamic  CTAs take them from a counter, so they stay in order
    """

    items: Tensor
    linears: Sequence[LinearTiles]
    waves: Sequence[int]  # of each linear
    ctas: int
    span: int
    is_dynamic: bool

    @staticmethod
    def empty(
        like: Tensor,
        linears: Sequence[LinearTiles],
        ctas: int,
        span: int,
        max_tiles: int,
        *,
        is_dynamic: bool = False,
    ) -> WorkItems:
        """Memory for up to `max_tiles` tiles of tokens, on the device of `like`."""
        assert ctas <= MAX_CTAS
        waves = [triton.cdiv(max_tiles * linear.num_n_tiles, ctas) for linear in linears]
        items = like.new_empty(sum(waves) * ctas, ITEM_WORDS.value)
        return WorkItems(items, linears, waves, ctas, span, is_dynamic)

    def each(self) -> list[Tensor]:
        """The items of each linear."""
        return list(self.items.split([num * self.ctas for num in self.waves]))

    def arguments(self) -> dict[str, Tensor | int]:
        """Arguments of kernels that call `schedule_wave`."""
        l1, l2 = self.linears[0], self.linears[-1]
        sizes = (*l1, *l2, self.waves[0], self.ctas, self.span)
        return {"items": self.items, **dict(zip(SIZES, sizes, strict=True))}

    @staticmethod
    def no_arguments(unused: Tensor) -> dict[str, Tensor | int]:
        """The same where no items are written."""
        return {"items": unused, **dict.fromkeys(SIZES, 0)}


# -- static: work items of one wave --------------------------------------------------------------


@triton.jit
def expert_rows(count, ALIGN: tl.constexpr = ROW_ALIGN):
    """First row of each expert in the pool, a multiple of ALIGN, of int32 [E] rows per expert."""
    aligned = (count + ALIGN - 1) // ALIGN * ALIGN
    return tl.cumsum(aligned, 0) - aligned


@triton.jit
def first_above(ends, numbers):
    """Index of the first of the ascending `ends` [power of two] above each number [N].

    Any index where none is above it.
    """
    SIZE: tl.constexpr = ends.shape[0]
    index = numbers * 0
    step = SIZE // 2
    while step > 0:
        index += tl.where(tl.gather(ends, index + step - 1, 0) <= numbers, step, 0)
        step //= 2
    return index


@triton.jit
def schedule_wave(
    wave, count, row_begin, items, l1, l2, l1_waves, num_ctas, span,
    CTAS: tl.constexpr, IS_DYNAMIC: tl.constexpr,
):  # fmt: skip
    """One program: the items of one wave, of L1 or, from wave `l1_waves` on, of L2.

    count      int32 [E]: rows of each expert; row_begin int32 [E]: the first of them in the pool
    l1, l2     (num_n_tiles, slabs) of each linear
    CTAS       num_ctas to the next power of two

    Where no expert has a row, `width` is zero, and what is divided by it is anything: words of
    items that have no tile. Readers look at their expert, -1, first.
    """
    is_l2 = wave >= l1_waves
    num_n_tiles = tl.where(is_l2, l2[0], l1[0])
    slabs = tl.where(is_l2, l2[1], l1[1])
    wave = tl.where(is_l2, wave - l1_waves, wave)
    items += tl.where(is_l2, l1_waves * num_ctas * ITEM_WORDS, 0)
    blocks = (count + PLAIN_TOKENS - 1) // PLAIN_TOKENS
    ends_half = ((count > 0) & (count - (blocks - 1) * PLAIN_TOKENS <= PLAIN_HALF)).to(tl.int32)
    last = tl.cumsum(blocks, 0)
    place = tl.arange(0, CTAS)
    item = wave * num_ctas + place
    used = (place < num_ctas) & (item < tl.sum(blocks, 0) * num_n_tiles)
    own = tl.where(used, item // num_n_tiles, 0)  # a tile of the same expert
    expert = first_above(last, own)
    rows = tl.gather(count, expert, 0)
    size = tl.maximum(tl.cdiv(rows, PLAIN_TOKENS), 1)
    first = tl.gather(last, expert, 0) - size  # the expert's first tile
    expert_begin = tl.gather(row_begin, expert, 0)
    width = tl.cdiv(size, tl.cdiv(size, span))  # tiles of a part
    begin = first + (own - first) // width * width
    width = tl.minimum(width, first + size - begin)
    inside_part = item - begin * num_n_tiles
    n_tile_idx = inside_part // width
    tile = begin + inside_part % width
    row = expert_begin + (tile - first) * PLAIN_TOKENS
    # Only an expert's last tile may be half, the last of its run.
    has_half = used & (rows - (size - 1) * PLAIN_TOKENS <= PLAIN_HALF)
    has_half = has_half & (begin + width == first + size)
    halves = tl.gather(tl.cumsum(ends_half, 0) - ends_half, expert, 0) * num_n_tiles
    halves += tl.where(has_half, n_tile_idx, 0)
    is_half = has_half & (tile == first + size - 1)
    base = tl.sum(tl.where(place == 0, halves, 0))
    halves = tl.where(used, halves, base + tl.sum(is_half.to(tl.int32)))
    whole = place - (halves - base)  # whole tiles of the wave before this one
    cta = tl.where(
        is_half, halves % num_ctas, (base % num_ctas + 2 * num_ctas - 1 - whole) % num_ctas
    )
    if IS_DYNAMIC:
        cta = place
    begins = used & ((inside_part % width == 0) | (place == 0))
    run = tl.maximum(tl.cumsum(begins.to(tl.int32), 0) - 1, 0)
    num_runs = tl.sum(begins.to(tl.int32))
    mask = place < num_ctas
    at = items + (wave * num_ctas + cta) * ITEM_WORDS
    tl.store(at + ITEM_EXPERT, tl.where(used, expert, -1), mask=mask)
    tl.store(at + ITEM_ROW_BEGIN, row, mask=mask)
    tl.store(at + ITEM_ROW_END, tl.minimum(row + PLAIN_TOKENS, expert_begin + rows), mask=mask)
    tl.store(at + ITEM_N_TILE, n_tile_idx, mask=mask)
    tl.store(at + ITEM_PLACE, run | num_runs << PLACE_BITS | place << (2 * PLACE_BITS), mask=mask)
    slab = expert * slabs + n_tile_idx * PLAIN_SLABS
    tl.store(items + (wave * num_ctas + run) * ITEM_WORDS + ITEM_SLAB, slab, mask=begins)
    zero = tl.zeros([CTAS], tl.int32)
    own_item = items + item * ITEM_WORDS
    tl.store(own_item + ITEM_STORED, tile if IS_DYNAMIC else zero, mask=mask)
    tl.store(own_item + ITEM_READ, zero, mask=mask)


@triton.jit
def no_items(items, wave, num_ctas, CTAS: tl.constexpr):
    """One program: a wave in which no CTA has a tile."""
    place = tl.arange(0, CTAS)
    at = items + (wave * num_ctas + place) * ITEM_WORDS
    tl.store(at + ITEM_EXPERT, place * 0 - 1, mask=place < num_ctas)
    tl.store(at + ITEM_READ, place * 0, mask=place < num_ctas)


@triton.jit(do_not_specialize=list(SIZES))
def _schedule_kernel(
    counts, num_experts, items, l1_n_tiles, l1_slabs, l2_n_tiles, l2_slabs, l1_waves, wave_ctas,
    span,
    CTAS: tl.constexpr, IS_DYNAMIC: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, E)
    count = tl.load(counts + expert, mask=expert < num_experts, other=0)
    schedule_wave(
        tl.program_id(0), count, expert_rows(count), items, (l1_n_tiles, l1_slabs),
        (l2_n_tiles, l2_slabs), l1_waves, wave_ctas, span, CTAS, IS_DYNAMIC,
    )  # fmt: skip


def schedule(work: WorkItems, counts: Tensor) -> None:
    """Write the items of experts with int32 [E] `counts` rows, in a launch of its own."""
    _schedule_kernel[(sum(work.waves),)](
        counts=counts, num_experts=len(counts), **work.arguments(),
        CTAS=triton.next_power_of_2(work.ctas), IS_DYNAMIC=work.is_dynamic,
        E=max(triton.next_power_of_2(len(counts)), 2), num_warps=4,
    )  # fmt: skip


# -- in a GEMM: the tile of a work item ----------------------------------------------------------


@gluon.jit
def num_work_items(gemm, ROWS: gl.constexpr):
    """Work items of the launch; round robin, a CTA takes every num_programs-th."""
    return gl.load(gemm.num_tiles) * num_n_tiles(gemm, ROWS)


@gluon.jit
def tile_in_list(gemm, item, ROWS: gl.constexpr):
    """The tile of an item, round robin: SPAN tiles of tokens share a sweep over the n tiles."""
    n_tiles = num_n_tiles(gemm, ROWS)
    first = item // (gemm.SPAN * n_tiles) * gemm.SPAN
    size = gl.minimum(gl.load(gemm.num_tiles) - first, gemm.SPAN)
    inside = item % (gemm.SPAN * n_tiles)
    return read_tile_list(gemm.tiles, first + inside % size, inside // size)


@gluon.jit
def num_waves(gemm):
    """Waves of the launch; some CTAs have no tile in the last."""
    return (num_work_items(gemm, PLAIN_ROWS) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def end_item(gemm):
    """The end of this CTA's items, of which it takes every num_programs-th."""
    end = num_work_items(gemm, PLAIN_ROWS)
    if gemm.HAS_ITEMS:
        last = gl.maximum(num_waves(gemm) - 1, 0) * gl.num_programs(0) + gl.program_id(0)
        end = last + gl.where(gl.load(gemm.items + last * ITEM_WORDS + ITEM_EXPERT) < 0, 0, 1)
    return end


@gluon.jit
def tile_at(gemm, item):
    """The tile of a work item of the plain GEMM."""
    if gemm.HAS_ITEMS:
        at = gemm.items + item * ITEM_WORDS
        n_tile_idx = gl.load(at + ITEM_N_TILE)
        return Tile(
            expert=gl.load(at + ITEM_EXPERT),
            n_tile_idx=n_tile_idx,
            row_begin=gl.load(at + ITEM_ROW_BEGIN),
            row_end=gl.load(at + ITEM_ROW_END),
        )
    else:
        return tile_in_list(gemm, item, PLAIN_ROWS)


@gluon.jit
def ctas_of_wave(gemm, wave):
    """CTAs that have a tile in the wave that begins with item `wave`."""
    return gl.minimum(num_work_items(gemm, PLAIN_ROWS) - wave, gl.num_programs(0))


@gluon.jit
def place_of(gemm, item):
    """(run, runs of the wave, place in the wave) of an item."""
    packed = gl.load(gemm.items + item * ITEM_WORDS + ITEM_PLACE)
    # Extracted by PTX: the compiler divides by what it knows to be short in a subroutine.
    runs = gl.inline_asm_elementwise(
        "bfe.u32 $0, $1, 10, 10;", "=r,r", [packed], dtype=gl.int32, is_pure=True, pack=1
    )
    return packed & PLACE_MASK, runs, packed >> (2 * PLACE_BITS)


# -- dynamic: the next item, and L2 that follows L1 tile by tile -----------------------------------
#
# A CTA of L2 takes the SM of one of L1 that has no tile left. TILE_L1_DONE of a tile of tokens
# counts L1's n tiles that are in memory; L2 waits for all of them, not for the launch.


@gluon.jit
def next_item(gemm, num_items):
    """The next of `num_items` items; the first one of a CTA is the one of its number.

    All CTAs together take `num_items` times, so the last one resets the counter.
    """
    counter = gemm.num_tiles + NEXT_ITEM + (0 if gemm.GATED else 1)
    ticket = gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
    if ticket == num_items - 1:
        gl.store(counter, 0)
    return gl.num_programs(0) + ticket


@gluon.jit
def l1_done_counter(gemm, item):
    """Where the finished L1 tiles of an item's tokens are counted."""
    tile_idx = gl.load(gemm.items + item * ITEM_WORDS + ITEM_TILE)
    return gemm.tiles + tile_idx * TILE_WORDS + TILE_L1_DONE


@gluon.jit
def publish_l1_tile(counter):
    """One more L1 tile is in memory, once all warpgroups have stored it."""
    fence_stores()
    gl.atomic_add(counter, 1, sem="release", scope="gpu")


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
    timeout = gemm.num_tiles + TIMEOUT_WORD
    bound_ns = gl.to_tensor(1000).to(gl.int64) * gemm.bound_us
    word = tile_word(gemm.follows, tile.row_begin)
    reached = bounded_wait(word, want, timeout, bound_ns, "gpu", "ge")
    gl.inline_asm_elementwise(
        GIVE_UP, "=r,r,r,l,l", [reached, want, timeout.to(gl.int64), error.to(gl.int64)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_until_reached(gemm, counter, value, timeout):
    """Wait until the words at `counter` are `value` or more; all threads of a role call it.

    After BOUND_NS, whatever the layer's own bound, it gives up: `timeout` and the layer's error
    word are set.
    """
    bound_ns = gl.to_tensor(BOUND_NS).to(gl.int64)
    reached = bounded_wait(counter, value, timeout, bound_ns, "gpu", "ge")
    gl.inline_asm_elementwise(
        GIVE_UP, "=r,r,r,l,l",
        [reached, value, timeout.to(gl.int64), gemm.decoded.error.to(gl.int64)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
