"""The oracle: the layer in plain PyTorch, rounding exactly where the contract rounds.

Between two roundings everything is evaluated in float64 and rounded once, so the result is the
FP32 value of the contract and depends on no BLAS, thread count, batch or device (docs/numerics.md).
Only experts that some token uses are dequantised, one at a time. Kernels share no code with this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megamoe.errors import RangeError, require
from megamoe.formats.quantize import dequantize, quantize
from megamoe.formats.quantized import Quantized
from megamoe.formats.spec import recipe_named
from megamoe.problem import Options
from megamoe.routing.permute import expert_counts

GPT_OSS_ALPHA = 1.702
SITU_GATE, SITU_UP = 4.0, 25.0  # Kimi K3's


class Experts(Protocol):
    """What the oracle reads of a rank's weights; `engine.ExpertWeights` has it."""

    @property
    def recipe(self) -> str: ...
    @property
    def w13(self) -> Quantized: ...  # [E, 2, intermediate, hidden]: gate, then up
    @property
    def w2(self) -> Quantized: ...  # [E, hidden, intermediate]
    @property
    def b13(self) -> Tensor | None: ...  # float32 [E, 2, intermediate]
    @property
    def b2(self) -> Tensor | None: ...  # float32 [E, hidden]
    @property
    def x_global(self) -> Tensor | None: ...  # float32 scalar, NVFP4 only
    @property
    def acts_global(self) -> Tensor | None: ...  # float32 [E], NVFP4 only


def moe(
    x: Tensor | Quantized,
    topk_idx: Tensor,
    topk_weights: Tensor,
    weights: Experts,
    options: Options | None = None,
    shared: Experts | None = None,
) -> Tensor:
    """The layer on one rank: bf16 [T, H] or Quantized, [T, k], [T, k] -> bf16 [T, H]."""
    return expert_parallel([x], [topk_idx], [topk_weights], [weights], options, shared)[0]


def expert_parallel(
    x: Sequence[Tensor | Quantized],
    topk_idx: Sequence[Tensor],
    topk_weights: Sequence[Tensor],
    weights: Sequence[Experts],
    options: Options | None = None,
    shared: Experts | None = None,
) -> list[Tensor]:
    """What R ranks must give, each with its own tokens (any number, also none) and its own experts.

    Expert ids count over all ranks; rank r owns the r-th run of ids. `shared` experts stand on
    every rank and see every token of it with weight 1; their rows are added after the routed ones.
    """
    options = options or Options()
    outputs = []
    for tokens, idx, weight in zip(x, topk_idx, topk_weights, strict=True):
        routed = _Slots(tokens, idx.long(), weight.float(), options)
        first = 0
        for owner in weights:
            routed.fill(owner, first)
            first += len(owner.w13)
        y = combine(routed.rows, routed.valid, routed.weights, options)
        if shared is not None:
            y = add_shared(y, tokens, shared, options)
        outputs.append(y.to(torch.bfloat16))
    return outputs


def add_shared(y: Tensor, x: Tensor | Quantized, shared: Experts, options: Options) -> Tensor:
    """Add the rows of the shared experts, which see every token with weight 1, to FP32 [T, H]."""
    every = torch.arange(len(shared.w13), device=y.device).expand(len(y), len(shared.w13))
    slots = _Slots(x, every, torch.ones_like(every, dtype=torch.float32), options)
    slots.fill(shared, 0)
    return combine(slots.rows, slots.valid, slots.weights, options, start=y)


def received(topk_idx: Sequence[Tensor], num_experts: int, num_ranks: int) -> Tensor:
    """int64 [R, E / R]: tokens that each rank's experts receive from all ranks."""
    counts = sum(expert_counts(idx, num_experts) for idx in topk_idx)
    assert isinstance(counts, Tensor)
    return counts.view(num_ranks, -1)


class _Slots:
    """The rows of one rank's tokens, [T, k, H], filled expert by expert."""

    def __init__(
        self, x: Tensor | Quantized, idx: Tensor, weights: Tensor, options: Options
    ) -> None:
        self.x, self.idx, self.weights, self.options = x, idx, weights, options
        self.valid = idx >= 0
        dtype = torch.bfloat16 if options.combine == "bf16" else torch.float32
        self.rows = torch.zeros(*idx.shape, x.shape[-1], dtype=dtype, device=idx.device)

    def fill(self, experts: Experts, first: int) -> None:
        """Compute the slots that go to these experts, whose ids start at `first`."""
        acts = tokens_as(self.x, experts)
        for expert in range(len(experts.w13)):
            token, slot = (self.idx == first + expert).nonzero(as_tuple=True)
            if len(token):
                row = expert_rows(
                    acts[token], self.weights[token, slot], experts, expert, self.options
                )
                self.rows[token, slot] = row


