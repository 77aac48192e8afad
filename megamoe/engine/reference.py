"""The reference backend: the oracle (`megamoe.reference`), in PyTorch on a CPU or a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megamoe.engine.call import Call
from megamoe.engine.interface import Backend, SlotRows
from megamoe.engine.weights import ExpertWeights
from megamoe.formats.quantize import dequantize
from megamoe.formats.quantized import Quantized
from megamoe.planner.launches import Pass
from megamoe.planner.plan import Plan
from megamoe.reference import layer as oracle
from megamoe.routing.permute import expert_counts

if TYPE_CHECKING:
    from megamoe.kernels.portable.routing import Routing


class Reference(Backend):
    """The oracle; nothing is launched, whatever the plan."""

    name = "reference"

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        return weights

    def run(self, call: Call, plan: Plan) -> Tensor:
        y = oracle.moe(
            call.x, call.topk_idx, call.topk_weights, call.weights, call.options, call.shared
        )
        _count(call)
        return y

    def rows(
        self,
        call: Call,
        plan: Plan,
        steps: Pass | None,
        out: SlotRows,
        first_slot: int = 0,
        routing: Routing | None = None,
    ) -> None:
        """As in `Backend`, of quantised tokens; BF16 rows."""
        assert out.scale is None and isinstance(call.x, Quantized)
        plain = replace(call.options, combine="bf16")  # FP8 rows are made of the BF16 ones
        for expert in sorted(set(call.topk_idx.flatten().tolist()) - {-1}):
            token, slot = (call.topk_idx == expert).nonzero(as_tuple=True)
            values = dequantize(_pick(call.x, token), torch.float64)
            weight = call.topk_weights[token, slot]
            out.data[token, first_slot + slot] = oracle.expert_rows(
                values, weight, call.weights, expert, plain
            )
        _count(call)


def _count(call: Call) -> None:
    if call.stats is not None:
        call.stats.add_(expert_counts(call.topk_idx, call.weights.num_experts))


def _pick(q: Quantized, at: Tensor) -> Quantized:
    """Some rows of tokens, each with its own global scale if it has one."""
    parts: dict[str, Any] = {}
    for name, t in q.tensors().items():  # as bytes where they are FP8: every torch indexes those
        raw = t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t
        parts[name] = raw[at].view(t.dtype)
    return replace(q, shape=(len(at), q.shape[1]), **parts)


REFERENCE = Reference()
