#!/usr/bin/env python
"""Compile every shipped configuration with the Triton that is imported, without a GPU.

    PYTHONPATH=folder/of/triton:. python scripts/newer_triton.py [--take 60] [--only REGEX]

Hopper's kernels for sm_90a, Blackwell's for sm_100a and sm_103a, portable ones for all three. What
is looked at: a cubin for the right machine; Blackwell's staged GEMM as in
`tests/kernels/test_blackwell_compile.py`, instructions, descriptors and memory, without spills; of
other kernels at most STACK bytes of spills a thread, since another assembler allocates registers
differently. `--take` compiles so many, spread over kinds. One process per core (`--processes`).
"""

import argparse
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import machine_code
import pytest
import triton

from megamoe.kernels.gluon.compat import HAS_PAIRS
from megamoe.planner.blackwell import shipped
from megamoe.planner.blackwell_fused import as_fused
from megamoe.planner.grouped import VARIANTS
from megamoe.planner.numerics import BLACKWELL_RECIPES
from tests.kernels import test_blackwell_compile, test_chain_compile, test_compile
from tests.kernels.blackwell import compiled, compiled_fused, compiled_grouped, tile_name
from tests.kernels.compiling import resources

Compile = Callable[[Any], list[Any]]
ARCHS = {90: "sm_90a", 100: "sm_100a", 103: "sm_103a"}
STACK = {  # bytes of a thread, by how a name begins
    "blackwell/fused": 96, "blackwell/": 0, "pairs/": 0, "hopper/": 96, "chain/": 96,
    "portable/": 1024,
}  # fmt: skip


def hopper() -> Iterator[tuple[str, int, Compile]]:
    """Staged and fused launches, routing."""
    for name, make in machine_code.configurations().items():
        yield f"hopper/{name}", 90, make


def chain() -> Iterator[tuple[str, int, Compile]]:
    """Launches of ranks that overlap: GEMMs that follow tiles, and what exchanges rows."""
    names = [name for _, name in test_chain_compile.HOST]
    for case, (recipe, num, given) in test_chain_compile.GEMMS.items():

        def made(patch, recipe=recipe, num=num, given=given):  # type: ignore[no-untyped-def]
            found = test_chain_compile.compiled(patch, recipe, num, names, **given)
            return [one for name in names for one in found[name]]

        yield f"chain/{case}", 90, made


def blackwell() -> Iterator[tuple[str, int, Compile]]:
    """The staged GEMM; checked as the tests do."""
    for arch, (recipe, tile, gated) in itertools.product((100, 103), test_blackwell_compile.ALL):

        def made(patch, recipe=recipe, tile=tile, gated=gated, arch=arch):  # type: ignore[no-untyped-def]
            kernel = compiled(recipe, tile, gated, arch=arch)
            test_blackwell_compile.assert_is_as_planned(recipe, tile, kernel)
            return [kernel]

        linear = "l1" if gated else "l2"
        yield f"blackwell/{recipe}-{tile_name(tile)}-{linear}", arch, made


def blackwell_more() -> Iterator[tuple[str, int, Compile]]:
    """The fused launch, and grouped GEMMs alone: tiles of few and of many rows."""
    for arch, recipe in itertools.product((100, 103), BLACKWELL_RECIPES):
        for tile in shipped(recipe):
            if as_fused(recipe, tile)[0] is None:
                continue

            def fused(patch, how=(recipe, tile, arch)):  # type: ignore[no-untyped-def]
                return [compiled_fused(*how)]

            yield f"blackwell/fused-{recipe}-{tile_name(tile)}", arch, fused
        for variant, rows in itertools.product(VARIANTS, (16, 512)):
            if (recipe, variant) == ("w4a16", "gather"):
                continue

            def grouped(patch, how=(recipe, variant, rows, arch)):  # type: ignore[no-untyped-def]
                _, kernels = compiled_grouped(how[0], how[1], how[2], arch=how[3])
                return list(kernels)

            yield f"blackwell/grouped_{variant}-{recipe}-{rows}", arch, grouped


def pairs() -> Iterator[tuple[str, int, Compile]]:
    """The staged GEMM by pairs of CTAs, which is offered, no default: Triton 3.8 and newer."""
    each = test_blackwell_compile.PAIRS if HAS_PAIRS else ()
    for arch, (recipe, tile, gated) in itertools.product((100, 103), each):

        def made(patch, recipe=recipe, tile=tile, gated=gated, arch=arch):  # type: ignore[no-untyped-def]
            kernel = compiled(recipe, tile, gated, arch=arch)
            test_blackwell_compile.assert_is_as_planned(recipe, tile, kernel)
            return [kernel]

        linear = "l1" if gated else "l2"
        yield f"pairs/{recipe}-{tile_name(tile)}-{linear}", arch, made


