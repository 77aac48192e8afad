#!/usr/bin/env python
"""Compile every configuration that plans of the Blackwell backend take, without a GPU, for sm_100a
and sm_103a, with the Triton that is imported.

    PYTHONPATH=. python scripts/compile_blackwell.py [--only REGEX] [--take N] [--full]

A configuration is one key of Triton's cache for sm_100a: what the engine's own launches ask for,
over the calls of `calls` (models, token counts, modes, options, ranks, grouped GEMMs alone), each
key once. `tests/kernels/test_every_blackwell.py` holds that random plans ask for no other tile.

Of each: no stack and no spills (the list of tiles may have 64 bytes, from Triton 3.7 on the fused
launch 96), no reduction of which Triton 3.6 dies for sm_103a; of Gluon's also the instructions of
its format (`tests/kernels/instructions.py`: the kind of MMA, copies of scales, TMA, gather4, all
that pairs of CTAs add), descriptors that PTX allows, a fence before and after tensor memory, a
barrier before arrivals, and the memory of a CTA. For sm_103a Triton makes the same PTX but for its
target where it has no MMA of its own: that PTX is assembled for sm_103a, and one in EIGHTH, and all
that may differ, are compiled in full and must have that PTX.
"""

import argparse
import hashlib
import itertools
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend

from megamoe.bench.workloads import MODELS
from megamoe.engine import recording
from megamoe.engine.recording import LayerSpec, make_calls, recorded
from megamoe.errors import MegaMoEError
from megamoe.hardware import B200, SMEM_PER_CTA
from megamoe.kernels.gluon import compiler_hooks
from megamoe.kernels.gluon.compat import HAS_PAIRS, VERSION
from megamoe.planner.grouped import VARIANTS
from megamoe.planner.numerics import BLACKWELL_RECIPES
from megamoe.planner.tables.blackwell import (
    BLOCK_MS,
    LEAST_PAIRED,
    PAIRED,
    TILES,
    TMEM_COLUMNS,
    WIDE_N,
)
from megamoe.problem import Options
from tests.kernels.blackwell import launch_grouped
from tests.kernels.compiling import resources
from tests.kernels.descriptors import decoded
from tests.kernels.instructions import Asked, wrong_instructions
from tests.proof.compiled import (
    assert_arrivals_follow_barriers,
    assert_is_alone_on_an_sm,
    assert_tensor_memory_is_fenced,
)

ARCHS = {100: "sm_100a", 103: "sm_103a"}
MACHINE = (B200.label, B200.num_sms, B200.arch, B200.hbm_bytes)
TOKENS = tuple(2**i for i in range(14))
CHAIN_TOKENS = (8, 16, 64, 112, 256, 512, 2048)  # of each of 8 ranks
FEW_TOKENS = (8, 512, 8192)  # of options, whose code is the same in every tile
EIGHTH = 8  # one in so many is compiled in full for sm_103a too
SHAPES = ("deepseek-v4-flash", "gpt-oss-120b")  # models that are tried in every recipe
# Of two ranks: memory for their counts leaves fewer stages, in tiles of few rows and of more.
MANY_EXPERTS, MANY_TOKENS = (768, 2048), (64, 512, 1365)
GEMMS = ("gemm_tmem_kernel", "mega_tmem_kernel")
FP32_REDUX = re.compile(r"redux\.sync\.\S*f32")
MORE = {  # beside a model's own options, in every recipe
    "rows in fp8": {"options": Options(combine="fp8")},
    "weight at combine": {"options": Options(weight_at="combine")},
    "graphs": {"graphs": True},
    "shared experts": {"shared": True},
}


class Found(NamedTuple):
    """A configuration: what asked for it first, its kernel, and what Triton compiles."""

    name: str
    kernel: str
    source: Any
    options: dict[str, Any]


# -- what plans ask for ----------------------------------------------------------------------------


def layer(recipe: str, model: str, mode: str, **more: Any) -> LayerSpec:
    """A model's layer in a recipe."""
    one = MODELS[model]
    given = (("backend", "blackwell"), ("mode", mode), *more.pop("given", ()))
    if more.pop("shared", False):
        own = recording.SharedSpec(1, recipe, one.intermediate, True, "launches of their own")
        more["shared"] = own
    how = {"options": one.options, "has_bias": one.has_bias, "id_bits": (64,), **more}
    return LayerSpec(
        recipe, one.hidden, one.intermediate, one.num_experts, one.top_k, MACHINE,
        overrides=given, **how,
    )  # fmt: skip


