"""GroupCalls: the modes of a layer over a group, and which of them a call has.

All ranks choose alike without asking each other: by `max_tokens`, the bound that they pass to a
call. One fused launch takes small bounds, the chain all others; each mode has shared memory of its
own. Ranks that pass different bounds see that on the device, where bounds travel with the signals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megamoe.distributed.group import check_alike
from megamoe.distributed.rendezvous import RESTART
from megamoe.engine import chain_group, fused_group
from megamoe.engine.bounds import check_bound
from megamoe.engine.chain_group import ChainGroup
from megamoe.engine.fused_group import FusedGroup
from megamoe.engine.group_memory import memory_for
from megamoe.engine.planning import log_once
from megamoe.engine.status import CHAIN, DeviceStatus
from megamoe.errors import (
    MegaMoEError,
    MegaMoETimeout,
    RankError,
)
from megamoe.planner.buckets import UpTo, size_of
from megamoe.planner.modes import WITHOUT_HOST
from megamoe.planner.plan import Plan

if TYPE_CHECKING:
    from megamoe.distributed.group import GroupWorld
    from megamoe.engine.layer import MoE

NO_HOST = "no host between ranks"
CAN = {"fused": "every rank can, in one launch", "chain": NO_HOST, "split": NO_HOST}


class Picked(NamedTuple):
    """What makes a call, and the tokens of a rank that it is planned for; None: a staged call."""

    calls: FusedGroup | ChainGroup | None
    bound: int


class GroupCalls:
    """The modes of a layer over a group that have no host between ranks, each where it is there.

    most       tokens of a rank that calls may have
    sizes      what `auto` came to, by the bound of a call; one mode that was asked for takes all
    quantized  what it came to for quantised tokens, at any bound; None: as for others
    has_graphs  whether the layer was asked to replay its calls
    """

    def __init__(
        self,
        fused: FusedGroup | None,
        chain: ChainGroup | None,
        most: int,
        sizes: tuple[UpTo, ...],
        quantized: UpTo | None = None,
        *,
        has_graphs: bool = False,
    ) -> None:
        self.fused, self.chain, self.most, self.sizes = fused, chain, most, sizes
        self.quantized = quantized
        modes = self._all if has_graphs else []
        self.why_eager = "; ".join(
            f"mode {one.mode} runs eagerly, {one.why_eager}" for one in modes if one.why_eager
        )
        if fused is not None and chain is not None and self.status.explain is None:
            self.status.explain = _OtherMode(fused, chain)

    def __deepcopy__(self, memo: Any) -> GroupCalls:
        return self  # a copied layer has the same peers

    @property
    def mode(self) -> str:
        """The mode of all calls with BF16 tokens, or "auto": it follows from their bounds."""
        modes = {one.mode for one in self.sizes}
        return modes.pop() if len(modes) == 1 else "auto"

    @property
    def why(self) -> str:
        """The modes by size, with their reasons; that of quantised tokens where it differs; which
        calls no graph holds where the layer was asked for graphs.
        """
        parts = []
        for one in self.sizes:
            upto = f"up to {one.tokens} tokens of a rank" if one.tokens < self.most else "above"
            size = "" if len(self.sizes) == 1 else f"{one.mode} {upto}: "
            parts.append(f"{size}{CAN.get(one.mode, one.why)}")
        ready = self.quantized
        if ready is not None and {one.mode for one in self.sizes} != {ready.mode}:
            parts.append(f"{ready.mode} for quantised tokens: {CAN.get(ready.mode, ready.why)}")
        return "; ".join([*parts, *filter(None, [self.why_eager])])

    @property
    def num_bytes(self) -> int:
        """Symmetric memory of this rank, of all layers that are alike."""
        return sum(one.num_bytes for one in self._all)

    @property
    def status(self) -> DeviceStatus:
        """That of all layers over the same memory."""
        return self._all[0].memory.status

    @property
    def _all(self) -> list[FusedGroup | ChainGroup]:
        return [one for one in (self.fused, self.chain) if one is not None]

    def checked(self, max_tokens: int | None) -> int:
        """The bound of a call: `max_tokens`, or that of the layer."""
        if max_tokens is None:
            return self.most
        check_bound(max_tokens, self.most)
        return max_tokens

    def pick(self, max_tokens: int | None, *, is_quantized: bool = False) -> Picked:
        """Who makes a call with this bound, which all ranks pass."""
        bound = self.checked(max_tokens)
        calls: FusedGroup | ChainGroup | None = self.chain
        if not (is_quantized and self.quantized is not None):  # no fused launch takes those
            is_fused = size_of(self.sizes, bound).mode == "fused"
            calls = self.fused if is_fused else self.chain
        if calls is None:
            return Picked(None, bound)
        return Picked(calls, calls.bucket(bound))

    def bounds(self, token_counts: Sequence[int]) -> list[Picked]:
        """Every mode and size of calls with these bounds, and of the layer's own."""
        counts = sorted({*(min(num, self.most) for num in token_counts), self.most})
        return list(dict.fromkeys(self.pick(num) for num in counts))


