"""The Hopper backend: packed weights, and the staged launches of a plan.

Weights are packed once per layer (`kernels.hopper.weights.pack`); nothing is rounded.
No host synchronisation and shapes that depend on sizes alone, so a call can be captured in a CUDA
graph and replayed with other routing. Fused launches are in `fused.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megamoe.engine.call import Call
from megamoe.engine.fingerprint import Seal
from megamoe.engine.planning import why_unlike
from megamoe.engine.portable import all_experts
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import NotAvailable, require
from megamoe.formats.quantize import dequantize
from megamoe.formats.quantized import Quantized
from megamoe.formats.spec import Scale, recipe_named
from megamoe.kernels.gluon.dispatch import Tokens, route
from megamoe.kernels.hopper import launch
from megamoe.kernels.hopper.launch import Arithmetic
from megamoe.kernels.hopper.weights.pack import (
    Packed,
    can_be_placed,
    fits_bf16,
    joined,
    pack,
    parted,
)
from megamoe.kernels.hopper.weights.pack import fits_e4m3 as pack_fits_e4m3
from megamoe.kernels.portable.acts import CODES
from megamoe.kernels.portable.combine import combine
from megamoe.kernels.portable.dispatch import dispatch
from megamoe.kernels.portable.routing import Routing
from megamoe.planner.launches import Gemm, GemmSwapAb, Launch, Pass
from megamoe.planner.plan import Plan
from megamoe.planner.tables.hopper import ACTIVATIONS
from megamoe.problem import Options


@dataclass(frozen=True, slots=True)
class Prepared:
    """The experts of one rank as the kernels read them."""

    w13: Packed
    w2: Packed
    how: Arithmetic


# By the bytes of a matrix: what was made from them, and the seal of the bytes and scales it was
# made from (decision 0026). Entries go when the weights go: images hold nothing of the original.
_MADE: Any = WeakIdKeyDictionary()


def prepared(weights: ExpertWeights) -> Prepared:
    """The packed weights; images of FP4 are made at the first call and kept with the weights."""
    reason = why_not(weights)
    require(
        not reason,
        "the hopper backend needs E8M0 scales of 2**-126 or more where a group is not zero",
        got=reason,
        fix='use backend="portable", which holds them exactly',
        kind=NotAvailable,
    )
    both = weights.w13, weights.w2
    how = launch.arithmetic(weights.recipe, fits_e4m3=can_be_e4m3(weights))
    is_placed = _is_placed(both, how)
    w13, w2 = (_packed(w, how.to_e4m3, is_placed) for w in both)
    return Prepared(w13, w2, how)


def with_shared(weights: ExpertWeights, shared: ExpertWeights) -> Prepared:
    """Both as the experts of one launch (`why_apart` is empty); the shared ones are the last.

    Where nothing was made of one of them alone, it is a part of what is made here.
    """
    how = launch.arithmetic(weights.recipe, fits_e4m3=can_be_e4m3(weights))
    is_placed = _is_placed((weights.w13, weights.w2, shared.w13, shared.w2), how)
    image = _image(how.to_e4m3, is_placed)

    def both(a: Quantized, b: Quantized) -> Packed:
        made = joined(*(pack(w, to_e4m3=how.to_e4m3, is_placed=is_placed) for w in (a, b)))
        for w, part in zip((a, b), parted(made, len(a.data)), strict=True):
            _known(w, image, lambda _, part=part: part)  # type: ignore[misc]
        return made

    def found(a: Quantized, b: Quantized) -> Packed:
        what = f"behind {id(a.data)}, {image}"  # other layers may share either
        made: Packed = _known(b, what, lambda b: both(a, b), a)
        return made

    return Prepared(found(weights.w13, shared.w13), found(weights.w2, shared.w2), how)


def num_of(shared: ExpertWeights | None) -> int:
    """How many shared experts there are."""
    return 0 if shared is None else shared.num_experts


def why_apart(weights: ExpertWeights, shared: ExpertWeights) -> str:
    """Why no launch has both; "" where one can."""
    reason = why_unlike(weights, shared) or why_not(weights) or why_not(shared)
    if not reason and can_be_e4m3(weights) != can_be_e4m3(shared):
        reason = "exponents that E4M3 holds in one of routed and shared experts only"
    return reason


def fits_e4m3(weights: ExpertWeights) -> bool:
    """Whether the layer multiplies in FP8, where its recipe does."""
    return weights.recipe != "w4a8_block" or can_be_e4m3(weights)


def check_activation(options: Options) -> None:
    """Refuse an activation that the kernels would take for another."""
    require(
        options.activation in ACTIVATIONS,
        f"the hopper backend computes {' and '.join(ACTIVATIONS)}",
        got=options.activation,
        fix='use backend="portable"',
        kind=NotAvailable,
    )


def why_not(weights: ExpertWeights) -> str:
    """Why no exact path holds these weights; "" where one does."""
    if recipe_named(weights.recipe).weights.scale is not Scale.E8M0 or can_be_e4m3(weights):
        return ""
    both = weights.w13, weights.w2
    return "" if all(_known(w, "fits_bf16", fits_bf16) for w in both) else "a scale of 2**-127"


def can_be_e4m3(weights: ExpertWeights) -> bool:
    """Whether w4a8_block multiplies in FP8."""
    both = weights.w13, weights.w2
    is_block = weights.recipe == "w4a8_block"
    return is_block and all(_known(w, "fits_e4m3", pack_fits_e4m3) for w in both)


def _is_placed(all_of_them: Sequence[Quantized], how: Arithmetic) -> bool:
    """Whether the weights of one launch, which has one decoder, are placed images."""
    return not how.to_e4m3 and all(_known(w, "placed", can_be_placed) for w in all_of_them)


def _packed(w: Quantized, to_e4m3: bool, is_placed: bool) -> Packed:
    if w.spec.element.bits != 4:
        return pack(w, to_e4m3=False)  # as they are: nothing to keep
    image = _image(to_e4m3, is_placed)
    made: Packed = _known(w, image, lambda w: pack(w, to_e4m3=to_e4m3, is_placed=is_placed))
    return made


def _image(to_e4m3: bool, is_placed: bool) -> str:
    """The name of what is kept."""
    return f"image {to_e4m3} {is_placed}"


def _known(
    w: Quantized, what: str, find: Callable[[Quantized], Any], other: Quantized | None = None
) -> Any:
    """find(w), found once for these bytes and scales, and the other's, as they are now."""
    parts = tuple(t for q in (w, other) if q is not None for t in q.tensors().values())
    made = _MADE.setdefault(w.data, {})
    refs, seal, found = made.get(what, ((), None, None))
    is_new = seal is None or any(ref() is not t for ref, t in zip(refs, parts, strict=True))
    if is_new or not seal.holds(parts):
        found = find(w)
        made[what] = tuple(map(weakref.ref, parts)), Seal(parts), found
    return found


