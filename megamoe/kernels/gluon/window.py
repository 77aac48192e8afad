"""Split: a window of the rows, so that two GEMMs can share a pool smaller than all of them.

Rows of all slots are known before (`permute.place`). A window has `pool_rows` of them from
`first_row` on, counted from zero. Tiles that lie across its ends are cut, which changes no bit.

  program      makes
  0            the tile list
  1 to CHUNKS  rows of a chunk of slots in the window, and zeroed counters of L1's tiles
  the rest     a wave of work items each, of L1 and then of L2

Each waits for the launch before, all of it. Counters of L1's tiles stand by the first row of a tile
(`tile_scheduler`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megamoe.kernels.common.compat import after_previous, overlap
from megamoe.kernels.gluon.permute import write_tiles
from megamoe.kernels.gluon.pool import ROW_ALIGN, Pool
from megamoe.kernels.gluon.tile_scheduler import (
    WorkItems,
    expert_rows,
    no_items,
    schedule_wave,
)
from megamoe.planner.launches import Launch, Window

_WORK = ("n_tiles", "slabs", "ctas")
_SIZES = tuple(f"{linear}_{name}" for linear in ("l1", "l2") for name in _WORK)


@triton.jit(do_not_specialize=["first_row", "pool_rows", "l1_waves", "span", *_SIZES])
def _window_kernel(
    counts, rows, window_rows, l1_done, tiles, num_tiles, num_slots, num_experts, first_row,
    pool_rows, l1_items, l2_items, l1_n_tiles, l1_slabs, l1_ctas, l2_n_tiles, l2_slabs, l2_ctas,
    l1_waves, span,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, E: tl.constexpr,
    IS_WHOLE: tl.constexpr, CTAS: tl.constexpr, IS_DYNAMIC: tl.constexpr,
):  # fmt: skip
    """A program each: the tile list; chunks of slots and of L1's counters; waves of work items."""
    after_previous()
    number = tl.program_id(0)
    expert = tl.arange(0, E)
    count = tl.load(counts + expert, mask=expert < num_experts, other=0)
    row_begin = expert_rows(count)
    begin = tl.minimum(tl.maximum(row_begin - first_row, 0), pool_rows)
    here = tl.minimum(tl.maximum(row_begin + count - first_row, 0), pool_rows) - begin
    if number == 0:
        write_tiles(here, begin, tiles, num_tiles, BLOCK)
    elif number <= CHUNKS:
        at = (number - 1) * CHUNK + tl.arange(0, CHUNK)
        tl.store(l1_done + at, at * 0, mask=at < pool_rows // ROW_ALIGN)
        if not IS_WHOLE:
            inside = at < num_slots
            row = tl.load(rows + at, mask=inside, other=-1) - first_row
            is_here = (row >= 0) & (row < pool_rows)
            tl.store(window_rows + at, tl.where(is_here, row, -1), mask=inside)
    elif CTAS:
        wave = number - 1 - CHUNKS
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


class Slots(NamedTuple):
    """What `place` found of all slots."""

    rows: Tensor  # int32 [slots]: the row of each; -1 of masked ones
    counts: Tensor  # int32 [E]: the rows of each expert


def window(
    slots: Slots, pool: Pool, l1_done: Tensor, work: Sequence[WorkItems], step: Launch, *, pdl: bool
) -> Tensor:
    """int32 [slots]: the row of each slot in the plan's window of the pool, -1 of those elsewhere.

    Writes the tiles of `pool` and the items of `work`, and zeroes int32 [R / 8] `l1_done`.
    """
    config, unused = step.config, pool.num_tiles
    assert isinstance(config, Window) and bool(work) == (config.max_ctas > 0)
    assert len(pool.data) == config.num_rows
    assert config.chunk * config.chunks >= max(len(slots.rows), len(l1_done))
    rows = slots.rows if config.is_whole else unused.new_empty(len(slots.rows))
    sizes: dict[str, Tensor | int] = dict.fromkeys(_SIZES, 0)
    sizes |= {"l1_items": unused, "l2_items": unused, "span": work[0].span if work else 0}
    for linear, one, waves in zip(("l1", "l2"), work, config.waves, strict=False):
        assert tuple(one.waves) == (waves,)
        values = (*one.linears[0], one.ctas)
        sizes |= {f"{linear}_{name}": value for name, value in zip(_WORK, values, strict=True)}
        sizes[f"{linear}_items"] = one.items
    _window_kernel[step.grid](
        counts=slots.counts, rows=slots.rows, window_rows=rows, l1_done=l1_done, tiles=pool.tiles,
        num_tiles=pool.num_tiles, num_slots=len(slots.rows), num_experts=len(slots.counts),
        first_row=config.first_row, pool_rows=config.num_rows, l1_waves=config.waves[0], **sizes,
        **config.constants(), **overlap(pdl),
    )  # fmt: skip
    return rows
