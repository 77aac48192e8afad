"""The owner's side of the chain: rows of the pool from what sources pushed, and tokens pulled.

`_rows_kernel` makes rows, tiles and work items of the pushed counts and lists: the rows of an
expert by source rank, token and slot, which is the order of one rank that had all tokens. It reads
this rank's memory alone. `pull_kernel` then brings tokens into the pool on a few SMs, in the order
of the tiles, 8 rows in one trip to their ranks, and counts them; L1 waits for the rows of each
tile, not for the launch. Counters stand by a tile's first row: word `row_begin // ROW_ALIGN` of

  arrived   rows of the tile that are in the pool       pull_kernel -> L1
  l1_done   n tiles of L1 that are in memory            L1 -> L2, where L2 follows tile by tile

A pool smaller than the rows of a call holds a window of them; passes go through the windows.

  kernel        programs                                       waits for
  _rows_kernel  chunks of each source's list, tiles, waves     the launch before, all of it
  pull_kernel   every num_programs-th group of 8 rows          the launch before, all of it
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon

from megamoe.kernels.common.compat import after_previous
from megamoe.kernels.gluon.compat import gl
from megamoe.kernels.gluon.exchange import CALL, MISSED
from megamoe.kernels.gluon.permute import write_tiles
from megamoe.kernels.gluon.pipeline import (
    allow_next_launch,
    fence_stores,
    now_ns,
    wait_for_launch,
    wait_until,
)
from megamoe.kernels.gluon.placed import BLOCK_BYTES, placed_row
from megamoe.kernels.gluon.pool import (
    ROW_ALIGN,
    TILE_ROW_BEGIN,
    TILE_ROW_END,
    TILE_WORDS,
)
from megamoe.kernels.gluon.tile_scheduler import (
    expert_rows,
    first_above,
    no_items,
    schedule_wave,
)

DEST_UNIT = 16  # values: what L2 writes of a row begins at a multiple of them, of 16 bytes at least
ORIGIN_UNIT = 16  # words: a record begins at a multiple of 64 bytes
_UNIT = tl.constexpr(ORIGIN_UNIT)
_ORIGIN_BYTES = tl.constexpr(4 * ORIGIN_UNIT)


class Pulled(NamedTuple):
    """What a chain has of each of a pool's rows besides the pool."""

    origin: Tensor  # int64 [R]: 64-byte units from `tokens` here to the row's record
    arrived: Tensor  # int32 [R / ROW_ALIGN]
    l1_done: Tensor  # int32 [R / ROW_ALIGN]


