"""The gated activations as plain torch operations, for what runs beside the layer's own kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from megamoe.problem import OWN_CLAMP


def gated(activation: str, clamp: float | None, gate: Tensor, up: Tensor) -> Tensor:
    """Clamp and activation of docs/numerics.md, in the dtype of gate and up.

    >>> gated("swiglu", None, torch.tensor(0.0), torch.tensor(3.0)).item()
    0.0
    """
    limit = OWN_CLAMP[activation] if clamp is None else clamp
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    match activation:
        case "swiglu":
            return functional.silu(gate) * up
        case "gpt_oss":
            return gate * torch.sigmoid(1.702 * gate) * (up + 1)
        case "situ":
            return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * (25 * torch.tanh(up / 25))
        case "geglu":
            return functional.gelu(gate) * up
        case "geglu_tanh":
            return functional.gelu(gate, approximate="tanh") * up
    raise AssertionError(activation)
