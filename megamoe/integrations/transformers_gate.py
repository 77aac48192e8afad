"""What stands between the linears of a transformers experts module: found by asking it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megamoe.engine.gates import gated
from megamoe.errors import NotAvailable, require
from megamoe.problem import OWN_CLAMP

LIMITS = ("limit", "swiglu_limit")  # where models keep their clamp


class Gate(NamedTuple):
    """What stands between an experts module's two linears, in our words."""

    gate_up: str  # "split" or "interleaved"
    activation: str
    clamp: float | None


def gate_of(module: nn.Module) -> Gate:
    """Which of our activations the module's own gate computes; refuses one that is none of them."""
    apply = getattr(module, "_apply_gate", None)
    gates: list[Gate] = []
    if callable(apply):
        limits = [getattr(module, name, None) for name in LIMITS]
        clamps = [None, *(float(c) for c in limits if isinstance(c, (int, float)))]
        far = max([24.0] + [2 * clamp for clamp in clamps if clamp])
        probe = torch.linspace(-far, far, 64, dtype=torch.float32, device="cpu").view(8, 8)
        probe = torch.stack((probe, probe.flip(0) * 0.7), dim=2).flatten(1)  # gate, up, gate, up
        with torch.no_grad():
            theirs = apply(probe).float()
        candidates = [
            Gate(order, activation, clamp)
            for order in ("split", "interleaved")
            for activation in OWN_CLAMP
            for clamp in clamps
        ]
        gates = [g for g in candidates if torch.allclose(theirs, _apply(g, probe), 1e-5, 1e-5)]
    require(
        bool(gates),
        f"the experts' gate must be one of {', '.join(OWN_CLAMP)}, with or without a clamp",
        got=f"another one in {type(module).__name__}",
        fix='use experts_implementation="eager" for this model',
        kind=NotAvailable,
    )
    return gates[0]


def _apply(gate: Gate, x: Tensor) -> Tensor:
    """Our activation on [rows, gate and up], as numerics.md has it."""
    split = x.chunk(2, dim=-1) if gate.gate_up == "split" else (x[..., ::2], x[..., 1::2])
    return gated(gate.activation, gate.clamp, *split)
