"""Every block once, L1 before the L2 that reads it, ring slots never taken early."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamoe.errors import RangeError, ShapeError
from megamoe.studies.deep_gemm.blocks import (
    L1,
    L2,
    Block,
    Grid,
    arrival_mask,
    arrival_masks,
    block_mn,
    blocks,
    interleaved,
    num_m_blocks,
    valid_m,
)
from megamoe.studies.deep_gemm.capacity import waves
from megamoe.studies.deep_gemm.walk import Walk

from .support import CASES, SETTINGS, all_blocks

ROLES = ("load_tokens", "load_weights", "issue_mma", "epilogue")


@SETTINGS
@given(CASES)
def test_every_block_comes_exactly_once(case):
    seen = [tuple(b)[1:] for b in blocks(case.grid, case.waves, lag=case.lag)]
    assert len(seen) == len(set(seen)) == case.grid.num_blocks(case.rows)
    assert set(seen) == all_blocks(case.grid, case.rows)


@SETTINGS
@given(CASES)
def test_an_l2_block_stands_behind_the_l1_blocks_it_reads(case):
    finished: dict[tuple[int, int], int] = {}
    for block in blocks(case.grid, case.waves, lag=case.lag):
        key = (block.expert, block.m)
        if block.phase == L1:
            finished[key] = finished.get(key, 0) + 1
        else:
            assert finished[key] == case.grid.num_l1_n


@SETTINGS
@given(CASES)
def test_a_ring_slot_is_taken_only_when_its_last_owner_is_done(case):
    if case.ring_blocks is None:
        return
    offsets = case.grid.pool_offsets(case.rows)
    done = [0] * offsets[-1]
    for block in blocks(case.grid, case.waves, lag=case.lag):
        pool = offsets[block.expert] + block.m
        if block.phase == L2:
            done[pool] += 1
        elif pool >= case.ring_blocks:
            assert done[pool - case.ring_blocks] == case.grid.num_l2_n


@SETTINGS
@given(CASES)
def test_waves_and_phases_come_in_order(case):
    listed = list(blocks(case.grid, case.waves))
    assert listed == sorted(listed, key=lambda b: (b.wave, b.phase, b.expert, b.m, b.n))


@SETTINGS
@given(CASES)
def test_a_lag_beyond_the_wave_is_whole_phases(case):
    assert list(blocks(case.grid, case.waves, lag=10**6)) == list(blocks(case.grid, case.waves))


def test_a_lag_of_one_runs_l2_one_row_block_behind():
    listed = list(blocks(Grid(4, 2, 1), waves([12], block_m=4, experts_per_wave=1), lag=1))
    assert [(b.phase, b.m, b.n) for b in listed] == [
        *((L1, 0, 0), (L1, 0, 1)),
        *((L1, 1, 0), (L1, 1, 1), (L2, 0, 0)),
        *((L1, 2, 0), (L1, 2, 1), (L2, 1, 0)),
        *((L2, 2, 0),),
    ]


@SETTINGS
@given(CASES)
def test_the_walks_of_all_sms_are_the_order_dealt_block_by_block(case):
    order = list(blocks(case.grid, case.waves, lag=case.lag))
    for sm in range(case.num_sms):
        assert list(walk(case, sm)) == order[sm :: case.num_sms]


@SETTINGS
@given(CASES)
def test_all_roles_of_an_sm_see_the_same_sequence(case):
    # A034: each role walks alone. They run in turns here, as warps do.
    walks = {role: walk(case, 0) for role in ROLES}
    while True:
        found = {walks[role].next_block() for role in ROLES}
        assert len(found) == 1
        if found == {None}:
            break


def walk(case, sm):
    return Walk(
        case.grid,
        case.rows,
        experts_per_wave=case.experts_per_wave,
        sm=sm,
        num_sms=case.num_sms,
        ring_rows=case.ring_rows,
        lag=case.lag,
    )


def test_a_finished_walk_stays_finished():
    done = Walk(Grid(4, 1, 1), [4], experts_per_wave=1, sm=0, num_sms=1)
    assert [b.phase for b in done] == [L1, L2]
    assert done.next_block() is None and done.next_block() is None


def test_the_worked_wave_of_two_experts():
    # 2 experts of 2 and 1 row blocks, 2 and 1 weight blocks: SM 1 of 3
    order = list(Walk(Grid(8, 2, 1), [9, 8], experts_per_wave=2, sm=1, num_sms=3))
    assert order == [
        Block(0, L1, 0, 0, 1),
        Block(0, L1, 1, 0, 0),
        Block(0, L2, 0, 1, 0),
    ]


@SETTINGS
@given(st.integers(0, 200), st.integers(1, 32))
def test_row_blocks_cover_the_rows(rows, block_m):
    num = num_m_blocks(rows, block_m)
    assert sum(valid_m(rows, m, block_m) for m in range(num)) == rows
    assert all(1 <= valid_m(rows, m, block_m) <= block_m for m in range(num))


def test_n_runs_fastest():
    assert [block_mn(i, 3) for i in range(4)] == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_pool_blocks_of_experts_lie_end_to_end():
    assert Grid(16, 1, 1).pool_offsets([17, 0, 16, 1]) == (0, 2, 2, 3, 4)


@SETTINGS
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 4), st.data())
def test_interleaving_is_a_bijection(num_m, l1, l2, data):
    lag = data.draw(st.integers(0, num_m))
    seen = [interleaved(i, num_m, l1, l2, lag) for i in range(num_m * (l1 + l2))]
    assert set(seen) == {
        (is_l2, m, n) for m in range(num_m) for is_l2, w in ((0, l1), (1, l2)) for n in range(w)
    }


def test_masks_stay_defined_at_64_bits():
    # A045: num_k_blocks = 32 is 64 bits; a single shift by 64 would be undefined
    assert arrival_mask(64) == 2**64 - 1
    assert [arrival_mask(n) for n in (0, 1, 63)] == [0, 1, 2**63 - 1]
    assert arrival_masks(96) == (2**64 - 1, 2**32 - 1)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (8, 0, 1), (8, 1, 0)], ids=str)
def test_an_empty_grid_is_refused(sizes):
    with pytest.raises(ShapeError, match="at least one row and one block"):
        Grid(*sizes)


def test_an_sm_outside_the_launch_is_refused():
    with pytest.raises(RangeError, match="got 4 of 4"):
        Walk(Grid(4, 1, 1), [4], experts_per_wave=1, sm=4, num_sms=4)


def test_no_rows_are_no_blocks():
    assert list(blocks(Grid(4, 2, 2), waves([0, 0], block_m=4, experts_per_wave=1))) == []
