"""The layer over a group as one torch operator, for compiled models.

The operator finds the layer by a number: a process group is no argument that a graph can hold.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from megamoe.engine.bounds import check_devices

if TYPE_CHECKING:
    from megamoe.engine.layer import MoE

_LAYERS: WeakValueDictionary[int, MoE] = WeakValueDictionary()
_NUMBERS = itertools.count(1)  # never given again: a graph may outlive its layer


def handle_of(layer: MoE) -> int:
    """The number by which the operator finds `layer`."""
    handle = next(_NUMBERS)
    _LAYERS[handle] = layer
    return handle


@torch.library.custom_op("megamoe::moe_across", mutates_args=("stats", "sent"))
def group_moe_op(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    stats: Tensor,
    sent: Tensor,
    handle: int,
    max_tokens: int | None,
) -> Tensor:
    """bf16 [T, H], [T, k], [T, k] -> bf16 [T, H] on every rank of the layer's group."""
    return _LAYERS[handle]._call_over_group(x, topk_idx, topk_weights, stats, sent, max_tokens)


@group_moe_op.register_fake
def _(x, topk_idx, topk_weights, stats, sent, handle, max_tokens):  # type: ignore[no-untyped-def]
    check_devices(x, topk_idx, topk_weights, stats, sent)
    return torch.empty_like(x, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