class _OtherMode:
    """After a timeout: which rank began a call of the other mode, as words in own memory prove.

    A rank that has begun more chains than this one, and not the fused call in which this rank waits
    for it, makes a chain at that place in the order; and the other way round.
    """

    def __init__(self, fused: FusedGroup, chain: ChainGroup) -> None:
        self._signals = fused.buffer.signals
        self._begun, self._state = chain.begun_calls
        self._num_ranks = chain.num_ranks
        self._known: RankError | None = None

    def __call__(self, report: list[int]) -> MegaMoEError | None:
        """The error of a report, if that is it. Reads the GPU's memory."""
        from megamoe.kernels.gluon.exchange import CALL, WAIT_BEGUN, WAIT_STOPPED
        from megamoe.kernels.gluon.mega import sync

        if self._known is not None:
            return self._known
        _, rank, _, what, _, call, *_ = report
        if what not in (sync.WAIT_RANK.value, WAIT_BEGUN.value, WAIT_STOPPED.value):
            return None  # what was expected is not the number of a call, or all have begun it
        num = self._num_ranks
        signals, begun, state = _read_now(self._signals, self._begun, self._state)
        of_fused = signals[sync.BEGUN.value :][:num], signals[sync.LAST_CALL.value]
        of_chain = begun[:num], state[CALL.value]
        is_chain = what >= CHAIN
        (mine, _), (others, last) = (of_chain, of_fused) if is_chain else (of_fused, of_chain)
        modes = ("a chain", "a fused launch") if is_chain else ("a fused launch", "a chain")
        for other in range(num):
            if mine[other] < call and last < others[other] < sync.TIMED_OUT.value:
                self._known = RankError(
                    "all ranks must make a call in the same mode: pass the same max_tokens, and "
                    f"quantised tokens on all ranks or on none; got {modes[0]} on rank {rank}, "
                    f"{modes[1]} on rank {other}; {RESTART}"
                )
                break
        return self._known


def _read_now(*words: Tensor) -> list[list[int]]:
    """Words of a GPU, without a wait for calls that are queued: each may run into its bound."""
    stream = torch.cuda.Stream(words[0].device) if words[0].is_cuda else None
    with torch.cuda.stream(stream):
        return [t.tolist() for t in words]


def join(layer: MoE, world: GroupWorld) -> tuple[GroupCalls | None, str]:
    """(calls over the group without a host between ranks, "") or (None, why they are staged).

    Logs once which calls no graph holds, where the layer was asked for graphs.
    """
    calls, why = _join(layer, world)
    eager = "" if calls is None else calls.why_eager
    if calls is None and layer._wants_graphs:
        eager = "staged calls run eagerly, since the host takes part in them"
        why = f"{why}; {eager}"
    if eager:
        log_once(f"cuda_graphs=True over a group: {eager}")
    return calls, why


def _join(layer: MoE, world: GroupWorld) -> tuple[GroupCalls | None, str]:
    """`join`, without a word of graphs.

    All ranks come to the same: `auto` takes what the plans of every rank say, and is staged where
    ranks do not reach each other's memory.
    """
    mode, most = layer._wanted[1], layer.max_tokens_per_rank
    if layer.backend not in ("hopper", "blackwell"):  # as on all ranks
        return None, f"backend {layer.backend} has only staged calls over a group"
    if mode == "staged":
        return None, "asked for"
    if mode in WITHOUT_HOST:
        assert most is not None  # or the plan was refused
        return _share(layer, world, most, (UpTo(most, mode, "asked for"),), None), ""

    def look() -> list[Any]:
        try:
            sizes, quantized = layer._modes()
            plans = _plans(layer, sizes, quantized)
            if not any(one.mode in WITHOUT_HOST for one in sizes):
                plans = {}
            how = {"fused": fused_group.describe, "chain": chain_group.describe}
            modes = [None if one is None else list(one) for one in (*sizes, quantized)]
            return [modes, [how[mode](plan) for mode, plan in plans.items()]]
        except MegaMoEError as error:
            return [[[0, "staged", str(error)], None], []]

    cards = world.rendezvous.gather("choose the modes", look)
    whys = [
        f"rank {rank}: {modes[-2][2]}" for rank, (modes, plans) in enumerate(cards) if not plans
    ]
    try:
        if not whys:
            check_alike([{"modes": [one and one[:2] for one in modes]} for modes, _ in cards])
            for plans in zip(*(plans for _, plans in cards), strict=True):
                check_alike(list(plans))
            *sizes, ready = cards[world.rendezvous.rank][0]
            assert most is not None
            quantized = None if ready is None else UpTo(*ready)
            if quantized is not None and quantized.mode not in WITHOUT_HOST:
                log_once(f"calls with quantised tokens over the group are staged: {quantized.why}")
            return _share(layer, world, most, tuple(UpTo(*one) for one in sizes), quantized), ""
    except MegaMoETimeout:
        raise
    except MegaMoEError as error:  # every rank has the same one
        whys = [str(error)]
    log_once(f"calls over the group are staged: {whys[0]}")
    return None, whys[0]


def _plans(layer: MoE, sizes: Sequence[UpTo], quantized: UpTo | None) -> dict[str, Plan]:
    """The plan of the largest call of every mode without a host between ranks."""
    modes = [*sizes, *(() if quantized is None else (quantized,))]
    return {
        one.mode: layer._plan_in(one.mode, one.tokens) for one in modes if one.mode in WITHOUT_HOST
    }


def _share(
    layer: MoE,
    world: GroupWorld,
    most: int,
    sizes: tuple[UpTo, ...],
    quantized: UpTo | None,
) -> GroupCalls:
    """The memory of every mode that there is, which layers that are alike share."""
    plans, fused, chained = _plans(layer, sizes, quantized), None, None
    regions = {"fused": fused_group.regions}
    where = {mode: regions.get(mode, chain_group.regions)(plan) for mode, plan in plans.items()}
    memory = memory_for(world.rendezvous, where, layer.top_k, layer._status)
    layer._status = memory.status
    for mode in plans:
        if mode == "fused":
            edge = next(one.tokens for one in sizes if one.mode == "fused")
            fused = FusedGroup(layer, world.rendezvous, edge, memory)
        else:
            chained = ChainGroup(layer, world.rendezvous, world.placement, memory)
    return GroupCalls(fused, chained, most, sizes, quantized, has_graphs=layer._wants_graphs)
