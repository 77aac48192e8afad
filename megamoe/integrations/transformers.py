"""Hugging Face transformers: `experts_implementation="megamoe"`.

    from megamoe.integrations.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="megamoe")

A model's experts module keeps its parameters; at its first call we make ExpertWeights of them and
keep these beside the module until a parameter changes. What its gate computes is found by asking
it: its `_apply_gate` is compared with our activations on a few numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megamoe.engine import backends
from megamoe.engine.fingerprint import Seal
from megamoe.engine.layer import MoE
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import DTypeError, NotAvailable, RangeError, ShapeError, require
from megamoe.formats.quantize import FLOATS
from megamoe.formats.spec import recipe_named
from megamoe.problem import OWN_CLAMP

PARAMETERS = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
LIMITS = ("limit", "swiglu_limit")  # where models keep their clamp
GPT_OSS_ALPHA = 1.702


class Gate(NamedTuple):
    """What stands between an experts module's two linears, in our words."""

    gate_up: str  # "split" or "interleaved"
    activation: str
    clamp: float | None


@dataclass(slots=True)
class _Kept:
    """The layer of one module, and what its parameters were when it was made."""

    layer: MoE
    places: tuple[Any, ...]
    copied: tuple[str, ...]  # parameters whose memory the layer does not share
    seal: Seal


def register(name: str = "megamoe", *, recipe: str = "bf16", backend: str = "auto") -> None:
    """Offer the layer to transformers as `experts_implementation=name`.

    recipe   "bf16" gives the model's own results to rounding; others quantise the experts once.
             Several recipes may stand beside each other under several names.
    backend  as for `mm.moe`
    """
    recipe_named(recipe)
    require(backend in backends.NAMES, f"backend must be one of {', '.join(backends.NAMES)}",
            got=repr(backend), kind=RangeError)  # fmt: skip
    _interface().register(name, experts_forward(recipe, backend))


