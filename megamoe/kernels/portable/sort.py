"""Slots sorted by expert on the device: counts, offsets, order and tile maps in three launches.

The same maps as `routing.permute`, without a host synchronisation and with shapes that depend on
sizes alone (E001, E002). Slots are cut into chunks; a chunk's histogram, a scan of each expert's
histograms over the chunks, and each slot's rank inside its chunk give its row. The order within an
expert is that of the slots, so the result is deterministic.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.kernels.common.compat import after_previous, overlap
from megamoe.planner.launches import Launch, Pass
from megamoe.planner.tables.portable import CHUNK
from megamoe.routing.spec import max_tiles


class Order(NamedTuple):
    """Buffers of one sort. `permuted_idx_to_expanded_idx` is valid below each tile's limit only."""

    counts: Tensor  # int32 [E]
    permuted_idx_to_expanded_idx: Tensor  # int32 [max_tiles * tile_m]
    tile_idx_to_group_idx: Tensor  # int32 [max_tiles]
    tile_idx_to_mn_limit: Tensor  # int32 [max_tiles]
    num_non_exiting_tiles: Tensor  # int32 [1]
    chunk_counts: Tensor  # int32 [chunks, E], scratch
    tile_m: int

    @staticmethod
    def empty(num_slots: int, num_experts: int, tile_m: int, device: torch.device) -> "Order":
        """Buffers for up to `num_slots` slots."""

        def ints(*shape: int) -> Tensor:
            return torch.empty(*shape, dtype=torch.int32, device=device)

        tiles = max(max_tiles(num_slots, num_experts, tile_m), 1)
        chunks = max(triton.cdiv(num_slots, CHUNK), 1)
        return Order(
            ints(num_experts), ints(tiles * tile_m), ints(tiles), ints(tiles), ints(1),
            ints(chunks, num_experts), tile_m,
        )  # fmt: skip


@triton.jit
def _count_kernel(idx, chunk_counts, num_slots, num_experts, CHUNK: tl.constexpr, E: tl.constexpr):
    """Histogram of one chunk."""
    after_previous()
    chunk = tl.program_id(0)
    slot = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(idx + slot, mask=slot < num_slots, other=-1)
    counts = tl.histogram(tl.maximum(expert, 0), E, mask=expert >= 0)
    column = tl.arange(0, E)
    tl.store(chunk_counts + chunk * num_experts + column, counts, mask=column < num_experts)


@triton.jit
def _scan_kernel(
    chunk_counts, counts, stats, num_chunks, num_experts, num_stats,
    HAS_STATS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """One expert: exclusive scan of its counts over the chunks, in place; its total."""
    after_previous()
    expert = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    at = chunk_counts + chunk * num_experts + expert
    own = tl.load(at, mask=chunk < num_chunks, other=0)
    tl.store(at, tl.cumsum(own, 0) - own, mask=chunk < num_chunks)
    total = tl.sum(own, 0)
    tl.store(counts + expert, total)
    if HAS_STATS:
        is_counted = expert < num_stats
        tl.store(stats + expert, tl.load(stats + expert, mask=is_counted) + total, mask=is_counted)


@triton.jit
def _place_kernel(
    idx, chunk_counts, counts, to_expanded, tile_group, tile_limit, num_tiles,
    num_slots, num_chunks, num_experts, max_tiles,
    TILE_M: tl.constexpr, CHUNK: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """First programs: the row of each slot of a chunk. The rest: the maps of CHUNK tiles each."""
    after_previous()
    column = tl.arange(0, E)
    total = tl.load(counts + column, mask=column < num_experts, other=0)
    tiles = (total + TILE_M - 1) // TILE_M
    end_tile = tl.cumsum(tiles, 0)
    program = tl.program_id(0)
    if program < num_chunks:
        slot = program * CHUNK + tl.arange(0, CHUNK)
        expert = tl.load(idx + slot, mask=slot < num_slots, other=-1)
        before = tl.arange(0, CHUNK)[None, :] < tl.arange(0, CHUNK)[:, None]
        other_slot = program * CHUNK + tl.arange(0, CHUNK)
        other = tl.load(idx + other_slot, mask=other_slot < num_slots, other=-1)
        rank = tl.sum(((other[None, :] == expert[:, None]) & before).to(tl.int32), 1)
        routed = expert >= 0
        base = tl.load(chunk_counts + program * num_experts + expert, mask=routed, other=0)
        mine = column[None, :] < expert[:, None]
        first_tile = tl.sum(tl.where(mine, tiles[None, :], 0), 1)
        tl.store(to_expanded + first_tile * TILE_M + base + rank, slot, mask=routed)
    else:
        tile = (program - num_chunks) * CHUNK + tl.arange(0, CHUNK)
        live = tl.sum(tiles, 0)
        passed = end_tile[None, :] <= tile[:, None]
        group = tl.sum((passed & (column < num_experts)[None, :]).to(tl.int32), 1)
        first = tl.sum(tl.where(passed, tiles[None, :], 0), 1)
        own = tl.sum(tl.where(column[None, :] == group[:, None], total[None, :], 0), 1)
        limit = tl.minimum((tile + 1) * TILE_M, first * TILE_M + own)
        is_live = tile < live
        inside = tile < max_tiles
        tl.store(tile_group + tile, tl.where(is_live, group, -1), mask=inside)
        tl.store(tile_limit + tile, tl.where(is_live, limit, -1), mask=inside)
        if program == num_chunks:
            tl.store(num_tiles, live)


def scan_counts(
    chunk_counts: Tensor, counts: Tensor, stats: Tensor | None, step: Launch, *, pdl: bool = False
) -> None:
    """Each expert's counts of the chunks [chunks, E] to those before a chunk, in place; totals.

    `stats`, of the first experts or all, get the totals added.
    """
    num_chunks, num_experts = chunk_counts.shape
    _scan_kernel[step.grid](
        chunk_counts=chunk_counts, counts=counts, stats=stats if stats is not None else counts,
        num_chunks=num_chunks, num_experts=num_experts,
        num_stats=0 if stats is None else len(stats), HAS_STATS=stats is not None,
        **step.config.constants(), **overlap(pdl),
    )  # fmt: skip


def sort_slots(
    idx: Tensor, order: Order, steps: Pass, stats: Tensor | None = None, *, pdl: bool = False
) -> None:
    """Fill `order` from int32 [T, k] experts (-1 masked); add the counts to `stats` if given."""
    num_slots, num_experts = idx.numel(), order.counts.numel()
    tiles = order.tile_idx_to_group_idx.numel()
    if num_slots == 0:
        order.counts.zero_()
        order.num_non_exiting_tiles.zero_()
        return
    scratch = order.chunk_counts
    count, place = steps["count"], steps["place"]
    _count_kernel[count.grid](
        idx=idx, chunk_counts=scratch, num_slots=num_slots, num_experts=num_experts,
        **count.config.constants(), **overlap(pdl),
    )  # fmt: skip
    scan_counts(scratch, order.counts, stats, steps["scan"], pdl=pdl)
    _place_kernel[place.grid](
        idx=idx, chunk_counts=scratch, counts=order.counts,
        to_expanded=order.permuted_idx_to_expanded_idx, tile_group=order.tile_idx_to_group_idx,
        tile_limit=order.tile_idx_to_mn_limit, num_tiles=order.num_non_exiting_tiles,
        num_slots=num_slots, num_chunks=len(scratch), num_experts=num_experts, max_tiles=tiles,
        **place.config.constants(), **overlap(pdl),
    )  # fmt: skip
