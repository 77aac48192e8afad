"""The layer over a process group: what each rank computes, and what all ranks must agree on."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megamoe import __version__
from megamoe.balance.placement import Placement
from megamoe.balance.statistics import Statistics
from megamoe.distributed.wire import Wire
from megamoe.engine import chain_group, fused_group, partition
from megamoe.engine.functional import check_values
from megamoe.engine.status import DeviceStatus
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import DTypeError, NotAvailable, ShapeError, require
from megamoe.formats.quantize import dequantize, quantize
from megamoe.formats.quantized import Quantized
from megamoe.formats.spec import recipe_named
from megamoe.planner.launches import Pass
from megamoe.planner.plan import MODES, Plan, rows_plan, shared_plan
from megamoe.problem import Options
from megamoe.reference import layer as reference

if TYPE_CHECKING:
    from megamoe.distributed.group import GroupWorld
    from megamoe.engine.layer import MoE

Planned = Callable[[int, bool], Plan]  # tokens of this rank, whether they come quantised


class RankCompute(ABC):
    """One rank's part in a call: its tokens quantised, its experts' rows, its tokens combined."""

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

    @abstractmethod
    def _quantize(self, x: Tensor) -> Quantized: ...

    @abstractmethod
    def rows(self, x: Quantized, expert: Tensor, weight: Tensor) -> Quantized: ...

    @abstractmethod
    def combine(
        self, rows: Quantized, slots: Tensor, x: Tensor | Quantized, idx: Tensor, weights: Tensor
    ) -> Tensor: ...


class ReferenceCompute(RankCompute):
    """With the oracle's arithmetic."""

    def _quantize(self, x: Tensor) -> Quantized:
        return quantize(x, self.acts, global_scale=self.weights.x_global)

    def rows(self, x: Quantized, expert: Tensor, weight: Tensor) -> Quantized:
        num, hidden = x.shape
        y = torch.empty(num, hidden, dtype=torch.bfloat16, device=expert.device)
        plain = replace(self.options, combine="bf16")  # FP8 rows are made of the BF16 ones
        for e in sorted(set(expert.tolist())):
            at = (expert == e).nonzero()[:, 0]
            values = dequantize(_pick(x, at), torch.float64)
            y[at] = reference.expert_rows(values, weight[at], self.weights, e, plain)
        self.stats += torch.bincount(expert, minlength=len(self.stats))
        return quantize(y, self.rows_wire.format)

    def combine(
        self, rows: Quantized, slots: Tensor, x: Tensor | Quantized, idx: Tensor, weights: Tensor
    ) -> Tensor:
        values = rows.data if rows.scale is None else dequantize(rows)
        slot_rows = torch.zeros(idx.numel(), rows.shape[1], dtype=values.dtype, device=idx.device)
        slot_rows[slots] = values
        slot_rows = slot_rows.view(*idx.shape, rows.shape[1])
        y = reference.combine(slot_rows, idx >= 0, weights, self.options)
        if self.shared is not None:
            y = reference.add_shared(y, x, self.shared, self.options)
        return y.to(torch.bfloat16)


