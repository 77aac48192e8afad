"""FusedGroup: fused calls of a layer whose ranks are processes, over symmetric memory.

Every rank puts its tokens and routing where its peers read them, then launches; the launches meet
on the GPU. The host never waits. A rank that refuses its own input takes part with no tokens, so
that nobody waits for it, and raises afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megamoe.distributed.group import check_alike
from megamoe.distributed.rendezvous import RESTART, Rendezvous
from megamoe.engine import rooms
from megamoe.engine.manner import MOST_S, Manner, check_grid
from megamoe.errors import (
    CapacityError,
    DTypeError,
    MegaMoEError,
    MegaMoETimeout,
    NotAvailable,
    require,
)
from megamoe.formats.quantized import Quantized
from megamoe.schedule.heuristics.hopper_fused import MOST_RANKS, MOST_SLOTS, passes
from megamoe.schedule.placement import Placement

if TYPE_CHECKING:
    from megamoe.distributed.group import GroupWorld
    from megamoe.engine.layer import MoE


def describe(layer: MoE, placement: Placement) -> dict[str, Any]:
    """Require what fused calls over a group need; what more the ranks must have alike."""
    num, most = placement.num_ranks, layer.max_tokens_per_rank
    require(
        layer.backend == "hopper",
        "fused calls over a group need Hopper GPUs",
        got=f"backend {layer.backend} on {layer.weights.device}",
        fix="use mode='auto' or 'staged'",
        kind=NotAvailable,
    )
    require(
        layer.shared is None,
        "fused calls over a group have no shared experts",
        got="shared experts",
        fix="use mode='auto' or 'staged'",
        kind=NotAvailable,
    )
    require(
        placement.is_contiguous,
        "fused calls over a group need contiguous experts, each once",
        got="another placement",
        fix="use mode='auto' or 'staged'",
        kind=NotAvailable,
    )
    require(
        num <= MOST_RANKS,
        f"fused calls take {MOST_RANKS} ranks at most",
        got=num,
        fix="use mode='auto' or 'staged'",
        kind=NotAvailable,
    )
    require(
        most is not None and most > 0,
        "fused calls over a group need max_tokens_per_rank: memory is shared up front",
        got=most,
        kind=CapacityError,
    )
    assert most is not None
    from megamoe.engine import fused

    _, each = _passes(layer, num)
    slots = num * each * layer.top_k
    tile = fused.tile_for(layer.weights, slots, ranks=num)
    require(
        tile is not None,
        f"a fused launch takes {MOST_SLOTS} slots at most, and few of them an expert",
        got=f"{num} ranks x top-{layer.top_k} over {num * layer.weights.num_experts} experts",
        fix="use mode='auto' or 'staged'",
        kind=CapacityError,
    )
    assert tile is not None
    most_rows = fused.num_rows(slots, layer.weights.num_experts)
    fused.ring(most_rows, layer._manner.pool_rows, tile.tokens)
    return {"fits_e4m3": fused.fits_e4m3(layer.weights)}


def join(layer: MoE, world: GroupWorld) -> tuple[FusedGroup | None, str]:
    """(fused calls over the group, "") or (None, why its calls are staged): all ranks alike.

    `auto` is fused where every rank can be and a call is one launch; more launches read all weights
    more than once, and staged calls do not.
    """
    mode = layer._wanted[1]
    if mode == "fused":
        return FusedGroup(layer, world.meeting), ""
    if mode == "staged":
        return None, "asked for"
    if layer.weights.device.type != "cuda":  # as on all ranks
        return None, "the experts lie on no GPU"

    def look() -> list[Any]:
        try:
            layer._take("fused")
            found = describe(layer, world.placement)
            num, _ = _passes(layer, world.num_ranks)
            return ["" if num == 1 else f"a call would take {num} fused launches", found]
        except MegaMoEError as error:
            return [str(error), None]

    cards = world.meeting.meet("choose the mode", look)
    whys = [f"rank {rank}: {why}" for rank, (why, _) in enumerate(cards) if why]
    try:
        if not whys:
            check_alike([found for _, found in cards])
            return FusedGroup(layer, world.meeting), ""
    except MegaMoETimeout:
        raise
    except MegaMoEError as error:  # every rank has the same one
        whys = [str(error)]
    layer._take("auto")
    return None, whys[0]


def _passes(layer: MoE, num_ranks: int) -> tuple[int, int]:
    """(launches of a call, tokens of a rank in each of them)."""
    from megamoe.engine import fused

    assert layer.max_tokens_per_rank is not None
    return passes(
        layer.weights.recipe, layer.max_tokens_per_rank, num_ranks * layer.top_k,
        num_ranks * layer.weights.num_experts, fits_e4m3=fused.fits_e4m3(layer.weights),
    )  # fmt: skip


class FusedGroup:
    """This rank's room, and its peers'. Make it on all ranks."""

    def __init__(self, layer: MoE, meeting: Rendezvous) -> None:
        from megamoe.distributed.symmetric import share
        from megamoe.engine import fused
        from megamoe.kernels.hopper import launch
        from megamoe.kernels.hopper.mega.launch import World

        weights, most = layer.weights, layer.max_tokens_per_rank
        assert most is not None
        self.num_tokens = most
        self.num_passes, self._each = _passes(layer, meeting.num_ranks)
        room = self.num_passes * self._each
        where = rooms.layout(room, weights.hidden, layer.top_k, self.num_passes)
        self._shared = share(meeting, where.num_bytes, weights.device)
        self.room = rooms.room_in(self._shared.own, where)
        slots = meeting.num_ranks * self._each * layer.top_k
        tile = fused.tile_for(weights, slots, ranks=meeting.num_ranks)
        assert tile is not None
        self._tile = tile
        peers = torch.tensor(self._shared.offsets, dtype=torch.int64, device=weights.device)
        self._world = World(meeting.num_ranks, 1, meeting.rank, peers, self.room.signals)
        # Ranks that share a GPU share its SMs: all launches of a call must be resident together.
        num_sms = launch.num_sms(weights.device)
        wanted = layer._manner
        taken = num_sms - (num_sms - wanted.reserve_sms) // self._shared.ranks_here
        self._manner = replace(wanted, reserve_sms=taken)

        def card() -> dict[str, int]:
            check_grid(num_sms, self._manner, 1)
            return {"CTAs of a launch": num_sms - taken}

        check_alike(meeting.meet("agree on the launch", card))

    @property
    def num_bytes(self) -> int:
        """Symmetric memory of this rank."""
        return self._shared.own.numel()

    def __deepcopy__(self, memo: Any) -> FusedGroup:
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
        found = layer._faults
        found.remedy = RESTART  # no rank knows how far its peers came
        found.in_turn()  # before the room is written to
        refusal: Exception | None = None
        try:
            found.raise_if_seen()
            check()
            self._check(x)
            assert isinstance(x, Tensor)
            self.room.put(x, topk_idx, topk_weights)
        except MegaMoETimeout:
            raise
        except Exception as error:
            refusal = error
            self.room.num_valid.zero_()
        y = self._launch(layer, stats, self._manner)
        found.follow(layer.top_k)
        if refusal is not None:
            raise refusal
        return y[: len(x)]

    def warm(self, layer: MoE) -> None:
        """Compile, in a call without tokens that all ranks make; nobody's first call is late."""
        self.room.num_valid.zero_()
        self._launch(layer, torch.zeros_like(layer.stats), replace(self._manner, timeout_s=MOST_S))
        layer._faults.check(layer.top_k)

    def _launch(self, layer: MoE, stats: Tensor, manner: Manner) -> Tensor:
        from megamoe.engine import fused

        found = layer._faults
        parts = [
            fused.over(
                self.room, self._each, layer.weights, layer.options, self._world, found.word,
                stats, tile=self._tile, found=found, manner=manner, number=number,
            )
            for number in range(self.num_passes)
        ]  # fmt: skip
        return parts[0] if self.num_passes == 1 else torch.cat(parts)

    def _check(self, x: Tensor | Quantized) -> None:
        require(
            isinstance(x, Tensor),
            "a fused launch takes BF16 tokens",
            got="quantised ones",
            fix="dequantise them, or build the layer with mode='staged'",
            kind=DTypeError,
        )
        require(
            x.shape[0] <= self.num_tokens,
            f"a call may hold at most max_tokens_per_rank = {self.num_tokens} tokens",
            got=x.shape[0],
            fix="split the batch or build the layer for more",
            kind=CapacityError,
        )
