"""A staged call: routing checked, rows of routed and of shared experts, FP8 where asked, combine.

The launches are the plan's, on one stream (mode split has routed experts on two). No host
synchronisation and shapes that depend on sizes alone, so a call can be captured in a CUDA graph and
replayed with other routing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.engine.call import Call
from megamoe.engine.interface import Backend, SlotRows
from megamoe.kernels.portable.acts import CODES
from megamoe.kernels.portable.combine import combine
from megamoe.kernels.portable.dispatch import dispatch
from megamoe.kernels.portable.routing import Routing
from megamoe.planner.launches import Launch, Pass
from megamoe.planner.plan import Plan


def run(backend: Backend, call: Call, plan: Plan) -> Tensor:
    """The launches of a plan: bf16 [T, H] -> bf16 [T, H].

    With `plan.overlaps` each launch is placed while the one before it ends (docs/hopper.md).
    """
    num_tokens, hidden, device = call.num_tokens, call.weights.hidden, call.weights.device
    if num_tokens == 0:
        return torch.empty(0, hidden, dtype=torch.bfloat16, device=device)
    routing, is_fp8 = routing_of(call), call.options.combine == "fp8" and backend.has_fp8_rows
    slots = call.top_k + call.num_shared
    out = SlotRows.empty(num_tokens, slots, hidden, device, is_fp8=is_fp8)
    is_split = plan.mode == "split"
    num = sum(one.find("window") is not None for one in plan.passes) if is_split else 1
    routed, others = plan.passes[:num], plan.passes[num:]
    own = call._replace(shared=None) if others else call
    if is_split:
        from megamoe.engine import split

        split.rows(own, plan, routed, out.data, routing)
    else:
        backend.rows(own, plan, routed[0], out, routing=routing)
    return finish(
        backend, call, plan, out, routing.idx, routing.weights,
        shared=others[0] if others else None, to_fp8=fp8_step(plan),
    )  # fmt: skip


def fp8_step(plan: Plan) -> Launch | None:
    """The launch that makes rows FP8 for combine, if the plan has one."""
    return next((one for one in plan.rest if one.name == "rows_to_fp8"), None)


def routing_of(call: Call) -> Routing:
    """The routing as it comes, and memory for the checked one."""
    idx = torch.empty_like(call.topk_idx, dtype=torch.int32)
    weights = torch.empty_like(call.topk_weights)
    error = call.status.bad_slot
    return Routing(call.topk_idx, call.topk_weights, idx, weights, error, call.num_valid)


def finish(
    backend: Backend,
    call: Call,
    plan: Plan,
    out: SlotRows,
    idx: Tensor,
    weights: Tensor,
    *,
    shared: Pass | None,
    to_fp8: Launch | None,
) -> Tensor:
    """Rows of the routed experts, and those that shared experts have apart, to bf16 [T, H].

    idx, weights  the checked routing
    shared        launches of the shared experts; None: their rows are there, or there are none
    to_fp8        makes rows FP8 that are not, all of them or those of shared experts
    """
    y = torch.empty(call.num_tokens, call.weights.hidden, dtype=torch.bfloat16, device=idx.device)
    if shared is not None:
        shared_rows(backend, call, plan, shared, out, to_fp8)
    if to_fp8 is not None and out.scale is None:
        out = as_fp8(out.data, to_fp8)
    last, weighted = plan.rest[-1], call.options.weight_at == "combine"
    combine(*out, idx, weights, y, step=last, weighted=weighted, pdl=last.overlaps)
    return y


def shared_rows(
    backend: Backend,
    call: Call,
    plan: Plan,
    steps: Pass,
    out: SlotRows,
    to_fp8: Launch | None,
) -> None:
    """Shared experts in launches of their own: every token to all of them, with weight 1."""
    assert call.shared is not None
    num_tokens, num, device = call.num_tokens, call.num_shared, out.data.device
    every = torch.arange(num, dtype=torch.int32, device=device).repeat(num_tokens, 1)
    ones = torch.ones(num_tokens, num, dtype=torch.float32, device=device)
    own = call._replace(
        topk_idx=every, topk_weights=ones, weights=call.shared, shared=None, stats=None,
        num_valid=None,
    )  # fmt: skip
    if out.scale is None or backend.has_fp8_rows:
        backend.rows(own, plan, steps, out, call.top_k)
        return
    assert to_fp8 is not None
    plain = SlotRows.empty(num_tokens, num, call.weights.hidden, device, is_fp8=False)
    backend.rows(own, plan, steps, plain)
    codes, scale = as_fp8(plain.data, to_fp8)
    assert scale is not None
    out.data[:, call.top_k :].copy_(codes)
    out.scale[:, call.top_k :, : scale.shape[2]].copy_(scale)


def as_fp8(rows: Tensor, step: Launch) -> SlotRows:
    """BF16 rows [T, slots, H] as FP8, with an E8M0 scale per 128 columns."""
    num_tokens, num_slots, hidden = rows.shape
    codes, scale = SlotRows.empty(num_tokens, num_slots, hidden, rows.device, is_fp8=True)
    assert scale is not None
    flat = rows.flatten(0, 1), codes.flatten(0, 1), scale.flatten(0, 1)
    dispatch(*flat, CODES["fp8_combine"], step=step, pdl=step.overlaps)
    return SlotRows(codes, scale)
