"""Our own communication between vLLM's ranks: additional_config `"exchange": "megamoe"`.

A layer is one `mm.MoE` over vLLM's group of expert-parallel ranks: a rank brings the tokens that it
has and gets their finished rows. vLLM asks `moe_kernel` of a method whether it still has to gather
tokens and add rows; ours says that it has not. Ranks call their layers in step because vLLM's own
collectives need that too: idle ranks run dummy batches, and graphs are captured and replayed with
as many tokens everywhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.balance.placement import Placement
from megamoe.engine.layer import MoE
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import NotAvailable, require
from megamoe.integrations.shared_batch import Sharers

TIMEOUT_S = 600.0  # a rank may read its shards for minutes longer than another
# The tokens of the fullest rank in a call: what `MoE.forward` may take beside its own.
TAKES_BOUND = "max_tokens" in inspect.signature(MoE.forward).parameters


@dataclass(frozen=True, slots=True)
class Over:
    """vLLM's expert-parallel ranks, as a layer uses them.

    num_experts  over all ranks
    placement    None: contiguous
    max_tokens   the most that a rank brings in a call
    sharers      ranks that hold the same tokens; None: each has tokens of its own
    rank_tokens  gives the tokens by rank in the call that runs, as vLLM has them on all ranks;
                 None: it has none
    is_captured  whether vLLM captures calls in CUDA graphs
    """

    group: Any
    num_experts: int
    placement: Placement | None
    max_tokens: int
    sharers: Sharers | None
    rank_tokens: Callable[[], Sequence[int] | None]
    is_captured: bool = False

    def options(self) -> dict[str, Any]:
        """For `mm.MoE`."""
        return {
            "group": self.group,
            "placement": self.placement,
            "max_tokens_per_rank": self.max_tokens,
            "timeout_s": TIMEOUT_S,
        }

    def check(self, moe: MoE) -> None:
        """Refuse calls that vLLM would capture and that wait for the host."""
        require(
            not (self.is_captured and moe.mode == "staged"),
            "calls over a group that vLLM captures in CUDA graphs must not wait for the host",
            got=moe.why,
            fix="start vLLM with --enforce-eager, with fewer --max-num-batched-tokens, or without "
            '"exchange"',
            kind=NotAvailable,
        )

    def with_common_scale(self, weights: ExpertWeights) -> ExpertWeights:
        """NVFP4: tokens go to experts of all ranks, so their scale is the largest of all."""
        if weights.x_global is None:
            return weights
        common = weights.x_global.clone()
        dist.all_reduce(common, dist.ReduceOp.MAX, group=self.group)
        return replace(weights, x_global=common)

    def apply(self, moe: MoE, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """One call, which all ranks make; float32 weights."""
        bound = self._bound(x.shape[0])
        how = {} if bound is None or not TAKES_BOUND else {"max_tokens": bound}

        def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            y: Tensor = moe(x.contiguous(), ids.contiguous(), weights.contiguous(), **how)
            return y

        if self.sharers is None:
            return call(x, topk_ids, topk_weights)
        return self.sharers.run(call, x, topk_ids, topk_weights)

    def _bound(self, num_tokens: int) -> int | None:
        """Tokens of the fullest rank in this call, the same on all ranks."""
        by_rank = self.rank_tokens()
        if by_rank is None and (self.sharers is None or self.sharers.num < self.group.size()):
            return None
        most = num_tokens if by_rank is None else max(by_rank)
        most = most if self.sharers is None else self.sharers.rows(most)
        return min(most, self.max_tokens)  # vLLM may count tokens that ranks share


class Finished:
    """In place of vLLM's kernel: tokens are not to be gathered before, nor rows added after."""

    is_monolithic = False
    can_overlap_shared_experts = False
    consumes_expert_mask = False

    def output_is_reduced(self) -> bool:
        return True

    def supports_lora(self) -> bool:
        return False

    @property
    def fused_experts(self) -> Finished:
        return self

    @property
    def impl(self) -> Finished:
        return self


def is_wanted(layer: Any, exchange: str) -> bool:
    """Whether there are ranks between which we were asked to communicate."""
    ranks = layer.moe_config.moe_parallel_config
    return exchange == "megamoe" and bool(ranks.use_ep) and ranks.ep_size > 1


def why_not(layer: Any, parallel: Any) -> str:
    """Why vLLM must communicate; "" if we can.

    parallel  vLLM's ParallelConfig
    """
    ranks = layer.moe_config.moe_parallel_config
    if layer.global_num_experts % ranks.ep_size:
        return f"{layer.global_num_experts} experts do not divide by {ranks.ep_size} ranks"
    if getattr(parallel, "enable_elastic_ep", False):
        return "elastic expert parallelism has no process group"
    if getattr(parallel, "enable_dbo", False):
        return "dual batch overlap makes calls of two batches at once"
    if getattr(layer.moe_config, "skip_final_all_reduce", False):
        return "the model adds the ranks' rows itself"
    return ""


def over(layer: Any) -> Over:
    """vLLM's ranks of a layer that is being made."""
    from vllm.config import get_current_vllm_config  # type: ignore[import-not-found]
    from vllm.distributed import get_ep_group, get_tp_group  # type: ignore[import-not-found]

    config, experts = get_current_vllm_config(), layer.global_num_experts
    ranks, group = layer.moe_config.moe_parallel_config, get_ep_group()
    tensor_parallel = get_tp_group()
    sharers = None
    if not ranks.is_sequence_parallel and tensor_parallel.world_size > 1:
        sharers = Sharers(
            tensor_parallel.world_size, tensor_parallel.rank_in_group,
            lambda rows: tensor_parallel.all_gather(rows, dim=0),
        )  # fmt: skip
    most = layer.moe_config.max_num_tokens
    num_parts = tensor_parallel.world_size
    is_gpu = torch.device(layer.moe_config.device).type == "cuda"
    return Over(
        group.device_group,
        experts,
        placement_of(layer.expert_map_manager, experts, ranks.ep_size),
        -(-most // num_parts),
        sharers,
        _rank_tokens,
        is_gpu and not config.model_config.enforce_eager,
    )


def placement_of(manager: Any, num_experts: int, num_ranks: int) -> Placement | None:
    """Which experts vLLM puts on which rank; None: contiguous runs."""
    if getattr(manager, "placement_strategy", "linear") == "linear":
        return None
    return Placement(
        num_experts, tuple(tuple(range(r, num_experts, num_ranks)) for r in range(num_ranks))
    )


def _rank_tokens() -> Sequence[int] | None:
    from vllm.forward_context import (  # type: ignore[import-not-found]
        get_forward_context,
        is_forward_context_available,
    )

    if not is_forward_context_available():
        return None
    metadata = get_forward_context().dp_metadata
    if metadata is None:
        return None
    sizes: Sequence[int] = metadata.local_sizes or metadata.num_tokens_across_dp_cpu.tolist()
    return sizes
