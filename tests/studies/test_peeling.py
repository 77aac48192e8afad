"""Min-peeling: a bijection that spreads neighbouring pulls over the ranks that have rows left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamoe.errors import RangeError
from megamoe.studies.deep_gemm.peeling import source, sources

from .support import SETTINGS

COUNTS = st.lists(st.integers(0, 12), min_size=1, max_size=80)


@SETTINGS
@given(COUNTS)
def test_every_row_is_pulled_once(counts):
    pulled = list(sources(counts))
    assert len(pulled) == sum(counts)
    assert set(pulled) == {(r, i) for r, count in enumerate(counts) for i in range(count)}


@SETTINGS
@given(COUNTS)
def test_a_slot_alone_finds_what_the_sequence_gives(counts):
    assert [source(slot, counts) for slot in range(sum(counts))] == list(sources(counts))


@SETTINGS
@given(COUNTS)
def test_neighbouring_pulls_go_to_all_ranks_that_have_rows_left(counts):
    pulled = list(sources(counts))
    for first, (_, place) in enumerate(pulled):
        active = sum(count > place for count in counts)
        window = [p.rank for p in pulled[first : first + active] if p.place == place]
        assert len(window) == len(set(window))


def test_the_worked_example_of_four_ranks():
    # 10 rows; all four ranks are active, the shortest (rank 3) has one row: round 1 covers
    # 4 x 1 slots; then rank 2 is shortest, then rank 1; rank 0 ends alone.
    counts = [4, 3, 2, 1]
    assert [p.rank for p in sources(counts)] == [0, 1, 2, 3, 0, 1, 2, 0, 1, 0]
    assert [p.place for p in sources(counts)] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 3]


def test_the_worked_grid_of_two_rows_and_four_ranks_is_row_major():
    # four active ranks, a round of length 2: slot = row * 4 + rank
    for slot in range(8):
        assert source(slot, [2, 2, 2, 5]) == (slot % 4, slot // 4)
    assert source(8, [2, 2, 2, 5]) == (3, 2)


def test_more_than_32_ranks_take_several_counts_a_lane():
    counts = [0] * 72
    counts[3], counts[35], counts[71] = 2, 1, 2
    assert [tuple(p) for p in sources(counts)] == [(3, 0), (35, 0), (71, 0), (3, 1), (71, 1)]
    assert source(2, counts) == (71, 0)


def test_ranks_without_rows_are_skipped():
    assert [p.rank for p in sources([0, 2, 0, 1])] == [1, 3, 1]
    assert list(sources([0, 0])) == list(sources([])) == []


@pytest.mark.parametrize("slot", [-1, 3])
def test_a_slot_beyond_the_rows_is_refused(slot):
    with pytest.raises(RangeError, match=f"below the expert's 3 rows; got {slot}"):
        source(slot, [2, 1])
