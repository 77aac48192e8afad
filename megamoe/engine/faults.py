"""What went wrong on the GPU, told without waiting for it.

Kernels treat a bad slot as masked and keep the first one's place in a word on the device. That word
follows each call to pinned memory; the next call, or `check()`, reads it there and raises.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.errors import RangeError, require

NONE = 2**31 - 1


class Faults:
    """The error word of one layer on one device."""

    def __init__(self, device: torch.device) -> None:
        self.word = torch.full((1,), NONE, dtype=torch.int32, device=device)
        self._seen: Tensor | None = torch.full(
            (1,), NONE, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda"
        )
        self._top_k = 1

    @classmethod
    def around(cls, word: Tensor) -> Faults:
        """A view of a word that somebody else reads: nothing travels, nothing is raised."""
        found = cls.__new__(cls)
        found.word, found._seen, found._top_k = word, None, 1
        return found

    def follow(self, top_k: int) -> None:
        """After a call: let the word travel to the host, on the call's stream."""
        self._top_k = top_k
        if self._seen is not None:
            self._seen.copy_(self.word, non_blocking=True)

    def raise_if_seen(self) -> None:
        """Raise what has arrived so far, once; never waits."""
        first = NONE if self._seen is None else int(self._seen)
        if self._seen is None or first == NONE:
            return
        self.word.fill_(NONE)
        self._seen.fill_(NONE)
        token, slot = divmod(first, self._top_k)
        require(
            False,
            "expert ids must name an expert or be -1, and topk_weights must be finite",
            got=f"otherwise at token {token}, slot {slot} of an earlier call",
            fix="the slot was treated as masked; mask it with expert -1",
            kind=RangeError,
        )

    def check(self, top_k: int) -> None:
        """Wait for the GPU, then raise what it found."""
        self._top_k = top_k
        if self._seen is not None:
            self._seen.copy_(self.word)
        self.raise_if_seen()


_BY_DEVICE: dict[torch.device, Faults] = {}


def of_device(device: torch.device) -> Faults:
    """The word that calls without a layer share."""
    if device not in _BY_DEVICE:
        _BY_DEVICE[device] = Faults(device)
    return _BY_DEVICE[device]
