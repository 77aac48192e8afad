"""The Hopper backend: the staged launches of a plan.

Weights are packed once (`images.py`); nothing is rounded.
No host synchronisation and shapes that depend on sizes alone, so a call can be captured in a CUDA
graph and replayed with other routing. Fused launches are in `fused.py`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megamoe.engine.call import Call
from megamoe.engine.images import prepared, with_shared
from megamoe.engine.portable import all_experts
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import NotAvailable, require
from megamoe.formats.quantize import dequantize
from megamoe.formats.quantized import Quantized
from megamoe.kernels.gluon.dispatch import Tokens, route
from megamoe.kernels.gluon.follow import Chain
from megamoe.kernels.hopper import launch
from megamoe.kernels.hopper.launch import Arithmetic
from megamoe.kernels.portable.acts import CODES
from megamoe.kernels.portable.combine import combine
from megamoe.kernels.portable.dispatch import dispatch
from megamoe.kernels.portable.routing import Routing
from megamoe.planner.launches import Gemm, GemmSwapAb, Launch, Pass
from megamoe.planner.plan import Plan
from megamoe.planner.tables.hopper import ACTIVATIONS
from megamoe.problem import Options


def num_of(shared: ExpertWeights | None) -> int:
    """How many shared experts there are."""
    return 0 if shared is None else shared.num_experts


def check_activation(options: Options) -> None:
    """Refuse an activation that the kernels would take for another."""
    require(
        options.activation in ACTIVATIONS,
        f"the hopper backend computes {' and '.join(ACTIVATIONS)}",
        got=options.activation,
        fix='use backend="portable"',
        kind=NotAvailable,
    )


def run(call: Call, plan: Plan) -> Tensor:
    """The launches of a plan: bf16 [T, H] -> bf16 [T, H]."""
    if plan.mega is not None:
        from megamoe.engine import fused

        return fused.run(call, plan.mega)
    if plan.mode == "split":
        from megamoe.engine import split

        return split.run(call, plan)
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
    packed = prepared(weights) if shared is None else with_shared(weights, shared)
    how, experts, num_slots = packed.how, steps.num_experts, steps.num_slots
    l1, l2 = steps["l1"], steps["l2"]
    block_m = tile_in(l1).block_m
    pool = launch.pool(how, num_slots, weights.hidden, experts, block_m, weights.device)
    work = launch.work_items(pool, (packed.w13, packed.w2), l1)
    tokens = ready(x, how) if isinstance(x, Quantized) else Tokens(x, g=weights.x_global)
    route(
        tokens, routing, how.acts, pool, steps, work=work, stats=stats, first_slot=first_slot,
        num_dest=rows.shape[1], num_shared=num_of(shared), by_group=how.to_e4m3, pdl=pdl,
    )  # fmt: skip
    acts = launch.pool(how, num_slots, weights.intermediate, experts, block_m, weights.device, pool)
    first, second = (None, None) if work is None else work.each()
    launch.gated(
        pool, packed.w13, acts, l1, how, options, items=first, bias=weights.b13,
        acts_factor=weights.acts_global, error=routing.error, use_pdl=pdl,
    )  # fmt: skip
    launch.linear(
        acts, packed.w2, rows, l2, how, options, items=second, bias=weights.b2,
        acts_factor=weights.acts_global, error=routing.error, use_pdl=pdl,
        chain=Chain(after=packed.w13),
    )  # fmt: skip


def tile_in(step: Launch) -> GemmSwapAb | Gemm:
    """The tile of a GEMM's launch."""
    assert isinstance(step.config, GemmSwapAb | Gemm)
    return step.config


def ready(x: Quantized, how: Arithmetic) -> Tokens:
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
