"""Figures of the documents on Blackwell, number by number, out of the planner's arithmetic."""

from math import lcm, prod

import pytest

from megamoe.bench.cells import UNEVEN_GEMMS
from megamoe.errors import CapacityError
from megamoe.studies.deep_gemm import tcgen05
from megamoe.studies.deep_gemm.tcgen05 import (
    GroupedTile,
    Operand,
    grouped_tile,
    num_stages,
    stage_bytes,
)

KIB = 1024


def test_the_worked_pool_has_22656_rows():
    """A022: 8 ranks, 256 tokens a rank, top-8, 32 local experts."""
    assert tcgen05.pool_rows(8, 256, 8, 32) == 22_656
    assert tcgen05.pool_rows(8, 256, 8, 4) == 8_832 + 384  # at most the local experts are chosen
    assert lcm(*tcgen05.CANDIDATES) == 384 and max(tcgen05.CANDIDATES) == 192


def test_the_worked_budget_has_7_stages_of_25_kb_beside_47():
    """A027: tiles of 128 x 128 x 128, FP8 in shared memory, half the tokens from each CTA."""
    stage = stage_bytes(Operand(128, 8, 32, num_ctas=2), Operand(128, 8, 32), 128)
    assert stage == 8 * KIB + 16 * KIB + 512 + 512 + 16 and round(stage / KIB) == 25
    fixed = 1024 + 4 * 7168 + 16 * KIB + 1024 + 192 + 4
    assert fixed == 47_300 and round(fixed / 1000) == 47
    for limit in (232_448, 232 * KIB):
        assert num_stages(fixed, stage, limit) == 7


@pytest.mark.parametrize(
    ("mma", "wanted"),
    [
        ("fp8", {16: 256, 32: 128, 64: 128, 96: 128, 128: 128, 192: 128}),
        ("fp4", {32: 256, 64: 256, 96: 128, 128: 128, 192: 256}),
    ],
)
def test_depth_by_band(mma, wanted):
    """A021 and D004: 256 for packed FP4 with 32, 64 and 192 tokens, 128 with 96 and 128."""
    assert {m: tcgen05.block_k(mma, m)[0] for m in wanted} == wanted
    assert tcgen05.padded_block_m("fp4", 16) == 32 and tcgen05.padded_block_m("fp8", 16) == 16


def test_a_stage_of_256_takes_31_kib_packed_and_57_thousand_bytes_with_fp8_tokens():
    """D005, with 192 tokens: 6 to 10 stages fit packed, three with FP8.

    The two published figures have no unit in common: 31 is KiB with scales (28.7 thousand bytes
    without), 57 is thousand bytes without (59 KiB with).
    """
    packed = stage_bytes(Operand(192, 4, 32, num_ctas=2), Operand(128, 4, 32), 256)
    assert round(packed / KIB) == 31
    bare = sum(o.num_bytes(256) for o in (Operand(192, 4, 32, num_ctas=2), Operand(128, 4, 32)))
    assert bare == 28_672
    operands = (Operand(192, 8, 32, num_ctas=2), Operand(128, 8, 32))
    assert round(sum(o.num_bytes(256) for o in operands) / 1000) == 57
    assert round(stage_bytes(*operands, 256) / KIB) == 59
    fixed = 40_000  # about: pulled rows of 2 KiB, the output tile, amax, counts
    assert 6 <= num_stages(fixed, packed) <= 10
    assert num_stages(fixed, stage_bytes(*operands, 256)) == 3


def test_exact_stages_of_the_grouped_gemm():
    """C009 and C010: 6 for 128 x 128 and 4 for 128 x 256, as the presets have them at most."""
    assert tcgen05.STATIC_BYTES == 52 and tcgen05.SMEM_PER_CTA == 227 * KIB
    assert GroupedTile(128, 128, 256).num_stages == 6
    assert GroupedTile(128, 256, 256).num_stages == 4


def test_tiles_of_the_four_shapes():
    """C009: only the shape that the document calls wide has the wide tile."""
    shapes = UNEVEN_GEMMS
    wide = {name for name, shape in shapes.items() if grouped_tile(shape.n).block_n == 256}
    assert len(shapes) == 4 and {shapes[name].n for name in wide} == {7168}
    tile = GroupedTile(128, 256, 256)  # 256 weight rows a tile: what fills 148 SMs, and what not
    found = [tile.num_tiles(tuple(shape.rows), shape.n) for shape in shapes.values()]
    assert found == [176, 364, 60, 64]


def test_busy_groups_come_first_and_the_smaller_operand_stays():
    rows = (80, 176, 128, 72, 64, 248, 96, 160)  # shape A
    order = tcgen05.largest_first(rows)
    assert [rows[g] for g in order] == sorted(rows, reverse=True) and sorted(order) == [*range(8)]
    assert tcgen05.kept_in_l2(248, 4096) == "tokens" and tcgen05.kept_in_l2(8192, 4096) == "weights"
    assert sum(m <= tcgen05.LOW_M for m in rows) == 4


@pytest.mark.parametrize(
    ("times", "mean"),
    [
        ((351, 341, 167, 146), 232),
        ((641, 451, 142, 80.2), 240),
        ((313, 286, 111, 63.7), 159),
        ((129, 128, 43.6, 22.6), 63.5),
        ((47.5, 45.0, 14.3, 10.5), 23.8),
    ],
    ids=["reference", "v1", "v2", "v3", "v4"],
)
def test_published_means_are_geometric(times, mean):
    """C012; the reference's is given as 238 there, and its four times make 232."""
    assert prod(times) ** 0.25 == pytest.approx(mean, rel=5e-3)


def test_a_stage_that_does_not_fit_twice_is_refused():
    with pytest.raises(CapacityError, match="got 100 fixed bytes and 60 a stage"):
        num_stages(100, 60, 200)
    assert num_stages(100, 60, 220) == 2 and num_stages(0, 1) == 32
