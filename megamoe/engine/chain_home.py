"""The end of a chained call: rows that are home, and those of shared experts, to the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megamoe.engine import hopper
from megamoe.kernels.portable.combine import combine
from megamoe.kernels.portable.routing import Routing
from megamoe.planner.launches import Launch
from megamoe.planner.plan import Plan, shared_plan

if TYPE_CHECKING:
    from megamoe.engine.chain import _Ranked


def combine_rows(
    here: _Ranked, plan: Plan, rest: list[Launch], routing: Routing, y: Tensor
) -> None:
    """Rows that are home, and those of shared experts, to y [T, H]."""
    call, num = here.call, len(y)
    rows = here.me.buffer.rows[: num * here.num_slots].view(num, here.num_slots, -1)
    if rows.dtype == torch.uint8:
        _combine_fp8(here, plan, rest, routing, rows, y)
        return
    if call.shared is not None:
        here.backend.shared_rows(
            call.x, call.shared, call.options, call.status.bad_slot, rows, shared_plan(plan),
            call.top_k, here.pdl,
        )  # fmt: skip
    row_scale = None
    if call.options.combine == "fp8":
        rows, row_scale = hopper.as_fp8(rows, rest[-2], here.pdl)
    weighted = call.options.weight_at == "combine"
    combine(
        rows, row_scale, routing.idx, routing.weights, y, step=rest[-1], weighted=weighted,
        pdl=here.pdl,
    )  # fmt: skip


def _combine_fp8(
    here: _Ranked, plan: Plan, rest: list[Launch], routing: Routing, rows: Tensor, y: Tensor
) -> None:
    """The same of rows that came as FP8, their scales after them."""
    call, num, hidden = here.call, *y.shape
    codes, row_scale = rows[:, :, :hidden], rows[:, :, hidden:]
    if call.shared is not None:
        extra = call.shared.num_experts
        own = torch.empty(num, extra, hidden, dtype=torch.bfloat16, device=y.device)
        here.backend.shared_rows(
            call.x, call.shared, call.options, call.status.bad_slot, own, shared_plan(plan), 0,
            here.pdl,
        )  # fmt: skip
        own_codes, own_scale = hopper.as_fp8(own, rest[-2], here.pdl)
        codes[:, call.top_k :].copy_(own_codes)
        row_scale[:, call.top_k :, : own_scale.shape[2]].copy_(own_scale)
    weighted = call.options.weight_at == "combine"
    combine(
        codes, row_scale, routing.idx, routing.weights, y, step=rest[-1], weighted=weighted,
        pdl=here.pdl,
    )  # fmt: skip