def tokens_as(x: Tensor | Quantized, experts: Experts) -> Tensor:
    """The tokens as the recipe sees them: quantised to its activation format; float64 values."""
    acts = recipe_named(experts.recipe).acts
    if isinstance(x, Tensor):
        x = quantize(x, acts.name, global_scale=experts.x_global)
    require(
        x.format == acts.name,
        f"recipe {experts.recipe} takes {acts.name} tokens",
        got=x.format,
        fix="pass BF16 tokens, or quantise to the recipe's activation format",
        kind=RangeError,
    )
    return dequantize(x, torch.float64)


def expert_rows(
    x: Tensor, weight: Tensor, experts: Experts, expert: int, options: Options
) -> Tensor:
    """L1, activation, requantisation and L2 of one expert: float64 [m, H] -> rows for combine."""
    return l2_rows(l1_acts(x, weight, experts, expert, options), weight, experts, expert, options)


def l1_acts(x: Tensor, weight: Tensor, experts: Experts, expert: int, options: Options) -> Tensor:
    """L1, the activation and requantisation: float64 [m, H] -> float64 values [m, I]."""
    w13 = dequantize(experts.w13[expert], torch.float64)
    b13 = (None, None) if experts.b13 is None else experts.b13[expert]
    gate = linear(x, w13[0], b13[0]).to(torch.bfloat16)
    up = linear(x, w13[1], b13[1]).to(torch.bfloat16)
    acts = activate(gate, up, options)
    if options.weight_at == "l1":
        acts = acts * weight[:, None]
    g = None if experts.acts_global is None else experts.acts_global[expert]
    quantised = quantize(acts, recipe_named(experts.recipe).acts.name, global_scale=g)
    return dequantize(quantised, torch.float64)


def l2_rows(
    acts: Tensor, weight: Tensor, experts: Experts, expert: int, options: Options
) -> Tensor:
    """L2: float64 [m, I] -> BF16 [m, H], or under `combine="fp8"` the FP32 values of FP8 rows."""
    b2 = None if experts.b2 is None else experts.b2[expert]
    if b2 is not None and options.weight_at == "l1":
        b2 = b2 * weight[:, None]  # the weight already stands in the activations; bias needs it too
    w2 = dequantize(experts.w2[expert], torch.float64)
    rows = linear(acts, w2, b2).to(torch.bfloat16)
    if options.combine == "fp8":
        return dequantize(quantize(rows, "fp8_combine"))
    return rows


def linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """FP32 sums over k of float64 x [m, k] and w [n, k]; an FP32 bias is added in FP32."""
    sums = (x @ w.T).float()
    return sums if bias is None else sums + bias.float()


def activate(gate: Tensor, up: Tensor, options: Options) -> Tensor:
    """Clamp, then the gated activation of BF16 gate and up, in FP32: one rounding per operation."""
    g = gate.float().clamp(max=options.limit)
    u = up.float().clamp(-options.limit, options.limit)
    wide = g.double()
    if options.activation == "gpt_oss":
        return (wide / (1.0 + torch.exp(-GPT_OSS_ALPHA * wide))).float() * (u + 1.0)
    if options.activation == "situ":
        soft = SITU_GATE * torch.tanh(wide / SITU_GATE) / (1.0 + torch.exp(-wide))
        return soft.float() * (SITU_UP * torch.tanh(u.double() / SITU_UP)).float()
    if options.activation == "geglu":
        return (wide * 0.5 * (1.0 + torch.erf(wide * math.sqrt(0.5)))).float() * u
    if options.activation == "geglu_tanh":
        inner = math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide**3)
        return (wide * 0.5 * (1.0 + torch.tanh(inner))).float() * u
    return (wide / (1.0 + torch.exp(-wide))).float() * u


def combine(
    rows: Tensor, valid: Tensor, weights: Tensor, options: Options, start: Tensor | None = None
) -> Tensor:
    """Add the slots in ascending order in FP32: [T, k, H] -> [T, H]; masked ones add nothing."""
    total = torch.zeros_like(rows[:, 0], dtype=torch.float32) if start is None else start
    for slot in range(rows.shape[1]):
        row = rows[:, slot].float()
        if options.weight_at == "combine":
            row = row * weights[:, slot, None]
        total = torch.where(valid[:, slot, None], total + row, total)
    return total
