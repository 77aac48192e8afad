"""Calls replayed from CUDA graphs: one graph per bucket of tokens, captured at its first call.

A replay costs a copy of the inputs into the graph's own and one launch, whatever the number of
kernels inside. Rows beyond the call's tokens are masked on the device, so a bucket serves any
number of tokens up to its size with the bits of a plain call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# (x, topk_idx, topk_weights, num_valid) -> y
Call = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
EXACT = 64  # up to here every number of tokens has its own graph
WARM_UP = 2


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]  # x, topk_idx, topk_weights of the bucket's size
    num_valid: Tensor
    y: Tensor


def bucket_of(num_tokens: int) -> int:
    """Tokens that the graph for a call of `num_tokens` is captured with.

    >>> [bucket_of(n) for n in (1, 64, 65, 100, 300, 4000)]
    [1, 64, 80, 112, 320, 4096]
    """
    if num_tokens <= EXACT:
        return num_tokens
    step = 1 << max((num_tokens - 1).bit_length() - 3, 4)  # at most an eighth is padding
    return -(-num_tokens // step) * step


class Graphs:
    """The graphs of one layer."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._captured: dict[tuple[int, torch.dtype], _Captured] = {}

    def __call__(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """The layer's output: a tensor of its own, not the graph's."""
        num_tokens = x.shape[0]
        key = bucket_of(num_tokens), topk_idx.dtype
        one = self._captured.get(key)
        if one is None:
            one = self._captured[key] = self._capture(key[0], x, topk_idx, topk_weights)
        rooms = one.inputs
        if num_tokens < key[0]:
            rooms = [room[:num_tokens] for room in rooms]
            one.num_valid.fill_(num_tokens)
        torch._foreach_copy_(rooms, [x, topk_idx, topk_weights])
        one.graph.replay()
        return one.y[:num_tokens].clone()

    def _capture(self, bucket: int, x: Tensor, idx: Tensor, weights: Tensor) -> _Captured:
        inputs = [t.new_zeros(bucket, t.shape[1]) for t in (x, idx, weights)]
        num_valid = torch.full((1,), bucket, dtype=torch.int32, device=x.device)
        here, side = torch.cuda.current_stream(x.device), torch.cuda.Stream(x.device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            inputs[1].fill_(-1)  # nothing is routed, so that statistics do not count the warm-up
            for _ in range(WARM_UP):
                self._call(*inputs, num_valid)
        here.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = self._call(*inputs, num_valid)
        return _Captured(graph, inputs, num_valid, y)
