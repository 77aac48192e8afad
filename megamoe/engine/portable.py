"""The portable backend: the layer as launches on one stream, in plain Triton.

dispatch (quantise, check, pad) -> sort -> L1 with activation -> L2 to (token, slot) -> combine.
No host synchronisation and shapes that depend on sizes alone, so a call can be captured in a CUDA
graph and replayed with other routing; padding rows are masked and may hold anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.engine.call import Call
from megamoe.engine.weights import ExpertWeights
from megamoe.formats.quantized import Quantized
from megamoe.kernels.portable import launch
from megamoe.kernels.portable.combine import combine
from megamoe.kernels.portable.decode_tokens import decode_tokens
from megamoe.kernels.portable.dispatch import dispatch
from megamoe.kernels.portable.launch import Activations
from megamoe.kernels.portable.routing import Routing
from megamoe.kernels.portable.sort import Order, sort_slots
from megamoe.planner.launches import Pass, PortableGemm
from megamoe.planner.numerics import numerics
from megamoe.planner.plan import Plan
from megamoe.problem import Options


def run(call: Call, plan: Plan) -> Tensor:
    """The launches of a plan: bf16 [T, H] -> bf16 [T, H]."""
    device, hidden, top_k = call.weights.device, call.weights.hidden, call.top_k
    num_tokens = call.num_tokens
    extra = 0 if call.shared is None else call.shared.num_experts
    y = torch.empty(num_tokens, hidden, dtype=torch.bfloat16, device=device)
    if num_tokens == 0:
        return y
    idx = torch.empty(num_tokens, top_k, dtype=torch.int32, device=device)
    weight = torch.empty(num_tokens, top_k, dtype=torch.float32, device=device)
    inputs = call.topk_idx, call.topk_weights
    routing = Routing(*inputs, idx, weight, call.status.bad_slot, call.num_valid)
    rows, row_scale = slots(num_tokens, top_k + extra, hidden, call.options, device)
    first, *others = plan.passes
    one = ExpertPass(call.x, call.weights, call.options, rows, row_scale, plan)
    one.run(idx, weight, first, first_slot=0, routing=routing, stats=call.stats)
    for steps in others:
        assert call.shared is not None
        every, ones = all_experts(num_tokens, extra, device)
        shared = ExpertPass(call.x, call.shared, call.options, rows, row_scale, plan)
        shared.run(every, ones, steps, first_slot=top_k)
    (last,) = plan.rest
    weighted = call.options.weight_at == "combine"
    combine(rows, row_scale, idx, weight, y, step=last, weighted=weighted, pdl=plan.overlaps)
    return y


class ExpertPass:
    """The routed experts, or the shared ones, over all tokens: their rows go to their slots."""

    def __init__(
        self,
        x: Tensor | Quantized,
        weights: ExpertWeights,
        options: Options,
        rows: Tensor,
        row_scale: Tensor | None,
        plan: Plan,
    ) -> None:
        self.x, self.weights, self.options = x, weights.canonical(), options
        self.rows, self.row_scale, self.pdl = rows, row_scale, plan.overlaps
        how = plan.numerics
        if weights.recipe != plan.problem.recipe:  # shared experts
            how = numerics("portable", weights.recipe, arch=plan.hardware.arch)
        self.how = launch.arithmetic_of(weights.recipe, how)

    def run(
        self,
        idx: Tensor,
        weight: Tensor,
        steps: Pass,
        *,
        first_slot: int,
        routing: Routing | None = None,
        stats: Tensor | None = None,
    ) -> None:
        """Dispatch, sort, L1 and L2 of these slots."""
        w, how = self.weights, self.how
        top_k = idx.shape[1]
        tokens, x_global = self._tokens(routing, steps)
        l1, l2 = steps["l1"], steps["l2"]
        assert isinstance(l1.config, PortableGemm)
        order = Order.empty(idx.numel(), w.num_experts, l1.config.block_m, w.device)
        sort_slots(idx, order, steps, stats, pdl=self.pdl)
        acts = how.allocate(order.permuted_idx_to_expanded_idx.numel(), w.intermediate, w.device)
        launch.gated(
            tokens, w.w13, order, weight, acts, l1, how, self.options, top_k=top_k,
            factors=launch.Factors(w.b13, x_global, w.acts_global), pdl=self.pdl,
        )  # fmt: skip
        to = launch.Destination(
            "slots", self.row_scale, first_slot, top_k, topk_weights=weight,
            weight_bias=self.options.weight_at == "l1",
        )  # fmt: skip
        launch.linear(
            acts, w.w2, order, self.rows, l2, how, to=to,
            factors=launch.Factors(w.b2, w.acts_global), pdl=self.pdl,
        )  # fmt: skip

    def _tokens(self, routing: Routing | None, steps: Pass) -> tuple[Activations, Tensor | None]:
        """Tokens as the GEMM loads them, and NVFP4's global scale of each; checks the routing."""
        x, w, how = self.x, self.weights, self.how
        step = steps.find("dispatch")
        if isinstance(x, Quantized):
            held, g = decode_tokens(x, how, steps.find("decode")), x.global_scale
            if routing is not None:
                assert step is not None
                dispatch(
                    None, None, None, how.acts, routing=routing, num_experts=w.num_experts,
                    step=step, pdl=self.pdl,
                )  # fmt: skip
        else:
            held, g = how.allocate(x.shape[0], x.shape[1], w.device), w.x_global
            assert step is not None
            dispatch(
                x, launch.as_bytes(held.data), held.scale, how.acts, g=g, routing=routing,
                num_experts=w.num_experts, step=step, pdl=self.pdl,
            )  # fmt: skip
        return held, None if g is None else g.expand(x.shape[0]).contiguous()


def all_experts(num_tokens: int, num: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The routing of shared experts: each token to all of them, with weight 1."""
    every = torch.arange(num, dtype=torch.int32, device=device).repeat(num_tokens, 1)
    return every, torch.ones(num_tokens, num, dtype=torch.float32, device=device)


def slots(
    num_tokens: int, num_slots: int, hidden: int, options: Options, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Memory for the rows on their way to combine, and their scales where they are FP8."""
    if options.combine == "bf16":
        return torch.empty(num_tokens, num_slots, hidden, dtype=torch.bfloat16, device=device), None
    rows = torch.empty(num_tokens, num_slots, hidden, dtype=torch.uint8, device=device)
    blocks = -(-hidden // 128)
    scale = torch.empty(num_tokens, num_slots, blocks, dtype=torch.uint8, device=device)
    return rows, scale
