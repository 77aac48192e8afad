"""Changes to what the compiler makes: stages that Gluon has no words for.

A module that needs one registers a function of a stage's result ("ptx", "cubin"). Where the
compiler takes no such functions, kernels are compiled without, and must be right all the same.
"""

from collections.abc import Callable
from typing import Any

import triton

_CHANGES: list[tuple[str, Callable[[Any], Any], str]] = []


def change(stage: str, function: Callable[[Any], Any], key: str) -> None:
    """Have `function` called on what a stage gives, for every kernel that is compiled from now on.

    key  names what it does, for caches: another one when it writes something else
    """
    if not _CHANGES:
        _install()
    _CHANGES.append((stage, function, key))


def _changed(make: Callable[..., Any], function: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda source, metadata: function(make(source, metadata))


def _install() -> None:
    """Look at every kernel's stages, behind whoever looks already."""
    runtime = getattr(triton.knobs, "runtime", None)
    if not hasattr(runtime, "add_stages_inspection_hook"):
        return
    before = runtime.add_stages_inspection_hook

    def add(backend=None, stages=None, *rest):  # type: ignore[no-untyped-def]
        if stages is None:  # later compilers first ask what their own keys and hashes depend on
            key, digest = ("", "") if before is None else before()
            ours = "".join(sorted(key for _, _, key in _CHANGES))  # imports have any order
            return key + ours, digest + ours
        if before is not None:
            before(backend, stages, *rest)
        for stage, function, _ in _CHANGES:
            if stage in stages:
                stages[stage] = _changed(stages[stage], function)
        return None

    runtime.add_stages_inspection_hook = add
