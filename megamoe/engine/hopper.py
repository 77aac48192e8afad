"""Staged mode of the Hopper backend: route, L1, L2 and combine as launches on one stream.

Weights are packed once per layer for the kernels (`kernels.hopper.pack`); nothing is rounded.
No host synchronisation and shapes that depend on sizes alone, so a call can be captured in a CUDA
graph and replayed with other routing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megamoe.engine.fingerprint import Seal
from megamoe.engine.manner import why_apart
from megamoe.engine.staged import all_experts
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import NotAvailable, require
from megamoe.formats.quantize import dequantize
from megamoe.formats.quantized import Quantized
from megamoe.formats.spec import Scale, recipe_named
from megamoe.kernels.hopper import launch
from megamoe.kernels.hopper.deal import Hand
from megamoe.kernels.hopper.launch import Arithmetic
from megamoe.kernels.hopper.pack import (
    Packed,
    can_be_placed,
    fits_bf16,
    fits_e4m3,
    joined,
    pack,
    parted,
)
from megamoe.kernels.hopper.pool import Pool
from megamoe.kernels.hopper.route import route
from megamoe.kernels.portable.acts import CODES
from megamoe.kernels.portable.combine import combine
from megamoe.kernels.portable.dispatch import Routing, dispatch
from megamoe.problem import Options
from megamoe.schedule.heuristics.hopper_tiles import Tile, tiles


@dataclass(frozen=True, slots=True)
class Prepared:
    """The experts of one rank as the kernels read them."""

    w13: Packed
    w2: Packed
    how: Arithmetic


ACTIVATIONS = ("swiglu", "gpt_oss")

# By the bytes of a matrix: what was made from them, and the seal of the bytes and scales it was
# made from (decision 0026). Entries go when the weights go: images hold nothing of the original.
_MADE = WeakIdKeyDictionary()


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
    return Prepared(*(_packed(w, how.to_e4m3, is_placed) for w in both), how)


def with_shared(weights: ExpertWeights, shared: ExpertWeights) -> Prepared:
    """Both as the experts of one launch (`can_join`): the shared ones are the last.

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
        return _known(b, what, lambda b: both(a, b), a)

    return Prepared(found(weights.w13, shared.w13), found(weights.w2, shared.w2), how)


def num_of(shared: ExpertWeights | None) -> int:
    """How many shared experts there are."""
    return 0 if shared is None else shared.num_experts


def can_join(weights: ExpertWeights, shared: ExpertWeights) -> bool:
    """Whether one launch can have both."""
    if why_apart(weights, shared) or why_not(weights) or why_not(shared):
        return False
    return can_be_e4m3(weights) == can_be_e4m3(shared)


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
    return is_block and all(_known(w, "fits_e4m3", fits_e4m3) for w in both)


def _is_placed(all_of_them: Sequence[Quantized], how: Arithmetic) -> bool:
    """Whether the weights of one launch, which has one decoder, are placed images."""
    return not how.to_e4m3 and all(_known(w, "placed", can_be_placed) for w in all_of_them)


def _packed(w: Quantized, to_e4m3: bool, is_placed: bool) -> Packed:
    if w.spec.element.bits != 4:
        return pack(w, to_e4m3=False)  # as they are: nothing to keep
    image = _image(to_e4m3, is_placed)
    return _known(w, image, lambda w: pack(w, to_e4m3=to_e4m3, is_placed=is_placed))


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


def moe(
    x: Tensor | Quantized,
    topk_idx: Tensor,
    topk_weights: Tensor,
    weights: ExpertWeights,
    options: Options,
    shared: ExpertWeights | None,
    error: Tensor,
    stats: Tensor | None = None,
    num_valid: Tensor | None = None,
    *,
    pdl: bool = True,
    tile: Tile | None = None,
) -> Tensor:
    """bf16 [T, H] -> bf16 [T, H]; `error` and `stats` are the words that the call adds to.

    With `pdl` each launch is placed while the one before it ends (docs/hopper.md). `tile`, of the
    routed experts, is the table's where it is None. No bit depends on either.
    """
    num_tokens, hidden = x.shape
    top_k = topk_idx.shape[1]
    device = weights.device
    extra = num_of(shared)
    y = torch.empty(num_tokens, hidden, dtype=torch.bfloat16, device=device)
    if num_tokens == 0:
        return y
    idx = torch.empty(num_tokens, top_k, dtype=torch.int32, device=device)
    weight = torch.empty(num_tokens, top_k, dtype=torch.float32, device=device)
    routing = Routing(topk_idx, topk_weights, idx, weight, error, num_valid)
    slots = top_k + extra
    rows = torch.empty(num_tokens, slots, hidden, dtype=torch.bfloat16, device=device)
    alike = shared if shared is not None and can_join(weights, shared) else None
    run_pass(x, weights, options, routing, rows, 0, stats, pdl, tile, alike)
    if shared is not None and alike is None:
        every, ones = all_experts(num_tokens, extra, device)
        always = Routing(every, ones, every.clone(), ones.clone(), error, None)
        run_pass(x, shared, options, always, rows, top_k, None, pdl)
    row_scale = None
    if options.combine == "fp8":
        rows, row_scale = as_fp8(rows, pdl)
    combine(rows, row_scale, idx, weight, y, weighted=options.weight_at == "combine", pdl=pdl)
    return y


