"""From tensors to plans: traits of weights and tokens, the machine of a device, and a cache.

The planner decides; here it is asked, once for each kind of call.
"""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple

import torch

from megamoe.engine.certified import is_certified
from megamoe.engine.weights import ExpertWeights
from megamoe.formats.spec import Scale
from megamoe.hardware import CPU, Hardware, of_gpu
from megamoe.planner.call import CallSpec, SharedSpec
from megamoe.planner.numerics import not_on
from megamoe.planner.overrides import Overrides
from megamoe.planner.plan import Plan, plan_call
from megamoe.planner.tables.hopper import ACTIVATIONS
from megamoe.problem import Options, Problem

LOG = logging.getLogger("megamoe")
OWN_LAUNCHES = "shared experts have launches of their own on this backend"


@functools.cache
def log_once(message: str) -> None:
    """Tell of a fallback, the first time that it happens."""
    LOG.warning(message)


@functools.cache
def hardware_of(device: torch.device) -> Hardware:
    """The machine that a device is."""
    if device.type != "cuda":
        return CPU
    facts = torch.cuda.get_device_properties(device)
    arch = f"sm_{facts.major}{facts.minor}" + ("a" if facts.major >= 9 else "")
    return of_gpu(facts.name, facts.multi_processor_count, arch, facts.total_memory)


class Traits(NamedTuple):
    """What plans depend on beside sizes: bytes of the weights, as they are now."""

    fits_e4m3: bool = True
    not_hopper: str = ""
    shared: SharedSpec | None = None
    has_bias: bool = False


def traits_of(
    backend: str,
    weights: ExpertWeights,
    shared: ExpertWeights | None,
    activation: str = "swiglu",
) -> Traits:
    """The traits of a layer's experts; only Hopper's kernels look at their bytes."""
    if backend != "hopper":
        return Traits(shared=_shared_spec(shared))
    from megamoe.engine import images

    if activation not in ACTIVATIONS:
        return Traits(not_hopper=f"activation {activation}", shared=_shared_spec(shared))
    for one in (weights, shared):
        if one is not None and not_on("hopper", one.recipe):
            return Traits(not_hopper=not_on("hopper", one.recipe), shared=_shared_spec(shared))
    fits, why_not = images.traits(weights)
    has_bias = weights.b13 is not None or weights.b2 is not None
    if shared is None:
        return Traits(fits, why_not, has_bias=has_bias)
    apart = images.why_apart(weights, shared) or images.lie_apart(weights, shared)
    spec = _shared_spec(shared, fits_e4m3=images.fits_e4m3(shared), apart=apart)
    return Traits(fits, why_not or images.why_not(shared), spec, has_bias)


def _shared_spec(
    shared: ExpertWeights | None,
    *,
    fits_e4m3: bool = True,
    apart: str = OWN_LAUNCHES,
) -> SharedSpec | None:
    if shared is None:
        return None
    return SharedSpec(shared.num_experts, shared.recipe, shared.intermediate, fits_e4m3, apart)


def why_unlike(weights: ExpertWeights, shared: ExpertWeights) -> str:
    """Why no launch has these shared experts among the others; "" where one can."""
    if shared.recipe != weights.recipe:
        return f"shared experts in {shared.recipe}, the others in {weights.recipe}"
    spec = weights.w13.spec
    if spec.element.bits != 4 or spec.scale is not Scale.E8M0:
        return f"shared experts in {weights.recipe}"
    if shared.intermediate != weights.intermediate:
        return f"shared experts of {shared.intermediate}, the others of {weights.intermediate}"
    has_bias = any(t is not None for w in (weights, shared) for t in (w.b13, w.b2))
    return "shared experts and biases" if has_bias else ""


class Ranks(NamedTuple):
    """The ranks of a call."""

    num: int = 1
    num_experts: int | None = None  # of all ranks; None: those of the weights
    local: int = 1
    is_placed: bool = False
    max_tokens: int | None = None  # that a call is planned for
    shared_tokens: int | None = None  # that memory is shared for


ONE_RANK = Ranks()


def plan_for(
    weights: ExpertWeights,
    options: Options,
    traits: Traits,
    *,
    num_tokens: int,
    top_k: int,
    overrides: Overrides,
    ranks: Ranks = ONE_RANK,
    is_quantized: bool = False,
    is_captured: bool = False,
) -> Plan:
    """The plan of a call; overrides name the backend."""
    kind = _Kind(
        device=weights.device, num_tokens=num_tokens, hidden=weights.hidden,
        intermediate=weights.intermediate,
        num_experts=weights.num_experts if ranks.num_experts is None else ranks.num_experts,
        top_k=top_k, recipe=weights.recipe, combine=options.combine, is_quantized=is_quantized,
        is_captured=is_captured,
    )  # fmt: skip
    return _planned(kind, traits, ranks, overrides)


class _Kind(NamedTuple):
    """A kind of call, as it is asked for."""

    device: torch.device
    num_tokens: int
    hidden: int
    intermediate: int
    num_experts: int  # of all ranks
    top_k: int
    recipe: str
    combine: str
    is_quantized: bool
    is_captured: bool


@functools.lru_cache(maxsize=8192)
def _planned(kind: _Kind, traits: Traits, ranks: Ranks, overrides: Overrides) -> Plan:
    device, recipe, hw = kind.device, kind.recipe, hardware_of(kind.device)
    problem = Problem(
        num_tokens=kind.num_tokens, hidden=kind.hidden, intermediate=kind.intermediate,
        num_experts=kind.num_experts, top_k=kind.top_k, num_ranks=ranks.num, recipe=recipe,
    )  # fmt: skip
    call = CallSpec(
        problem,
        combine=kind.combine,
        fits_e4m3=traits.fits_e4m3,
        not_hopper=traits.not_hopper,
        shared=traits.shared,
        is_quantized=kind.is_quantized,
        is_captured=kind.is_captured,
        local_ranks=ranks.local,
        is_placed=ranks.is_placed,
        max_tokens=ranks.max_tokens,
        shared_tokens=ranks.shared_tokens,
        is_certified=is_certified(device, hw.arch, recipe),
        has_bias=traits.has_bias,
    )
    return plan_call(call, hw, overrides)