class KernelCompute(RankCompute):
    """With a backend's kernels, in the launches of a staged plan."""

    backend: str

    def _quantize(self, x: Tensor) -> Quantized:
        from megamoe.kernels.portable.dispatch import quantize as launch

        steps = self.plan(len(x), False).before
        step = steps[0] if steps else None
        return launch(x, self.acts, g=self.weights.x_global, step=step)

    def steps(self, num_rows: int) -> Pass:
        """The launches of so many received rows."""
        plan = self.plan(1, True)
        return rows_plan(plan.call, self.backend, plan.hardware, num_rows, plan.overrides)

    def rows(self, x: Quantized, expert: Tensor, weight: Tensor) -> Quantized:
        num, hidden = x.shape
        if num == 0:
            slot_rows, scale = self._slot_rows(0, 1, hidden, expert.device)
        else:
            tokens = x.data if x.format == "bf16" else x
            chosen = expert.int()[:, None], weight[:, None].contiguous()
            slot_rows, scale = self._rows(tokens, *chosen, self.steps(num))
        slot_rows = slot_rows.view(num, hidden)
        if scale is None:
            return Quantized(slot_rows, None, "bf16", (num, hidden))
        return Quantized(
            slot_rows.view(torch.float8_e4m3fn),
            scale.view(num, scale.shape[-1]),
            "fp8_combine",
            (num, hidden),
        )

    def combine(
        self, rows: Quantized, slots: Tensor, x: Tensor | Quantized, idx: Tensor, weights: Tensor
    ) -> Tensor:
        from megamoe.kernels.portable.combine import combine

        (num_tokens, top_k), hidden = idx.shape, rows.shape[1]
        extra = 0 if self.shared is None else self.shared.num_experts
        y = torch.empty(num_tokens, hidden, dtype=torch.bfloat16, device=idx.device)
        if num_tokens == 0:
            return y
        plan = self.plan(num_tokens, not isinstance(x, Tensor))
        slot_rows, scale = self._slot_rows(num_tokens, top_k + extra, hidden, idx.device)
        at = slots // top_k * (top_k + extra) + slots % top_k
        slot_rows.view(-1, hidden)[at] = rows.data.view(slot_rows.dtype)
        if scale is not None and rows.scale is not None:
            scale.view(-1, scale.shape[-1])[at] = rows.scale
        if self.shared is not None:
            self._shared(x, slot_rows, scale, top_k, plan)
        weighted = self.options.weight_at == "combine"
        combine(slot_rows, scale, idx.int(), weights, y, step=plan.rest[-1], weighted=weighted)
        return y

    def _slot_rows(
        self, num: int, slots: int, hidden: int, device: torch.device
    ) -> tuple[Tensor, Tensor | None]:
        from megamoe.engine import portable

        return portable.slots(num, slots, hidden, self.options, device)

    @abstractmethod
    def _rows(
        self, x: Tensor | Quantized, idx: Tensor, weight: Tensor, steps: Pass
    ) -> tuple[Tensor, Tensor | None]:
        """Rows of one slot each [T, 1, H], and their scales where combine takes FP8."""

    @abstractmethod
    def _shared(
        self,
        x: Tensor | Quantized,
        slot_rows: Tensor,
        scale: Tensor | None,
        first_slot: int,
        plan: Plan,
    ) -> None:
        """The shared experts' rows into `slot_rows` [T, slots, H] from `first_slot` on."""


class PortableCompute(KernelCompute):
    """With the portable kernels."""

    backend = "portable"

    def _rows(
        self, x: Tensor | Quantized, idx: Tensor, weight: Tensor, steps: Pass
    ) -> tuple[Tensor, Tensor | None]:
        from megamoe.engine import portable

        slot_rows, scale = self._slot_rows(len(idx), 1, self.weights.hidden, idx.device)
        plan = self.plan(1, True)
        one = portable.ExpertPass(x, self.weights, self.options, slot_rows, scale, plan)
        one.run(idx, weight, steps, first_slot=0, stats=self.stats)
        return slot_rows, scale

    def _shared(
        self,
        x: Tensor | Quantized,
        slot_rows: Tensor,
        scale: Tensor | None,
        first_slot: int,
        plan: Plan,
    ) -> None:
        from megamoe.engine import portable

        assert self.shared is not None
        every = portable.all_experts(len(x), self.shared.num_experts, slot_rows.device)
        one = portable.ExpertPass(x, self.shared, self.options, slot_rows, scale, plan)
        one.run(*every, shared_plan(plan), first_slot=first_slot)


