"""The layer over a process group: what each rank computes, and what all ranks must agree on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megamoe import __version__
from megamoe.balance.placement import Placement
from megamoe.balance.statistics import Statistics
from megamoe.distributed.wire import Wire
from megamoe.engine import chain_group, fused_group, partition
from megamoe.engine.call import Call
from megamoe.engine.functional import check_values
from megamoe.engine.interface import SlotRows, backend_named
from megamoe.engine.reference import REFERENCE
from megamoe.engine.status import DeviceStatus
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import DTypeError, NotAvailable, ShapeError, require
from megamoe.formats.quantize import dequantize, quantize
from megamoe.formats.quantized import Quantized
from megamoe.formats.spec import recipe_named
from megamoe.planner.plan import MODES, Plan, rows_plan, shared_plan
from megamoe.problem import Options
from megamoe.reference import layer as oracle

if TYPE_CHECKING:
    from megamoe.distributed.group import GroupWorld
    from megamoe.engine.layer import MoE

Planned = Callable[[int, bool], Plan]  # tokens of this rank, whether they come quantised


class RankCompute:
    """One rank's part in a call: its tokens quantised, its experts' rows, its tokens combined.

    The rows are those of a backend, in the launches of a staged plan: the bits of one rank.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        shared: ExpertWeights | None,
        options: Options,
        num_experts: int,
        stats: Tensor,
        plan: Planned,
        status: DeviceStatus,
    ) -> None:
        self.weights, self.shared, self.options = weights, shared, options
        self.num_experts, self.stats = num_experts, stats
        self.plan, self.status = plan, status
        self.acts = recipe_named(weights.recipe).acts.name
        self.tokens_wire = Wire(self.acts, weights.hidden)
        rows = "bf16" if options.combine == "bf16" else "fp8_combine"
        self.rows_wire = Wire(rows, weights.hidden)

    def check(self, topk_idx: Tensor, topk_weights: Tensor) -> None:
        check_values(topk_idx, topk_weights, self.num_experts)

    def tokens(self, x: Tensor | Quantized) -> Quantized:
        if isinstance(x, Quantized):
            return x
        if self.acts == "bf16":
            return Quantized(x, None, "bf16", tuple(x.shape))
        return self._quantize(x)

    def _quantize(self, x: Tensor) -> Quantized:
        from megamoe.kernels.portable.dispatch import quantize as launch

        steps = self.plan(len(x), False).before
        step = steps[0] if steps else None
        return launch(x, self.acts, g=self.weights.x_global, step=step)

    def _received(self, x: Tensor | Quantized, expert: Tensor, weight: Tensor) -> Call:
        """The call of rows that came: one slot each."""
        slot = expert.int()[:, None], weight[:, None].contiguous()
        return Call(x, *slot, self.weights, self.options, None, self.status, self.stats)

    def rows(self, x: Quantized, expert: Tensor, weight: Tensor) -> Quantized:
        from megamoe.engine import staged

        plan, (num, hidden) = self.plan(1, True), x.shape
        backend, is_fp8 = backend_named(plan.backend), self.options.combine == "fp8"
        out = SlotRows.empty(
            num, 1, hidden, expert.device, is_fp8=is_fp8 and (backend.has_fp8_rows or num == 0)
        )
        if num > 0:
            tokens = x.data if x.format == "bf16" else x
            call = self._received(tokens, expert, weight)
            steps = rows_plan(plan.call, plan.backend, plan.hardware, num, plan.overrides)
            backend.rows(call, plan, steps, out)
            to_fp8 = steps.find("rows_to_fp8")
            if to_fp8 is not None:
                out = staged.as_fp8(out.data, to_fp8)
        data, scale = out.data.view(num, hidden), out.scale
        if scale is None:
            return Quantized(data, None, "bf16", (num, hidden))
        codes, scale = data.view(torch.float8_e4m3fn), scale.flatten(0, 1)
        return Quantized(codes, scale, "fp8_combine", (num, hidden))

    def combine(
        self, rows: Quantized, slots: Tensor, x: Tensor | Quantized, idx: Tensor, weights: Tensor
    ) -> Tensor:
        from megamoe.engine import staged

        (num_tokens, top_k), hidden, device = idx.shape, rows.shape[1], idx.device
        if num_tokens == 0:
            return torch.empty(0, hidden, dtype=torch.bfloat16, device=device)
        plan = self.plan(num_tokens, not isinstance(x, Tensor))
        call = Call(x, idx, weights, self.weights, self.options, self.shared, self.status)
        total, is_fp8 = top_k + call.num_shared, self.options.combine == "fp8"
        out = SlotRows.empty(num_tokens, total, hidden, device, is_fp8=is_fp8)
        at = slots // top_k * total + slots % top_k
        out.data.view(-1, hidden)[at] = rows.data.view(out.data.dtype)
        if out.scale is not None and rows.scale is not None:
            out.scale.flatten(0, 1)[at] = rows.scale
        shared = None if self.shared is None else shared_plan(plan)
        return staged.finish(
            backend_named(plan.backend), call, plan, out, idx.int(), weights, shared=shared,
            to_fp8=None if shared is None else shared.find("rows_to_fp8"),
        )  # fmt: skip


