"""Regions follow each other, aligned and apart, and are found by name."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.errors import RangeError, ShapeError
from megamoe.layout.regions import DTYPE_BYTES, Region, Segment, chain

SETTINGS = settings(deadline=None, derandomize=True, max_examples=100, database=None)
SEGMENTS = st.lists(
    st.builds(
        lambda dtype, shape, align: (dtype, tuple(shape), align),
        st.sampled_from(list(DTYPE_BYTES)),
        st.lists(st.integers(0, 9), max_size=3),
        st.sampled_from([8, 16, 128, 1024]),
    ),
    max_size=12,
)


@SETTINGS
@given(SEGMENTS)
def test_regions_are_disjoint_aligned_and_in_order(wanted):
    placed = chain(Segment(f"r{i}", d, s, "data", align=a) for i, (d, s, a) in enumerate(wanted))
    end = 0
    for region, (dtype, shape, align) in zip(placed.regions, wanted, strict=True):
        assert region.offset % align == 0 and region.offset >= end
        assert region.num_bytes == DTYPE_BYTES[dtype] * prod(shape)
        end = region.end
    assert placed.num_bytes >= end and placed.num_bytes % 128 == 0
    assert placed.num_bytes - end < 128


def test_an_element_is_found_row_major():
    region = Region("a", 256, 96, 16, "u64", (3, 4))
    assert [region.at(0, 0), region.at(0, 1), region.at(2, 3)] == [256, 264, 344]
    assert region.at(2, 3) + region.item_bytes == region.end
    with pytest.raises(RangeError, match=r"inside \(3, 4\); got \(3, 0\)"):
        region.at(3, 0)
    with pytest.raises(RangeError, match=r"got \(1,\)"):
        region.at(1)


def test_lookup_names_what_there_is():
    placed = chain([Segment("a", "u32", (4,), "control"), Segment("b", "u8", (3,), "data")])
    assert placed["b"].offset == 128
    assert placed.control_bytes == 16
    assert [r.name for r in placed.section("data")] == ["b"]
    assert "total" in str(placed) and "256" in str(placed)
    with pytest.raises(RangeError, match="regions a, b; got 'c'"):
        placed["c"]


def test_an_empty_chain_is_an_empty_workspace():
    assert chain([]).num_bytes == 0
    assert chain([]).control_bytes == 0


@pytest.mark.parametrize(
    ("segment", "error", "says"),
    [
        (Segment("a", "f16", (1,), "data"), RangeError, "got f16"),
        (Segment("a", "u8", (-1,), "data"), ShapeError, "negative"),
        (Segment("a", "u64", (1,), "data", align=4), ShapeError, "alignment of a"),
        (Segment("a", "u8", (1,), "data", align=24), ShapeError, "power of two"),
    ],
)
def test_a_bad_segment_is_refused(segment, error, says):
    with pytest.raises(error, match=says):
        chain([segment])


def test_two_regions_may_not_share_a_name():
    with pytest.raises(RangeError, match="must differ"):
        chain([Segment("a", "u8", (1,), "data"), Segment("a", "u8", (1,), "data")])
