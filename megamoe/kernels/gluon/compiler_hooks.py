"""Changes to what the compiler makes of our kernels: stages that Gluon has no words for.

A module that needs one registers a function of a stage's result ("ptx", "cubin") with `change`. The
changes apply to kernels marked with `ours`, while they are compiled, in the thread that compiles
them. Other kernels of the process, and their cache keys, are as if this module were not there.
Where the compiler takes no such functions, kernels are compiled without, and are right all the
same.
"""

import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import triton

_CHANGES: list[tuple[str, Callable[[Any], Any], str]] = []
_LOCK = threading.Lock()
_COMPILING = threading.local()  # .depth: nested compilations of ours in this thread
_INSTALLED: list[Callable[..., Any] | None] = []  # one hook that was there before, per compilation


def change(stage: str, function: Callable[[Any], Any], key: str) -> None:
    """Have `function` called on what a stage gives, for our kernels compiled from now on.

    key  names what it does, for caches: another one when it writes something else
    """
    _CHANGES.append((stage, function, key))


def ours(kernel: Any) -> Any:
    """Mark a jit function: its compilations see the changes. -> the same function."""
    compile_kernel = getattr(kernel, "_do_compile", None)
    if compile_kernel is not None:  # Triton's interpreter compiles nothing

        def compile_with_changes(*args: Any, **options: Any) -> Any:
            if not hasattr(kernel.compile, "__wrapped__"):
                kernel.compile = _with_changes(kernel.compile)
            return compile_kernel(*args, **options)

        kernel._do_compile = compile_with_changes
        kernel.is_ours = True
    return kernel


def _with_changes(compile_kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`compile_kernel` with the changes; it may be called in a thread of the compiler's."""

    def compile_changed(*args: Any, **options: Any) -> Any:
        with applied():
            return compile_kernel(*args, **options)

    compile_changed.__wrapped__ = compile_kernel  # type: ignore[attr-defined]
    return compile_changed


@contextmanager
def applied():
    """What this thread compiles inside has the changes."""
    runtime = getattr(triton.knobs, "runtime", None)
    if not hasattr(runtime, "add_stages_inspection_hook"):
        yield
        return
    with _LOCK:
        if not _INSTALLED:
            _INSTALLED.append(runtime.add_stages_inspection_hook)
            runtime.add_stages_inspection_hook = _add_stages
        else:
            _INSTALLED.append(None)
    _COMPILING.depth = getattr(_COMPILING, "depth", 0) + 1
    try:
        yield
    finally:
        _COMPILING.depth -= 1
        with _LOCK:
            if len(_INSTALLED) == 1:
                runtime.add_stages_inspection_hook = _INSTALLED[0]
            _INSTALLED.pop()


def _changed(make: Callable[..., Any], function: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda source, metadata: function(make(source, metadata))


def _add_stages(backend=None, stages=None, *rest):  # type: ignore[no-untyped-def]
    """Triton's hook while one of ours is compiled: after the hook that was there before."""
    before = _INSTALLED[0]
    is_ours = getattr(_COMPILING, "depth", 0) > 0
    if stages is None:  # later compilers first ask what their own keys and hashes depend on
        key, digest = ("", "") if before is None else before()
        ours_key = "".join(sorted(key for _, _, key in _CHANGES)) if is_ours else ""
        return key + ours_key, digest + ours_key
    if before is not None:
        before(backend, stages, *rest)
    if is_ours:
        for stage, function, _ in _CHANGES:
            if stage in stages:
                stages[stage] = _changed(stages[stage], function)
    return None
