"""Checks of Blackwell's own instructions, before any kernel of the library: `blackwell_probe`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from megamoe.certify import blackwell_probe as probe
from megamoe.certify.checks import Check, Failed
from megamoe.certify.target import Target


def all_checks(target: Target) -> Iterator[Check]:
    """Copies, products by format and tokens, long sums: each leans on those before."""
    for name in probe.KINDS:
        run = partial(_product, target, name, 16, 512, is_copy=True)
        yield Check("hardware", f"{name}, copies alone", run)
    for name in probe.KINDS:
        for n in probe.NS:
            run = partial(_product, target, name, n, 512)
            yield Check("hardware", f"{name}, product of {n} tokens", run)
    for name in probe.KINDS:
        run = partial(_product, target, name, 16, 7168, is_adversarial=True)
        yield Check("hardware", f"{name}, 7168 terms that cancel", run)


def _product(
    target: Target,
    name: str,
    n: int,
    k: int,
    *,
    is_copy: bool = False,
    is_adversarial: bool = False,
) -> str:
    case = probe.case(probe.KINDS[name], n, k, is_adversarial=is_adversarial)
    sums = probe.product(name, n, case, target.device, multiply=not is_copy)
    if is_copy:
        if not bool((sums == 1).all()):
            raise Failed("the kernel ended before its copies")
        return "the barrier completed on the packed bytes"
    off = float(((sums.double() - case.y).abs() / case.size).max())
    text = f"off by {off:.1e} of the sum of sizes, bound {probe.BOUND:.1e}"
    if not off <= probe.BOUND:
        raise Failed(text)
    return text
