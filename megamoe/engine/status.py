"""What went wrong on the GPU, reported without waiting for it; and the counters of fused launches.

Kernels treat a bad slot as masked and keep the first one's place in a word on the device. A wait of
a fused launch that runs past its bound leaves a report beside it. Both follow a call to pinned
memory in one copy; the next call, or `check()`, reads them there and raises. Graphs hold no such
copy, which would take 7 us of every replay: replays are followed now and then.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from megamoe.errors import MegaMoEError, MegaMoETimeout, RangeError, RankError, require
from megamoe.planner.tables.hopper import COUNTERS, MAX_RANKS

NONE = 2**31 - 1

# The words: the first bad slot of each rank, the report, and in lines of their own the counters.
REPORT, STATUS_WORDS, FIRST_COUNTER = MAX_RANKS, MAX_RANKS + 8, 32
REPLAYS = 32  # that share a copy
_CLEAN = memoryview(array("i", [NONE] * REPORT + [0] * (STATUS_WORDS - REPORT)))

BARRIERS = {
    1: "the pool of tokens",
    2: "L1 of tile {where}",
    3: "the end of all ranks",
    4: "all tiles to be assigned",
    5: "rank {where} to begin the call",
    6: "wave {where} of the pool",
    7: "rank {where}, which gave the call up",
    8: "rank {where} to end the call",
    16: "rank {where} to push its tokens' slots",
    17: "rows that rank {where} computes",
    18: "its peers: rank {where} gave up and said so",
}
CHAIN = 16  # and on: waits of the chain
# No waits: ranks planned a call for different bounds, as this one saw, or one that stopped it.
UNLIKE, UNLIKE_STOPPED = (9, 19), 20
ANEW, RESET = "the next call starts anew", "call layer.reset() before the next call"
GAVE_UP = -1  # as a bad slot: a staged launch whose CTAs wait for each other gave up


class DeviceStatus:
    """The words of one layer on one device; of its `ranks` where one launch runs several.

    resets_itself  whether the call that raises a timeout also resets, where there is no layer
    explain        over a group: what a report comes from, where more than its own words say it
    """

    explain: Callable[[list[int]], MegaMoEError | None] | None = None

    def __init__(
        self, device: torch.device, *, ranks: int = 1, resets_itself: bool = False
    ) -> None:
        self._ranks, self._resets_itself, self._top_k = ranks, resets_itself, 1
        self.remedy = ANEW if resets_itself else RESET  # of a timeout
        self._calls = 0
        with torch.inference_mode(False):
            num = FIRST_COUNTER + COUNTERS
            self.storage = torch.empty(num, dtype=torch.int32, device=device)
            self._mirror: Tensor | None = torch.empty(
                STATUS_WORDS, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda"
            )
            self._reports = self.storage[:STATUS_WORDS]
        self._last: torch.cuda.Stream | None = None
        self._clear()

    @classmethod
    def around(cls, words: Tensor) -> DeviceStatus:
        """A view of words that somebody else reads: nothing travels, nothing is raised."""
        status = cls.__new__(cls)
        status.storage, status._mirror, status._last = words, None, None
        status._ranks, status._resets_itself, status._top_k = 1, False, 1
        status.remedy, status._calls = RESET, 0
        return status

    def __reduce__(self) -> tuple[object, ...]:
        where = self.storage[:0]  # which follows map_location; a copy has words of its own
        return _again, (where.clone(), self._ranks, self._resets_itself)

    @functools.cached_property
    def bad_slot(self) -> Tensor:
        """int32 [ranks]: where each rank's first bad slot is kept."""
        return self.storage[: self._ranks]

    @functools.cached_property
    def report(self) -> Tensor:
        """int32 [8]: what a wait past its bound leaves."""
        return self.storage[REPORT:STATUS_WORDS]

    @functools.cached_property
    def counters(self) -> Tensor:
        """int32 [COUNTERS]: zero between fused launches of one rank, which follow each other."""
        return self.storage[FIRST_COUNTER:]

    @functools.cached_property
    def _view(self) -> memoryview:
        """What has arrived, read in a tenth of the time that the tensor takes."""
        assert self._mirror is not None
        return memoryview(cast(Any, self._mirror.numpy()))

    def order_after_last(self) -> None:
        """Before a fused launch: its stream waits for that of the one before."""
        device = self.storage.device
        if self._mirror is None or device.type != "cuda" or is_capturing(device):
            return  # a graph's owner keeps its replays in turn
        now = torch.cuda.current_stream(device)
        if self._last is not None and now != self._last:
            now.wait_stream(self._last)
        self._last = now

    def copy_to_host_async(self, top_k: int, *, every: int = 1) -> None:
        """After a call: let the words travel to the host, on the call's stream; not in a capture.

        every  how many calls share a copy; the first one has its own
        """
        self._top_k = top_k
        calls = self._calls
        if calls % every == 0:
            if self._mirror is None or is_capturing(self.storage.device):
                return
            self._mirror.copy_(self._reports, non_blocking=True)
        self._calls = calls + 1

    def raise_if_seen(self) -> None:
        """Raise what has arrived so far; never waits. A timeout is raised until `reset`."""
        if self._mirror is None or self._view == _CLEAN:
            return
        value = self._view.tolist()
        if value[REPORT]:
            if self._resets_itself:
                self.reset()
            known = None
            if self.explain is not None and not is_capturing(self.storage.device):
                known = self.explain(value[REPORT:])
            raise known or _given_up(value[REPORT:], self.remedy)
        first, rank = min((word, rank) for rank, word in enumerate(value[: self._ranks]))
        if first == NONE:
            return
        self.bad_slot.fill_(NONE)
        self._mirror[:REPORT].fill_(NONE)
        if first == GAVE_UP:
            raise MegaMoETimeout(
                rank, "tiles or weights of other CTAs", 1, 0, "that call's result is wrong; retry"
            )
        token, slot = divmod(first, self._top_k)
        of = f" of rank {rank}" if self._ranks > 1 else ""
        require(
            False,
            "expert ids must name an expert or be -1, and topk_weights must be finite",
            got=f"otherwise at token {token}, slot {slot}{of} of an earlier call",
            fix="the slot was treated as masked; mask it with expert -1",
            kind=RangeError,
        )

    def check(self, top_k: int) -> None:
        """Wait for the GPU, then raise what it found."""
        self._top_k = top_k
        if self._mirror is not None:
            self._mirror.copy_(self._reports)
        self.raise_if_seen()

    def reset(self) -> None:
        """Wait for the GPU, then forget what it found; counters begin at zero again."""
        _wait(self.storage.device)
        self._clear()
        _wait(self.storage.device)

    def _clear(self) -> None:
        for words in (self.storage, self._mirror):
            assert words is not None
            words.zero_()
            words[:REPORT].fill_(NONE)


