"""ChainGroup: calls of a layer in mode chain whose ranks are processes, over symmetric memory.

The host never waits, and nothing it does depends on what the GPU found: calls can be captured. A
rank that refuses its own input takes part with no tokens, so that nobody waits for it, and raises
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megamoe.balance.placement import Placement
from megamoe.distributed.placement import Places
from megamoe.distributed.rendezvous import RESTART, Rendezvous
from megamoe.engine import fused_group
from megamoe.engine.group_memory import GroupMemory
from megamoe.engine.launch_options import MAX_S
from megamoe.errors import (
    MegaMoETimeout,
    NotAvailable,
    RankError,
    require,
)
from megamoe.formats.quantized import Quantized
from megamoe.layout.regions import Workspace
from megamoe.planner import chain as planned
from megamoe.planner.buckets import bucket_of
from megamoe.planner.plan import Plan

if TYPE_CHECKING:
    from megamoe.engine.layer import MoE
    from megamoe.kernels.portable.graph_io import Inputs


def describe(plan: Plan) -> dict[str, Any]:
    """What more the ranks of a chain must have alike."""
    return {
        "fits_e4m3": plan.call.fits_e4m3,
        "symmetric bytes": planned.memory(plan.call, plan.backend).num_bytes,
    }


def regions(plan: Plan) -> Workspace:
    """What a rank shares with its peers."""
    return planned.memory(plan.call, plan.backend)


class ChainGroup:
    """This rank's shared memory, and where its peers' lies. Make it on all ranks."""

    def __init__(
        self,
        layer: MoE,
        rendezvous: Rendezvous,
        placement: Placement,
        memory: GroupMemory | None = None,
    ) -> None:
        """memory  that of layers that are alike; None: its own"""
        from megamoe.engine import chain

        weights, most = layer.weights, layer.max_tokens_per_rank
        self.mode = "split" if layer._wanted[1] == "split" else "chain"
        plan = layer._plan_in(self.mode)
        assert most is not None
        self.num_tokens, self._fits = most, plan.call.fits_e4m3
        where = regions(plan)
        self.memory = memory or GroupMemory(layer._status)
        self._shared = self.memory.share(self.mode, rendezvous, where.num_bytes, weights.device)
        require(
            self.mode == "chain" or self._shared.ranks_here == 1,
            "mode split needs a GPU for each rank: it parts all of the GPU's SMs",
            got=f"{self._shared.ranks_here} ranks on one",
            fix="use mode='chain'",
            kind=NotAvailable,
        )
        layer._share_sms(plan.hardware.num_sms, self._shared.ranks_here)
        peers = torch.tensor(self._shared.offsets, dtype=torch.int64, device=weights.device)
        buffer = chain.buffer_in(self._shared.own, where)
        self._me = chain.Member(buffer, peers, rendezvous.rank, rendezvous.num_ranks)
        self._places = Places(placement, weights.device)

    def bucket(self, bound: int) -> int:
        """The bound that a call is planned for."""
        return bucket_of(bound, self.num_tokens)

    @property
    def why_eager(self) -> str:
        """Why no graph of the layer holds a call; "" where one does."""
        return "" if self.mode == "chain" else "on streams of the GPU's parts"

    @property
    def has_graphs(self) -> bool:
        """Whether a call can be replayed."""
        return not self.why_eager

    @property
    def num_bytes(self) -> int:
        """Symmetric memory of this rank."""
        return self._shared.own.numel()

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        return self._me.num_ranks

    @property
    def begun_calls(self) -> tuple[Tensor, Tensor]:
        """(by rank, the last call that it began; words of this rank's own), as peers write them."""
        return self._me.buffer.begun, self._me.buffer.state

    def __deepcopy__(self, memo: Any) -> ChainGroup:
        return self  # a copied layer has the same peers

    def __call__(
        self,
        layer: MoE,
        x: Tensor | Quantized,
        topk_idx: Tensor,
        topk_weights: Tensor,
        stats: Tensor,
        check: Callable[[], None],
        bound: int | None = None,
    ) -> Tensor:
        """One call on this rank; all ranks make it. bf16 [T, H].

        bound  tokens of a rank that it is planned for, the same on all; None: the layer's
        """
        bound = self.num_tokens if bound is None else bound
        status = layer._status
        status.remedy = fused_group.REMEDY  # no rank knows how far its peers came
        fused_group.order_after_last(layer.weights.device)
        refusal: Exception | None = None
        try:
            status.raise_if_seen()
            check()
        except (MegaMoETimeout, RankError):
            raise  # the ranks stand at different calls
        except Exception as error:
            refusal = error
            x, topk_idx, topk_weights = self._masked(layer, 0)
        self._check_whole()
        try:
            inputs = x, topk_idx, topk_weights
            y = self._launch(layer, inputs, bound, stats, layer._launch.timeout_s)
        except BaseException as error:  # out of memory, Ctrl-C: peers may have what it pushed
            self.memory.lost = error
            raise
        status.copy_to_host_async(layer.top_k)
        if refusal is not None:
            raise refusal
        return y

    def compile(self, layer: MoE, bound: int | None = None) -> None:
        """Compile what a call launches, and launch nothing: nobody waits for a peer's compiler."""
        if layer.weights.device.type != "cuda":
            return
        from megamoe.engine.compile_only import compiled_only

        bound = self.num_tokens if bound is None else bound
        with compiled_only():  # but for weights, which are packed
            stats = torch.zeros_like(layer.stats)
            self._launch(layer, self._masked(layer, bound), bound, stats, MAX_S)

    def warm(self, layer: MoE, bound: int | None = None) -> None:
        """A call with a masked token that all ranks make once they have compiled it."""
        fused_group.order_after_last(layer.weights.device)
        bound = self.num_tokens if bound is None else bound
        stats = torch.zeros_like(layer.stats)
        self._launch(layer, self._masked(layer, 1), bound, stats, MAX_S)
        layer._status.check(layer.top_k)

    def inputs(self, bound: int, layer: MoE) -> Inputs:
        """Where a graph of calls up to a bound finds its tokens."""
        from megamoe.kernels.portable.graph_io import Inputs

        w = layer.weights
        return Inputs.empty(bound, w.hidden, layer.top_k, w.device)

    def launch(self, layer: MoE, inputs: Inputs, bound: int) -> Tensor:
        """A call on the inputs of a graph, for its capture."""
        args = inputs.x, inputs.topk_idx, inputs.topk_weights
        timeout_s = layer._launch.timeout_s
        return self._launch(layer, args, bound, layer.stats, timeout_s, inputs.count)

    def _launch(
        self,
        layer: MoE,
        inputs: tuple[Tensor | Quantized, Tensor, Tensor],
        bound: int,
        stats: Tensor,
        timeout_s: float,
        count: Tensor | None = None,
    ) -> Tensor:
        from megamoe.engine import chain, images

        is_alike = layer.backend != "hopper" or images.fits_e4m3(layer.weights) == self._fits
        require(
            is_alike,
            "weights of a chain over a group must keep the range that it was built for",
            got="scales that changed what E4M3 can hold",
            fix="build the layer anew on all ranks",
            kind=NotAvailable,
        )
        x, topk_idx, topk_weights = inputs
        topk_idx = self._places.routed(topk_idx, self._me.rank)
        call = layer._call(x, topk_idx, topk_weights)._replace(
            stats=stats, timeout_s=timeout_s, num_valid=count
        )
        is_quantized = not isinstance(x, Tensor)
        plan = layer._plan_in(self.mode, bound, call.num_tokens, is_quantized=is_quantized)
        return chain.run(self._me, call, plan)

    def _masked(self, layer: MoE, num: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens that no expert sees."""
        device = layer.weights.device
        x = torch.zeros(num, layer.weights.hidden, dtype=torch.bfloat16, device=device)
        idx = torch.full((num, layer.top_k), -1, dtype=torch.int32, device=device)
        return x, idx, torch.zeros(num, layer.top_k, dtype=torch.float32, device=device)

    def _check_whole(self) -> None:
        """Peers number calls by what this rank pushed: after half a call it cannot go on."""
        lost = self.memory.lost
        require(
            lost is None,
            "a rank of a chain must make all launches of a call",
            got=f"an earlier one that ended with {type(lost).__name__}: {lost}",
            fix=RESTART,
            kind=RankError,
        )
