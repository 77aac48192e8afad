"""Timing: a whole call, whatever launches it is made of."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable

import torch

from megamoe.errors import NotAvailable, RangeError, require

FLUSH_BYTES = 256 << 20  # written before each call, more than any L2 holds


def bench(
    fn: Callable[[], object],
    num_warmups: int = 5,
    num_tests: int = 10,
    high_precision: bool = False,
) -> float:
    """Mean seconds of a call of `fn`, one after the other; `high_precision` is accepted."""
    for _ in range(num_warmups):
        fn()
    once = _once_on_gpu if torch.cuda.is_available() else _once_on_cpu

    def all_of_them() -> None:
        for _ in range(num_tests):
            fn()

    return once(all_of_them) / num_tests


class empty_suppress(contextlib.nullcontext):  # type: ignore[type-arg]
    """Suppresses nothing."""


class suppress_stdout_stderr:
    """What is written to the process's standard output and error meanwhile goes nowhere."""

    def __enter__(self) -> suppress_stdout_stderr:
        sys.stdout.flush()
        sys.stderr.flush()
        self._saved = [(fd, os.dup(fd)) for fd in (1, 2)]
        self._streams = sys.stdout, sys.stderr
        self._nowhere = open(os.devnull, "w")
        for fd, _ in self._saved:
            os.dup2(self._nowhere.fileno(), fd)
        sys.stdout = sys.stderr = self._nowhere
        return self

    def __exit__(self, *_: object) -> None:
        self._nowhere.close()
        sys.stdout, sys.stderr = self._streams
        for fd, copy in self._saved:
            os.dup2(copy, fd)
            os.close(copy)


def bench_kineto(
    fn: Callable[[], object],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    with_multiple_kernels: bool = False,
    barrier: Callable[[], object] | None = None,
) -> float | tuple[float, ...]:
    """Mean seconds of one call of `fn`.

    Upstream reads the named kernel out of a profile. Megamoe's launches have other names and are
    several in staged mode, so the whole call is timed: by events on a GPU, by the clock elsewhere.
    """
    names = (kernel_names,) if isinstance(kernel_names, str) else tuple(kernel_names)
    require(
        len(names) == 1,
        "one name: the whole call is timed, not its kernels one by one",
        got=names,
        kind=NotAvailable,
    )
    require(num_tests >= 1, "num_tests must be at least 1", got=num_tests, kind=RangeError)
    fn()  # compiles what there is to compile
    if trace_path is not None:
        with torch.profiler.profile() as profile:
            fn()
        profile.export_chrome_trace(trace_path)
    once = _once_on_gpu if torch.cuda.is_available() else _once_on_cpu
    total = 0.0
    for _ in range(num_tests):
        if flush_l2 and torch.cuda.is_available():
            torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda").zero_()
        if barrier is not None:
            barrier()
        total += once(fn)
    mean = total / num_tests
    return mean if isinstance(kernel_names, str) else (mean,)


def _once_on_gpu(fn: Callable[[], object]) -> float:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    fn()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _once_on_cpu(fn: Callable[[], object]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start
