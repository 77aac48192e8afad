"""Staged mode of the portable backend: the layer as launches on one stream.

dispatch (quantise, check, pad) -> sort -> L1 with activation -> L2 to (token, slot) -> combine.
No host synchronisation and shapes that depend on sizes alone, so a call can be captured in a CUDA
graph and replayed with other routing; padding rows are masked and may hold anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.engine.weights import ExpertWeights
from megamoe.formats.quantized import Quantized
from megamoe.kernels.portable import launch
from megamoe.kernels.portable.combine import combine
from megamoe.kernels.portable.decode_tokens import decode_tokens
from megamoe.kernels.portable.dispatch import Routing, dispatch
from megamoe.kernels.portable.launch import Activations
from megamoe.kernels.portable.sort import Order, sort_slots
from megamoe.problem import Options
from megamoe.schedule.heuristics.portable import tiles


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
    pdl: bool = False,
) -> Tensor:
    """bf16 [T, H] -> bf16 [T, H]; `error` and `stats` are the words that the call adds to.

    With `pdl` each launch is placed while the one before it ends: the same bits.
    """
    num_tokens, hidden = x.shape
    top_k = topk_idx.shape[1]
    device = weights.device
    extra = 0 if shared is None else shared.num_experts
    y = torch.empty(num_tokens, hidden, dtype=torch.bfloat16, device=device)
    if num_tokens == 0:
        return y
    idx = torch.empty(num_tokens, top_k, dtype=torch.int32, device=device)
    weight = torch.empty(num_tokens, top_k, dtype=torch.float32, device=device)
    routing = Routing(topk_idx, topk_weights, idx, weight, error, num_valid)
    rows, row_scale = slots(num_tokens, top_k + extra, hidden, options, device)
    pass_one = Pass(x, weights, options, rows, row_scale, pdl)
    pass_one.run(idx, weight, first_slot=0, routing=routing, stats=stats)
    if shared is not None:
        every, ones = all_experts(num_tokens, extra, device)
        Pass(x, shared, options, rows, row_scale, pdl).run(every, ones, first_slot=top_k)
    combine(rows, row_scale, idx, weight, y, weighted=options.weight_at == "combine", pdl=pdl)
    return y


class Pass:
    """The routed experts, or the shared ones, over all tokens: their rows go to their slots."""

    def __init__(
        self,
        x: Tensor | Quantized,
        weights: ExpertWeights,
        options: Options,
        rows: Tensor,
        row_scale: Tensor | None,
        pdl: bool = False,
    ) -> None:
        self.x, self.weights, self.options = x, weights, options
        self.rows, self.row_scale, self.pdl = rows, row_scale, pdl
        self.how = launch.arithmetic_on(weights.device, weights.recipe)

    def run(
        self,
        idx: Tensor,
        weight: Tensor,
        *,
        first_slot: int,
        routing: Routing | None = None,
        stats: Tensor | None = None,
    ) -> None:
        """Dispatch, sort, L1 and L2 of these slots."""
        w, how = self.weights, self.how
        num_tokens, top_k = idx.shape
        tokens, x_global = self._tokens(routing)
        load = num_tokens * top_k / w.num_experts
        tile1, tile2, _ = tiles(w.recipe, load, is_native=how.is_native)
        order = Order.empty(idx.numel(), w.num_experts, tile1.block_m, w.device)
        sort_slots(idx, order, stats, pdl=self.pdl)
        acts = how.allocate(order.permuted_idx_to_expanded_idx.numel(), w.intermediate, w.device)
        launch.gated(
            tokens, w.w13, order, weight, acts, tile1, how, self.options, top_k=top_k,
            x_global=x_global, acts_global=w.acts_global, bias=w.b13, pdl=self.pdl,
        )  # fmt: skip
        launch.linear(
            acts, w.w2, order, self.rows, tile2, how, top_k=top_k, store="slots",
            out_scale=self.row_scale, first_slot=first_slot, topk_weights=weight, bias=w.b2,
            weight_bias=self.options.weight_at == "l1", x_global=w.acts_global, pdl=self.pdl,
        )  # fmt: skip

    def _tokens(self, routing: Routing | None) -> tuple[Activations, Tensor | None]:
        """Tokens as the GEMM loads them, and NVFP4's global scale of each; checks the routing."""
        x, w, how = self.x, self.weights, self.how
        if isinstance(x, Quantized):
            held, g = decode_tokens(x, how), x.global_scale
            if routing is not None:
                dispatch(
                    None, None, None, how.acts, routing=routing, num_experts=w.num_experts,
                    pdl=self.pdl,
                )  # fmt: skip
        else:
            held, g = how.allocate(*x.shape, w.device), w.x_global
            dispatch(
                x, launch.as_bytes(held.data), held.scale, how.acts, g=g, routing=routing,
                num_experts=w.num_experts, pdl=self.pdl,
            )  # fmt: skip
        return held, None if g is None else g.expand(x.shape[0]).contiguous()


def all_experts(num_tokens: int, num: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The routing of shared experts: each token to all of them, with weight 1."""
    every = torch.arange(num, dtype=torch.int32, device=device).repeat(num_tokens, 1)
    return every, torch.ones(num_tokens, num, device=device)


def slots(
    num_tokens: int, num_slots: int, hidden: int, options: Options, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Room for the rows on their way to combine, and their scales where they are FP8."""
    if options.combine == "bf16":
        return torch.empty(num_tokens, num_slots, hidden, dtype=torch.bfloat16, device=device), None
    rows = torch.empty(num_tokens, num_slots, hidden, dtype=torch.uint8, device=device)
    blocks = -(-hidden // 128)
    scale = torch.empty(num_tokens, num_slots, blocks, dtype=torch.uint8, device=device)
    return rows, scale