def layers() -> Iterator[tuple[str, LayerSpec, tuple[int, ...]]]:
    """Every layer whose calls are walked: its name, and the tokens of its calls."""
    for recipe, mode in itertools.product(BLACKWELL_RECIPES, ("staged", "fused")):
        own = (name for name, one in MODELS.items() if one.recipe == recipe)
        for model in dict.fromkeys((*SHAPES, *own)):
            yield f"{mode} {recipe} {model}", layer(recipe, model, mode), TOKENS
        flash = SHAPES[0]
        for what, more in MORE.items():
            yield f"{mode} {recipe}, {what}", layer(recipe, flash, mode, **more), FEW_TOKENS
        short = layer(recipe, flash, mode, id_bits=(32,))
        yield f"{mode} {recipe}, int32 ids", short, FEW_TOKENS
        ranks = {"num_ranks": 8, "max_tokens": 64}
        yield f"{mode} {recipe}, 8 processes", layer(recipe, flash, mode, **ranks), (64,)
        if mode == "staged":
            yield from chains(recipe)
        if mode == "staged" and recipe in PAIRED and HAS_PAIRS:  # offered, no default
            for rows in (m for m in BLOCK_MS if m >= LEAST_PAIRED):
                pair = layer(recipe, flash, mode, given=(("cta_pair", True), ("block_m", rows)))
                yield f"staged {recipe}, pairs of CTAs, tiles of {rows}", pair, (512,)
        if mode == "fused":
            together = {"num_ranks": 4, "local_ranks": 4}
            one = layer(recipe, flash, mode, **together)
            yield f"fused {recipe}, 4 ranks of a launch", one, TOKENS
            ring = layer(recipe, flash, mode, given=(("pool_rows", 512),))
            yield f"fused {recipe}, a ring", ring, FEW_TOKENS
            for experts, most in itertools.product(MANY_EXPERTS, MANY_TOKENS):
                wide = layer(recipe, flash, mode, num_ranks=2, max_tokens=most)
                wide = replace(wide, num_experts=experts)
                yield f"fused {recipe}, {experts} experts, up to {most} tokens", wide, (most,)


def chains(recipe: str) -> Iterator[tuple[str, LayerSpec, tuple[int, ...]]]:
    """A rank of eight, for the tokens of each tile; passes, rows in FP8, other experts."""
    flash = SHAPES[0]
    for most in CHAIN_TOKENS:
        one = layer(recipe, flash, "chain", num_ranks=8, max_tokens=most)
        yield f"chain {recipe}, up to {most} tokens", one, (most,)
    for what, more in (MORE | {"passes": {"given": (("pool_rows", 4096),)}}).items():
        one = layer(recipe, flash, "chain", num_ranks=8, max_tokens=512, **more)
        yield f"chain {recipe}, {what}", one, (512,)
    biased = layer(recipe, SHAPES[1], "chain", num_ranks=8, max_tokens=512)
    yield f"chain {recipe} {SHAPES[1]}", biased, (512,)


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every call, by name; those that no plan takes raise."""
    for name, one, tokens in layers():
        for num in tokens:
            yield f"{name}, {num} tokens", lambda one=one, num=num: make_calls(one, num)
    for *sizes, order in grouped_calls():
        what = f"grouped {' '.join(map(str, sizes))} {order['schedule']}"
        yield what, lambda sizes=sizes, order=order: launch_grouped(*sizes, **order)


def grouped_calls() -> Iterator[tuple[str, str, int, int, dict[str, Any]]]:
    """Recipe, variant, rows, outputs of a row and order of each grouped GEMM alone."""
    edges = sorted({edge for _, edge, *_ in TILES})
    orders = {"schedule": "static"}, {"schedule": "dynamic", "sort_by_m": True}
    for recipe, variant in itertools.product(BLACKWELL_RECIPES, VARIANTS):
        for edge, n, order in itertools.product(edges, (256, WIDE_N + 128), orders):
            rows = 4 * int(min(edge, 128.0))  # of 4 groups: the last row of each band
            yield recipe, variant, rows, n, order


def configurations(only: str = "") -> dict[str, Found]:
    """By key, in the order of `calls`; of calls whose names match."""
    found: dict[str, Found] = {}
    real, asked_by = recording._cubin, [""]

    def kept(src: Any, target: Any, options: dict[str, Any], compile_it: Any) -> Any:
        one = real(src, target, options, compile_it)
        found.setdefault(one.hash, Found(asked_by[0], one.kernel, src, options))
        return one

    recording._cubin = kept
    try:
        for asks, call in calls():
            asked_by[0] = asks
            if not re.search(only, asks):
                continue
            try:
                with recorded(GPUTarget("cuda", 100, 32)):
                    call()
            except MegaMoEError:
                continue  # refused by name
    finally:
        recording._cubin = real
    return found


# -- one of them -----------------------------------------------------------------------------------


class Made(NamedTuple):
    """What was compiled, as `resources` and the checks read it."""

    asm: dict[str, Any]
    metadata: Any


def compiled(one: Found, arch: int) -> Made:
    """In full, by Triton, for a machine of this architecture."""
    target = GPUTarget("cuda", arch, 32)
    made = recording._cubin(one.source, target, one.options, triton.compile).compile()
    return Made({"ptx": made.asm["ptx"], "cubin": made.asm["cubin"]}, made.metadata)


def assembled(one: Found, ptx: str, like: Made, arch: int) -> Made:
    """The PTX of another architecture, by Triton's own last stage."""
    backend = make_backend(GPUTarget("cuda", arch, 32))
    options = backend.parse_options({**one.options, **one.source.parse_options()})
    is_ours = getattr(one.source.fn, "is_ours", False)
    with compiler_hooks.applied() if is_ours else nullcontext():
        cubin = backend.make_cubin(ptx, {}, options, arch)
    return Made({"ptx": ptx, "cubin": cubin}, like.metadata)


