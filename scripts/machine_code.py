#!/usr/bin/env python
"""Hashes of the machine code of every Hopper kernel that is shipped, compiled without a GPU.

    PYTHONPATH=. python scripts/machine_code.py --write before.json
    PYTHONPATH=. python scripts/machine_code.py --compare before.json [--only 'fused/.*ranks']

A hash covers the instructions (the ELF sections `.text.*` of a cubin), the constants they read and
the registers and shared memory that a launch asks for. It does not depend on names of kernels,
functions, arguments or files, nor on line numbers: a change that only renames or moves code leaves
every hash as it was. `--compare` prints what differs and exits with 1 if anything does.
"""

import argparse
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from struct import unpack_from
from typing import Any

import pytest
import torch

from megamoe.kernels.portable import combine, sort
from tests.kernels import test_chain_compile, test_compile, test_fused_compile, test_hopper_compile
from tests.kernels.compiling import compile_kernel
from tests.kernels.steps import combine_step, sort_steps

META = torch.device("meta")
ALLOCATED = 2  # a section flag: it is loaded
NO_BITS = 8  # a section type: it has a size but no bytes


def sections(cubin: bytes) -> Iterator[tuple[str, bytes, int]]:
    """(name, bytes, registers) of every loaded section of the ELF; registers of code alone."""
    (at,), (size, num, names) = unpack_from("<Q", cubin, 40), unpack_from("<3H", cubin, 58)
    headers = [unpack_from("<2I4Q2I", cubin, at + size * i) for i in range(num)]
    for name_at, kind, flags, _, offset, length, _, info in headers:
        start = headers[names][4] + name_at
        name = cubin[start : cubin.index(0, start)].decode()
        if flags & ALLOCATED:
            data = b"" if kind == NO_BITS else cubin[offset : offset + length]
            yield name, data, info >> 24


def fingerprint(kernel: Any) -> str:
    """Of one compiled kernel. Constants in bank 0 are the arguments: their size counts."""
    digest = hashlib.sha256(f"shared {kernel.metadata.shared}".encode())
    code = 0
    for name, data, registers in sorted(sections(kernel.asm["cubin"])):
        kind = ".".join(name.split(".")[:3])  # without the name of the kernel
        if kind.startswith((".text", ".nv.constant")):
            code += len(data) if kind.startswith(".text") else 0
            kind = ".text" if kind.startswith(".text") else kind
            digest.update(f"{kind} {len(data)} {registers if kind == '.text' else 0}".encode())
            digest.update(data)
    return f"{digest.hexdigest()[:32]} {code}"


def tile_key(tile: Any) -> str:
    """A tile by its sizes, whatever its class and fields are called."""
    if hasattr(tile, "slabs"):
        sizes = tile.block_m, 64 * tile.slabs, tile.k_blocks, tile.num_stages
        return "swap_ab-" + "x".join(map(str, sizes)) + f"-span{tile.group_m}"
    how = {"strided": [], "static": ["is_dealt"], "dynamic": ["is_drawn"]}[tile.schedule]
    sizes = tile.num_stages, tile.num_image_stages
    return "-".join(["plain", *map(str, sizes), f"ahead{tile.decode_ahead}", *how])


def staged() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The two GEMMs."""
    for is_placed in (True, False):
        all_cases = test_hopper_compile.cases() if is_placed else test_hopper_compile.MULTIPLY_BF16
        for case in all_cases:
            recipe, fits, tile, linear, activation = case
            words = recipe, "" if fits else "wide", tile_key(tile), linear, activation
            name = "-".join(filter(None, (*words, "" if is_placed else "table")))

            def compiled(patch, case=case, is_placed=is_placed):
                return [test_hopper_compile.compiled(patch, *case, is_placed=is_placed)]

            yield f"gemm/{name}", compiled
    for linear in ("l1", "l2"):

        def narrow(patch, linear=linear):
            case = "w4a8_block", True, test_hopper_compile.AHEAD, linear, ""
            sizes = {"hidden": 2304, "intermediate": 1280}
            return [test_hopper_compile.compiled(patch, *case, **sizes)]

        yield f"gemm/w4a8_block-ahead-odd-{linear}", narrow


def fused() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The fused kernel: recipes and tiles, ranks, a ring, shared experts, biases, a trace."""
    for case in test_fused_compile.cases():
        recipe, fits, tile, more = case
        words = [f"{k}={v.__name__ if callable(v) else v}" for k, v in sorted(more.items())
                 if isinstance(v, int)]  # fmt: skip
        options = more.get("options")
        words += [] if options is None else [options.activation, options.combine, options.weight_at]
        words += ["int64"] if more.get("ids") is torch.int64 else []
        name = "-".join(filter(None, (recipe, "" if fits else "wide", tile_key(tile), *words)))

        def compiled(patch, case=case):
            return [test_fused_compile.compiled(patch, *case)]

        yield f"fused/{name}", compiled


