"""Sizes of calls: modes over a group, and buckets that share a plan, its kernels and a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from megamoe.formats.spec import recipe_named
from megamoe.layout.regions import align_up
from megamoe.planner import hopper
from megamoe.planner.backends import reasons_on
from megamoe.planner.call import CallSpec
from megamoe.planner.choice import Value
from megamoe.planner.modes import auto_over_group

STEP = 256  # buckets above this are its multiples


class UpTo(NamedTuple):
    """What `auto` takes over a group, for bounds up to a number of tokens of a rank."""

    tokens: int
    mode: str
    why: str


def group_modes(call: CallSpec, overrides: Mapping[str, Value]) -> tuple[UpTo, ...]:
    """The modes of a layer over a group by the bound of a call, which all ranks know.

    >>> from megamoe.problem import Problem
    >>> flash = Problem(1, 4096, 2048, 256, 6, num_ranks=8, recipe="w4a8_block")
    >>> [found[:2] for found in group_modes(CallSpec(flash, max_tokens=4096), {})]
    [(120, 'fused'), (4096, 'chain')]
    """
    p, max_tokens = call.problem, call.max_tokens or 0
    edge = hopper.tokens_of_a_launch(
        p.recipe, max_tokens, p.num_ranks * p.top_k, p.num_experts, fits_e4m3=call.fits_e4m3
    )
    modes: list[UpTo] = []
    for bound in sorted({min(edge, max_tokens) or max_tokens, max_tokens}):
        here = replace(call, problem=replace(p, num_tokens=min(bound, 1)), max_tokens=bound)
        mode, why = auto_over_group(here, hopper.why_not_fused(here, overrides))
        if modes and modes[-1].mode == mode:
            modes.pop()
        modes.append(UpTo(bound, mode, why))
    return tuple(modes)


def quantized_mode(call: CallSpec, overrides: Mapping[str, Value]) -> UpTo | None:
    """What `auto` takes over a group for quantised tokens, at any bound; None: there are none.

    >>> from megamoe.problem import Problem
    >>> flash = Problem(1, 4096, 2048, 256, 6, num_ranks=8, recipe="w4a8_block")
    >>> quantized_mode(CallSpec(flash, max_tokens=64), {})[:2]
    (64, 'chain')
    """
    p, max_tokens = call.problem, call.max_tokens or 0
    if recipe_named(p.recipe).acts.name == "bf16":
        return None
    small = replace(p, num_tokens=min(p.num_tokens, max_tokens, 1))
    here = replace(call, problem=small, is_quantized=True)
    mode, why = auto_over_group(here, hopper.why_not_fused(here, overrides))
    return UpTo(max_tokens, mode, why)


def bucket_of(num_tokens: int, max_tokens: int) -> int:
    """The tokens of the bucket of a call: a power of two up to STEP, then its multiples.

    >>> [bucket_of(num, 2048) for num in (0, 1, 3, 8, 9, 200, 257)], bucket_of(65, max_tokens=100)
    ([1, 1, 4, 8, 16, 256, 512], 100)
    """
    is_small = num_tokens <= STEP
    bucket = 1 << (max(num_tokens, 1) - 1).bit_length() if is_small else align_up(num_tokens, STEP)
    return min(bucket, max_tokens)


def size_of(sizes: Sequence[UpTo], bound: int) -> UpTo:
    """The size of a call with this bound: the first that holds it, or the largest.

    >>> size_of((UpTo(120, "fused", ""), UpTo(4096, "chain", "")), 121).mode
    'chain'
    """
    return next((one for one in sizes if bound <= one.tokens), sizes[-1])


def planned_call(
    call: CallSpec, arch: str, overrides: Mapping[str, Value], max_tokens: int
) -> CallSpec:
    """The call as a layer plans it where its ranks pass `max_tokens`: with a bucket's bound.

    call  with the layer's own bound
    """
    mode, largest = overrides.get("mode", "auto"), call.max_tokens or 0
    if not call.is_group or not largest or mode == "staged":
        return call
    if mode != "chain" and reasons_on(arch)["hopper"]:
        return call  # fused calls of Blackwell have the layer's bound, staged ones none
    if mode == "fused" and hopper.passes_of(call)[0] > 1:
        return call
    edge = size_of(group_modes(call, overrides), max_tokens).tokens if mode == "auto" else largest
    return replace(call, max_tokens=bucket_of(max_tokens, edge))