def _again(where: Tensor, ranks: int, resets_itself: bool) -> DeviceStatus:
    return DeviceStatus(where.device, ranks=ranks, resets_itself=resets_itself)


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched now goes into somebody's graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _given_up(report: list[int], remedy: str) -> MegaMoEError:
    """The report of `kernels/gluon/mega/sync.py` in words."""
    _, rank, cta, what, where, expected, value, _ = report
    if what in UNLIKE or what == UNLIKE_STOPPED:
        got = f"{expected} on rank {rank}, {value} on rank {where}"
        if what == UNLIKE_STOPPED:
            got = f"another on some rank, as rank {where} saw"
        return RankError(
            f"all ranks must pass the same max_tokens to a call (in buckets); got {got}; {remedy}"
        )
    barrier = BARRIERS.get(what, f"barrier {what}").format(where=where)
    of = "the chain" if what >= CHAIN else "a fused launch"
    waited_for = f"{barrier} (CTA {cta} of {of})"
    return MegaMoETimeout(rank, waited_for, expected, value, remedy)


_BY_STREAM: dict[tuple[torch.device, int | None], DeviceStatus] = {}


def of_stream(device: torch.device) -> DeviceStatus:
    """The words of calls without a layer: one for each stream, since their calls may overlap.

    A call that is being captured shares those of the device, and runs no fused launch: graphs of
    one stream may be replayed on several.
    """
    stream = None
    if device.type == "cuda" and not is_capturing(device):
        stream = torch.cuda.current_stream(device).cuda_stream
    for key in ((device, stream), (device, None)):  # both now: none may be made in a capture
        if key not in _BY_STREAM:
            _BY_STREAM[key] = DeviceStatus(device, resets_itself=True)
    return _BY_STREAM[device, stream]
