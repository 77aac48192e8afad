"""The tables: published tiers at their edges, worked sums, and Hopper's measured bests."""

from __future__ import annotations

import pytest

import megamoe as mm
from megamoe.engine import rooms
from megamoe.errors import CapacityError, ShapeError
from megamoe.formats.spec import RECIPES
from megamoe.hardware import H200
from megamoe.planner.choice import SharedMemory, Term, Tiles, num_registers, num_stages
from megamoe.studies.deep_gemm.heuristics import (
    BACKENDS,
    blackwell,
    hopper,
    hopper_fused,
    hopper_tiles,
    portable,
)


def load(rows_per_expert, recipe="w4a8", hidden=4096, intermediate=2048):
    """A problem whose mean load is exactly this: one expert in ten, tokens in tenths."""
    tokens = round(rows_per_expert * 10)
    assert tokens / 10 == rows_per_expert
    return mm.Problem(tokens, hidden, intermediate, 10, 1, 1, recipe)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (0.1, (16, 8, 2)),
        (8.5, (16, 8, 2)),
        (8.6, (32, 16, 2)),
        (16.5, (32, 16, 2)),
        (16.6, (64, 32, 1)),
        (32.5, (64, 32, 1)),
        (32.6, (96, 16, 2)),
        (64.5, (96, 16, 2)),
        (64.6, (128, 32, 2)),
        (96.5, (128, 32, 2)),
        (96.6, (192, 32, 2)),
        (5000.0, (192, 32, 2)),
    ],
)
def test_blackwell_tiers_at_their_edges(rows, expected):
    found = blackwell.tier(load(rows))
    assert (found.block_m, found.store_block_m, found.epilogue_groups) == expected
    assert blackwell.CLUSTER == 2


@pytest.mark.parametrize(
    ("rows", "block_m", "block_k"),
    [
        *((8.5, 32, 256), (16.5, 32, 256), (32.5, 64, 256)),
        *((64.5, 96, 128), (96.5, 128, 128), (97.0, 192, 256)),
    ],
)
def test_packed_fp4_raises_16_to_32_and_deepens_three_bands(rows, block_m, block_k):
    problem = load(rows, "w4a4")
    assert blackwell.block_m(problem).value == block_m  # D009
    assert blackwell.block_k(problem, block_m).value == block_k  # D004


def test_fp8_rows_are_128_deep_but_for_the_narrowest_band():
    assert blackwell.block_k(load(8.5), 16).value == 256  # A021, later code
    for m in (32, 64, 96, 128, 192):
        assert blackwell.block_k(load(8.5), m).value == 128


def test_the_worked_budget_has_7_stages():
    # A027: 256 experts, hidden 7168, tiles of 128, whole rows pulled, 32 rows stored at once
    fixed = blackwell.fixed_terms(256, 7168, 128, 8, 32, 2)
    stage = blackwell.stage_terms(Tiles(128, 128, 128, "fp8"), 4)
    assert {t.name: t.num_bytes for t in fixed} == {
        "expert counts": 1024,
        "pulled rows": 28672,
        "output tile": 16384,
        "amax": 1024,
        "barriers": 192,
        "tensor memory": 4,
    }
    assert [t.num_bytes for t in stage] == [8192, 16384, 512, 512, 16]
    for limit in (232448, 232 * 1024):
        assert num_stages(fixed, stage, limit).value == 7


def test_packed_fp4_stages_of_256_take_31_kb_and_6_to_10_fit():
    # D005
    stage = blackwell.stage_terms(Tiles(192, 128, 256, "fp4"), 8)
    assert round(sum(t.num_bytes for t in stage) / 1024) == 31
    for m in (32, 64, 192):
        fixed, stage = blackwell.shared_memory(load(1.0, "w4a4"), Tiles(m, 128, 256, "fp4"))
        assert 6 <= num_stages(fixed, stage, 232448).value <= 10


@pytest.mark.parametrize(
    ("num_n", "num_k", "block_n", "stages"),
    [(4096, 7168, 128, (6, 6)), (7168, 2048, 256, (2, 4)), (3072, 4096, 128, (6, 6))],
)
def test_nvfp4_widens_the_tile_where_n_is_wide(num_n, num_k, block_n, stages):
    found = blackwell.nvfp4_tile(num_n, num_k)  # C009, shapes A to C of C011
    assert found[:2] == (block_n, stages)


