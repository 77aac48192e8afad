"""ChainGroup: calls of a layer in mode chain whose ranks are processes, over symmetric memory.

Nothing that the host does depends on what the GPU found: calls can be captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megamoe.balance.placement import Placement
from megamoe.distributed.placement import Places
from megamoe.distributed.rendezvous import RESTART, Rendezvous
from megamoe.engine.group_memory import GroupMemory
from megamoe.engine.group_mode import GroupMode, Inputs, order_after_last
from megamoe.engine.launch_options import MAX_S
from megamoe.errors import NotAvailable, RankError, require
from megamoe.layout.regions import Workspace
from megamoe.planner import chain as planned
from megamoe.planner.plan import Plan

if TYPE_CHECKING:
    from megamoe.engine.layer import MoE
    from megamoe.kernels.portable import graph_io


def describe(plan: Plan) -> dict[str, Any]:
    """What more the ranks of a chain must have alike."""
    return {
        "fits_e4m3": plan.call.fits_e4m3,
        "symmetric bytes": planned.memory(plan.call, plan.backend).num_bytes,
    }


def regions(plan: Plan) -> Workspace:
    """What a rank shares with its peers."""
    return planned.memory(plan.call, plan.backend)


class ChainGroup(GroupMode):
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

        max_tokens = layer.max_tokens_per_rank
        self.mode = "split" if layer._wanted[1] == "split" else "chain"
        self.plan = plan = layer._plan_in(self.mode)
        assert max_tokens is not None
        self.num_tokens, where = max_tokens, regions(plan)
        peers = self._share(layer, rendezvous, where, memory)
        require(
            self.mode == "chain" or self._shared.ranks_here == 1,
            "mode split needs a GPU for each rank: it parts all of the GPU's SMs",
            got=f"{self._shared.ranks_here} ranks on one",
            fix="use mode='chain'",
            kind=NotAvailable,
        )
        layer._share_sms(plan.hardware.num_sms, self._shared.ranks_here)
        buffer = chain.buffer_in(self._shared.own, where)
        self._me = chain.Member(buffer, peers, rendezvous.rank, rendezvous.num_ranks)
        self._places = Places(placement, layer.weights.device)

    @property
    def why_eager(self) -> str:
        """Why no graph of the layer holds a call; "" where one does."""
        return "" if self.mode == "chain" else "on streams of the GPU's parts"

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        return self._me.num_ranks

    @property
    def begun_calls(self) -> tuple[Tensor, Tensor]:
        """(by rank, the last call that it began; words of this rank's own), as peers write them."""
        return self._me.buffer.begun, self._me.buffer.state

    def _accept(self, inputs: Inputs) -> None:
        pass

    def _make(self, layer: MoE, inputs: Inputs | None, bound: int | None, stats: Tensor) -> Tensor:
        self._check_whole()
        inputs = self._masked(layer, 0) if inputs is None else inputs
        bound = self.num_tokens if bound is None else bound
        try:
            return self._launch(layer, inputs, bound, stats, layer._launch.timeout_s)
        except BaseException as error:  # out of memory, Ctrl-C: peers may have what it pushed
            self.memory.lost = error
            raise

    def compile(self, layer: MoE, bound: int | None = None) -> None:
        """Compile what a call launches, and launch nothing: no rank waits for a peer's compiler."""
        if layer.weights.device.type != "cuda":
            return
        from megamoe.engine.compile_only import compiled_only

        bound = self.num_tokens if bound is None else bound
        with compiled_only():  # but for weights, which are packed
            stats = torch.zeros_like(layer.stats)
            self._launch(layer, self._masked(layer, bound), bound, stats, MAX_S)

    def warm(self, layer: MoE, bound: int | None = None) -> None:
        """A call with a masked token that all ranks make once they have compiled it."""
        order_after_last(layer.weights.device)
        bound = self.num_tokens if bound is None else bound
        stats = torch.zeros_like(layer.stats)
        self._launch(layer, self._masked(layer, 1), bound, stats, MAX_S)
        layer._status.check(layer.top_k)

    def inputs(self, bound: int, layer: MoE) -> graph_io.Inputs:
        """Where a graph of calls up to a bound finds its tokens."""
        from megamoe.kernels.portable import graph_io

        w = layer.weights
        return graph_io.Inputs.empty(bound, w.hidden, layer.top_k, w.device)

    def launch(self, layer: MoE, inputs: graph_io.Inputs, bound: int) -> Tensor:
        """A call on the inputs of a graph, for its capture."""
        args = inputs.x, inputs.topk_idx, inputs.topk_weights
        timeout_s = layer._launch.timeout_s
        return self._launch(layer, args, bound, layer.stats, timeout_s, inputs.count)

    def _launch(
        self,
        layer: MoE,
        inputs: Inputs,
        bound: int,
        stats: Tensor,
        timeout_s: float,
        count: Tensor | None = None,
    ) -> Tensor:
        from megamoe.engine import chain

        self._check_range(layer)
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