def run_pass(
    x: Tensor | Quantized,
    weights: ExpertWeights,
    options: Options,
    routing: Routing,
    rows: Tensor,
    first_slot: int,
    stats: Tensor | None,
    pdl: bool,
    tile: Tile | None = None,
    shared: ExpertWeights | None = None,
) -> None:
    """Route, L1 and L2 of these slots; their rows go to `rows` [T, slots, H].

    Shared experts that are given (`can_join`) have the slots behind these.
    """
    check_activation(options)
    made = prepared(weights) if shared is None else with_shared(weights, shared)
    extra = num_of(shared)
    how, experts = made.how, weights.num_experts + extra
    num_slots = routing.topk_idx.numel()
    if tile is None:
        tile, _ = tiles(weights.recipe, num_slots / weights.num_experts, fits_e4m3=how.is_fp8)
    num_slots += len(x) * extra
    pool = launch.pool(how, num_slots, weights.hidden, experts, tile.tokens, weights.device)
    hand = launch.hand(pool, (made.w13, made.w2), tile)
    _fill(
        x, weights, how, routing, pool, hand, tile.tokens, rows.shape[1], first_slot, stats, pdl,
        extra,
    )  # fmt: skip
    acts = launch.pool(
        how, num_slots, weights.intermediate, experts, tile.tokens, weights.device, pool
    )
    first, second = (None, None) if hand is None else hand.each()
    launch.gated(
        pool, made.w13, acts, tile, how, options, items=first, bias=weights.b13,
        acts_factor=weights.acts_global, error=routing.error, use_pdl=pdl,
    )  # fmt: skip
    launch.linear(
        acts, made.w2, rows, tile, how, options, after=made.w13, items=second, bias=weights.b2,
        acts_factor=weights.acts_global, error=routing.error, use_pdl=pdl,
    )  # fmt: skip


def _fill(
    x: Tensor | Quantized,
    weights: ExpertWeights,
    how: Arithmetic,
    routing: Routing,
    pool: Pool,
    hand: Hand | None,
    block: int,
    num_dest: int,
    first_slot: int,
    stats: Tensor | None,
    pdl: bool,
    num_shared: int,
) -> None:
    """Tokens into the pool, quantised on the way unless they are already."""
    scale, g, is_ready = None, weights.x_global, False
    if isinstance(x, Quantized):
        x, scale, g, is_ready = _ready(x, how)
    route(
        x, routing, how.acts, pool, block, weights.num_experts + num_shared, hand=hand,
        x_scale=scale, g=g, stats=stats, first_slot=first_slot, num_dest=num_dest,
        num_shared=num_shared, is_ready=is_ready, by_group=how.to_e4m3, pdl=pdl,
    )  # fmt: skip


def _ready(x: Quantized, how: Arithmetic) -> tuple[Tensor, Tensor | None, Tensor | None, bool]:
    """Tokens that come quantised, in the pool's format: data, scales, global scales, True."""
    g = x.global_scale
    if how.is_promoted:
        assert x.scale is not None
        data = x.data if how.is_fp8 else x.data.to(torch.bfloat16)
        return data, x.scale.contiguous(), None, True
    if g is not None:
        x = replace(x, global_scale=torch.ones_like(g))
        g = g.contiguous()
    return dequantize(x).to(torch.bfloat16), None, g, True


def as_fp8(rows: Tensor, pdl: bool) -> tuple[Tensor, Tensor]:
    """Rows on their way to combine, one E8M0 scale per 128 columns."""
    flat = rows.flatten(0, 1)
    blocks = -(-rows.shape[2] // 128)
    codes = torch.empty_like(flat, dtype=torch.uint8)
    scale = torch.empty(len(flat), blocks, dtype=torch.uint8, device=rows.device)
    dispatch(flat, codes, scale, CODES["fp8_combine"], pdl=pdl)
    return codes.view(rows.shape), scale.view(*rows.shape[:2], blocks)
