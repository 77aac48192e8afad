"""Call: one call of a layer on one rank, checked, as a value."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megamoe.engine.status import DeviceStatus
from megamoe.engine.weights import ExpertWeights
from megamoe.formats.quantized import Quantized
from megamoe.problem import Options


class Call(NamedTuple):
    """What a backend computes, and where it reports.

    status     words of the device: bad slots, timeouts, counters of fused launches
    stats      int64 [E], added to: tokens each expert received
    num_valid  int32 [1] on the device: tokens from there on are padding
    timeout_s  bound of every wait in a fused launch
    is_poisoned  NaN bytes in all memory of a fused launch before it begins
    """

    x: Tensor | Quantized
    topk_idx: Tensor
    topk_weights: Tensor
    weights: ExpertWeights
    options: Options
    shared: ExpertWeights | None
    status: DeviceStatus
    stats: Tensor | None = None
    num_valid: Tensor | None = None
    timeout_s: float = 60.0
    is_poisoned: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens, padding included."""
        return int(self.x.shape[0])

    @property
    def top_k(self) -> int:
        """Routed slots of a token."""
        return int(self.topk_idx.shape[1])

    @property
    def num_shared(self) -> int:
        """Slots of a token after the routed ones."""
        return 0 if self.shared is None else self.shared.num_experts