class HopperCompute(KernelCompute):
    """With the Hopper kernels: the bits of fused launches and of one rank."""

    backend = "hopper"

    def _rows(
        self, x: Tensor | Quantized, idx: Tensor, weight: Tensor, steps: Pass
    ) -> tuple[Tensor, Tensor | None]:
        from megamoe.engine import hopper
        from megamoe.kernels.portable.routing import Routing

        num, hidden = len(idx), self.weights.hidden
        slot_rows = torch.empty(num, 1, hidden, dtype=torch.bfloat16, device=idx.device)
        checked = torch.empty_like(idx), torch.empty_like(weight)
        routing = Routing(idx, weight, *checked, self.status.bad_slot, None)
        hopper.run_pass(
            x, self.weights, self.options, routing, slot_rows, steps, 0, self.stats, pdl=False
        )
        return self._as_wire(slot_rows, steps)

    def _as_wire(self, slot_rows: Tensor, steps: Pass) -> tuple[Tensor, Tensor | None]:
        from megamoe.engine import hopper

        step = steps.find("rows_to_fp8")
        return (slot_rows, None) if step is None else hopper.as_fp8(slot_rows, step, pdl=False)

    def _shared(
        self,
        x: Tensor | Quantized,
        slot_rows: Tensor,
        scale: Tensor | None,
        first_slot: int,
        plan: Plan,
    ) -> None:
        assert self.shared is not None
        num, hidden = self.shared.num_experts, self.weights.hidden
        own = torch.empty(len(x), num, hidden, dtype=torch.bfloat16, device=slot_rows.device)
        steps = shared_plan(plan)
        self._shared_rows(x, own, steps)
        rows, row_scale = self._as_wire(own, steps)
        slot_rows[:, first_slot:] = rows.view(slot_rows.dtype)
        if scale is not None and row_scale is not None:
            scale[:, first_slot:] = row_scale

    def _shared_rows(self, x: Tensor | Quantized, own: Tensor, steps: Pass) -> None:
        """Rows of the shared experts, in launches of their own."""
        from megamoe.engine import hopper

        assert self.shared is not None
        hopper.shared_rows(
            x, self.shared, self.options, self.status.bad_slot, own, steps, 0, pdl=False
        )


class BlackwellCompute(HopperCompute):
    """With the Blackwell kernels: the bits of one rank."""

    backend = "blackwell"

    def _rows(
        self, x: Tensor | Quantized, idx: Tensor, weight: Tensor, steps: Pass
    ) -> tuple[Tensor, Tensor | None]:
        from megamoe.engine import blackwell
        from megamoe.kernels.portable.routing import Routing

        out = torch.empty(len(idx), 1, self.weights.hidden, dtype=torch.bfloat16, device=idx.device)
        checked = torch.empty_like(idx), torch.empty_like(weight)
        routing = Routing(idx, weight, *checked, self.status.bad_slot, None)
        blackwell.rows(x, self.weights, self.options, routing, out, steps, 0, self.stats, pdl=False)
        return self._as_wire(out, steps)

    def _shared_rows(self, x: Tensor | Quantized, own: Tensor, steps: Pass) -> None:
        from megamoe.engine import blackwell

        assert self.shared is not None
        blackwell.shared_rows(
            x, self.shared, self.options, self.status.bad_slot, own, steps, 0, pdl=False
        )


COMPUTE: dict[str, type[RankCompute]] = {
    "reference": ReferenceCompute,
    "portable": PortableCompute,
    "hopper": HopperCompute,
    "blackwell": BlackwellCompute,
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
    """The placement in force; the weights must be as many as it has places on a rank."""
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

    def mine() -> list[list[int]]:
        return [layer.sent.tolist(), layer.stats.tolist()]

    w = layer.weights
    if world is None:
        placement, counts = Placement.contiguous(layer.num_experts, 1), [mine()]
    else:
        placement, counts = world.placement, world.rendezvous.gather("gather statistics", mine)
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


def _pick(q: Quantized, at: Tensor) -> Quantized:
    """Some rows of tokens; the wire gave every row its own global scale."""
    parts: dict[str, Any] = {}
    for name, t in q.tensors().items():  # as bytes where they are FP8: every torch indexes those
        raw = t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t
        parts[name] = raw[at].view(t.dtype)
    return replace(q, shape=(len(at), q.shape[1]), **parts)
