"""Experts as serving engines stack them: `w13_*` and `w2_*` of one module, in a checkpoint's bytes.

vLLM and SGLang load experts into parameters of the same names. Nothing here imports either of them:
a layer is anything with those attributes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megamoe.engine.weights import ExpertWeights
from megamoe.errors import RangeError, ShapeError, require
from megamoe.formats.quantize import FLOATS
from megamoe.formats.spec import Format, Scale, recipe_named


@dataclass(frozen=True, slots=True)
class Stacked:
    """Under which names a layer keeps its experts, after "w13_" and "w2_".

    recipe     the one that takes these bytes
    values     the elements
    scales     of blocks; None: there are none
    globals_   NVFP4: factors of the weights
    inputs     NVFP4: factors of tokens and activations; None: they stay BF16
    direction  of those factors: "multiply", or "divide" where reciprocals are stored
    bias       biases, where there are any
    """

    recipe: str
    values: str = "weight"
    scales: str | None = None
    globals_: str | None = None
    inputs: str | None = None
    direction: str = "multiply"
    bias: str = "bias"

    @property
    def names(self) -> tuple[str, ...]:
        """Every parameter that is read."""
        parts = (self.values, self.scales, self.globals_, self.inputs, self.bias)
        return tuple(f"{head}_{part}" for part in parts if part for head in ("w13", "w2"))


def experts_of(
    layer: Any, how: Stacked, *, recipe: str | None = None, gate_up: str = "split"
) -> ExpertWeights:
    """The experts of a layer; its bytes are shared where our order is theirs.

    layer    has the parameters of `how`; biases may be missing
    recipe   another one with the same weights, such as "w4a8_block" for MXFP4
    gate_up  "split", or "interleaved": gpt-oss's rows
    """
    recipe = recipe or how.recipe
    own, wanted = (recipe_named(name).weights for name in (how.recipe, recipe))
    require(own is wanted, f"recipe {recipe} must take {own.name} weights", got=wanted.name)

    def pair(part: str | None) -> tuple[Tensor | None, Tensor | None]:
        if part is None:
            return None, None
        return _tensor(layer, f"w13_{part}"), _tensor(layer, f"w2_{part}")

    w13, w2 = pair(how.values)
    s13, s2 = (_codes_if(t, own) for t in pair(how.scales))
    g13, g2 = pair(how.globals_)
    assert w13 is not None and w2 is not None
    factors: dict[str, Any] = {}
    if how.inputs is not None and recipe_named(recipe).acts.has_global:
        a13, a2 = pair(how.inputs)
        assert a13 is not None and a2 is not None
        # One scale for the tokens of all experts: the one of the largest tokens.
        largest = a13.float().amin() if how.direction == "divide" else a13.float().amax()
        factors = {"x_global": float(largest), "acts_global": a2.float().reshape(len(w2))}
    b13, b2 = (getattr(layer, f"{head}_{how.bias}", None) for head in ("w13", "w2"))
    return ExpertWeights.from_quantized(
        w13, s13, w2, s2, recipe=recipe, w13_global=_float(g13), w2_global=_float(g2),
        b13=None if b13 is None else b13.detach(), b2=None if b2 is None else b2.detach(),
        gate_up=gate_up, scales="divide" if how.direction == "divide" else None, **factors,
    )  # fmt: skip


def drop(layer: Any, how: Stacked) -> None:
    """Take the experts' memory from a layer: ours holds it now, and may repack it (one copy)."""
    for name in how.names:
        t = getattr(layer, name, None)
        if isinstance(t, Tensor):
            t.data = torch.empty(0, dtype=t.dtype, device=t.device)


def local_ids(topk_ids: Tensor, expert_map: Tensor | None) -> Tensor:
    """Ids among this rank's experts; -1 where the slot is another rank's, or none.

    expert_map  int [experts of all ranks]: the number here, or -1; None: all experts are here
    """
    if expert_map is None:
        return topk_ids.contiguous()
    local = expert_map[topk_ids.clamp(min=0).long()]
    return local.masked_fill(topk_ids < 0, -1)


def e8m0_codes(scale: Tensor) -> Tensor:
    """FP32 powers of two as E8M0 codes."""
    bits = scale.float().contiguous().view(torch.int32)
    require(
        bool(((bits & 0x807FFFFF) == 0).all()),
        "scales of FP4 experts must be powers of two",
        got="others",
        kind=RangeError,
    )
    return (bits >> 23).to(torch.uint8)


def _codes_if(scale: Tensor | None, fmt: Format) -> Tensor | None:
    """MX scales that were loaded as floats."""
    is_float = scale is not None and scale.dtype in FLOATS and fmt.scale is Scale.E8M0
    return e8m0_codes(scale) if is_float and scale is not None else scale


def _tensor(layer: Any, name: str) -> Tensor:
    t = getattr(layer, name, None)
    require(
        isinstance(t, Tensor), f"the layer must have {name}", got=type(t).__name__, kind=ShapeError
    )
    assert isinstance(t, Tensor)
    return t.detach()


def _float(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.float()