@triton.jit(
    do_not_specialize=[
        "first_row", "l1_n_tiles", "l1_slabs", "l2_n_tiles", "l2_slabs", "l1_waves", "l1_ctas",
        "l2_ctas", "span",
    ]
)  # fmt: skip
def _rows_kernel(
    counts_in, list_in, weight_in, state, peers, stats, dest, origin, weight, arrived, l1_done,
    tiles, num_tiles, num_experts, num_dest, row_bytes, record_bytes, pitch, capacity, chunks,
    first_row, pool_rows, l1_items, l2_items, l1_n_tiles, l1_slabs, l2_n_tiles, l2_slabs,
    l1_waves, l1_ctas, l2_ctas, span,
    RANKS: tl.constexpr, R: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, ALIGN: tl.constexpr, CTAS: tl.constexpr, IS_DYNAMIC: tl.constexpr,
    IS_FIRST: tl.constexpr, HAS_STATS: tl.constexpr, DEST_BYTES: tl.constexpr,
):  # fmt: skip
    """A program each: chunks of every source's list; the tile list; waves of work items.

    The pool holds the call's rows from `first_row` on. There are none where this rank did not see
    every peer's lists. All programs must decide that alike, so they read a word that only this
    rank's earlier launch writes, not the one that peers may write meanwhile.

    ALIGN  rows at whose multiples experts begin, and a window of the pool: whole tiles where
           scales are placed by tile (Blackwell)
    """
    after_previous()
    number = tl.program_id(0)
    source = tl.arange(0, R)[:, None]
    expert = tl.arange(0, E)
    is_there = (source < RANKS) & (expert < num_experts)[None, :]
    is_there = is_there & (tl.load(state + MISSED) == 0)
    by_source = tl.load(counts_in + source * pitch + expert[None, :], mask=is_there, other=0)
    count = tl.sum(by_source, 0)
    row_begin = expert_rows(count, ALIGN)
    begin = tl.minimum(tl.maximum(row_begin - first_row, 0), pool_rows)
    here = tl.minimum(tl.maximum(row_begin + count - first_row, 0), pool_rows) - begin
    wave = number - RANKS * chunks - 1
    if wave >= 0:
        if CTAS:
            if tl.sum(here, 0) == 0:
                if wave < l1_waves:
                    no_items(l1_items, wave, l1_ctas, CTAS)
                else:
                    no_items(l2_items, wave - l1_waves, l2_ctas, CTAS)
            elif wave < l1_waves:
                schedule_wave(
                    wave, here, begin, l1_items, (l1_n_tiles, l1_slabs), (l1_n_tiles, l1_slabs),
                    l1_waves, l1_ctas, span, CTAS, IS_DYNAMIC,
                )  # fmt: skip
            else:
                schedule_wave(
                    wave - l1_waves, here, begin, l2_items, (l2_n_tiles, l2_slabs),
                    (l2_n_tiles, l2_slabs), 0, l2_ctas, span, CTAS, IS_DYNAMIC,
                )  # fmt: skip
    elif wave == -1:
        write_tiles(here, begin, tiles, num_tiles, BLOCK)
        if IS_FIRST:
            tl.store(state + CALL, tl.load(state + CALL) + 1)
            if HAS_STATS:
                is_expert = expert < num_experts
                total = tl.load(stats + expert, mask=is_expert)
                tl.store(stats + expert, total + count, mask=is_expert)
    else:
        mine = number // chunks
        own = tl.sum(tl.where(source == mine, by_source, 0), 0)
        before = tl.sum(tl.where(source < mine, by_source, 0), 0)
        aligned = (own + ROW_ALIGN - 1) // ROW_ALIGN * ROW_ALIGN
        ends = tl.cumsum(aligned, 0)
        at = number % chunks * CHUNK + tl.arange(0, CHUNK)
        used = at < tl.sum(aligned, 0)
        owner = first_above(ends, tl.where(used, at, 0))
        inside = at - (tl.gather(ends, owner, 0) - tl.gather(aligned, owner, 0))
        used = used & (inside < tl.gather(own, owner, 0))
        row = tl.gather(row_begin + before, owner, 0) + inside - first_row
        used = used & (row >= 0) & (row < pool_rows)
        entry = tl.load(list_in + mine * capacity + at, mask=used, other=0)
        share = tl.load(weight_in + mine * capacity + at, mask=used, other=0.0)
        peer_bytes = tl.load(peers + mine)
        dest_bytes = peer_bytes + entry.to(tl.int64) * row_bytes
        token = (entry // num_dest).to(tl.int64)
        tl.store(dest + row, dest_bytes // DEST_BYTES, mask=used)
        tl.store(origin + row, (peer_bytes + token * record_bytes) // _ORIGIN_BYTES, mask=used)
        tl.store(weight + row, share, mask=used)
        begins = used & (row % ROW_ALIGN == 0)
        tl.store(arrived + row // ROW_ALIGN, row * 0, mask=begins)
        tl.store(l1_done + row // ROW_ALIGN, row * 0, mask=begins)


# -- pull ----------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["rank", "pool_rows", "own_units", "ns_per_row", "latency_ns"])
def pull_kernel(
    tokens, data, scale, factor, origin, tiles, num_tiles, arrived, rank, pool_rows, pitch,
    data_words, scale_words, own_units, ns_per_row, latency_ns,
    RANKS: gl.constexpr, BLOCK: gl.constexpr, COLS: gl.constexpr, SCALES: gl.constexpr,
    HAS_FACTOR: gl.constexpr, PACE: gl.constexpr, PLACED: gl.constexpr,
):  # fmt: skip
    """CTA: every num_programs-th group of 8 rows of the pool, in the order of the tiles.

    tokens  int32 [T, pitch]: records of this rank; `origin` leads to those of all ranks
    data    int32 [R, data_words]: the pool; scale FP32 [blocks, R]
    PLACED  scale has words of four bytes where a block-scaled MMA's copies find them (`placed`)
    SCALES  words after the data, to a power of two; 0: there are none
    PACE    remote rows are not counted before a link of 1 / ns_per_row rows could have brought
            them, nor before `latency_ns` after they were asked for; own ones are those of the first
            `own_units` of `tokens`
    """
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [8, gl.num_warps() // 8], [1, 0])
    wait_for_launch()
    allow_next_launch()  # L1 does not wait for this launch; what it reads first is older
    part_row = gl.arange(0, ROW_ALIGN, gl.SliceLayout(1, WIDE))
    col = gl.expand_dims(gl.arange(0, COLS, gl.SliceLayout(0, WIDE)), 0)
    word = gl.expand_dims(gl.arange(0, SCALES if SCALES else 1, gl.SliceLayout(0, WIDE)), 0)
    begin_ns = now_ns()
    num_far = 0
    first_part = rank * (BLOCK // ROW_ALIGN) // RANKS  # ranks begin a tile at different sources
    end = gl.load(num_tiles) * (BLOCK // ROW_ALIGN)
    begin, step = gl.program_id(0), gl.num_programs(0)
    row_begin, first, num_rows, units = _group(
        begin, end, first_part, part_row, tiles, origin, BLOCK
    )
    for number in range(begin, end, step):
        # Issue all loads of a group before any store, so that the group pays one link latency; the
        # next group's addresses are loaded in between.
        used = part_row < num_rows
        is_used = gl.expand_dims(used, 1)
        record = tokens + gl.expand_dims(units * _UNIT, 1)
        asked_ns = now_ns() if PACE else 0
        got = gl.load(record + col, mask=is_used & (col < data_words), other=0)
        if SCALES:
            after = is_used & (word < pitch - data_words)
            scales = gl.load(record + data_words + word, mask=after, other=0)
        later = _group(number + step, end, first_part, part_row, tiles, origin, BLOCK)
        row = first + part_row
        to_row = data + gl.expand_dims(row.to(gl.int64) * data_words, 1)
        gl.store(to_row + col, got, mask=is_used & (col < data_words))
        for at in range(COLS, data_words, COLS):  # rows that are too wide for registers
            mask = is_used & (at + col < data_words)
            gl.store(to_row + at + col, gl.load(record + at + col, mask=mask, other=0), mask=mask)
        if SCALES:
            _store_scales(
                scales.to(gl.float32, bitcast=True), scale, factor, row, after, word, pool_rows,
                scale_words, HAS_FACTOR, PLACED, BLOCK,
            )  # fmt: skip
        if PACE:
            is_far = used & ((units < 0) | (units >= own_units))
            num_here = gl.sum(is_far.to(gl.int32), 0)
            num_far += num_here
            through_ns = begin_ns + num_far.to(gl.int64) * ns_per_row
            _wait_for_link(num_here, gl.maximum(through_ns, asked_ns) + latency_ns)
        fence_stores()
        gl.thread_barrier()
        if num_rows > 0:
            gl.atomic_add(arrived + row_begin // ROW_ALIGN, num_rows, sem="release", scope="gpu")
        row_begin, first, num_rows, units = later


@gluon.jit
def _wait_for_link(num_far, time_ns):
    """Wait until a link could have brought `num_far` rows; for none there is no wait."""
    if num_far > 0:
        wait_until(time_ns)


@gluon.jit
def _group(number, end, first_part, part_row, tiles, origin, BLOCK: gl.constexpr):
    """-> (first row of its tile, first row of the group, how many, where their records lie).

    A tile has BLOCK // ROW_ALIGN groups; some have no rows, and so have those from `end` on.
    """
    PARTS: gl.constexpr = BLOCK // ROW_ALIGN
    is_there = number < end
    tile = tiles + number // PARTS * TILE_WORDS
    row_begin = gl.load(tile + TILE_ROW_BEGIN, mask=is_there, other=0)
    row_end = gl.load(tile + TILE_ROW_END, mask=is_there, other=0)
    first = row_begin + (number + first_part) % PARTS * ROW_ALIGN
    num_rows = gl.minimum(gl.maximum(row_end - first, 0), ROW_ALIGN)
    units = gl.load(origin + first + part_row, mask=part_row < num_rows, other=0)
    return row_begin, first, num_rows, units


@gluon.jit
def _scale_at(word, row, pool_rows, scale_words, PLACED: gl.constexpr, BLOCK: gl.constexpr):
    """Word of the pool's scales that takes a record's scale word of a row, in tiles of BLOCK."""
    if PLACED:  # a word has the four scales of a row in a block
        WORDS: gl.constexpr = BLOCK_BYTES // 4
        begin = (row // BLOCK).to(gl.int64) * (scale_words * WORDS) + placed_row(row % BLOCK) // 4
        at = begin + word * WORDS
    else:
        at = word.to(gl.int64) * pool_rows + row
    return at


@gluon.jit
def _store_scales(
    got, scale, factor, row, mask, word, pool_rows, scale_words, HAS_FACTOR: gl.constexpr,
    PLACED: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """The words after the data of a group of rows: scales, and NVFP4's factor."""
    at = _scale_at(word, gl.expand_dims(row, 1), pool_rows, scale_words, PLACED, BLOCK)
    gl.store(scale + at, got, mask=mask & (word < scale_words))
    if HAS_FACTOR:
        is_factor = mask & (word == scale_words)
        gl.store(factor + gl.expand_dims(row, 1) + 0 * word, got, mask=is_factor)
