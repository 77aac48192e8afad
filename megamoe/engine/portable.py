"""The portable backend: the layer as launches on one stream, in plain Triton.

dispatch (quantise, check, pad) -> sort -> L1 with activation -> L2 to (token, slot) -> combine.
Padding rows are masked and may hold anything.
"""

from __future__ import annotations

from torch import Tensor

from megamoe.engine import staged
from megamoe.engine.call import Call
from megamoe.engine.interface import Backend, SlotRows
from megamoe.engine.weights import ExpertWeights
from megamoe.formats.quantized import Quantized
from megamoe.kernels.portable import launch
from megamoe.kernels.portable.decode_tokens import decode_tokens
from megamoe.kernels.portable.dispatch import dispatch
from megamoe.kernels.portable.launch import Activations, Arithmetic
from megamoe.kernels.portable.routing import Routing
from megamoe.kernels.portable.sort import Order, sort_slots
from megamoe.planner.launches import Pass, PortableGemm
from megamoe.planner.numerics import numerics
from megamoe.planner.plan import Plan


class Portable(Backend):
    """Triton's kernels, which run on any GPU since Ampere."""

    name = "portable"
    has_fp8_rows = True

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        return weights.canonical()

    def run(self, call: Call, plan: Plan) -> Tensor:
        return staged.run(self, call, plan)

    def rows(
        self,
        call: Call,
        plan: Plan,
        steps: Pass,
        out: SlotRows,
        first_slot: int = 0,
        routing: Routing | None = None,
    ) -> None:
        w, top_k, pdl = self.prepare(call.weights), call.top_k, plan.overlaps
        idx, weight = call.topk_idx, call.topk_weights
        if routing is not None:
            idx, weight = routing.idx, routing.weights
        arithmetic = launch.arithmetic_of(
            w.recipe, numerics("portable", w.recipe, arch=plan.hardware.arch)
        )
        tokens, x_global = _tokens(call.x, w, arithmetic, routing, steps, pdl)
        l1, l2 = steps["l1"], steps["l2"]
        assert isinstance(l1.config, PortableGemm)
        order = Order.empty(idx.numel(), w.num_experts, l1.config.block_m, w.device)
        sort_slots(idx, order, steps, call.stats, pdl=pdl)
        acts = arithmetic.allocate(
            order.permuted_idx_to_expanded_idx.numel(), w.intermediate, w.device
        )
        launch.gated(
            tokens, w.w13, order, weight, acts, l1, arithmetic, call.options, top_k=top_k,
            factors=launch.Factors(w.b13, x_global, w.acts_global), pdl=pdl,
        )  # fmt: skip
        to = launch.Destination(
            "slots", out.scale, first_slot, top_k, topk_weights=weight,
            weight_bias=call.options.weight_at == "l1",
        )  # fmt: skip
        launch.linear(
            acts, w.w2, order, out.data, l2, arithmetic, to=to,
            factors=launch.Factors(w.b2, w.acts_global), pdl=pdl,
        )  # fmt: skip


def _tokens(
    x: Tensor | Quantized, w: ExpertWeights, arithmetic: Arithmetic, routing: Routing | None,
    steps: Pass, pdl: bool,
) -> tuple[Activations, Tensor | None]:  # fmt: skip
    """Tokens as the GEMM loads them, and NVFP4's global scale of each; checks the routing."""
    step, source, codes, scale, by = steps.find("dispatch"), None, None, None, None
    if isinstance(x, Quantized):
        acts, g = decode_tokens(x, arithmetic, steps.find("decode")), x.global_scale
    else:
        acts, g = arithmetic.allocate(x.shape[0], x.shape[1], w.device), w.x_global
        source, codes, scale, by = x, launch.as_bytes(acts.data), acts.scale, g
    if source is not None or routing is not None:
        assert step is not None
        dispatch(
            source, codes, scale, arithmetic.acts, g=by, routing=routing, num_experts=w.num_experts,
            step=step, pdl=pdl,
        )  # fmt: skip
    return acts, None if g is None else g.expand(x.shape[0]).contiguous()


PORTABLE = Portable()
