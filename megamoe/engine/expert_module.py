"""ExpertModule: the experts of a layer as a torch module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megamoe.engine.fingerprint import counted
from megamoe.engine.weights import ExpertWeights


class ExpertModule(nn.Module):
    """ExpertWeights as buffers, so that a model's state_dict and device moves reach them."""

    def __init__(self, weights: ExpertWeights) -> None:
        super().__init__()
        self._recipe = weights.recipe
        self._names = {name.replace(".", "_"): name for name in weights.state_dict()}
        for name, t in weights.state_dict().items():
            self.register_buffer(name.replace(".", "_"), t)
        self._weights: ExpertWeights | None = weights
        self._owns = False  # the caller's tensors, which others may hold too

    @property
    def weights(self) -> ExpertWeights:
        if self._weights is None:
            for key in self._names:
                self._buffers[key] = counted(self.get_buffer(key))
            tensors = {name: self.get_buffer(key) for key, name in self._names.items()}
            self._weights = ExpertWeights.from_state_dict(tensors, self._recipe)
        return self._weights

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertModule:
        """Follow moves between devices, never casts: the bytes are the weights."""

        def move(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        self._weights = None
        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load into tensors of this module's own: those it was built from may be others' too."""
        if not self._owns:
            for key in self._names:
                self._buffers[key] = torch.empty_like(self.get_buffer(key))
            self._owns = True
        self._weights = None  # load_state_dict(assign=True) replaces the tensors
        super()._load_from_state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        w = self.weights
        return (
            f"{w.recipe}, {w.num_experts} of {w.hidden} x {w.intermediate}, {megabytes(w.nbytes)}"
        )


def megabytes(num_bytes: int) -> str:
    """For people: 0.4 MB, 428 MB.

    >>> megabytes(400_000), megabytes(427_819_008)
    ('0.4 MB', '428 MB')
    """
    return f"{num_bytes / 1e6:,.0f} MB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.1f} MB"
