"""From logical experts to places on ranks, token by token: `schedule.placement` as tensors.

The copy of an expert that a token goes to is a hash of the token's rank, its row in the call and
the expert: nothing else in the batch matters, two slots of a token with the same expert meet, and
the result has the same bits whichever copy computes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.balance.placement import Placement

_MASK = 0xFFFFFFFF
_RANK, _ROW, _EXPERT = 0x85EBCA6B, 0x9E3779B1, 0xC2B2AE35  # odd: a product mod 2^32 loses nothing
_MIX = 0x2C1B3C6D


class Places:
    """The physical experts of a placement on one device."""

    def __init__(self, placement: Placement, device: torch.device) -> None:
        self.placement, self.is_contiguous = placement, placement.is_contiguous
        replicas = placement.replicas()
        max_replicas = max(map(len, replicas))
        rows = [ids + ids[:1] * (max_replicas - len(ids)) for ids in replicas]
        self.table = torch.tensor(rows, dtype=torch.int64, device=device)  # [E, most]
        self.counts = torch.tensor([len(ids) for ids in replicas], device=device)

    def physical(self, topk_idx: Tensor, rank: int) -> Tensor:
        """int64 [T, k] physical experts of a rank's tokens; what names no expert becomes -1."""
        idx = topk_idx.long()
        is_legal = (idx >= 0) & (idx < self.placement.num_experts)
        if self.is_contiguous:
            return idx.where(is_legal, -1)
        idx = idx.where(is_legal, 0)
        row = torch.arange(len(idx), device=idx.device)[:, None]
        which = replica_hash(rank, row, idx) % self.counts[idx]
        return self.table[idx, which].where(is_legal, -1)

    def routed(self, topk_idx: Tensor, rank: int) -> Tensor:
        """As `physical`, but that ids which are neither legal nor masked stay so, for kernels."""
        if self.is_contiguous:
            return topk_idx
        ids = self.physical(topk_idx, rank)
        return ids.where((ids >= 0) | (topk_idx == -1), self.placement.num_physical)


def replica_hash(rank: int, row: Tensor, expert: Tensor) -> Tensor:
    """0 .. 2^32 - 1, int64; all factors are below 2^32, so that only low halves are kept."""
    mixed = ((row * _ROW) + (expert * _EXPERT) + rank * _RANK) & _MASK
    mixed = ((mixed ^ (mixed >> 15)) * _MIX) & _MASK
    return mixed ^ (mixed >> 13)
