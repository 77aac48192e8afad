"""Calls over a group from a layer's own graphs: one for each mode and bucket of bounds.

The bucket follows the bound that all ranks pass, so all replay the same launches. Capturing is a
rank's own affair: it launches nothing, so no rank waits for another's capture, and a rank may even
run eagerly what its peers replay.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megamoe.engine import device_guard, parallel
from megamoe.engine.compile_only import compiled_only
from megamoe.engine.functional import Signature
from megamoe.engine.graphs import experts_changed, verify_experts
from megamoe.engine.group_calls import GroupCalls, Picked
from megamoe.engine.group_mode import order_after_last, refusal_of
from megamoe.engine.status import DeviceStatus
from megamoe.engine.weights import ExpertWeights
from megamoe.formats.quantized import Quantized

if TYPE_CHECKING:
    from megamoe.engine.layer import MoE
    from megamoe.kernels.portable.graph_io import Inputs


class GroupParts(NamedTuple):
    """What captured calls of a layer use beside their inputs, as `graphs.Parts`."""

    backend: str
    weights: ExpertWeights
    shared: ExpertWeights | None
    status: DeviceStatus
    stats: Tensor
    sent: Tensor
    top_k: int
    calls: GroupCalls
    layer: MoE

    @classmethod
    def of(cls, layer: MoE) -> GroupParts:
        """Those of a layer as it is now."""
        assert layer._fused_group is not None
        weights, shared = layer._parts()
        return cls(
            backend=layer.backend, weights=weights, shared=shared, status=layer._status,
            stats=layer.stats, sent=layer._sent, top_k=layer.top_k, calls=layer._fused_group,
            layer=layer,
        )  # fmt: skip

    def inputs(self, bucket: Picked) -> Inputs:
        """Where the graph of a bucket finds its tokens."""
        assert bucket.calls is not None
        return bucket.calls.inputs(bucket.bound, self.layer)

    def launch(self, bucket: Picked, inputs: Inputs) -> Tensor:
        """The call on a graph's inputs."""
        assert bucket.calls is not None
        y = bucket.calls.launch(self.layer, inputs, bucket.bound)
        token = torch.arange(bucket.bound, device=y.device)
        is_padding = (token >= inputs.count)[:, None]
        parallel.add_counts(self.sent, inputs.topk_idx.masked_fill(is_padding, -1))
        return y

    def rehearsing(self) -> AbstractContextManager[None]:
        """Before a capture: everything is compiled, and no peer hears of it."""
        return compiled_only()

    def has_changed(self) -> bool:
        """Whether somebody wrote to what the experts were packed from."""
        return experts_changed(self.backend, self.weights, self.shared)

    def verify(self) -> None:
        """Refuse experts that changed, uncounted, after they were packed."""
        verify_experts(self.backend, self.weights, self.shared)


def serves(layer: MoE, picked: Picked) -> bool:
    """Whether such calls are replayed; inside somebody else's capture they are captured there."""
    calls, bound = picked
    graphs = layer._graphs
    if graphs is None or calls is None or not calls.has_graphs or bound > graphs.most:
        return False
    return not torch.cuda.is_current_stream_capturing()


def replay(
    layer: MoE,
    signature: Signature | None,
    inputs: tuple[Tensor | Quantized, Tensor, Tensor],
    max_tokens: int | None,
    copy: bool,
) -> Tensor | None:
    """A call from a graph, or None where it is made eagerly.

    A rank that refuses its own input takes part without tokens, then raises, as in eager calls.
    """
    x, topk_idx, topk_weights = inputs
    if layer._fused_group is None or not isinstance(x, Tensor):
        return None
    picked = layer._fused_group.pick(max_tokens)
    if not serves(layer, picked):
        return None
    graphs, device = layer._graphs, layer.weights.device
    assert graphs is not None
    refusal = refusal_of(
        layer._status,
        partial(layer._check_once, signature, x, topk_idx, topk_weights, max_tokens),
    )
    if refusal is not None:
        x = torch.empty(0, layer.weights.hidden, dtype=torch.bfloat16, device=device)
        topk_idx = torch.empty(0, layer.top_k, dtype=torch.int32, device=device)
        topk_weights = torch.empty(0, layer.top_k, dtype=torch.float32, device=device)
        signature = None
    with torch.no_grad(), device_guard.on(device):
        order_after_last(device)
        parts = GroupParts.of(layer)
        one = graphs.find((signature, picked))
        if one is None or not all(map(is_, parts, one.parts)):
            one = graphs.ready_for((signature, picked), picked, x, topk_idx, parts)
        y = graphs.send(one, x, topk_idx, topk_weights, copy)  # whatever else arrives: take part
    if refusal is not None:
        raise refusal
    return y


def prepare(layer: MoE, picked: Picked) -> None:
    """Capture the graph of a bucket, if the layer keeps graphs and has not done so."""
    if serves(layer, picked):
        assert layer._graphs is not None
        layer._graphs.captured(picked, GroupParts.of(layer))