def verify(*both: ExpertWeights | None) -> None:
    """Refuse experts that were written to, uncounted, after something was made of them."""
    for w in (
        part for weights in both if weights is not None for part in (weights.w13, weights.w2)
    ):
        for refs, seal, _ in _MADE.get(w.data, {}).values():
            parts = [ref() for ref in refs]
            if all(t is not None for t in parts):
                seal.verify(parts)


def run(call: Call, plan: Plan) -> Tensor:
    """The launches of a plan: bf16 [T, H] -> bf16 [T, H]."""
    if plan.mega is not None:
        from megamoe.engine import fused

        return fused.run(call, plan.mega)
    return staged(call, plan)


def staged(call: Call, plan: Plan) -> Tensor:
    """Permute, L1, L2 and combine as launches on one stream.

    With `plan.overlaps` each launch is placed while the one before it ends (docs/hopper.md).
    """
    device, hidden, top_k = call.weights.device, call.weights.hidden, call.top_k
    num_tokens, extra, pdl = call.num_tokens, num_of(call.shared), plan.overlaps
    y = torch.empty(num_tokens, hidden, dtype=torch.bfloat16, device=device)
    if num_tokens == 0:
        return y
    idx = torch.empty(num_tokens, top_k, dtype=torch.int32, device=device)
    weight = torch.empty(num_tokens, top_k, dtype=torch.float32, device=device)
    error = call.status.bad_slot
    routing = Routing(call.topk_idx, call.topk_weights, idx, weight, error, call.num_valid)
    rows = torch.empty(num_tokens, top_k + extra, hidden, dtype=torch.bfloat16, device=device)
    first, *others = plan.passes
    alike = None if others else call.shared
    run_pass(call.x, call.weights, call.options, routing, rows, first, 0, call.stats, pdl, alike)
    for steps in others:
        assert call.shared is not None
        shared_rows(call.x, call.shared, call.options, error, rows, steps, top_k, pdl)
    row_scale = None
    *to_fp8, last = plan.rest
    for step in to_fp8:
        rows, row_scale = as_fp8(rows, step, pdl)
    weighted = call.options.weight_at == "combine"
    combine(rows, row_scale, idx, weight, y, step=last, weighted=weighted, pdl=pdl)
    return y


