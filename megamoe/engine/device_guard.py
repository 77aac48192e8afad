"""Launches go to the current device: the one that a layer lies on must be it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_SAME = nullcontext()


def is_current(device: torch.device) -> bool:
    """Whether launches go to `device` as it is."""
    return device.type != "cuda" or device.index in (None, torch.cuda.current_device())


def on(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which launches go to `device`; where they do already it does nothing."""
    return _SAME if is_current(device) else torch.cuda.device(device)