def test_half_a_packed_tile_of_16_is_refused():
    with pytest.raises(ShapeError, match="multiple of 1024 bytes; got 512 bytes"):
        blackwell.check(load(1.0, "w4a4"), Tiles(16, 128, 128, "fp4"))


# One rank's share on one H200, w4a8_block: (tokens, hidden, intermediate, experts, top_k) and the
# best token tile and 128-blocks a stage that were measured.
MEASURED = [
    ((8, 4096, 2048, 32, 6), 8, 2),
    ((64, 4096, 2048, 32, 6), 16, 2),
    ((8, 7168, 3072, 48, 6), 8, 2),
    ((64, 7168, 3072, 48, 6), 16, 2),
    ((8, 7168, 2048, 32, 8), 8, 2),
    ((64, 7168, 2048, 32, 8), 32, 1),
    ((8, 6144, 2048, 48, 8), 8, 2),
    ((32, 6144, 2048, 48, 8), 16, 2),
    ((64, 6144, 2048, 48, 8), 16, 2),
    ((128, 6144, 2048, 48, 8), 32, None),
]


@pytest.mark.parametrize(("shape", "tile", "steps"), MEASURED, ids=str)
def test_hopper_chooses_the_best_measured_tile(shape, tile, steps):
    tokens, hidden, intermediate, experts, top_k = shape
    problem = mm.Problem(tokens, hidden, intermediate, experts, top_k, 1, "w4a8_block")
    assert hopper.block_m(problem).value == tile
    assert hopper.block_n(problem, H200, 132, tile).value == 256  # two slabs a warpgroup
    if steps:
        assert hopper.block_k(problem, tile).value == 128 * steps


def test_hopper_counts_whole_tile_waves():
    # 25 of 32 experts touched, 16 tiles of 256 rows each: 400 tiles on 132 SMs are 4 waves
    problem = mm.Problem(8, 4096, 2048, 32, 6, 1, "w4a8_block")
    four = hopper.tile_us(problem, H200, 132, 8, 256)
    assert hopper.tile_us(problem, H200, 134, 8, 256) < four  # 400 tiles, 3 waves of 134
    prefill = mm.Problem(8192, 4096, 2048, 32, 6, 1, "w4a8_block")
    assert hopper.block_n(prefill, H200, 132, 256).value == 128


def test_hopper_refuses_accumulators_that_spill():
    with pytest.raises(CapacityError, match="block_m must be at most 32; got block_m 64"):
        hopper.check(load(1.0), Tiles(64, 256, 128, "fp8"))
    with pytest.raises(ShapeError, match="multiple of 128: FP8 sums are promoted"):
        hopper.check(load(1.0), Tiles(8, 256, 64, "fp8"))


def test_portable_refuses_half_a_block_of_fp4_weights():
    portable.check(mm.Problem(64, 512, 512, 8, 2, 1, "bf16"), Tiles(16, 64, 64, "bf16"))
    with pytest.raises(ShapeError, match="multiple of 128 for FP4 weights"):
        portable.check(mm.Problem(64, 512, 512, 8, 2, 1, "w4a16"), Tiles(16, 64, 64, "bf16"))


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_tile_of_every_recipe_fits_registers_and_two_stages(backend, recipe):
    for m in backend.BLOCK_MS:
        problem = mm.Problem(64, 7168, 3072, 384, 6, 8, recipe)
        n = backend.block_n(problem, H200, 132, m).value
        tiles = Tiles(m, n, backend.block_k(problem, m).value, backend.mma(problem)[0])
        if m == 16 and tiles.mma == "fp4":
            continue  # D009
        backend.check(problem, tiles)
        fixed, stage = backend.shared_memory(problem, tiles)
        stages = num_stages(fixed, stage, 232448).value
        assert SharedMemory(fixed, stage, stages, 232448).num_bytes <= 232448
        roles = backend.roles(problem, tiles)
        assert num_registers(roles) <= 65536
        assert sum(role.num_warps for role in roles) <= 32
        assert all(24 <= role.registers <= 255 for role in roles)


@pytest.mark.parametrize("backend", [blackwell, hopper, portable])
def test_every_table_covers_every_load_and_says_why(backend):
    for rows in (0.0, 0.1, 1e6):
        value, why = backend.block_m(load(rows))
        assert value in backend.BLOCK_MS and len(why) > 10


