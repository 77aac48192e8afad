"""What scripts/fuzz.py launches, compiled by several processes.

    PYTHONPATH=. python3 scripts/gpu/compile_fuzzer.py

The sizes are those of tests/engine/test_fuzz.py. Without a GPU it compiles for an H200.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from megamoe.engine import planning
from megamoe.engine.precompile import compile_layers
from megamoe.engine.recording import LayerSpec
from megamoe.errors import MegaMoEError
from tests.engine.test_fuzz import COUNTS, RECIPES, E, H, I, K

Work = tuple[LayerSpec, list[int]]  # a layer, and the tokens of its calls
MODES = ({"mode": "auto"}, {"mode": "staged"}, {"mode": "split"}, {"mode": "fused"},
         {"mode": "auto", "pool_rows": 256})  # fmt: skip
MOST_FUSED = 64  # tokens of all ranks
SIZES = [num for num in COUNTS if num]


def machine() -> tuple[str, int, str, int]:
    """Of the GPU here, or an H200."""
    if not torch.cuda.is_available():
        return "NVIDIA H200", 132, "sm_90a", 141 << 30
    facts = torch.cuda.get_device_properties(0)
    here = planning.hardware_of(torch.device("cuda", 0))
    return facts.name, here.num_sms, here.arch, facts.total_memory


def layers(recipe: str, of: tuple[str, int, str, int]) -> Iterator[Work]:
    """Every layer of the fuzzer in a recipe, on one rank and on several of one process."""

    def layer(overrides: dict[str, object], **more: object) -> LayerSpec:
        chosen = (("backend", "hopper"), *overrides.items())
        return LayerSpec(recipe, H, I, E, K, of, id_bits=(64,), overrides=chosen, **more)

    few = [num for num in SIZES if num <= MOST_FUSED]
    for one in MODES:
        counts = few if one["mode"] == "fused" else SIZES
        yield layer(one, graphs=one == MODES[0]), counts
        yield layer(one, has_stats=False), counts
    for num in (2, 4, 8):
        ranks = {"num_ranks": num, "local_ranks": num}
        fused = [n for n in (1, 2, 4, 8, 16, 32) if n * num <= MOST_FUSED]
        yield layer({"mode": "fused"}, **ranks), fused
        for most in SIZES:
            below = [n for n in SIZES if n <= most]
            yield layer({"mode": "chain"}, max_tokens=most, **ranks), below


def is_taken(work: Work) -> bool:
    layer, counts = work
    try:
        layer.plan(max(counts))
    except MegaMoEError:
        return False
    return True


def main() -> int:
    here = machine()
    works = [work for recipe in RECIPES for work in layers(recipe, here) if is_taken(work)]
    print(f"{len(works)} layers: {compile_layers(works)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
