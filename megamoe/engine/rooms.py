"""A rank's shared memory as tensors, for fused launches over several ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megamoe.layout.exchange import exchange
from megamoe.layout.regions import Workspace
from megamoe.schedule.heuristics.hopper_fused import COUNTERS

DTYPES = {"i32": torch.int32, "i64": torch.int64, "f32": torch.float32, "bf16": torch.bfloat16}


class Room(NamedTuple):
    """The regions of `layout.exchange`."""

    signals: Tensor
    counters: Tensor
    num_valid: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    tokens: Tensor
    rows: Tensor

    def put(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> None:
        """The tokens of a call, on the current stream."""
        num = len(x)
        self.tokens[:num].copy_(x)
        self.topk_idx[:num].copy_(topk_idx)
        self.topk_weights[:num].copy_(topk_weights)
        self.num_valid.fill_(num)


def layout(num_tokens: int, hidden: int, top_k: int) -> Workspace:
    """Where everything lies in a room for so many tokens."""
    return exchange(num_tokens, hidden, top_k, COUNTERS)


def room_in(memory: Tensor, of: Workspace) -> Room:
    """uint8 memory as a room."""
    return Room(
        *(
            memory[r.offset : r.end].view(DTYPES[r.dtype]).view(r.shape)
            for r in (of[name] for name in Room._fields)
        )
    )
