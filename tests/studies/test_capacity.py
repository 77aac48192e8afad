"""Capacity: the bound of a pool, and waves that fit in a ring."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.errors import CapacityError, ShapeError
from megamoe.layout.regions import ceil_div
from megamoe.studies.deep_gemm.capacity import (
    capacity,
    max_blocks,
    pool_rows,
    scale_pool_rows,
    wave_end,
    waves,
)

from .support import TILES

SETTINGS = settings(deadline=None, derandomize=True, max_examples=60, database=None)
ROWS = st.lists(st.one_of(st.just(0), st.integers(0, 90)), min_size=1, max_size=12)


def test_our_pool_counts_every_slot():
    # the same expert may stand twice in a row: all 8 slots can come to 2 experts
    assert pool_rows(4, 64, 8, 2, (8,)) >= 4 * 64 * 8
    assert pool_rows(4, 64, 8, 2, (8,)) == (2 + (2048 - 2) // 8) * 8


def test_the_scale_pool_pads_each_block_to_128():
    # A023: (pool / block) * align(block, 128), the most over the tiles
    assert scale_pool_rows(384, (192,)) == 2 * 256
    assert scale_pool_rows(384, TILES) == 384 // 8 * 128
    assert scale_pool_rows(384, TILES, scale_align=1) == 384


@SETTINGS
@given(st.integers(0, 12), st.integers(1, 4), st.integers(1, 5))
def test_the_most_blocks_is_reached_and_never_passed(num_rows, num_experts, block_m):
    def most(rows, experts):
        if experts == 0:
            return 0 if rows == 0 else -(10**9)
        return max(ceil_div(c, block_m) + most(rows - c, experts - 1) for c in range(rows + 1))

    assert max_blocks(num_rows, num_experts, block_m) == most(num_rows, num_experts)


@SETTINGS
@given(
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from([(8, 16, 32), TILES, (16,)]),
    st.data(),
)
def test_every_batch_fits_the_pool_with_every_tile(ranks, tokens, top_k, local, tiles, data):
    sizes = capacity(ranks, tokens, top_k, local, block_ms=tiles)
    left = ranks * tokens * top_k
    rows = []
    for _ in range(local):
        rows.append(data.draw(st.integers(0, left)))
        left -= rows[-1]
    for m in tiles:
        used = sum(ceil_div(c, m) for c in rows)
        assert used * m <= sizes.pool_rows
        assert used <= sizes.pool_blocks
        assert sizes.pool_rows % m == 0
    assert not sizes.is_ring


@SETTINGS
@given(ROWS, st.sampled_from([1, 4, 8]), st.integers(1, 12), st.integers(1, 9))
def test_waves_hold_every_block_once_in_order_and_fit(rows, block_m, per_wave, ring_blocks):
    found = waves(rows, block_m=block_m, experts_per_wave=per_wave, ring_rows=ring_blocks * block_m)
    seen = [(p.expert, m) for w in found for p in w for m in range(p.first_m, p.first_m + p.num_m)]
    assert seen == [(e, m) for e, c in enumerate(rows) for m in range(ceil_div(c, block_m))]
    for wave in found:
        assert sum(p.num_m for p in wave) <= ring_blocks
        assert len({p.expert // per_wave for p in wave}) <= 1
        assert all(p.num_m > 0 for p in wave)


@SETTINGS
@given(ROWS, st.sampled_from([4, 8]), st.integers(1, 12), st.integers(1, 9))
def test_only_an_expert_larger_than_the_ring_is_cut(rows, block_m, per_wave, ring_blocks):
    found = waves(rows, block_m=block_m, experts_per_wave=per_wave, ring_rows=ring_blocks * block_m)
    for expert, count in enumerate(rows):
        parts = [p for w in found for p in w if p.expert == expert]
        assert len(parts) <= 1 or ceil_div(count, block_m) > ring_blocks
        assert len(parts) == ceil_div(ceil_div(count, block_m), ring_blocks)


@SETTINGS
@given(ROWS, st.integers(1, 12))
def test_without_a_ring_a_wave_is_a_group_of_experts(rows, per_wave):
    found = waves(rows, block_m=4, experts_per_wave=per_wave)
    assert len(found) == ceil_div(len(rows), per_wave)
    for index, wave in enumerate(found):
        group = range(index * per_wave, min((index + 1) * per_wave, len(rows)))
        assert [p.expert for p in wave] == [e for e in group if rows[e]]


def test_an_expert_larger_than_the_ring_runs_in_several_waves():
    # 10 blocks through a ring of 4, then the next expert joins what is left of the last pass
    found = waves([40, 4], block_m=4, experts_per_wave=2, ring_rows=16)
    assert [[tuple(p) for p in w] for w in found] == [
        [(0, 0, 4)],
        [(0, 4, 4)],
        [(0, 8, 2), (1, 0, 1)],
    ]


def test_a_wave_ends_where_the_scan_says():
    assert wave_end([40, 4], 4, 2, 4, 0, 0) == (0, 4)
    assert wave_end([40, 4], 4, 2, 4, 0, 8) == (2, 0)
    assert wave_end([4, 4, 4], 4, 2, 100, 0, 0) == (2, 0)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (
            lambda: waves([5, 7], block_m=16, experts_per_wave=1, ring_rows=8),
            CapacityError,
            "at least one block of 16 rows; got 8 rows for a batch of 12 rows",
        ),
        (lambda: waves([-1], block_m=4, experts_per_wave=1), ShapeError, "negative"),
        (lambda: waves([1], block_m=0, experts_per_wave=1), ShapeError, "block_m"),
        (lambda: waves([1], block_m=4, experts_per_wave=0), ShapeError, "experts_per_wave"),
        (
            lambda: capacity(8, 64, 8, 4, block_ms=(16, 96), ring_rows=100),
            ShapeError,
            "multiple of 96.*got 100; take 192",
        ),
        (lambda: capacity(8, 64, 8, 4, block_ms=(8,), ring_rows=0), ShapeError, "take 8"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_numbers(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_a_ring_larger_than_the_worst_case_is_the_worst_case():
    sizes = capacity(1, 8, 2, 4, block_ms=(8,), ring_rows=8000)
    assert sizes.ring_rows == sizes.pool_rows and not sizes.is_ring
