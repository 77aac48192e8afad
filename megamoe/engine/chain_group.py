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
from megamoe.distributed.group import check_alike
from megamoe.distributed.placement import Places
from megamoe.distributed.rendezvous import RESTART, Rendezvous
from megamoe.engine import fused_group
from megamoe.engine.launch_options import MAX_S
from megamoe.engine.planning import log_once
from megamoe.errors import (
    CapacityError,
    MegaMoEError,
    MegaMoETimeout,
    NotAvailable,
    RankError,
    require,
)
from megamoe.formats.quantized import Quantized
from megamoe.planner import chain as planned
from megamoe.planner.plan import Plan

if TYPE_CHECKING:
    from megamoe.distributed.group import GroupWorld
    from megamoe.engine.layer import MoE


def join(layer: MoE, world: GroupWorld) -> tuple[Any, str]:
    """(calls over the group without a host between ranks, "") or (None, why they are staged).

    All ranks come to the same. `auto` is one fused launch where the plan of every rank is, the
    chain where that of every rank is and all reach each other's memory, and staged otherwise.
    """
    mode = layer._wanted[1]
    if layer.backend != "hopper" or mode in ("staged", "fused"):
        return fused_group.join(layer, world)
    if mode in ("chain", "split"):
        return ChainGroup(layer, world.meeting, world.placement), ""

    def look() -> list[Any]:
        try:
            plan = layer._plan_in("auto")
            return [plan.mode, plan.why, describe(plan)]
        except MegaMoEError as error:
            return ["staged", str(error), None]

    cards = world.meeting.meet("choose between modes", look)
    if any(mode != "chain" for mode, _, _ in cards):
        return fused_group.join(layer, world)
    try:
        check_alike([found for *_, found in cards])
        return ChainGroup(layer, world.meeting, world.placement), ""
    except MegaMoETimeout:
        raise
    except MegaMoEError as error:  # every rank has the same one
        log_once(f"calls over the group are staged, not a chain: {error}")
        return None, str(error)


def describe(plan: Plan) -> dict[str, Any]:
    """What more the ranks of a chain must have alike."""
    return {
        "fits_e4m3": plan.call.fits_e4m3,
        "symmetric bytes": planned.memory(plan.call).num_bytes,
    }


class ChainGroup:
    """This rank's shared memory, and where its peers' lies. Make it on all ranks."""

    def __init__(self, layer: MoE, meeting: Rendezvous, placement: Placement) -> None:
        from megamoe.distributed.symmetric import share
        from megamoe.engine import chain

        weights, most = layer.weights, layer.max_tokens_per_rank
        self.mode = "split" if layer._wanted[1] == "split" else "chain"
        plan = layer._plan_in(self.mode)
        assert most is not None
        self.num_tokens, self._fits = most, plan.call.fits_e4m3
        where = planned.memory(plan.call)
        self._shared = share(meeting, where.num_bytes, weights.device)
        # Ranks that share a GPU share its SMs.
        kept = dict(plan.overrides).get("reserve_sms") or 0
        assert isinstance(kept, int)
        require(
            self.mode == "chain" or self._shared.ranks_here == 1,
            "mode split needs a GPU for each rank: it parts all of the GPU's SMs",
            got=f"{self._shared.ranks_here} ranks on one",
            fix="use mode='chain'",
            kind=NotAvailable,
        )
        num_sms = plan.hardware.num_sms
        layer._reserve(num_sms - (num_sms - kept) // self._shared.ranks_here)
        peers = torch.tensor(self._shared.offsets, dtype=torch.int64, device=weights.device)
        buffer = chain.buffer_in(self._shared.own, where)
        self._me = chain.Member(buffer, peers, meeting.rank, meeting.num_ranks)
        self._places = Places(placement, weights.device)
        self._lost: Exception | None = None  # what ended a call between two of its launches

    @property
    def num_bytes(self) -> int:
        """Symmetric memory of this rank."""
        return self._shared.own.numel()

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
    ) -> Tensor:
        """One call on this rank; all ranks make it. bf16 [T, H]."""
        found = layer._status
        found.remedy = RESTART  # no rank knows how far its peers came
        fused_group.order_after_last(layer.weights.device)
        refusal: Exception | None = None
        try:
            found.raise_if_seen()
            check()
            self._check(x)
        except MegaMoETimeout:
            raise
        except Exception as error:
            refusal = error
            x, topk_idx, topk_weights = self._masked(layer, 0)
        self._check_whole()
        try:
            y = self._launch(layer, (x, topk_idx, topk_weights), stats, layer._launch.timeout_s)
        except Exception as error:  # out of memory, say: peers may have taken what it pushed
            self._lost = error
            raise
        found.copy_to_host_async(layer.top_k)
        if refusal is not None:
            raise refusal
        return y

    def compile(self, layer: MoE) -> None:
        """Compile what a call launches, and launch nothing: nobody waits for a peer's compiler."""
        if layer.weights.device.type != "cuda":
            return
        from megamoe.engine.compile_only import compiled_only

        with compiled_only():  # weights are packed by torch, which goes on
            stats = torch.zeros_like(layer.stats)
            self._launch(layer, self._masked(layer, self.num_tokens), stats, MAX_S)

    def warm(self, layer: MoE) -> None:
        """A call with a masked token that all ranks make once they have compiled it."""
        fused_group.order_after_last(layer.weights.device)
        self._launch(layer, self._masked(layer, 1), torch.zeros_like(layer.stats), MAX_S)
        layer._status.check(layer.top_k)

    def _launch(
        self,
        layer: MoE,
        inputs: tuple[Tensor | Quantized, Tensor, Tensor],
        stats: Tensor,
        timeout_s: float,
    ) -> Tensor:
        from megamoe.engine import chain, images

        require(
            images.fits_e4m3(layer.weights) == self._fits,
            "weights of a chain over a group must keep the range that it was built for",
            got="scales that changed what E4M3 can hold",
            fix="build the layer anew on all ranks",
            kind=NotAvailable,
        )
        x, topk_idx, topk_weights = inputs
        topk_idx = self._places.routed(topk_idx, self._me.rank)
        call = layer._call(x, topk_idx, topk_weights)._replace(stats=stats, timeout_s=timeout_s)
        plan = layer.plan(call.num_tokens, is_quantized=not isinstance(call.x, Tensor))
        return chain.run(self._me, call, plan)

    def _masked(self, layer: MoE, num: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens that no expert sees."""
        device = layer.weights.device
        x = torch.zeros(num, layer.weights.hidden, dtype=torch.bfloat16, device=device)
        idx = torch.full((num, layer.top_k), -1, dtype=torch.int32, device=device)
        return x, idx, torch.zeros(num, layer.top_k, dtype=torch.float32, device=device)

    def _check_whole(self) -> None:
        """Peers number calls by what this rank pushed: after half a call it cannot go on."""
        require(
            self._lost is None,
            "a rank of a chain must make all launches of a call",
            got=f"an earlier one that ended with {type(self._lost).__name__}: {self._lost}",
            fix=RESTART,
            kind=RankError,
        )

    def _check(self, x: Tensor | Quantized) -> None:
        require(
            x.shape[0] <= self.num_tokens,
            f"a call may hold at most max_tokens_per_rank = {self.num_tokens} tokens",
            got=x.shape[0],
            fix="split the batch or build the layer for more",
            kind=CapacityError,
        )