def shared_rows(
    x: Tensor | Quantized,
    shared: ExpertWeights,
    options: Options,
    error: Tensor,
    rows: Tensor,
    steps: Pass,
    first_slot: int,
    pdl: bool,
) -> None:
    """Shared experts in launches of their own: rows [T, slots, H] from `first_slot` on."""
    every, ones = all_experts(len(x), shared.num_experts, rows.device)
    always = Routing(every, ones, every.clone(), ones.clone(), error, None)
    run_pass(x, shared, options, always, rows, steps, first_slot, None, pdl)


def run_pass(
    x: Tensor | Quantized,
    weights: ExpertWeights,
    options: Options,
    routing: Routing,
    rows: Tensor,
    steps: Pass,
    first_slot: int,
    stats: Tensor | None,
    pdl: bool,
    shared: ExpertWeights | None = None,
) -> None:
    """Permute, L1 and L2 of these slots; their rows go to `rows` [T, slots, H].

    Shared experts that are given (`why_apart` is empty) have the slots after the routed ones.
    """
    check_activation(options)
    made = prepared(weights) if shared is None else with_shared(weights, shared)
    how, experts, num_slots = made.how, steps.num_experts, steps.num_slots
    l1, l2 = steps["l1"], steps["l2"]
    block_m = tile_in(l1).block_m
    pool = launch.pool(how, num_slots, weights.hidden, experts, block_m, weights.device)
    work = launch.work_items(pool, (made.w13, made.w2), l1)
    tokens = _ready(x, how) if isinstance(x, Quantized) else Tokens(x, g=weights.x_global)
    route(
        tokens, routing, how.acts, pool, steps, work=work, stats=stats, first_slot=first_slot,
        num_dest=rows.shape[1], num_shared=num_of(shared), by_group=how.to_e4m3, pdl=pdl,
    )  # fmt: skip
    acts = launch.pool(how, num_slots, weights.intermediate, experts, block_m, weights.device, pool)
    first, second = (None, None) if work is None else work.each()
    launch.gated(
        pool, made.w13, acts, l1, how, options, items=first, bias=weights.b13,
        acts_factor=weights.acts_global, error=routing.error, use_pdl=pdl,
    )  # fmt: skip
    launch.linear(
        acts, made.w2, rows, l2, how, options, after=made.w13, items=second, bias=weights.b2,
        acts_factor=weights.acts_global, error=routing.error, use_pdl=pdl,
    )  # fmt: skip


def tile_in(step: Launch) -> GemmSwapAb | Gemm:
    """The tile of a GEMM's launch."""
    assert isinstance(step.config, GemmSwapAb | Gemm)
    return step.config


def _ready(x: Quantized, how: Arithmetic) -> Tokens:
    """Tokens that come quantised, in the pool's format."""
    g = x.global_scale
    if how.is_promoted:
        assert x.scale is not None
        data = x.data if how.is_fp8 else x.data.to(torch.bfloat16)
        return Tokens(data, x.scale.contiguous(), is_ready=True)
    if g is not None:
        x = replace(x, global_scale=torch.ones_like(g))
        g = g.contiguous()
    return Tokens(dequantize(x).to(torch.bfloat16), g=g, is_ready=True)


def as_fp8(rows: Tensor, step: Launch, pdl: bool) -> tuple[Tensor, Tensor]:
    """Rows on their way to combine, one E8M0 scale per 128 columns."""
    flat = rows.flatten(0, 1)
    blocks = -(-rows.shape[2] // 128)
    codes = torch.empty_like(flat, dtype=torch.uint8)
    scale = torch.empty(len(flat), blocks, dtype=torch.uint8, device=rows.device)
    dispatch(flat, codes, scale, CODES["fp8_combine"], step=step, pdl=pdl)
    return codes.view(rows.shape), scale.view(*rows.shape[:2], blocks)
