"""CapturedMemory: what graphs of ranks on one GPU replay on, kept when larger calls replace it."""

from __future__ import annotations

import torch

from megamoe.engine import status
from megamoe.errors import NotAvailable, require


class CapturedMemory:
    """Whether the ranks' memory is in somebody's graph, and what graphs had before it grew."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_captured = device, False
        self._before: list[object] = []

    def note(self) -> None:
        """Before a call: a capture has its memory."""
        self._is_captured |= status.is_capturing(self._device)

    def replace(self, had: object) -> None:
        """`had` is replaced by more: not in a capture, and not let go where a graph has it."""
        require(
            not status.is_capturing(self._device),
            "a captured call of ranks on one GPU must find its memory",
            got="a call with more tokens, or another top_k, than all before it",
            fix="make a call of that size, and this top_k, before the capture",
            kind=NotAvailable,
        )
        if self._is_captured:
            self._before.append(had)
        self._is_captured = False

    def clear(self) -> None:
        """Let go of all: graphs that were captured must not be replayed any more."""
        self._before, self._is_captured = [], False
