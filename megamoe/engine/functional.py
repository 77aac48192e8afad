"""moe(): the layer as one call, and the checks of its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megamoe.engine import backends, device_guard, status
from megamoe.engine.call import Call
from megamoe.engine.eager import eager
from megamoe.engine.interface import backend_named
from megamoe.engine.planning import Traits, log_once, plan_for, traits_of
from megamoe.engine.reference import REFERENCE
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import (
    DeviceError,
    DTypeError,
    NotAvailable,
    RangeError,
    ShapeError,
    require,
)
from megamoe.formats.quantized import Quantized
from megamoe.formats.spec import recipe_named
from megamoe.planner.choice import Value
from megamoe.planner.overrides import CHOICES, check_pairs, checked
from megamoe.planner.plan import Plan, choose_backend
from megamoe.planner.tables.blackwell import ACTIVATIONS as BLACKWELL_ACTIVATIONS
from megamoe.problem import Options, check_top_k
from megamoe.routing.permute import check_expert_ids


def moe(
    x: Tensor | Quantized,
    topk_idx: Tensor,
    topk_weights: Tensor,
    weights: ExpertWeights,
    *,
    activation: str = "swiglu",
    clamp: float | None = None,
    weight_at: str = "l1",
    combine: str = "bf16",
    fast_math: bool = False,
    shared: ExpertWeights | None = None,
    backend: str = "auto",
    mode: str = "auto",
    overrides: Mapping[str, Value] | None = None,
) -> Tensor:
    """Send every token through its experts and add up their results, by routing weight.

    x             bf16 [T, H], or Quantized in the recipe's activation format
    topk_idx      int32 or int64 [T, k]; -1 masks a slot; the same expert may occur twice
    topk_weights  float32 [T, k]
    weights       the experts
    shared        experts that see every token with weight 1, in any recipe
    backend       "auto" is the best one that works on the weights' device
    mode          "staged", "fused" (one launch), "split" (L1 and L2 side by side) or "auto": the
                  same bits; what a mode cannot take is refused; on a CPU the oracle computes what
                  any mode would
    overrides     tile choices in place of the planner's, such as {"block_m": 64}
    returns       bf16 [T, H]

    activation, clamp, weight_at, combine and fast_math are those of `Options`; docs/numerics.md has
    the rules.
    """
    if torch.compiler.is_compiling() and isinstance(x, Tensor):
        return _compiled(
            x, topk_idx, topk_weights, weights, shared,
            {"activation": activation, "clamp": clamp, "weight_at": weight_at, "combine": combine,
             "fast_math": fast_math, "backend": backend, "mode": mode},
            overrides,
        )  # fmt: skip
    options = Options(activation, clamp, weight_at, combine, fast_math)
    inputs = x, topk_idx, topk_weights, weights
    y: Tensor = _moe(*inputs, options, shared, backend, mode, overrides)
    return y


def _compiled(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    weights: ExpertWeights,
    shared: ExpertWeights | None,
    choices: dict[str, Any],
    overrides: Mapping[str, Value] | None,
) -> Tensor:
    """As one node of a compiled graph: tensors, and in words what they are."""
    from megamoe.engine.op import call_op
    from megamoe.engine.packed import pictured

    tensors: list[Tensor] = []
    words = ""
    for one in (weights, shared):
        if one is not None:
            parts = one.held()
            tensors += list(parts.values())
            pictures = ":".join([str(pictured(matrix)) for matrix in (one.w13, one.w2)])
            words += f"{one.recipe}:{','.join(parts)}:{pictures};"
    for name, value in choices.items():
        words += f"|{name}={value}"
    for name, value in (overrides or {}).items():
        words += f"|overrides.{name}={value}"
    y: Tensor = call_op(x, topk_idx, topk_weights, tensors, words)
    return y


WHY_EAGER = "quantised tokens pass mm.moe outside of compiled graphs"


@eager(WHY_EAGER)
def _moe(
    x: Tensor | Quantized,
    topk_idx: Tensor,
    topk_weights: Tensor,
    weights: ExpertWeights,
    options: Options,
    shared: ExpertWeights | None,
    backend: str,
    mode: str,
    overrides: Mapping[str, Value] | None,
) -> Tensor:
    check_tokens(x, topk_idx, topk_weights, weights)
    check_shared(shared, x, weights)
    asked = checked(overrides or {}, legal=CHOICES)
    check_pairs(backend, asked)
    name, traits, _ = choose(backend, mode, weights, shared, options.activation)
    chosen = checked({"backend": name, "mode": mode}) + asked
    is_layerless_capture = name != "reference" and status.is_capturing(weights.device)
    plan = plan_for(
        weights, options, traits, num_tokens=x.shape[0], top_k=topk_idx.shape[1],
        overrides=chosen, is_quantized=not isinstance(x, Tensor), is_captured=is_layerless_capture,
    )  # fmt: skip
    words = status.of_stream(weights.device)
    with torch.no_grad():
        return run(Call(x, topk_idx, topk_weights, weights, options, shared, words), plan)


BIASED = (
    "experts with biases and activation='swiglu': of the known models only gpt-oss has biases, and "
    "its activation is 'gpt_oss'; with 'swiglu' its results are wrong"
)


INTERLEAVED = (
    "experts whose gate and up were interleaved, and activation='swiglu': of the known models only "
    "gpt-oss has such, and its activation is 'gpt_oss'; with 'swiglu' its results are wrong"
)


def choose(
    backend: str,
    mode: str,
    weights: ExpertWeights,
    shared: ExpertWeights | None,
    activation: str = "swiglu",
    device: torch.device | None = None,
) -> tuple[str, Traits, str]:
    """(backend, traits of the experts, why `auto` passed over a better one, which is logged).

    device  where the experts will lie; None: where they do
    """
    if weights.b13 is not None and activation == "swiglu":
        log_once(BIASED)
    elif weights.gate_up == "interleaved" and activation == "swiglu":
        log_once(INTERLEAVED)
    device = weights.device if device is None else device
    reasons = backends.reasons_on(device)
    not_certified = _not_opt_in(reasons, device, weights, shared, activation)
    name, why = choose_backend(backend, mode, reasons, not_certified=not_certified)
    if why:
        log_once(f"backend {name}: {why}")
    traits = traits_of(name, weights, shared, activation)
    if traits.not_hopper:
        name, why = choose_backend(backend, mode, reasons, traits.not_hopper, not_certified)
        log_once(f"backend {name} instead of hopper: {why}")
        traits = traits_of(name, weights, shared, activation)
    return name, traits, why


def _not_opt_in(
    reasons: Mapping[str, str],
    device: torch.device,
    weights: ExpertWeights,
    shared: ExpertWeights | None,
    activation: str,
) -> str:
    """Why `auto` may not take the opt-in backend for this layer: no certificate of what it would
    compute, or no kernel for it; "" where it may."""
    for one in (weights, *(() if shared is None else (shared,))):
        reason = backends.not_certified(reasons, device, one.recipe)
        if reason:
            return reason
    if reasons.get("blackwell", "not here"):
        return ""
    if activation not in BLACKWELL_ACTIVATIONS:
        return f"no kernel for activation {activation}"
    from megamoe.engine import blackwell

    return blackwell.why_not(weights) or ("" if shared is None else blackwell.why_not(shared))


def run(call: Call, plan: Plan) -> Tensor:
    """One checked call; stats are added to.

    The reference reads ids and weights and refuses bad ones at once. A GPU backend reads nothing
    back: the next call raises them from the status words.
    """
    if plan.backend == "reference":
        check_values(call.topk_idx, call.topk_weights, call.weights.num_experts)
        return REFERENCE.run(call, plan)
    call.status.raise_if_seen()
    return launch(call, plan)


def launch(call: Call, plan: Plan) -> Tensor:
    """The launches of a call on a GPU backend; nothing is read back, so they may be captured."""
    if call.num_tokens == 0:
        return torch.empty(call.x.shape, dtype=torch.bfloat16, device=call.weights.device)
    with device_guard.on(call.weights.device):
        y = backend_named(plan.backend).run(call, plan)
        call.status.copy_to_host_async(call.top_k)
    return y


Signature = tuple[Any, ...]


def signature_of(x: object, topk_idx: object, topk_weights: object) -> Signature | None:
    """All that `check_tokens` sees of three tensors; None if one is something else.

    A call that looks like one that passed would pass as well. Flat, since it is made in every call.
    """
    if not (
        isinstance(x, Tensor) and isinstance(topk_idx, Tensor) and isinstance(topk_weights, Tensor)
    ):
        return None
    return (
        x.shape, x.stride(), x.dtype, x.device, x.requires_grad,
        topk_idx.shape, topk_idx.dtype, topk_idx.device, topk_idx.is_contiguous(),
        topk_weights.shape, topk_weights.dtype, topk_weights.device, topk_weights.is_contiguous(),
        topk_weights.requires_grad, torch.is_grad_enabled(),
    )  # fmt: skip


def check_tokens(
    x: Tensor | Quantized,
    topk_idx: Tensor,
    topk_weights: Tensor,
    weights: ExpertWeights,
    num_experts: int | None = None,
) -> None:
    """Require tokens, ids and weights that fit each other and the experts; no value is read."""
    require(
        isinstance(weights, ExpertWeights),
        "weights must be an ExpertWeights",
        got=type(weights).__name__,
        fix="make one with ExpertWeights.quantize or .from_quantized",
        kind=DTypeError,
    )
    _check_x(x, weights)
    num_experts = weights.num_experts if num_experts is None else num_experts
    for name, t in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
        require(
            isinstance(t, Tensor), f"{name} must be a tensor", got=type(t).__name__, kind=DTypeError
        )
        require(t.ndim == 2, f"{name} must be [T, top_k]", got=tuple(t.shape), kind=ShapeError)
    require(
        topk_idx.shape[0] == x.shape[0] and topk_weights.shape == topk_idx.shape,
        f"topk_idx and topk_weights must both be [{x.shape[0]}, top_k]",
        got=f"{tuple(topk_idx.shape)} and {tuple(topk_weights.shape)}",
        kind=ShapeError,
    )
    for name, t in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
        require(
            t.is_contiguous(),
            f"{name} must be contiguous",
            got=f"strides {t.stride()} for {tuple(t.shape)}",
            fix="call .contiguous()",
            kind=ShapeError,
        )
        require(
            t.device == weights.device,
            f"{name} must lie where the weights lie, on {weights.device}",
            got=t.device,
            kind=DeviceError,
        )
    require(
        topk_idx.dtype in (torch.int32, torch.int64),
        "topk_idx must be int32 or int64",
        got=topk_idx.dtype,
        kind=DTypeError,
    )
    require(
        topk_weights.dtype == torch.float32,
        "topk_weights must be float32",
        got=topk_weights.dtype,
        fix="call .float()",
        kind=DTypeError,
    )
    _check_no_grad("topk_weights", topk_weights)
    check_top_k(topk_idx.shape[1], num_experts)


def check_shared(
    shared: ExpertWeights | None, x: Tensor | Quantized, weights: ExpertWeights
) -> None:
    """Require shared experts of the same width, on the same device, that can read `x`."""
    if shared is None:
        return
    require(
        isinstance(shared, ExpertWeights),
        "shared must be an ExpertWeights",
        got=type(shared).__name__,
        kind=DTypeError,
    )
    require(
        shared.hidden == weights.hidden,
        f"shared experts must be {weights.hidden} wide",
        got=shared.hidden,
        kind=ShapeError,
    )
    require(
        shared.device == weights.device,
        f"shared experts must lie on {weights.device}",
        got=shared.device,
        kind=DeviceError,
    )
    _check_x(x, shared)


def _check_x(x: Tensor | Quantized, weights: ExpertWeights) -> None:
    acts = recipe_named(weights.recipe).acts
    if isinstance(x, Quantized):
        require(
            x.format == acts.name,
            f"recipe {weights.recipe} takes BF16 tokens or Quantized ones in {acts.name}",
            got=x.format,
            kind=RangeError,
        )
        require(
            x.global_scale is None or x.global_scale.ndim <= 1,
            "the tokens' global scale must be one number, or one per token",
            got=None if x.global_scale is None else tuple(x.global_scale.shape),
            kind=ShapeError,
        )
        for part in x.tensors().values():
            _check_no_grad("x", part)
    else:
        require(
            isinstance(x, Tensor),
            "x must be a tensor or Quantized",
            got=type(x).__name__,
            kind=DTypeError,
        )
        require(
            x.dtype == torch.bfloat16,
            "x must be bfloat16",
            got=x.dtype,
            fix="call .bfloat16(), or quantise it",
            kind=DTypeError,
        )
        _check_no_grad("x", x)
    require(
        len(x.shape) == 2 and x.shape[1] == weights.hidden,
        f"x must be [T, {weights.hidden}]",
        got=tuple(x.shape),
        fix="call .flatten(0, -2)" if len(x.shape) > 2 and x.shape[-1] == weights.hidden else "",
        kind=ShapeError,
    )
    data = x.data if isinstance(x, Quantized) else x
    require(
        data.stride(1) == 1,
        "the rows of x must be contiguous",
        got=f"strides {data.stride()}",
        fix="call .contiguous()",
        kind=ShapeError,
    )
    require(
        x.device == weights.device,
        f"x must lie where the weights lie, on {weights.device}",
        got=x.device,
        kind=DeviceError,
    )


def _check_no_grad(name: str, t: Tensor) -> None:
    """Refuse what would silently get no gradient."""
    require(
        not (t.requires_grad and torch.is_grad_enabled()),
        f"the layer has no backward: {name} must not require grad",
        got="requires_grad under grad mode",
        fix="call it under torch.no_grad()",
        kind=NotAvailable,
    )


def check_values(topk_idx: Tensor, topk_weights: Tensor, num_experts: int) -> None:
    """Require legal ids, and finite weights on the slots that count; names the first offender."""
    check_expert_ids(topk_idx, num_experts)
    bad = ~topk_weights.isfinite() & (topk_idx >= 0)
    if bool(bad.any()):
        token, slot = bad.nonzero()[0].tolist()
        require(
            False,
            "topk_weights must be finite",
            got=f"{topk_weights[token, slot].item()} at token {token}, slot {slot}",
            fix="mask the slot with expert -1",
            kind=RangeError,
        )
