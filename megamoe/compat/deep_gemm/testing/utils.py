"""What the machine is, and when a test runs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch


def get_arch_major() -> int:
    """9 on Hopper, 10 on Blackwell; 0 without a GPU."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0


def test_filter(condition: Callable[[], bool]) -> Callable[..., Any]:
    """Run a function where `condition()` holds; elsewhere say that it was left out."""

    def decorate(fn: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> None:
            if condition():
                fn(*args, **kwargs)
            else:
                print(f"{fn.__name__}: left out")

        return run

    return decorate


test_filter.__test__ = False  # type: ignore[attr-defined]  # no test itself


def ignore_env(name: str, condition: Callable[[], bool]) -> Callable[..., Any]:
    """Run a function without an environment variable where `condition()` holds."""

    def decorate(fn: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> None:
            saved = os.environ.pop(name, None) if condition() else None
            try:
                fn(*args, **kwargs)
            finally:
                if saved is not None:
                    os.environ[name] = saved

        return run

    return decorate
