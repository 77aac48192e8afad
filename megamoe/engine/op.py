"""The layer as one torch operator, so that `torch.compile(fullgraph=True)` sees a single node.

A compiled model passes the experts' tensors and a text that says what they are; the operator
puts them together again and runs the same checked call as everywhere else.
"""

from __future__ import annotations

import ast
import functools
import json
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from megamoe.engine.bounds import check_devices, check_fits, check_num_experts
from megamoe.engine.call import Call
from megamoe.engine.functional import check_shared, check_tokens, moe, run
from megamoe.engine.launch_options import AUTO, LaunchOptions
from megamoe.engine.packed import from_picture, pictured
from megamoe.engine.planning import plan_for, traits_of
from megamoe.engine.status import DeviceStatus
from megamoe.engine.weights import ExpertWeights
from megamoe.planner.overrides import Overrides
from megamoe.problem import Options


def describe(
    weights: ExpertWeights,
    shared: ExpertWeights | None,
    options: Options,
    backend: str,
    launch_options: LaunchOptions = AUTO,
    overrides: Overrides = (),
    *,
    top_k: int | None = None,
    max_tokens: int | None = None,
) -> str:
    """What the operator must know beside the tensors.

    top_k, max_tokens  what the layer was built for: other calls are refused; None: any
    """
    parts = [
        (w.recipe, list(w.held()), [pictured(m) for m in (w.w13, w.w2)])
        for w in (weights, shared)
        if w is not None
    ]
    how = {"options": asdict(options), "backend": backend, "launch_options": asdict(launch_options)}
    bounds = {"top_k": top_k, "max_tokens": max_tokens}
    return json.dumps({"parts": parts, **how, "overrides": overrides, "bounds": bounds})


@torch.library.custom_op("megamoe::moe", mutates_args=("stats", "error"))
def moe_op(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    tensors: list[Tensor],
    stats: Tensor,
    error: Tensor,
    what: str,
    max_tokens: int | None = None,
) -> Tensor:
    """bf16 [T, H], [T, k], [T, k] -> bf16 [T, H]; `what` comes from `describe`.

    error  the words of the layer's `DeviceStatus`, the counters of fused launches among them
    max_tokens  that this call may have; None: those of the layer
    """
    parts, options, backend, launch_options, overrides, bounds = _parse(what)
    weights, shared = _both(parts, tensors)
    check_tokens(x, topk_idx, topk_weights, weights)
    check_shared(shared, x, weights)
    check_num_experts(topk_idx, bounds["top_k"])
    check_fits(x, max_tokens, bounds["max_tokens"])
    traits = traits_of(backend, weights, shared)
    plan = plan_for(
        weights, options, traits, num_tokens=len(x), top_k=topk_idx.shape[1], overrides=overrides
    )
    call = Call(
        x, topk_idx, topk_weights, weights, options, shared,
        status=DeviceStatus.around(error), stats=stats, timeout_s=launch_options.timeout_s,
        is_poisoned=launch_options.is_poisoned,
    )  # fmt: skip
    return run(call, plan)


def _experts(recipe: str, tensors: dict[str, Tensor], pictures: list[Any]) -> ExpertWeights:
    """Canonical experts, or those of images."""
    if not any(pictures):
        return ExpertWeights.from_state_dict(tensors, recipe)
    parts: dict[str, Any] = {n: t for n, t in tensors.items() if "." not in n}
    for name, picture in zip(("w13", "w2"), pictures, strict=True):
        mine = {n.partition(".")[2]: t for n, t in tensors.items() if n.startswith(name + ".")}
        parts[name] = from_picture(picture, mine)
    return ExpertWeights(recipe, **parts)


@moe_op.register_fake
def _(x, topk_idx, topk_weights, tensors, stats, error, what, max_tokens=None):  # type: ignore[no-untyped-def]
    check_devices(x, topk_idx, topk_weights, *tensors, stats, error)
    return torch.empty_like(x, dtype=torch.bfloat16, memory_format=torch.contiguous_format)


@torch.library.custom_op("megamoe::moe_call", mutates_args=())
def call_op(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, tensors: list[Tensor], words: str
) -> Tensor:
    """`mm.moe` in a compiled function, which makes `words` of what is constant in its graph."""
    parts, how = _read(words)
    weights, shared = _both(parts, tensors)
    return moe(x, topk_idx, topk_weights, weights, shared=shared, **how)


@call_op.register_fake
def _(x, topk_idx, topk_weights, tensors, words):  # type: ignore[no-untyped-def]
    check_devices(x, topk_idx, topk_weights, *tensors)
    return torch.empty_like(x, dtype=torch.bfloat16, memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=256)
def _read(words: str) -> tuple[list[tuple[str, list[str], list[Any]]], dict[str, Any]]:
    """(recipe, names of the tensors and pictures of each set of experts, keywords of `moe`)."""
    experts, *pairs = words.split("|")
    parts = []
    for one in experts.split(";")[:-1]:
        recipe, names, *pictures = one.split(":")
        parts.append((recipe, names.split(","), [ast.literal_eval(text) for text in pictures]))
    how: dict[str, Any] = {"overrides": {}}
    for name, text in _pairs(pairs, "="):
        try:
            value = float(text) if text in ("inf", "nan") else ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        where, _, key = name.rpartition(".")
        (how[where] if where else how)[key] = value
    return parts, how


def _both(parts: list[Any], tensors: list[Tensor]) -> tuple[ExpertWeights, ExpertWeights | None]:
    """Routed and shared experts, put together again."""
    both, first = [], 0
    for recipe, names, pictures in parts:
        mine = dict(zip(names, tensors[first : first + len(names)], strict=True))
        both.append(_experts(recipe, mine, pictures))
        first += len(names)
    return both[0], both[1] if len(both) > 1 else None


def _pairs(texts: list[str], sign: str) -> list[tuple[str, str]]:
    return [(a, b) for a, _, b in (text.partition(sign) for text in texts)]


@functools.lru_cache(maxsize=256)
def _parse(
    what: str,
) -> tuple[list[Any], Options, str, LaunchOptions, Overrides, dict[str, int | None]]:
    read = json.loads(what)
    launch_options = LaunchOptions(**read["launch_options"])
    overrides = tuple((name, value) for name, value in read["overrides"])
    options, bounds = Options(**read["options"]), read["bounds"]
    return read["parts"], options, read["backend"], launch_options, overrides, bounds
