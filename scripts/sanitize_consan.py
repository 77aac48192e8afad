#!/usr/bin/env python
"""ConSan's parts: few kernels, built before a GPU is asked for, on few CTAs.

    PYTHONPATH=. python scripts/sanitize_consan.py [--compile-only] PART ...    (consan-RECIPE)

A part has one tile of each kind, L1 and L2 as launches of their own, a fused launch, and one over
two ranks: at most six Gluon kernels, without shared experts, on NUM_CTAS CTAs. `--compile-only`
fills Triton's disk cache in the way of `megamoe compile`, without a GPU; a run then compiles
nothing, and says so if it would.

A kernel under ConSan is 5 MB of PTX, for which the ptxas that comes with Triton 3.6 needs 42 s and
CUDA 13's, with less optimisation, 7 s (on a CPU, 2026-11-19): `environment` asks for that where it
is installed. It must be the same in both stages, as it is part of the cache's key.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys

from megamoe.engine.recording import LayerSpec
from megamoe.planner.hopper import as_fused, pick
from megamoe.planner.numerics import HOPPER_RECIPES

PARTS = tuple(f"consan-{recipe}" for recipe in HOPPER_RECIPES)
NUM_CTAS = 4
E, I, H, K = 2, 256, 256, 2
MACHINE = ("a few SMs of an H200", NUM_CTAS, "sm_90a", 141 << 30)
Layer = tuple[str, LayerSpec, int]  # what it is, the layer, tokens of a call


def ptxas() -> str | None:
    """CUDA 13's, if it is in the toolkit; older ones take as long as Triton's own."""
    where = shutil.which("ptxas", path=os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin")
    if where is None:
        return None
    said = subprocess.run([where, "--version"], capture_output=True, text=True).stdout
    major = said.rpartition("release ")[2].partition(".")[0]
    return where if major.isdigit() and int(major) >= 13 else None


def environment() -> dict[str, str]:
    """What builds and runs under ConSan have beside their own."""
    quick = ptxas()
    more = {"TRITON_PTXAS_PATH": quick, "PTXAS_OPTIONS": "-Ofc mid"} if quick else {}
    return {"TRITON_INSTRUMENTATION_MODE": "consan", **more}


def layers(recipe: str) -> list[Layer]:
    """What a part calls."""
    found = []
    few, many = (pick(recipe, rows)[0] for rows in (8, 2000))
    for what, tile, mode, num_tokens, ranks in (
        ("few rows, staged", few, "staged", 5, 1),
        ("many rows, staged", many, "staged", 70, 1),
        ("fused", few, "fused", 5, 1),
        ("fused over two ranks", few, "fused", 3, 2),
    ):
        if mode == "fused" and not as_fused(tile):
            continue
        shape = (("block_m", tile.block_m), ("block_n", tile.block_n), ("block_k", tile.block_k))
        layer = LayerSpec(
            recipe, H, I, E, K, MACHINE, num_ranks=ranks, local_ranks=ranks, id_bits=(64,),
            overrides=() if ranks > 1 else (("backend", "hopper"), ("mode", mode), *shape),
        )  # fmt: skip
        found.append((what, layer, num_tokens))
    return found


def build(parts: list[str]) -> None:
    """Fill the cache for all parts, in one process a core."""
    from megamoe.engine.precompile import compile_layers

    os.environ.update(environment())  # of the processes that compile
    works = [(one, [num]) for part in parts for _, one, num in layers(_recipe(part))]
    print(f"built: {compile_layers(works)}", flush=True)


def _recipe(part: str) -> str:
    return part.removeprefix("consan-")


def main() -> None:
    """Build the parts."""
    ask = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    ask.add_argument("parts", nargs="+", choices=PARTS)
    ask.add_argument("--compile-only", action="store_true")
    got = ask.parse_args()
    build(got.parts)


if __name__ == "__main__":
    sys.exit(main())