def portable() -> Iterator[tuple[str, int, Compile]]:
    """The grouped GEMMs; on sm_90a `hopper` has one tile of each already."""
    for arch, recipe, rows in itertools.product(ARCHS, test_compile.RECIPES, (1, 64, 1000)):
        has_mx = arch >= 100 and recipe in test_compile.NATIVE
        tiles = test_compile.tiles(recipe, rows, is_native=has_mx)
        for phase, tile in zip(("l1", "l2"), tiles, strict=False):

            def made(patch, how=(recipe, phase, tile, arch), has_mx=has_mx):  # type: ignore[no-untyped-def]
                return [test_compile.compiled(*how, has_mx=has_mx)]

            yield f"portable/{recipe}-{rows}-{phase}", arch, made


def configurations() -> dict[str, tuple[int, Compile]]:
    found: dict[str, tuple[int, Compile]] = {}
    for part in (hopper, chain, blackwell, blackwell_more, pairs, portable):
        for name, arch, make in part():
            found[f"{name} {ARCHS[arch]}"] = arch, make
    return found


def kind_of(name: str) -> str:
    """What `--take` spreads over: kind, machine, and what is before the first dash."""
    what, machine = name.split()
    return f"{what.split('-')[0]} {machine}"


def taken(names: list[str], num: int) -> list[str]:
    """`num` of them, of every kind in turn, from both ends of each."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(kind_of(name), []).append(name)
    order = [[*group[::-2], *group[-2::-2]] for group in kinds.values()]
    spread = [name for turn in itertools.zip_longest(*order) for name in turn if name]
    return spread[:num]


_ALL: dict[str, tuple[int, Compile]] = {}  # of a worker


def compile_one(name: str) -> tuple[str, int, str]:
    """(name, bytes of stack, what went wrong or "")."""
    if not _ALL:
        _ALL.update(configurations())
    arch, make = _ALL[name]
    try:
        with pytest.MonkeyPatch.context() as patch:
            kernels = make(patch)
        assert kernels, "nothing was compiled"
        for kernel in kernels:
            target = re.search(r"\.target (\w+)", kernel.asm["ptx"])
            assert target and target[1] == ARCHS[arch], f"compiled for {target and target[1]}"
        stack = max(resources(kernel)["stack"] for kernel in kernels)
        limit = next(most for begin, most in STACK.items() if name.startswith(begin))
        return name, stack, "" if stack <= limit else f"{stack} bytes of spills, at most {limit}"
    except Exception as error:
        while error.__cause__ is not None and isinstance(error.__cause__, Exception):
            error = error.__cause__
        return name, 0, f"{type(error).__name__}: {str(error)[-600:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--take", type=int, default=0, help="so many, spread over kinds; 0: all")
    parser.add_argument("--only", default="", help="a regular expression of configurations")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--list", action="store_true", help="print the configurations and stop")
    given = parser.parse_args()
    shipped = configurations()
    every = [name for name in shipped if re.search(given.only, name)]
    names = taken(every, given.take) if given.take else every
    if given.list:
        print("\n".join(names))
        return 0
    failed, spills, begin = [], [], time.monotonic()
    with ProcessPoolExecutor(given.processes) as pool:
        for done, future in enumerate(as_completed(pool.submit(compile_one, n) for n in names), 1):
            name, stack, wrong = future.result()
            if stack:
                spills.append((stack, name))
            if wrong:
                failed.append(name)
                print(f"\n{name}: {wrong}", flush=True)
            end = "\n" if done % 20 == 0 or done == len(names) or sys.stdout.isatty() else ""
            if end:
                seconds = time.monotonic() - begin
                print(f"triton {triton.__version__}: {done} of {len(names)} in {seconds:.0f} s",
                      flush=True)  # fmt: skip
    good = len(names) - len(failed)
    print(f"triton {triton.__version__}: {good} of {len(names)} configurations compiled, "
          f"{len(shipped)} are shipped; {len(spills)} spill", end="")  # fmt: skip
    print(f", at most {max(spills)[0]} bytes ({max(spills)[1]})" if spills else "")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
