"""Tokens sorted by expert: the contiguous grouped layout of grouped GEMMs (E001, E002).

Slot s of token t is *expanded row* t * top_k + s. Sorted by expert, each expert's rows padded to a
multiple of `tile_m`, it becomes a *permuted row*. All shapes depend on sizes alone, never on the
routing, so that the same code fits a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megamoe.errors import RangeError, ShapeError, require
from megamoe.routing.spec import max_tiles


class Permutation(NamedTuple):
    """Where every routed slot goes. Unused entries are -1."""

    counts: Tensor  # int32 [E]: rows of each expert
    offsets: Tensor  # int32 [E + 1]: first permuted row of each expert, a multiple of tile_m
    permuted_idx_to_expanded_idx: Tensor  # int32 [max_rows]: -1 on padding rows
    expanded_idx_to_permuted_idx: Tensor  # int32 [T * top_k]: -1 on masked slots
    tile_idx_to_group_idx: Tensor  # int32 [max_tiles]: expert of each tile
    tile_idx_to_mn_limit: Tensor  # int32 [max_tiles]: first row after the tile's valid rows
    num_non_exiting_tiles: Tensor  # int32 [1]


def expert_counts(topk_idx: Tensor, num_experts: int) -> Tensor:
    """int64 [num_experts]: slots routed to each expert; masked slots (-1) count nowhere."""
    flat = topk_idx.reshape(-1).long()
    return torch.bincount(flat[flat >= 0], minlength=num_experts)


def permute(topk_idx: Tensor, num_experts: int, tile_m: int = 1) -> Permutation:
    """Sort the slots of `topk_idx` [T, top_k] by expert; within one expert by expanded row."""
    require(
        topk_idx.ndim == 2,
        "topk_idx must be [T, top_k]",
        got=tuple(topk_idx.shape),
        kind=ShapeError,
    )
    require(tile_m >= 1, "tile_m must be at least 1", got=tile_m, kind=RangeError)
    check_expert_ids(topk_idx, num_experts)
    device = topk_idx.device
    flat = topk_idx.reshape(-1).long()
    num_tiles = max_tiles(flat.numel(), num_experts, tile_m)
    # Masked slots sort after the last expert.
    order = torch.where(flat < 0, num_experts, flat).sort(stable=True).indices
    counts = expert_counts(topk_idx, num_experts)
    tiles = -(-counts // tile_m)
    first_tile = torch.cat([tiles.new_zeros(1), tiles.cumsum(0)])
    first_sorted = counts.cumsum(0) - counts

    routed = order[: int(counts.sum())]
    expert = flat[routed]
    rank_in_expert = torch.arange(routed.numel(), device=device) - first_sorted[expert]
    row = first_tile[expert] * tile_m + rank_in_expert
    to_expanded = torch.full((num_tiles * tile_m,), -1, dtype=torch.int32, device=device)
    to_expanded[row] = routed.int()
    to_permuted = torch.full((flat.numel(),), -1, dtype=torch.int32, device=device)
    to_permuted[routed] = row.int()

    group = torch.full((num_tiles,), -1, dtype=torch.int32, device=device)
    limit = torch.full((num_tiles,), -1, dtype=torch.int32, device=device)
    owner = torch.repeat_interleave(torch.arange(num_experts, device=device), tiles)
    tile = torch.arange(owner.numel(), device=device)
    group[tile] = owner.int()
    end = first_tile[owner] * tile_m + counts[owner]
    limit[tile] = torch.minimum((tile + 1) * tile_m, end).int()
    return Permutation(
        counts.int(), (first_tile * tile_m).int(), to_expanded, to_permuted, group, limit,
        first_tile[-1:].int(),
    )  # fmt: skip


def check_expert_ids(topk_idx: Tensor, num_experts: int) -> None:
    """Require ids in -1..num_experts - 1; the error names the first offending token and slot."""
    bad = (topk_idx < -1) | (topk_idx >= num_experts)
    if bool(bad.any()):
        token, slot = bad.nonzero()[0].tolist()
        require(
            False,
            f"expert ids must lie between -1 (masked) and {num_experts - 1}",
            got=f"{topk_idx[token, slot].item()} at token {token}, slot {slot}",
            kind=RangeError,
        )
