"""`torch.compiler.disable` for those who compile: it imports torch._dynamo, seconds that a process
which compiles nothing would wait before its first layer."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def eager(reason: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function that compiled models call as it stands, outside of their graphs."""

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        disabled: list[Callable[P, R]] = []

        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if "torch._dynamo" not in sys.modules:
                return fn(*args, **kwargs)
            if not disabled:
                disabled.append(torch.compiler.disable(fn, reason=reason))
            return disabled[0](*args, **kwargs)

        known = cast(Any, call)  # what torch.compile asks of a function that it would inline
        known._torchdynamo_disable, known._torchdynamo_disable_msg = True, reason
        return call

    return decorate
