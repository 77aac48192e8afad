"""ReplayQueue: what each replay of a graph is about, written where the GPU reads it.

Host and GPU count the slots of a ring, each for itself: whatever is written to one is followed by a
replay that takes it. A slot is written again once the GPU has taken it, as an event for each half
of the ring shows.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from megamoe.kernels.portable.graph_io import ReplayArgs

SLOTS = 256  # replays that may be under way
HALF = SLOTS // 2

_WORDS, _SIZE = struct.Struct("7q"), 64  # as in kernels/portable/graph_io.py
_LEFT: dict[torch.device, list[ReplayArgs]] = {}  # of queues that went: the GPU may still read them


class ReplayQueue:
    """The host's side of a `ReplayArgs`."""

    def __init__(self, device: torch.device) -> None:
        from megamoe.kernels.portable.graph_io import ReplayArgs

        self.device = device
        self.args: ReplayArgs = ReplayArgs.empty(SLOTS, device)
        self._bytes = memoryview(cast(Any, self.args.slots.numpy())).cast("B")
        self._at = 0
        self._taken = [torch.cuda.Event() for _ in range(2)]  # of each half
        weakref.finalize(self, _leave, device, self.args)

    def send(self, args: tuple[int, ...], launch: Callable[[], object]) -> None:
        """Write a call's seven words, and launch on the current stream what takes them.

        Whatever is raised, it is unknown whether they were taken: the queue must not be used again.
        """
        at = self._at
        if at % HALF == 0:
            self._taken[at // HALF].synchronize()  # hardly ever waits: half a ring lies between
        _WORDS.pack_into(self._bytes, at * _SIZE, *args)
        launch()
        at += 1
        if at % HALF == 0:
            self._taken[at // HALF - 1].record(torch.cuda.current_stream(self.device))
        self._at = at % SLOTS


def finish(device: torch.device) -> None:
    """Wait for the GPU; what queues left there is then free."""
    left = _LEFT.pop(device, [])
    torch.cuda.synchronize(device)
    left.clear()


def _leave(device: torch.device, args: ReplayArgs) -> None:
    """Keep it for a while; no wait, since this may run inside somebody's capture."""
    _LEFT.setdefault(device, []).append(args)