def may_differ(ptx: str) -> bool:
    """Whether sm_103a may have another MMA: packed FP4 of K = 96, from Triton 3.9 on."""
    return VERSION >= (3, 9) and "kind::mxf4" in ptx


def retargeted(ptx: str, arch: int) -> str:
    """The same PTX for another target."""
    return re.sub(r"(?m)^\.target \w+", f".target {ARCHS[arch]}", ptx)


def without_names(ptx: str) -> str:
    """What decides instructions: debug sections hold the target's name, `.file` lines paths (of
    another checkout, where a cache is shared)."""
    return re.sub(r"(?m)^\s*\.file\s.*\n", "", retargeted(ptx, 100)).split(".section", 1)[0]


def most_stack(kernel: str) -> int:
    """Bytes of a thread: none of a GEMM at the tested Triton; later ones give registers away
    otherwise. Tiles of 384 experts and more do not fit 255."""
    newer = {"mega_tmem_kernel": 96, "gemm_tmem_kernel": 32, "_pool_kernel": 16}
    later = newer if VERSION > (3, 6) else {}
    return {"_place_kernel": 64, **later}.get(kernel, 0)


def constants_of(one: Found) -> dict[str, Any]:
    """The compile-time arguments of a configuration, by name."""
    names = one.source.fn.arg_names
    return {names[at[0]]: v for at, v in one.source.constants.items() if len(at) == 1}


def wrong_with(one: Found, made: Made, arch: int) -> list[str]:
    """What of one must not be."""
    ptx, bad = made.asm["ptx"], []
    if f".target {ARCHS[arch]}" not in ptx:
        bad.append("another target")
    used, most = resources(made), most_stack(one.kernel)
    if FP32_REDUX.search(ptx) and VERSION < (3, 7):
        bad.append("a warp's reduction of FP32, of which Triton 3.6 dies for sm_103a")
    if used["stack"] > most:
        bad.append(f"{used['stack']} bytes of stack, {most} are allowed")
    if one.kernel not in GEMMS:
        return bad
    if len(decoded(ptx)) != len(re.findall(r"tcgen05\.mma\.cta_group", ptx)):
        bad.append("MMAs without a descriptor")
    bad += wrong_instructions(ptx, Asked.of_constants(constants_of(one)))
    if made.metadata.shared > SMEM_PER_CTA:
        bad.append(f"{made.metadata.shared} bytes of shared memory")
    if made.metadata.tmem_size > TMEM_COLUMNS:
        bad.append(f"{made.metadata.tmem_size} columns of tensor memory")
    for check in (assert_tensor_memory_is_fenced, assert_is_alone_on_an_sm):
        check(ptx)
    assert_arrivals_follow_barriers(ptx, least=1)
    return bad