def chained() -> Iterator[tuple[str, Callable[..., Any]]]:
    """What a rank of a chain launches: GEMMs that follow tiles, and what goes before and after."""
    names = [name for _, name in test_chain_compile.HOST]
    for case, (recipe, num, given) in test_chain_compile.GEMMS.items():

        def compiled(patch, recipe=recipe, num=num, given=given):
            made = test_chain_compile.compiled(patch, recipe, num, names, **given)
            return [kernel for name in names for kernel in made[name]]

        yield f"chain/{case}", compiled


def dispatched() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Permutation and dispatch of the staged launches."""
    for tile, slots, experts, shared in test_hopper_compile.ROUTED:
        words = "-" if tile is None else tile_key(tile), str(slots), str(experts), str(shared)

        def compiled(patch, case=(tile, slots, experts, shared)):
            return test_hopper_compile.routed(patch, *case)

        yield "dispatch/" + "-".join(words), compiled


def portable() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Kernels that the Hopper backend shares with the portable one, and some of the latter's."""

    def combined(weighted, extra):
        def compiled(patch):
            compiler = test_hopper_compile.Compiler(combine._combine_kernel)
            patch.setattr(combine, "_combine_kernel", compiler)
            rows = torch.empty(64, 6 + extra, 2048, dtype=torch.bfloat16, device=META)
            idx = torch.empty(64, 6, dtype=torch.int32, device=META)
            y, gates = rows[:, 0], torch.empty(64, 6, device=META)
            step = combine_step(64, 2048)
            combine.combine(rows, None, idx, gates, y, step=step, weighted=weighted, pdl=True)
            return [compiler.made]

        return compiled

    def scanned(patch):
        compiler = test_hopper_compile.Compiler(sort._scan_kernel)
        patch.setattr(sort, "_scan_kernel", compiler)
        ints = torch.empty(32, 8, dtype=torch.int32, device=META)
        step = sort_steps(32 * 128, 8, 64)["scan"]
        sort.scan_counts(ints, ints[0], ints[0].long(), step, pdl=True)
        return [compiler.made]

    for weighted, extra in ((False, 0), (True, 0), (True, 1)):
        yield f"portable/combine-{weighted}-{extra}", combined(weighted, extra)
    yield "portable/scan", scanned
    for recipe in test_compile.RECIPES:
        for phase, tile in zip(("l1", "l2"), test_compile.tiles(recipe, 64), strict=False):

            def compiled(patch, recipe=recipe, phase=phase, tile=tile):
                return [test_compile.compiled(recipe, phase, tile, 90)]

            yield f"portable/gemm-{recipe}-{phase}", compiled
    for name, kernel, args, constants in test_compile.quantisers():
        yield (
            f"portable/{name}",
            lambda patch, k=kernel, a=args, c=constants: [compile_kernel(k, a, 90, **c)],
        )


def configurations() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for part in (fused, staged, chained, dispatched, portable):
        for name, compiled in part():
            number = sum(1 for other in found if other.split("#")[0] == name)
            found[f"{name}#{number}" if number else name] = compiled
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", type=Path, help="a JSON file for the hashes")
    parser.add_argument("--compare", type=Path, help="a JSON file that --write made")
    parser.add_argument("--only", default="", help="a regular expression of configurations")
    parser.add_argument("--every", type=int, default=1, help="take every n-th configuration")
    parser.add_argument("--list", action="store_true", help="print the configurations and stop")
    given = parser.parse_args()
    wanted = {n: make for n, make in configurations().items() if re.search(given.only, n)}
    wanted = {n: wanted[n] for n in list(wanted)[:: given.every]}
    if given.list:
        print("\n".join(wanted))
        return 0
    before = json.loads(given.compare.read_text()) if given.compare else {}
    found, different, begin = {}, [], time.monotonic()
    for name, make in wanted.items():
        with pytest.MonkeyPatch.context() as patch:
            found[name] = [fingerprint(kernel) for kernel in make(patch)]
        if given.compare and found[name] != before.get(name):
            different.append(name)
            print(f"differs: {name}: {before.get(name)} -> {found[name]}", flush=True)
        if given.write:
            given.write.write_text(json.dumps(found, indent=1))
    seconds = time.monotonic() - begin
    print(f"{len(found)} configurations in {seconds:.0f} s", end="")
    print(
        f", {len(found) - len(different)} equal, {len(different)} different" * bool(given.compare)
    )
    if given.compare and not (given.only or given.every > 1):
        gone = before.keys() - found.keys()
        different += gone
        print(*(f"gone: {name}" for name in sorted(gone)), sep="\n")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
