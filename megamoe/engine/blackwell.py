"""The Blackwell backend: placed weights, and the staged launches of a plan (fused: `fused.py`).

Emulated and compiled, not yet run on the hardware: `auto` takes it only where a machine has proven
it. Weights stay as checkpoints have them, only scales are placed (`kernels.blackwell.weights`). No
host synchronisation and shapes that depend on sizes alone, as on Hopper.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.engine.call import Call
from megamoe.engine.derived import known
from megamoe.engine.hopper import as_fp8, num_of
from megamoe.engine.portable import all_experts
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import NotAvailable, require
from megamoe.formats.quantized import Quantized
from megamoe.kernels.blackwell import launch
from megamoe.kernels.blackwell.launch import Arithmetic
from megamoe.kernels.blackwell.weights import Placed, place, place_into
from megamoe.kernels.gluon.dispatch import Tokens, route
from megamoe.kernels.hopper.weights.pack import fits_bf16
from megamoe.kernels.portable.combine import combine
from megamoe.kernels.portable.routing import Routing
from megamoe.planner.launches import GemmTmem, Pass
from megamoe.planner.plan import Plan
from megamoe.planner.tables.blackwell import ACTIVATIONS
from megamoe.problem import Options


@dataclass(frozen=True, slots=True)
class Prepared:
    """The experts of one rank as the kernels read them."""

    w13: Placed
    w2: Placed
    how: Arithmetic


def prepare(weights: ExpertWeights) -> Prepared:
    """The weights with placed scales, which are made at the first call and kept with them."""
    reason = why_not(weights)
    require(
        not reason,
        "the blackwell backend needs E8M0 scales of 2**-126 or more where w4a16 decodes to BF16",
        got=reason,
        fix='use backend="portable", which holds them exactly',
        kind=NotAvailable,
    )
    w13, w2 = (known(w, "placed for sm_100", place, place_into) for w in (weights.w13, weights.w2))
    return Prepared(w13, w2, launch.arithmetic(weights.recipe))


def why_not(weights: ExpertWeights) -> str:
    """Why no exact path holds these weights; "" where one does."""
    if weights.recipe != "w4a16" or weights.device.type == "meta":
        return ""
    both = weights.w13, weights.w2
    return "" if all(known(w, "fits_bf16", fits_bf16) for w in both) else "a scale of 2**-127"


def check_activation(options: Options) -> None:
    """Refuse an activation that the kernels would take for another."""
    require(
        options.activation in ACTIVATIONS,
        f"the blackwell backend computes {' and '.join(ACTIVATIONS)}",
        got=options.activation,
        fix='use backend="portable"',
        kind=NotAvailable,
    )


def run(call: Call, plan: Plan) -> Tensor:
    """The launches of a plan: bf16 [T, H] -> bf16 [T, H]."""
    if plan.mega is not None:
        from megamoe.engine import fused

        return fused.run(call, plan.mega)
    return staged(call, plan)


def staged(call: Call, plan: Plan) -> Tensor:
    """Permute, L1, L2 and combine as launches on one stream."""
    device, hidden, top_k = call.weights.device, call.weights.hidden, call.top_k
    num_tokens, extra, pdl = call.num_tokens, num_of(call.shared), plan.overlaps
    y = torch.empty(num_tokens, hidden, dtype=torch.bfloat16, device=device)
    if num_tokens == 0:
        return y
    idx = torch.empty(num_tokens, top_k, dtype=torch.int32, device=device)
    weight = torch.empty(num_tokens, top_k, dtype=torch.float32, device=device)
    error = call.status.bad_slot
    routing = Routing(call.topk_idx, call.topk_weights, idx, weight, error, call.num_valid)
    out = torch.empty(num_tokens, top_k + extra, hidden, dtype=torch.bfloat16, device=device)
    first, *others = plan.passes
    rows(call.x, call.weights, call.options, routing, out, first, 0, call.stats, pdl)
    for steps in others:
        assert call.shared is not None
        shared_rows(call.x, call.shared, call.options, error, out, steps, top_k, pdl)
    row_scale = None
    *to_fp8, last = plan.rest
    for step in to_fp8:
        out, row_scale = as_fp8(out, step, pdl)
    weighted = call.options.weight_at == "combine"
    combine(out, row_scale, idx, weight, y, step=last, weighted=weighted, pdl=pdl)
    return y


def ready(x: Quantized, how: Arithmetic) -> Tokens:
    """Tokens that come quantised, which is the pool's format."""
    scale, g = (None if t is None else t.contiguous() for t in (x.scale, x.global_scale))
    return Tokens(x.data, scale, g, is_ready=True, hidden=x.shape[1])


def shared_rows(
    x: Tensor | Quantized,
    shared: ExpertWeights,
    options: Options,
    error: Tensor,
    out: Tensor,
    steps: Pass,
    first_slot: int,
    pdl: bool,
) -> None:
    """Shared experts in launches of their own: rows [T, slots, H] from `first_slot` on."""
    every, ones = all_experts(len(x), shared.num_experts, out.device)
    always = Routing(every, ones, every.clone(), ones.clone(), error, None)
    rows(x, shared, options, always, out, steps, first_slot, None, pdl)


def rows(
    x: Tensor | Quantized,
    weights: ExpertWeights,
    options: Options,
    routing: Routing,
    out: Tensor,
    steps: Pass,
    first_slot: int,
    stats: Tensor | None,
    pdl: bool,
) -> None:
    """Permute, L1 and L2 of these slots; their rows go to `out` [T, slots, H]."""
    check_activation(options)
    placed = prepare(weights)
    how, experts, num_slots = placed.how, steps.num_experts, steps.num_slots
    l1, l2 = steps["l1"], steps["l2"]
    assert isinstance(l1.config, GemmTmem)
    block_m = l1.config.block_m
    pool = launch.pool(how, num_slots, weights.hidden, experts, block_m, weights.device)
    if isinstance(x, Quantized):
        tokens = ready(x, how)
    else:
        tokens = Tokens(x, g=weights.x_global, hidden=weights.hidden)
    route(
        tokens, routing, how.acts, pool, steps, stats=stats, first_slot=first_slot,
        num_dest=out.shape[1], pdl=pdl,
    )  # fmt: skip
    acts = launch.pool(how, num_slots, weights.intermediate, experts, block_m, weights.device, pool)
    launch.gated(
        pool, placed.w13, acts, l1, how, options, bias=weights.b13, acts_factor=weights.acts_global,
        use_pdl=pdl,
    )  # fmt: skip
    launch.linear(
        acts, placed.w2, out, l2, how, options, bias=weights.b2, acts_factor=weights.acts_global,
        use_pdl=pdl,
    )  # fmt: skip
