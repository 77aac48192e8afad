"""What stands between the linears of a transformers experts module: found by asking it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megamoe.engine.gates import gated
from megamoe.errors import NotAvailable, require
from megamoe.problem import OWN_CLAMP

PLAIN = (int, float, str, bool, type(None))
FAR = 1e4  # beyond the clamp of any model
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
        numbers = [float(c) for c in limits if isinstance(c, (int, float))]
        numbers += [float(c) for c in limits if isinstance(c, Tensor) and c.ndim == 0]
        clamps = [None, *numbers]
        far = max([24.0] + [2 * clamp for clamp in clamps if clamp])
        where = next((c.device for c in limits if isinstance(c, Tensor)), torch.device("cpu"))
        ranges = [
            torch.linspace(-to, to, 64, dtype=torch.float32, device=where) for to in (far, FAR)
        ]
        probe = torch.cat(ranges).view(16, 8)
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


class Asked:
    """What a module's gate was found to be, and the attributes that it may have read."""

    def __init__(self, module: nn.Module) -> None:
        self._gate, self._values = _form(module), _attributes(module)

    def holds(self, module: nn.Module) -> bool:
        """Whether the gate is the same; it is asked again where an attribute is another one."""
        now, before = _attributes(module), self._values
        if now.keys() == before.keys() and all(map(_is_same, now.values(), before.values())):
            return True
        is_same = _form(module) == self._gate
        if is_same:
            self._values = now
        return is_same


def _form(module: nn.Module) -> tuple[Gate, bool]:
    """The gate, and whether weights are transposed."""
    return gate_of(module), bool(getattr(module, "is_transposed", False))


def _is_same(one: tuple[Any, int], other: tuple[Any, int]) -> bool:
    """Whether an attribute is the same object, not written to, or an equal number or text."""
    (a, version), (b, before) = one, other
    is_equal = isinstance(a, PLAIN) and type(a) is type(b) and a == b
    return version == before and (a is b or is_equal)


def _attributes(module: nn.Module) -> dict[str, tuple[Any, int]]:
    """By name: an attribute, and how often it was written to if it is a tensor."""
    own = vars(module)
    every = {n: v for n, v in own.items() if n[0] != "_" and n not in ("training", "forward")}
    every |= {"_apply_gate": own.get("_apply_gate"), **module._modules, **module._buffers}
    return {
        name: (
            getattr(v, "__func__", v),  # a bound method would keep the module alive
            v._version if isinstance(v, Tensor) and not v.is_inference() else 0,
        )
        for name, v in every.items()
    }


def _apply(gate: Gate, x: Tensor) -> Tensor:
    """Our activation on [rows, gate and up], as numerics.md has it."""
    split = x.chunk(2, dim=-1) if gate.gate_up == "split" else (x[..., ::2], x[..., 1::2])
    return gated(gate.activation, gate.clamp, *split)
