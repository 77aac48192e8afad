"""Permutation: the row of each slot in the expert-sorted pool, and the tile list of the GEMMs.

Rows of one expert lie together in slot order and start at a multiple of the plan's `row_align`: TMA
reads FP32 scales in whole 16 bytes, and placed scales have a block a tile. One launch does it, each
program counting for itself, or two more count before it, as the plan says. Nothing is read back to
the host.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megamoe.kernels.common.compat import after_previous, overlap
from megamoe.kernels.gluon.pool import (
    TILE_EXPERT,
    TILE_L1_DONE,
    TILE_ROW_BEGIN,
    TILE_ROW_END,
    TILE_WORDS,
    Pool,
)
from megamoe.kernels.gluon.tile_scheduler import (
    SIZES,
    WorkItems,
    expert_rows,
    first_above,
    schedule_wave,
)
from megamoe.kernels.portable.routing import Routing, legal_or
from megamoe.kernels.portable.sort import scan_counts
from megamoe.planner.launches import Pass, Place


@triton.jit
def routing_place(at, TOP_K: tl.constexpr, SHARED: tl.constexpr):
    """(place of slots `at` in the routing as it comes, whether they are there).

    The last SHARED of a token's TOP_K slots are those of shared experts.
    """
    return at - at // TOP_K * SHARED, at % TOP_K < TOP_K - SHARED


@triton.jit
def legal(
    idx, weights, at, used, num_valid, num_experts, TOP_K: tl.constexpr, SHARED: tl.constexpr,
    HAS_COUNT: tl.constexpr,
):  # fmt: skip
    """(expert or -1, weight, whether it was neither legal nor masked) of slots `at`.

    Shared experts are the last ones; they see padding too, which combine adds up like tokens.
    """
    source, is_routed = routing_place(at, TOP_K, SHARED)
    is_read = used & is_routed
    expert = legal_or(tl.load(idx + source, mask=is_read, other=-1), num_experts - SHARED)
    weight = tl.load(weights + source, mask=is_read, other=0.0)
    if HAS_COUNT:
        expert = tl.where(at // TOP_K < tl.load(num_valid), expert, -1)
    if SHARED:
        is_shared = used & (is_routed == 0)
        expert = tl.where(is_shared, num_experts - TOP_K + at % TOP_K, expert)
        weight = tl.where(is_shared, 1.0, weight)
    finite = tl.abs(weight) < float("inf")
    bad = (expert < -1) | ((expert >= 0) & (finite == 0))
    keep = (expert >= 0) & (bad == 0)
    return tl.where(keep, expert, -1), tl.where(keep, weight, 0.0), bad & used


@triton.jit
def report_bad(bad, at, error):
    """The first slot that is neither legal nor masked."""
    first = tl.min(tl.where(bad, at, 2147483647))
    if first < 2147483647:
        tl.atomic_min(error, first)


@triton.jit
def rank(experts, other, mine, slot):
    """How many of the slots `other` come before `slot` and have the same expert."""
    same = (experts[None, :] == mine[:, None]) & (other[None, :] < slot[:, None])
    return tl.sum(same.to(tl.int32), 1)


@triton.jit
def write_tiles(
    count, row_begin, tiles, num_tiles, BLOCK: tl.constexpr, SORTED: tl.constexpr = False
):
    """One program: int32 [E] rows per expert to the tile list; its counters are zero.

    SORTED: experts with many rows first, those with equally many in their order (C010).
    """
    AT_ONCE: tl.constexpr = 128
    if SORTED:
        E: tl.constexpr = count.shape[0]
        keys = count.to(tl.int64) * E + (E - 1 - tl.arange(0, E))
        keys = tl.sort(keys, descending=True)
        experts = E - 1 - (keys % E).to(tl.int32)
        count = (keys // E).to(tl.int32)
        row_begin = tl.gather(row_begin, experts, 0)
    blocks = (count + BLOCK - 1) // BLOCK
    last = tl.cumsum(blocks, 0)
    total = tl.sum(blocks, 0)
    word = tl.arange(0, 4)
    tl.store(num_tiles + word, tl.where(word == 0, total, 0))
    for start in tl.range(0, total, AT_ONCE):
        tile = start + tl.arange(0, AT_ONCE)
        mask = tile < total
        expert = first_above(last, tl.where(mask, tile, 0))
        number = tile - (tl.gather(last, expert, 0) - tl.gather(blocks, expert, 0))
        begin = tl.gather(row_begin, expert, 0)
        row = begin + number * BLOCK
        at = tiles + tile * TILE_WORDS
        tl.store(at + TILE_EXPERT, tl.gather(experts, expert, 0) if SORTED else expert, mask=mask)
        tl.store(at + TILE_ROW_BEGIN, row, mask=mask)
        end = tl.minimum(row + BLOCK, begin + tl.gather(count, expert, 0))
        tl.store(at + TILE_ROW_END, end, mask=mask)
        tl.store(at + TILE_L1_DONE, tile * 0, mask=mask)


@triton.jit
def _count_kernel(
    idx, weights, num_valid, chunk_counts, num_slots, num_experts,
    HAS_COUNT: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, CHUNK: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    """Program: a chunk of slots, counted."""
    after_previous()
    chunk = tl.program_id(0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    expert, _, _ = legal(
        idx, weights, at, at < num_slots, num_valid, num_experts, TOP_K, SHARED, HAS_COUNT
    )
    column = tl.arange(0, E)
    counts = tl.histogram(tl.maximum(expert, 0), E, mask=expert >= 0)
    tl.store(chunk_counts + chunk * num_experts + column, counts, mask=column < num_experts)


@triton.jit(do_not_specialize=list(SIZES))
def _place_kernel(
    idx, weights, num_valid, error, idx_out, weights_out, g, g_stride, chunk_counts, counts, stats,
    rows, dest, weight, factor, tiles, num_tiles,
    num_slots, num_experts, first_slot, num_dest, items, l1_n_tiles, l1_slabs,
    l2_n_tiles, l2_slabs, l1_waves, wave_ctas, span,
    CTAS: tl.constexpr, IS_DYNAMIC: tl.constexpr, HAS_G: tl.constexpr, HAS_STATS: tl.constexpr,
    HAS_COUNT: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr,
    IS_COUNTED: tl.constexpr, CHUNK: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
    ALIGN: tl.constexpr, E: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """A program each: chunks of slots (checked, and their rows), the tile list, waves of items."""
    after_previous()
    chunk = tl.program_id(0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = at < num_slots
    mine, share, bad = legal(
        idx, weights, at, inside, num_valid, num_experts, TOP_K, SHARED, HAS_COUNT
    )
    expert = tl.arange(0, E)
    is_there = expert < num_experts
    if IS_COUNTED:
        count = tl.load(counts + expert, mask=is_there, other=0)
        known = is_there & (chunk * CHUNK < num_slots)
        before = tl.load(chunk_counts + chunk * num_experts + expert, mask=known, other=0)
    else:
        both = tl.zeros([2 * E], tl.int32)  # counts of slots before the chunk, and of the others
        for start in tl.range(0, num_slots, AT_ONCE):
            other = start + tl.arange(0, AT_ONCE)
            theirs, _, _ = legal(
                idx, weights, other, other < num_slots, num_valid, num_experts, TOP_K, SHARED,
                HAS_COUNT,
            )  # fmt: skip
            place = tl.maximum(theirs, 0) + tl.where(other < chunk * CHUNK, 0, E)
            both += tl.histogram(place, 2 * E, mask=theirs >= 0)
        before, after = tl.split(tl.permute(tl.reshape(both, (2, E)), (1, 0)))
        count = before + after
    row_begin = expert_rows(count, ALIGN)
    number = chunk - tl.cdiv(num_slots, CHUNK)  # among the programs without slots
    if number > 0:
        if CTAS:
            schedule_wave(
                number - 1, count, row_begin, items, (l1_n_tiles, l1_slabs),
                (l2_n_tiles, l2_slabs), l1_waves, wave_ctas, span, CTAS, IS_DYNAMIC,
            )  # fmt: skip
    elif number == 0:
        if HAS_STATS and not IS_COUNTED:
            is_counted = expert < num_experts - SHARED
            total = tl.load(stats + expert, mask=is_counted)
            tl.store(stats + expert, total + count, mask=is_counted)
        write_tiles(count, row_begin, tiles, num_tiles, BLOCK, SORTED)
    else:
        to, is_routed = routing_place(at, TOP_K, SHARED)
        tl.store(idx_out + to, mine, mask=inside & is_routed)
        tl.store(weights_out + to, share, mask=inside & is_routed)
        report_bad(bad, to, error)
        used = mine >= 0
        row = tl.gather(row_begin + before, tl.maximum(mine, 0), 0) + rank(mine, at, mine, at)
        tl.store(rows + at, tl.where(used, row, -1), mask=inside)
        token = at // TOP_K
        tl.store(dest + row, token * num_dest + first_slot + at % TOP_K, mask=used)
        tl.store(weight + row, share, mask=used)
        if HAS_G:
            tl.store(factor + row, tl.load(g + token * g_stride, mask=used), mask=used)


def place(
    routing: Routing,
    pool: Pool,
    steps: Pass,
    *,
    work: WorkItems | None,
    g: Tensor | None,
    g_stride: int,
    stats: Tensor | None,
    first_slot: int,
    num_dest: int,
    num_shared: int,
    pdl: bool,
    counts: Tensor | None = None,
) -> Tensor:
    """int32 [slots]: the row of each slot, -1 of masked ones.

    Fills all of the pool but tokens and their scales, in the plan's `steps`, and writes
    the work items of `work`.

    counts  int32 [E]: gets the slots of each expert, where two launches count them before
    """
    idx, weights, num_valid = routing.topk_idx, routing.topk_weights, routing.num_valid
    top_k, unused = idx.shape[1] + num_shared, pool.num_tiles
    slots, num_experts = len(idx) * top_k, steps.num_experts
    step, count = steps["place"], steps.find("count")
    config = step.config
    assert isinstance(config, Place) and (count is not None) == config.is_counted
    assert (work is not None) == (config.max_ctas > 0)
    sizes = {"HAS_COUNT": num_valid is not None, "TOP_K": top_k, "SHARED": num_shared}
    valid = unused if num_valid is None else num_valid
    rows = unused.new_empty(slots)
    chunk_counts = unused
    assert counts is None or count is not None
    counts = unused if counts is None else counts
    if count is not None:
        counts = unused.new_empty(num_experts) if counts is unused else counts
        chunk_counts = unused.new_empty(*count.grid, num_experts)
        _count_kernel[count.grid](
            idx=idx, weights=weights, num_valid=valid, chunk_counts=chunk_counts, num_slots=slots,
            num_experts=num_experts, **count.config.constants(), **sizes, **overlap(pdl),
        )  # fmt: skip
        scan_counts(chunk_counts, counts, stats, steps["scan"], pdl=pdl)
    _place_kernel[step.grid](
        idx=idx, weights=weights, num_valid=valid, error=routing.error, idx_out=routing.idx,
        weights_out=routing.weights, g=unused if g is None else g, g_stride=g_stride,
        chunk_counts=chunk_counts, counts=counts, stats=unused if stats is None else stats,
        rows=rows, dest=pool.dest, weight=pool.weight, factor=pool.factor, tiles=pool.tiles,
        num_tiles=pool.num_tiles, num_slots=slots, num_experts=num_experts,
        first_slot=first_slot, num_dest=num_dest,
        **(WorkItems.no_arguments(unused) if work is None else work.arguments()),
        HAS_G=g is not None, HAS_STATS=stats is not None, **config.constants(), **sizes,
        **overlap(pdl),
    )  # fmt: skip
    return rows
