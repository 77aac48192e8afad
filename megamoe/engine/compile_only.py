"""Launches that compile and launch nothing: a rank's first call must not wait for its compiler."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.compiler.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from megamoe.kernels.hopper.weights.pack_on_gpu import _pack_experts_kernel


@contextmanager
def compiled_only() -> Iterator[None]:
    """This thread's launches inside are compiled and loaded as they stand, and not made.

    But for those that pack experts: what is packed counts as packed, and later calls read it.
    """
    real, thread = JITFunction.run, threading.get_ident()

    def run(kernel: JITFunction[Any], *args: Any, **options: Any) -> object:
        if threading.get_ident() != thread or kernel is _pack_experts_kernel:
            return real(kernel, *args, **options)
        options["warmup"] = True
        made = real(kernel, *args, **options)
        if isinstance(made, CompiledKernel) and torch.cuda.is_available():
            made.run  # noqa: B018  loads it: a later load could wait for a peer, or end a capture
        return made

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = real