def test_fused_launches_hold_weights_to_a_window_unless_math_is_the_limit():
    for recipe in RECIPES:
        tile, _ = hopper_tiles.tiles(recipe, 4.0)
        becomes_bf16 = recipe in ("w4a16", "w4a8", "w4a4", "nvfp4")
        assert tile.window == (0 if becomes_bf16 else 2)
        assert hopper_fused.as_fused(tile).window == tile.window < tile.stages
    wide, _ = hopper_tiles.tiles("w4a8_block", 4.0, fits_e4m3=False)
    assert wide.window == 0


def test_a_stage_that_does_not_fit_twice_is_refused_with_the_sum():
    fixed, stage = (Term("a", 100, ""),), (Term("b", 60, ""),)
    with pytest.raises(CapacityError, match=r"200 bytes.*got 100 fixed bytes and 60 a stage"):
        num_stages(fixed, stage, 200)
    assert num_stages(fixed, stage, 220).value == 2
    assert num_stages(fixed, stage, 10**6).value == 32  # A026


def test_the_plan_prints_the_tile_of_hoppers_staged_launches_with_its_reason():
    problem = mm.Problem(64, 7168, 2048, 256, 8, 8, "w4a8_block")
    chosen = {c.name: c for c in mm.plan(problem, "h200").choices}
    tile, why = hopper_tiles.tiles("w4a8_block", problem.tokens_per_expert)
    assert (chosen["staged_tile"].value, chosen["staged_tile"].why) == (str(tile), why)
    assert "staged_tile" not in {c.name for c in mm.plan(problem, "b200").choices}


@pytest.mark.parametrize(
    ("tokens", "experts", "mode"), [(8, 256, "fused"), (64, 256, "fused"), (65, 256, "staged"),
                                    (64, 8, "staged")],
)  # fmt: skip
def test_the_plan_prints_what_auto_launches_on_one_rank(tokens, experts, mode, monkeypatch):
    """By the table, unless the tile needs launches of its own."""
    rows = (512, "fused", "one launch in this test"), (1e9, "staged", "four launches for this test")
    monkeypatch.setattr(hopper_fused, "MODES", rows)
    problem = mm.Problem(tokens, 7168, 2048, experts, 8, 1, "w4a8_block")
    chosen = {c.name: c for c in mm.plan(problem, "h200").choices}["auto_launch"]
    tile, _ = hopper_tiles.tiles("w4a8_block", problem.tokens_per_expert)
    assert (chosen.value, chosen.why) == hopper_fused.auto_mode(8 * tokens, tile)
    assert chosen.value == mode and len(chosen.why) > 20
    assert f"auto_launch{mode:>17}" in str(mm.plan(problem, "h200"))
    assert "auto_launch" not in {c.name for c in mm.plan(problem, "b200").choices}


def test_the_plan_prints_what_a_fused_group_shares_and_it_is_no_worst_case_pool():
    problem = mm.Problem(4096, 7168, 3072, 384, 6, 8, "w4a8_block")  # DeepSeek-V4-Pro, EP8
    plan = mm.plan(problem, "h200")
    chosen = {c.name: c for c in plan.choices}["group_room_bytes"]
    num, each = hopper_fused.passes("w4a8_block", 4096, 48, 384)
    assert num * each >= 4096 and each * 48 <= hopper_fused.MOST_SLOTS
    assert chosen.value == rooms.layout(num * each, 7168, 6, num).num_bytes
    pool = plan.workspace["l1_token"].num_bytes + plan.workspace["l1_scale"].num_bytes
    assert chosen.value <= pool / 2 and str(chosen.value) in str(plan)
    one = mm.Problem(4096, 7168, 3072, 384, 6, 1, "w4a8_block")
    for other in (mm.plan(one, "h200"), mm.plan(problem, "b200")):
        assert "group_room_bytes" not in {c.name for c in other.choices}


@pytest.mark.parametrize(
    ("tokens", "slots", "experts", "found"),
    [(64, 48, 384, (1, 64)), (85, 48, 384, (1, 85)), (86, 48, 384, (2, 43)), (100, 4, 8, (3, 34)),
     (5, 5000, 384, (5, 1))],
)  # fmt: skip
def test_a_call_over_a_group_has_as_few_launches_as_their_limits_let(tokens, slots, experts, found):
    assert hopper_fused.passes("w4a8_block", tokens, slots, experts) == found
