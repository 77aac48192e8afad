"""The reference system's tables: published tiers at their edges, and worked sums."""

from __future__ import annotations

import pytest

import megamoe as mm
from megamoe.errors import CapacityError, ShapeError
from megamoe.formats.spec import RECIPES
from megamoe.hardware import H200
from megamoe.planner.choice import SharedMemory, Term
from megamoe.studies.deep_gemm.choice import Tiles, num_registers, num_stages
from megamoe.studies.deep_gemm.heuristics import BACKENDS, blackwell, hopper


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


def test_half_a_packed_tile_of_16_is_refused():
    with pytest.raises(ShapeError, match="multiple of 1024 bytes; got 512 bytes"):
        blackwell.check(load(1.0, "w4a4"), Tiles(16, 128, 128, "fp4"))


def test_hopper_refuses_accumulators_that_spill():
    with pytest.raises(CapacityError, match="block_m must be at most 32; got block_m 64"):
        hopper.check(load(1.0), Tiles(64, 256, 128, "fp8"))
    with pytest.raises(ShapeError, match="multiple of 128: FP8 sums are promoted"):
        hopper.check(load(1.0), Tiles(8, 256, 64, "fp8"))


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


@pytest.mark.parametrize("backend", [blackwell, hopper])
def test_every_table_covers_every_load_and_says_why(backend):
    for rows in (0.0, 0.1, 1e6):
        value, why = backend.block_m(load(rows))
        assert value in backend.BLOCK_MS and len(why) > 10


def test_a_stage_that_does_not_fit_twice_is_refused_with_the_sum():
    fixed, stage = (Term("a", 100, ""),), (Term("b", 60, ""),)
    with pytest.raises(CapacityError, match=r"200 bytes.*got 100 fixed bytes and 60 a stage"):
        num_stages(fixed, stage, 200)
    assert num_stages(fixed, stage, 220).value == 2
    assert num_stages(fixed, stage, 10**6).value == 32  # A026