def experts_forward(recipe: str = "bf16", backend: str = "auto") -> Callable[..., Tensor]:
    """The function that `register` registers: (module, tokens, expert ids, weights) -> tokens."""
    kept: weakref.WeakKeyDictionary[nn.Module, _Kept] = weakref.WeakKeyDictionary()

    def forward(
        self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        top_k = top_k_index.shape[-1]
        places = (top_k, *_places(self))
        found = kept.get(self)
        if (
            found is None
            or found.places != places
            or not found.seal.holds([getattr(self, name) for name in found.copied])
        ):
            layer = make_layer(self, top_k, recipe, backend)
            copied = _copied(self, layer)
            seal = Seal([getattr(self, name) for name in copied])
            found = kept[self] = _Kept(layer, places, copied, seal)
        # Expert parallelism in transformers marks other ranks' slots with ids past the last.
        idx = top_k_index.masked_fill(top_k_index >= found.layer.num_experts, -1)
        weights = top_k_weights.float().contiguous()
        y: Tensor = found.layer(hidden_states.bfloat16().contiguous(), idx.contiguous(), weights)
        return y.to(hidden_states.dtype)

    return forward


def make_layer(module: nn.Module, top_k: int, recipe: str, backend: str = "auto") -> MoE:
    """The layer of a transformers experts module; BF16 experts stay where they are."""
    _check_module(module)
    gate = gate_of(module)
    tensors = [getattr(module, name, None) for name in PARAMETERS]
    w13, w2, b13, b2 = (t.detach() if isinstance(t, Tensor) else None for t in tensors)
    assert w13 is not None and w2 is not None
    if getattr(module, "is_transposed", False):
        w13, w2 = w13.transpose(1, 2).contiguous(), w2.transpose(1, 2).contiguous()
    if recipe == "bf16":
        experts = ExpertWeights.from_quantized(
            w13.bfloat16(), None, w2.bfloat16(), None, recipe=recipe, gate_up=gate.gate_up,
            b13=b13, b2=b2,
        )  # fmt: skip
    else:
        experts = ExpertWeights.quantize(w13, w2, recipe, gate_up=gate.gate_up, b13=b13, b2=b2)
    return MoE(
        experts, experts.num_experts, top_k, activation=gate.activation, clamp=gate.clamp,
        weight_at="combine", backend=backend,
    )  # fmt: skip


def gate_of(module: nn.Module) -> Gate:
    """Which of our activations the module's own gate computes; refuses one that is none of them."""
    apply = getattr(module, "_apply_gate", None)
    found: list[Gate] = []
    if callable(apply):
        limits = [getattr(module, name, None) for name in LIMITS]
        clamps = [None, *(float(c) for c in limits if isinstance(c, (int, float)))]
        far = max([24.0] + [2 * clamp for clamp in clamps if clamp])
        probe = torch.linspace(-far, far, 64, device="cpu").view(8, 8)
        probe = torch.stack((probe, probe.flip(0) * 0.7), dim=2).flatten(1)  # gate, up, gate, up
        with torch.no_grad():
            theirs = apply(probe).float()
        candidates = [
            Gate(order, activation, clamp)
            for order in ("split", "interleaved")
            for activation in OWN_CLAMP
            for clamp in clamps
        ]
        found = [g for g in candidates if torch.allclose(theirs, _apply(g, probe), 1e-5, 1e-5)]
    require(
        bool(found),
        "the experts' gate must be SwiGLU or gpt-oss's, with or without a clamp",
        got=f"another one in {type(module).__name__}",
        fix='use experts_implementation="eager" for this model',
        kind=NotAvailable,
    )
    return found[0]


def _apply(gate: Gate, x: Tensor) -> Tensor:
    """Our activation on [rows, gate and up], as numerics.md has it."""
    split = x.chunk(2, dim=-1) if gate.gate_up == "split" else (x[..., ::2], x[..., 1::2])
    limit = OWN_CLAMP[gate.activation] if gate.clamp is None else gate.clamp
    g, up = split[0].clamp(max=limit), split[1].clamp(-limit, limit)
    if gate.activation == "swiglu":
        return nn.functional.silu(g) * up
    return g * torch.sigmoid(GPT_OSS_ALPHA * g) * (up + 1)


def _check_module(module: nn.Module) -> None:
    name = type(module).__name__
    for flag, wanted, why in (
        ("has_gate", True, "experts must have a gate"),
        ("has_post_expert_norm", False, "experts must not be normalised before they are added"),
    ):
        require(
            getattr(module, flag, wanted) == wanted,
            why,
            got=name,
            fix='use experts_implementation="eager" for this model',
            kind=NotAvailable,
        )
    for attribute in PARAMETERS[:2]:
        t = getattr(module, attribute, None)
        require(
            isinstance(t, Tensor) and t.ndim == 3,
            f"experts must keep {attribute} as one tensor [experts, rows, columns]",
            got=f"{name} with {type(t).__name__} {tuple(getattr(t, 'shape', ()))}",
            kind=ShapeError,
        )
        assert isinstance(t, Tensor)
        require(
            t.dtype in FLOATS,
            f"experts must keep {attribute} in bfloat16, float32 or float16",
            got=f"{name} in {t.dtype}, quantised: its scales would be left out",
            fix="load the model unquantised",
            kind=DTypeError,
        )


def _places(module: nn.Module) -> tuple[Any, ...]:
    """Changes when a parameter is replaced, moved or cast."""
    found = (getattr(module, name, None) for name in PARAMETERS)
    return tuple((id(t), t.data_ptr(), t.dtype, t.device) for t in found if isinstance(t, Tensor))


def _copied(module: nn.Module, layer: MoE) -> tuple[str, ...]:
    """The parameters that the layer copied; what it shares cannot be out of date."""
    held = {t.data_ptr() for t in layer.weights.state_dict().values()}
    given = {name: getattr(module, name, None) for name in PARAMETERS}
    return tuple(n for n, t in given.items() if isinstance(t, Tensor) and t.data_ptr() not in held)


def _interface() -> Any:
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise NotAvailable(
            f"the experts interface of transformers 5 must be there; got {error}; "
            "pip install 'megamoe[transformers]'"
        ) from error
    return ALL_EXPERTS_FUNCTIONS