class ReferenceCompute(RankCompute):
    """With the oracle's arithmetic."""

    def _quantize(self, x: Tensor) -> Quantized:
        return quantize(x, self.acts, global_scale=self.weights.x_global)

    def rows(self, x: Quantized, expert: Tensor, weight: Tensor) -> Quantized:
        num, hidden = x.shape
        out = SlotRows.empty(num, 1, hidden, expert.device, is_fp8=False)
        REFERENCE.rows(self._received(x, expert, weight), self.plan(1, True), None, out)
        return quantize(out.data.view(num, hidden), self.rows_wire.format)

    def combine(
        self, rows: Quantized, slots: Tensor, x: Tensor | Quantized, idx: Tensor, weights: Tensor
    ) -> Tensor:
        values = rows.data if rows.scale is None else dequantize(rows)
        slot_rows = torch.zeros(idx.numel(), rows.shape[1], dtype=values.dtype, device=idx.device)
        slot_rows[slots] = values
        slot_rows = slot_rows.view(*idx.shape, rows.shape[1])
        y = oracle.combine(slot_rows, idx >= 0, weights, self.options)
        if self.shared is not None:
            y = oracle.add_shared(y, x, self.shared, self.options)
        return y.to(torch.bfloat16)


COMPUTE: dict[str, type[RankCompute]] = {
    "reference": ReferenceCompute,
    **dict.fromkeys(("portable", "hopper", "blackwell"), RankCompute),
}


def join(layer: MoE, build: Callable[[int], Placement], group: Any, timeout_s: float) -> GroupWorld:
    """Build this rank's part of a layer together with all other ranks', or fail with them."""
    from megamoe.distributed.group import GroupWorld
    from megamoe.distributed.rendezvous import Rendezvous

    rendezvous = Rendezvous(group, timeout_s)

    def make() -> tuple[Placement, dict[str, Any]]:
        mode = layer._wanted[1]
        require(
            mode in MODES,
            f"over a process group megamoe {__version__} runs {', '.join(MODES)}",
            got=f"mode {mode}",
            kind=NotAvailable,
        )
        placement = build(rendezvous.num_ranks)
        what = {**describe(layer, placement), "timeout_s": timeout_s, "mode": mode}
        if mode == "fused":
            what |= fused_group.describe(layer._plan_in(mode))
        if mode in ("chain", "split") and layer.backend in ("hopper", "blackwell"):
            plan = layer._plan_in(mode)
            partition.prepare(plan, layer.weights.device)  # what one rank refuses, all do
            what |= chain_group.describe(plan)
        return placement, what

    return GroupWorld(rendezvous, make, max_tokens=layer.max_tokens_per_rank)


def placement_of(
    num_experts: int, num_ranks: int, weights: ExpertWeights, placement: Placement | None
) -> Placement:
    """The placement in force; a rank has one place for each expert of its weights."""
    if placement is None:
        local = weights.num_experts
        require(
            local * num_ranks == num_experts,
            "num_experts must be the experts of all ranks, and all ranks hold as many",
            got=f"num_experts {num_experts} with weights of {local} on each of {num_ranks} rank(s)",
            kind=ShapeError,
        )
        return Placement.contiguous(num_experts, num_ranks)
    require(
        isinstance(placement, Placement),
        "placement must be a Placement",
        got=type(placement).__name__,
        kind=DTypeError,
    )
    require(
        (placement.num_experts, placement.num_ranks) == (num_experts, num_ranks),
        f"placement must be of {num_experts} experts over {num_ranks} rank(s)",
        got=f"{placement.num_experts} experts over {placement.num_ranks}",
        kind=ShapeError,
    )
    require(
        weights.num_experts == placement.slots_per_rank,
        f"the placement has {placement.slots_per_rank} places on a rank",
        got=f"weights of {weights.num_experts} experts",
        fix="take this rank's with weights.take(placement.slots[rank])",
        kind=ShapeError,
    )
    return placement


def add_counts(counts: Tensor, topk_idx: Tensor) -> None:
    """counts[e] += slots of expert e; nothing waits for the GPU."""
    idx = topk_idx.reshape(-1).long()
    names_one = (idx >= 0) & (idx < len(counts))
    counts.scatter_add_(0, idx.where(names_one, 0), names_one.long())


def statistics(layer: MoE, world: GroupWorld | None) -> Statistics:
    """What all ranks sent and received."""

    def own_counts() -> list[list[int]]:
        return [layer.sent.tolist(), layer.stats.tolist()]

    w = layer.weights
    if world is None:
        placement, counts = Placement.contiguous(layer.num_experts, 1), [own_counts()]
    else:
        placement, counts = (
            world.placement,
            world.rendezvous.gather("gather statistics", own_counts),
        )
    sent, received = (tuple(tuple(rank[i]) for rank in counts) for i in range(2))
    return Statistics(w.hidden, w.intermediate, layer.top_k, w.recipe, placement, sent, received)


def describe(layer: MoE, placement: Placement) -> dict[str, Any]:
    """What all ranks must have alike; the first difference is what the error names."""
    weights, shared = layer.weights, None if layer.shared is None else layer.shared.weights
    device = weights.device
    arch = "" if device.type != "cuda" else str(torch.cuda.get_device_capability(device))
    where = "contiguous"
    if not placement.is_contiguous:
        where = hashlib.sha256(repr(placement.slots).encode()).hexdigest()[:12]
    return {
        "version": __version__,
        **_shape(weights),
        "num_experts": layer.num_experts,
        "top_k": layer.top_k,
        **asdict(layer.options),
        "backend": layer.backend,
        "device": device.type + arch,
        "experts_per_rank": weights.num_experts,
        "placement": where,
        "biases": [b is not None for b in (weights.b13, weights.b2)],
        "x_global": None if weights.x_global is None else float(weights.x_global),
        "shared": None if shared is None else {**_shape(shared), "num": shared.num_experts},
    }


def _shape(weights: ExpertWeights) -> dict[str, Any]:
    return {
        "recipe": weights.recipe,
        "hidden": weights.hidden,
        "intermediate": weights.intermediate,
    }
