"""Blackwell's fused launch compiled for sm_100a without a GPU: what is in it, and that it fits.

A few configurations stand for all; `--every` compiles every tile of every recipe, and ranks, a
ring, biases and stamps beside each recipe's widest.
"""

import re

import pytest
import torch

from megamoe.hardware import SMEM_PER_CTA
from megamoe.planner.blackwell import shipped, tmem_columns
from megamoe.planner.blackwell_fused import as_fused, shared_memory
from megamoe.planner.fused import routing_bytes
from megamoe.planner.launches import next_power_of_2
from megamoe.planner.numerics import BLACKWELL_RECIPES
from megamoe.planner.tables.blackwell import TMEM_COLUMNS
from megamoe.problem import Options
from tests.kernels.blackwell import compiled_fused, fused_config, tile_name
from tests.kernels.compiling import code_bytes, resources
from tests.kernels.descriptors import decoded, faults
from tests.kernels.instructions import mma_of
from tests.kernels.support import INTERPRETED
from tests.proof.compiled import (
    assert_arrivals_follow_barriers,
    assert_is_alone_on_an_sm,
    assert_tensor_memory_is_fenced,
)

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter compiles nothing")

CODE = 128 << 10  # bytes of instructions of a launch of decode (docs/fused.md)
MORE = {
    "": {},
    "ranks": {"ranks": 8, "experts": 4, "has_count": True},
    "apart": {"ranks": 8, "local": 1, "experts": 4, "has_count": True, "ids": torch.int64},
    "ring": {"wave_rows": 64, "options": Options(combine="fp8")},
    "biases": {"has_bias": True, "has_count": True, "options": Options("gpt_oss", 7.0)},
    "traced": {"has_trace": True},
    "large": {"slots": 4096, "experts": 256},
}
# In every run: the narrowest tile, one with ranks, a promoted one with a ring, one that decodes.
DEFAULT = {("w4a8", 8, ""), ("nvfp4", 16, "apart"), ("w8a8", 16, "ring"), ("w4a16", 16, "")}


def cases():
    for recipe in BLACKWELL_RECIPES:
        tiles = [tile for tile in shipped(recipe) if as_fused(recipe, tile)[0] is not None]
        found = [(tile, "") for tile in tiles] + [(tiles[-1], what) for what in MORE if what]
        found += [(tile, "apart") for tile in tiles if tile.block_m == 16]
        found += [(tile, "ring") for tile in tiles[:-1] if tile.block_m == 32]
        for tile, what in found:
            marks = () if (recipe, tile.block_m, what) in DEFAULT else (pytest.mark.every,)
            name = "-".join(filter(None, (recipe, tile_name(tile), what)))
            yield pytest.param(recipe, tile, what, id=name, marks=marks)


def planned(recipe, config, more):
    """The planner's sum of shared memory."""
    slots, experts = more.get("slots", 384), more.get("experts", 32)
    routing = routing_bytes(slots, experts, more.get("ranks", 1))
    return shared_memory(recipe, config.tile, routing).num_bytes


@pytest.mark.parametrize(("recipe", "tile", "what"), list(cases()))
def test_a_fused_launch_is_legal_fits_and_does_not_spill(recipe, tile, what):
    more = MORE[what]
    kernel = compiled_fused(recipe, tile, **more)
    config = fused_config(
        recipe, tile, more.get("slots", 384), more.get("experts", 32), more.get("ranks", 1)
    )
    ptx, columns = kernel.asm["ptx"], tmem_columns(recipe, config.tile)
    assert set(re.findall(r"tcgen05\.mma\.cta_group::1\.kind::(\S+)", ptx)) == {mma_of(recipe)}
    rows = decoded(ptx)
    assert rows and not [fault for row in rows for fault in faults(row)]
    assert {(row["m"], row["n"]) for row in rows} == {(128, tile.block_m)}
    assert "setmaxnreg" in ptx and "trap" not in ptx
    assert_arrivals_follow_barriers(ptx)
    assert_tensor_memory_is_fenced(ptx)
    assert_is_alone_on_an_sm(ptx)
    assert columns <= TMEM_COLUMNS and kernel.metadata.tmem_size == next_power_of_2(columns, 32)
    used = resources(kernel)
    assert used["stack"] == 0
    assert used["shared"] <= planned(recipe, config, more) <= SMEM_PER_CTA
    if tile.block_m <= 16 and not what:
        assert code_bytes(kernel) <= CODE
    if what == "apart":
        assert not re.search(r"(atom|red)\S*\.sys", ptx)  # PCIe has no atomics between GPUs
        assert len(re.findall(r"fence\.acq_rel\.sys", ptx)) == 2  # begun and ended
        assert not re.search(r"st\.global\.\w*b16", ptx)  # rows go 16 bytes a thread


def test_every_fused_tile_fits_by_its_sums():
    for recipe in BLACKWELL_RECIPES:
        for tile in shipped(recipe):
            for routing in (0, 4096, routing_bytes(4096, 256), routing_bytes(0, 728, 8)):
                made, why = as_fused(recipe, tile, routing)
                assert made is not None or "tokens a tile" in why
                if made is not None:
                    assert shared_memory(recipe, made, routing).num_bytes <= SMEM_PER_CTA
                    assert tmem_columns(recipe, made) <= TMEM_COLUMNS and made.num_stages >= 2
