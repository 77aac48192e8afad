"""Launches that compile and launch nothing: a rank's first call must not wait for its compiler."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton.runtime.jit import JITFunction


@contextmanager
def compiled_only() -> Iterator[None]:
    """This thread's launches inside are compiled as they stand, and not made."""
    real, thread = JITFunction.run, threading.get_ident()

    def run(kernel: JITFunction[Any], *args: Any, **options: Any) -> object:
        if threading.get_ident() == thread:
            options["warmup"] = True
        return real(kernel, *args, **options)

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = real
