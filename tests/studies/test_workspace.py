"""The workspace: the protocol's words and ten data segments, the same for every rank and batch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import megamoe as mm
from megamoe.errors import RangeError
from megamoe.formats.spec import RECIPES, recipe_named
from megamoe.studies.deep_gemm.capacity import capacity
from megamoe.studies.deep_gemm.workspace import (
    data_segments,
    mask_words,
    ring_bytes,
    row_bytes,
    scale_words,
    workspace,
)

from .support import TILES

SETTINGS = settings(deadline=None, derandomize=True, max_examples=60, database=None)
CONTROL = [
    *("grid_sync", "barrier_counter", "barrier_signal", "abort_flag", "timeout_record", "ticket"),
    *("expert_send_count", "expert_recv_count", "expert_recv_count_sum"),
    *("l1_arrival_count", "l2_arrival_mask", "l2_done_count"),
    *("src_token_topk_idx", "token_src_metadata"),
]
DATA = [
    *("input_token", "input_scale", "input_topk_idx", "input_topk_weights"),
    *("l1_token", "l1_scale", "l1_topk_weights", "l2_token", "l2_scale"),
    *("combine_token", "combine_scale"),
]


def made(recipe="w4a8", *, ring_rows=None, combine="bf16", tokens=256):
    problem = mm.Problem(tokens, 7168, 2048, 256, 8, 8, recipe)
    sizes = capacity(8, 256, 8, 32, block_ms=TILES, ring_rows=ring_rows)
    return workspace(problem, sizes, combine=combine), sizes


@SETTINGS
@given(
    st.sampled_from(list(RECIPES)),
    st.sampled_from([1, 2, 8]),
    st.integers(1, 40),
    st.integers(1, 6),
    st.sampled_from([32, 96, 2880, 4096]),
    st.sampled_from([32, 416, 2880]),
    st.sampled_from(["bf16", "fp8"]),
)
def test_regions_are_disjoint_and_aligned(recipe, ranks, tokens, top_k, hidden, inter, combine):
    problem = mm.Problem(tokens, hidden, inter, 8 * ranks, top_k, ranks, recipe)
    sizes = capacity(ranks, tokens, top_k, 8, block_ms=(8, 16, 32))
    placed = workspace(problem, sizes, combine=combine)
    assert [r.name for r in placed.regions] == CONTROL + DATA
    end = 0
    for region in placed.regions:
        assert region.offset >= end and region.offset % region.align == 0
        assert region.align % 16 == 0
        end = region.end
    assert placed.num_bytes >= end
    for name in ("input_token", "l1_token", "l2_token", "combine_token"):
        assert placed[name].shape[-1] % 16 == 0  # A055: TMA rows


def test_control_words_have_the_sizes_of_the_protocol():
    placed, sizes = made()
    assert placed["grid_sync"].shape == (4,)
    assert placed["barrier_signal"].shape == (2,)
    assert placed["expert_send_count"].num_bytes == 8 * 256
    assert placed["expert_recv_count"].shape == (8, 32)
    assert placed["expert_recv_count_sum"].num_bytes == 8 * 32
    assert placed["l1_arrival_count"].num_bytes == 4 * sizes.pool_blocks
    assert placed["l2_arrival_mask"].shape == (sizes.pool_blocks, 1)
    assert placed["src_token_topk_idx"].shape == (32, 8, 256 * 8)
    assert placed["token_src_metadata"].num_bytes == 12 * sizes.pool_rows
    assert placed.control_bytes == placed["token_src_metadata"].end


def test_cleaned_words_are_those_that_count_a_call():
    placed, _ = made()
    cleaned = {r.name for r in placed.regions if r.is_cleaned}
    assert cleaned == {
        *("ticket", "expert_send_count", "expert_recv_count", "expert_recv_count_sum"),
        *("l1_arrival_count", "l2_arrival_mask", "l2_done_count"),
    }


def test_the_ten_segments_of_w4a8():
    placed, sizes = made()
    rows = sizes.pool_rows
    assert placed["input_token"].num_bytes == 256 * 7168
    assert placed["input_scale"].num_bytes == 256 * 7168 // 32
    assert placed["input_topk_idx"].num_bytes == 256 * 8 * 8
    assert placed["input_topk_weights"].num_bytes == 256 * 8 * 4
    assert placed["l1_token"].num_bytes == rows * 7168
    assert placed["l1_scale"].shape == (7168 // 128, rows // 8 * 128)
    assert placed["l1_topk_weights"].num_bytes == 4 * rows
    assert placed["l2_token"].num_bytes == rows * 2048
    assert placed["l2_scale"].shape == (2048 // 128, rows // 8 * 128)
    assert placed["combine_token"].num_bytes == 8 * 256 * 7168 * 2
    assert placed["combine_scale"].num_bytes == 0


def test_fp4_rows_halve_the_activations_and_keep_the_scales():
    # D002: half the row, the same hidden / 32 scale bytes
    fp8, fp4 = made("w4a8")[0], made("w4a4")[0]
    for name in ("input_token", "l1_token", "l2_token"):
        assert fp4[name].num_bytes * 2 == fp8[name].num_bytes
    for name in ("input_scale", "l1_scale", "l2_scale", "combine_token"):
        assert fp4[name].num_bytes == fp8[name].num_bytes


def test_an_fp8_combine_ships_a_byte_and_a_scale_per_128():
    placed = made(combine="fp8")[0]
    per_row = placed["combine_token"].num_bytes + placed["combine_scale"].num_bytes
    assert per_row == 8 * 256 * (7168 + 7168 // 128)  # D011: H + H/128


def test_bf16_rows_have_no_scales():
    placed = made("bf16")[0]
    assert placed["l1_token"].shape[1] == 2 * 7168
    assert placed["l1_scale"].num_bytes == placed["input_scale"].num_bytes == 0


def test_block_scales_take_one_fp32_per_128():
    placed = made("w4a8_block")[0]
    assert placed["input_scale"].num_bytes == 256 * 4 * 7168 // 128


def test_nvfp4_scales_take_a_byte_per_16():
    assert made("nvfp4")[0]["input_scale"].num_bytes == 256 * 7168 // 16


@pytest.mark.parametrize("tokens", [0, 1, 256])
def test_the_layout_depends_on_the_layer_never_on_the_batch(tokens):
    assert made(tokens=tokens)[0] == made()[0]


def test_a_ring_shrinks_the_pools_and_nothing_else():
    whole, sizes = made()
    ring, ring_sizes = made(ring_rows=3840)
    assert ring_sizes.is_ring and ring["l1_token"].shape[0] == 3840
    for region in whole.regions:
        if region.name[:3] in ("l1_", "l2_") and region.section == "data":
            assert ring[region.name].num_bytes < region.num_bytes
        else:
            assert ring[region.name].num_bytes == region.num_bytes
    problem = mm.Problem(256, 7168, 2048, 256, 8, 8, "w4a8")
    grown = [ring_bytes(problem, s.ring_rows, s.scale_rows) for s in (sizes, ring_sizes)]
    assert abs(grown[0] - grown[1] - (whole.num_bytes - ring.num_bytes)) < 5 * 128


def test_a_wide_layer_gets_a_second_mask_word():
    assert [mask_words(n) for n in (1, 64, 65, 96)] == [1, 1, 2, 2]
    problem = mm.Problem(8, 7168, 3072, 8, 2, 1, "w4a8")
    sizes = capacity(1, 8, 2, 8, block_ms=(8,))
    assert workspace(problem, sizes)["l2_arrival_mask"].shape[1] == 2
    assert workspace(problem, sizes, min_block_n=128)["l2_arrival_mask"].shape[1] == 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_scales_cover_every_value_of_a_ragged_row(recipe):
    fmt = recipe_named(recipe).acts
    for width in (32, 96, 2880):
        assert row_bytes(width, fmt) * 8 >= width * fmt.element.bits
        per_word = {"none": 0, "e8m0": 4, "e4m3": 4, "fp32": 1}[fmt.scale.value]
        covered = scale_words(width, fmt) * per_word * fmt.block[1]
        assert covered >= width or fmt.scale.value == "none"


def test_an_unknown_combine_is_refused():
    problem = mm.Problem(8, 64, 64, 8, 2, 1, "w4a8")
    with pytest.raises(RangeError, match="combine must be one of bf16, fp8; got 'fp4'"):
        data_segments(problem, capacity(1, 8, 2, 8, block_ms=(8,)), "fp4")
