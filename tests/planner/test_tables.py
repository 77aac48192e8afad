"""The tables: every load of every recipe has a tile that fits; measured bests are chosen."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.errors import CapacityError
from megamoe.formats.spec import RECIPES
from megamoe.hardware import SMEM_PER_CTA
from megamoe.planner import fused, hopper, portable, smem
from megamoe.planner.launches import Gemm, GemmSwapAb
from megamoe.planner.numerics import (
    HOPPER_RECIPES,
    narrowest_mma,
    not_on,
    numerics,
)
from megamoe.planner.plan import plan
from megamoe.planner.tables import hopper as tables
from megamoe.problem import Problem

SETTINGS = settings(deadline=None, derandomize=True, max_examples=60, database=None)
LOADS = (0.0, 0.1, 4.0, 4.1, 22.5, 49.9, 70.1, 200.0, 1e3, 1e6)


def sums(recipe, tile, fits_e4m3=True):
    if isinstance(tile, Gemm):
        return smem.gemm(recipe, tile)
    return smem.gemm_swap_ab(recipe, numerics("hopper", recipe, fits_e4m3=fits_e4m3), tile)


@pytest.mark.parametrize("recipe", HOPPER_RECIPES)
@pytest.mark.parametrize("fits", [True, False])
def test_every_load_has_a_tile_that_fits_and_fills_shared_memory(recipe, fits):
    for load in LOADS:
        tile, why = hopper.pick(recipe, load, fits_e4m3=fits)
        used = sums(recipe, tile, fits)
        assert tile.num_stages >= 2 and used.num_bytes <= SMEM_PER_CTA and len(why) > 10
        if isinstance(tile, GemmSwapAb) and tile.num_stages < tables.MAX_STAGES:
            assert used.num_bytes + used.stage_bytes > SMEM_PER_CTA, "another stage would fit"


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_load_has_portable_tiles_that_its_kernels_can_have(recipe):
    for arch in ("sm_80", "sm_90a", "sm_100a"):
        for load in LOADS:
            how = numerics("portable", recipe, arch=arch)
            l1, l2, why = portable.tiles_for(recipe, how, load, {})
            assert l1.block_m == l2.block_m, "slots are sorted once"
            assert len(why) > 10


@pytest.mark.parametrize("machine", ["h200", "b200"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_default_reason_is_words_without_a_figure_of_some_recipe(recipe, machine):
    """Figures stay in the tables: a plan would print those of one recipe for all."""
    for num_tokens, num_ranks in itertools.product((1, 8, 64, 512, 8192), (1, 8)):
        found = plan(Problem(num_tokens, 4096, 2048, 256, 6, num_ranks, recipe), machine)
        reasons = {choice.name: choice.why for choice in found.choices}
        reasons |= {launch.name: launch.why for launch in found.launches}
        for name, why in reasons.items():
            if why != tables.WHY_PULL_SMS:  # of copies, whatever the recipe
                assert not re.search(r"\d\s*(us|GB/s|TB/s)\b", why), (name, why)


@pytest.mark.parametrize("recipe", HOPPER_RECIPES)
def test_tiles_grow_with_the_load(recipe):
    widths = [hopper.pick(recipe, load)[0].block_m for load in LOADS]
    assert widths == sorted(widths)
    widths = [portable.pick(recipe, load)[0].block_m for load in LOADS]
    assert widths == sorted(widths)


# One rank's share on one H200, w4a8_block: (tokens, experts, top_k), and the best token tile and
# 128-blocks a stage that were measured.
MEASURED = [
    ((8, 32, 6), 8, 2),
    ((64, 32, 6), 16, 2),
    ((64, 48, 6), 16, 2),
    ((64, 32, 8), 32, 2),
    ((32, 48, 8), 16, 2),
    ((128, 48, 8), 32, 2),
    ((256, 48, 8), 64, 2),
    ((512, 32, 6), 128, 1),
]


@pytest.mark.parametrize(("call", "block_m", "blocks"), MEASURED, ids=str)
def test_the_best_measured_tile_is_chosen(call, block_m, blocks):
    tokens, experts, top_k = call
    tile, _ = hopper.pick("w4a8_block", tokens * top_k / experts)
    assert (tile.block_m, tile.block_n, tile.block_k) == (block_m, 256, 128 * blocks)


@pytest.mark.parametrize("recipe", HOPPER_RECIPES)
def test_every_candidate_fits_and_has_a_name_of_its_own(recipe):
    for load in LOADS:
        picked, _ = hopper.pick(recipe, load)
        found = hopper.candidates(recipe, picked)
        assert found[0] == picked and len({hopper.label(tile) for tile in found}) == len(found)
        assert all(sums(recipe, tile).num_bytes <= SMEM_PER_CTA for tile in found)


@pytest.mark.parametrize("recipe", HOPPER_RECIPES)
def test_fused_launches_hold_weights_to_a_window_unless_math_is_the_limit(recipe):
    tile, _ = hopper.pick(recipe, 4.0)
    becomes_bf16 = recipe in ("w4a16", "w4a8", "w4a4", "nvfp4")
    assert tile.max_in_flight == (0 if becomes_bf16 else 2)
    fused = hopper.as_fused(tile)
    assert fused.max_in_flight == tile.max_in_flight < tile.num_stages
    how = numerics("hopper", recipe)
    for routing, stages in ((0, 0), (tables.ROUTING_BYTES, 0), (tables.ROUTING_BYTES + 1, 1)):
        beside = smem.Beside(routing, 256)
        assert hopper.fused_stages(recipe, how, fused, beside) == tile.num_stages - stages


@pytest.mark.parametrize("recipe", HOPPER_RECIPES)
def test_wide_tiles_have_no_fused_launch(recipe):
    for load in LOADS:
        tile, _ = hopper.pick(recipe, load)
        assert (hopper.as_fused(tile) is None) == (tile.block_m >= 64)


def test_a_layer_whose_exponents_e4m3_lacks_multiplies_in_bf16():
    assert numerics("hopper", "w4a8_block").mma == "fp8"
    wide = numerics("hopper", "w4a8_block", fits_e4m3=False)
    assert (wide.mma, wide.promotion) == ("bf16", 128)
    for load in LOADS:
        tile, why = hopper.pick("w4a8_block", load, fits_e4m3=False)
        assert isinstance(tile, GemmSwapAb) and "outside E4M3's exponents" in why


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("backend", ["hopper", "portable", "reference"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_numerics_hold_both_operands(recipe, backend, arch):
    """An MMA type is never narrower than the operands; FP8 and FP4 only where they exist."""
    if not_on(backend, recipe):
        return
    found = numerics(backend, recipe, arch=arch)
    bits = {"float64": 64, "bf16": 16, "fp8": 8, "fp4": 4}
    assert bits[found.mma] >= bits[narrowest_mma(recipe)]
    if arch == "sm_80" and backend == "portable":
        assert found.mma == "bf16"
    if found.mma == "fp4":
        assert arch == "sm_100a" and backend == "portable"


@SETTINGS
@given(st.integers(1, 40_000), st.integers(1, 12_000), st.sampled_from([8, 16, 32]))
def test_a_ring_holds_two_waves_and_their_last_tiles(max_rows, pool_rows, block_m):
    try:
        rows, wave = fused.ring(max_rows, pool_rows, block_m)
    except CapacityError as error:
        least = int(str(error).split("must have ")[1].split()[0])
        assert pool_rows < least
        assert fused.ring(max_rows, least, block_m)[0] <= least
        return
    if wave == 0:
        assert rows == max_rows <= pool_rows
        return
    assert rows <= pool_rows < max_rows and rows % 16 == 0 and wave % 8 == 0
    assert wave + block_m <= rows // 2, "a wave and the tile that reaches beyond it"
    assert -(-max_rows // wave) <= tables.MAX_WAVES


def fits(rows):
    """Whether a fused launch of w4a8_block takes so many rows of an expert."""
    return hopper.as_fused(hopper.pick("w4a8_block", rows)[0]) is not None


@pytest.mark.parametrize(
    ("tokens", "slots", "experts", "found"),
    [(64, 48, 384, (1, 64)), (180, 48, 384, (1, 180)), (181, 48, 384, (2, 91)),
     (100, 4, 8, (3, 34)), (5, 20000, 384, (5, 1))],
)  # fmt: skip
def test_a_call_over_a_group_has_as_few_launches_as_their_limits_let(tokens, slots, experts, found):
    assert fused.passes(fits, tokens, slots, experts) == found


@SETTINGS
@given(st.integers(1, 9000), st.integers(1, 300), st.sampled_from([8, 32, 256]))
def test_passes_cover_all_tokens_within_the_limits(tokens, slots, experts):
    num, each = fused.passes(fits, tokens, slots, experts)
    assert (num - 1) * each < tokens <= num * each
    if each > 1:
        assert each * slots <= tables.MAX_GROUP_SLOTS


def test_one_formula_of_shared_memory_adds_up():
    tile, _ = hopper.pick("w4a8_block", 2.0)
    found = sums("w4a8_block", tile)
    terms = {t.name: t.num_bytes for t in found.stage}
    # 256 rows of 256 columns: FP4 with four bits for 32 of K; 8 tokens in FP8; 32 FP32 scales twice
    assert terms == {
        "weights": 256 * 256 * 33 // 64, "tokens": 8 * 256, "token scales": 2 * 32 * 4,
        "barriers": 16,
    }  # fmt: skip
    assert found.num_bytes == found.fixed_bytes + tile.num_stages * sum(terms.values())
    assert "6 stages" in str(found)
