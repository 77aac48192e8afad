"""Launches that compile and launch nothing: a rank's first call must not wait for its compiler."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.compiler.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

_HERE = threading.local()  # is_on: whether this thread's launches are compiled and not made


class _Patch:
    """Triton's launch, replaced while any thread needs it: the last one puts it back."""

    def __init__(self) -> None:
        self.lock, self.num, self.real = threading.Lock(), 0, JITFunction.run

    def __enter__(self) -> None:
        with self.lock:
            if self.num == 0:
                self.real = JITFunction.run
                JITFunction.run = _instead_of(self.real)
            self.num += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.num -= 1
            if self.num == 0:
                JITFunction.run = self.real


_PATCH = _Patch()


def _instead_of(real: Any) -> Any:
    def run(kernel: JITFunction[Any], *args: Any, **options: Any) -> object:
        if not getattr(_HERE, "is_on", False):
            return real(kernel, *args, **options)
        options["warmup"] = True
        compiled = real(kernel, *args, **options)
        if isinstance(compiled, CompiledKernel) and torch.cuda.is_available():
            compiled.run  # noqa: B018  loads it: a later load could wait for a peer, or end a capture
        return compiled

    return run


@contextmanager
def compiled_only() -> Iterator[None]:
    """This thread's launches inside are compiled and loaded as they stand, and not made."""
    with _PATCH, _here(True):
        yield


@contextmanager
def launched() -> Iterator[None]:
    """This thread's launches inside are made, wherever it is: they write what others rely on."""
    with _here(False):
        yield


@contextmanager
def _here(is_on: bool) -> Iterator[None]:
    before, _HERE.is_on = getattr(_HERE, "is_on", False), is_on
    try:
        yield
    finally:
        _HERE.is_on = before
