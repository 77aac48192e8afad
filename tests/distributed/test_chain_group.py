"""A layer over a group in mode chain: two processes, emulated kernels, the bits of one rank."""

import pytest

from tests.distributed.chain_processes import (
    calls_have_the_bits_of_one_rank,
    graphs_have_the_bits_of_one_rank,
    layers_that_are_alike_share_memory,
    one_layer_serves_all_sizes,
    ranks_that_pass_other_bounds_get_an_error,
    who_does_not_come_is_named,
)
from tests.distributed.ranks import launch
from tests.kernels.support import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")


CALLS = {
    "replicas": ("w8a8", True, "hopper"),
    "fp4": ("w4a8_block", False, "hopper"),
    "blackwell": ("nvfp4", True, "blackwell"),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_have_the_bits_of_one_rank(case, tmp_path):
    how = str(tmp_path), *CALLS[case]
    ends = launch(2, calls_have_the_bits_of_one_rank, *how, limit_s=300.0)
    assert [(end.result, end.error) for end in ends] == [(True, "")] * 2


@pytest.mark.parametrize("recipe", ["w8a8", pytest.param("w4a8_block", marks=pytest.mark.every)])
def test_one_layer_serves_all_sizes(recipe, tmp_path):
    ends = launch(2, one_layer_serves_all_sizes, str(tmp_path), recipe, limit_s=300.0)
    assert [(end.result, end.error) for end in ends] == [(True, "")] * 2


def test_graphs_have_the_bits_of_one_rank(tmp_path):
    how = str(tmp_path), "w4a8_block"
    ends = launch(2, graphs_have_the_bits_of_one_rank, *how, limit_s=300.0)
    assert [(end.result, end.error) for end in ends] == [(True, "")] * 2


@pytest.mark.parametrize("bounds", [(2, 8), (24, 40), (2, 40)], ids=["fused", "chain", "both"])
def test_ranks_that_pass_other_bounds_get_an_error(bounds, tmp_path):
    how = str(tmp_path), bounds
    ends = launch(2, ranks_that_pass_other_bounds_get_an_error, *how, limit_s=300.0)
    assert [end.error for end in ends] == [""] * 2
    if bounds == (2, 40):
        assert all("MegaMoETimeout: " in end.result for end in ends)
        assert "rank 1 to begin the call" in ends[0].result
        assert "rank 0 to push its tokens' slots" in ends[1].result
    else:
        assert all("RankError: all ranks must pass the same" in end.result for end in ends)


def test_who_does_not_come_is_named(tmp_path):
    ends = launch(2, who_does_not_come_is_named, str(tmp_path), limit_s=300.0)
    assert [(end.result, end.error) for end in ends] == [(True, "")] * 2


def test_layers_that_are_alike_share_memory(tmp_path):
    ends = launch(2, layers_that_are_alike_share_memory, str(tmp_path), limit_s=300.0)
    assert [(end.result, end.error) for end in ends] == [(True, "")] * 2