class Result(NamedTuple):
    """Of one configuration."""

    key: str
    name: str
    kernel: str
    wrong: list[str]  # by architecture
    is_full: bool  # compiled in full for both
    stack: int  # bytes of a thread
    seconds: float


_ALL: dict[str, Found] = {}  # of a worker


def look_at(key: str, is_full: bool) -> Result:
    """Compile and check one, for both architectures."""
    if not _ALL:
        _ALL.update(configurations())
    one, begin, stack = _ALL[key], time.monotonic(), 0
    wrong: list[str] = []
    try:
        first = compiled(one, 100)
        wrong += [f"sm_100a: {text}" for text in wrong_with(one, first, 100)]
        ptx = retargeted(first.asm["ptx"], 103)
        is_full = is_full or may_differ(ptx) or int(key, 16) % EIGHTH == 0
        is_full = is_full and not wrong  # what is wrong may end this process
        second = compiled(one, 103) if is_full else assembled(one, ptx, first, 103)
        wrong += [f"sm_103a: {text}" for text in wrong_with(one, second, 103)]
        is_same = without_names(second.asm["ptx"]) == without_names(ptx)
        stack = max(resources(made)["stack"] for made in (first, second))
        if not is_same and not may_differ(ptx):
            wrong.append("sm_103a: other PTX than for sm_100a")
    except Exception as error:
        while isinstance(error.__cause__, Exception):
            error = error.__cause__
        wrong.append(f"{type(error).__name__}: {str(error)[-600:]}")
    return Result(key, one.name, one.kernel, wrong, is_full, stack, time.monotonic() - begin)


# -- all -------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", help="a regular expression of names and kernels")
    parser.add_argument("--take", type=int, default=0, help="so many, evenly spread; 0: all")
    parser.add_argument("--full", action="store_true", help="compile all in full for both")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--list", action="store_true", help="print the configurations and stop")
    return parser.parse_args()


def commit() -> str:
    """Of this checkout."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip()[:12] or "no checkout"


def main() -> int:
    given, begin = arguments(), time.monotonic()
    shipped = configurations()
    keys = [
        key for key, one in shipped.items() if re.search(given.only, f"{one.kernel} {one.name}")
    ]
    if given.take:
        keys = sorted(keys, key=lambda key: hashlib.sha256(key.encode()).digest())[: given.take]
    kinds = Counter(one.kernel for one in shipped.values())
    if given.list:
        print("\n".join(f"{shipped[key].kernel} {shipped[key].name}" for key in keys))
        return 0
    print(f"triton {triton.__version__}: {len(shipped)} configurations, found in "
          f"{time.monotonic() - begin:.0f} s: {dict(kinds)}", flush=True)  # fmt: skip
    _ALL.update(shipped)  # of workers that are forked
    results: list[Result] = []
    order = sorted(keys, key=lambda key: shipped[key].kernel not in GEMMS)  # slow ones first
    with ProcessPoolExecutor(given.processes) as pool:
        for future in as_completed(pool.submit(look_at, key, given.full) for key in order):
            one = future.result()
            results.append(one)
            if one.wrong:
                print(f"{one.kernel} of {one.name}: {'; '.join(one.wrong)}", flush=True)
            if len(results) % 50 == 0 or sys.stdout.isatty():
                seconds = time.monotonic() - begin
                print(f"{len(results)} of {len(keys)} in {seconds:.0f} s", flush=True)
    good = sum(not one.wrong for one in results)
    stacks = [one.stack for one in results if one.stack]
    spills = "no stack, no spills"
    if stacks:
        spills = f"{len(stacks)} with up to {max(stacks)} bytes of stack"
    seconds, num_full = time.monotonic() - begin, sum(one.is_full for one in results)
    print(
        f"triton {triton.__version__}, commit {commit()}: {good} of {len(keys)} compiled "
        f"for sm_100a and sm_103a: {spills}, instructions as asked, descriptors legal; "
        f"{len(shipped)} are shipped, {num_full} compiled in full for both, {seconds:.0f} s"
    )
    return good != len(keys)


if __name__ == "__main__":
    sys.exit(main())
