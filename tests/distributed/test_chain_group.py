"""A layer over a group in mode chain: two processes, emulated kernels, the bits of one rank."""

import signal

import pytest

from tests.distributed.chain_processes import (
    BOUND_S,
    calls_have_the_bits_of_one_rank,
    graphs_have_the_bits_of_one_rank,
    layers_that_are_alike_share_memory,
    one_layer_serves_all_sizes,
    ranks_that_pass_other_bounds_get_an_error,
    who_dies_is_named,
    who_does_not_come_is_named,
)
from tests.distributed.ranks import launch
from tests.kernels.support import INTERPRETED

SLACK_S = 15.0  # emulated launches on a busy machine

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


@pytest.mark.parametrize(
    "bounds",
    [(2, 8), (24, 40), pytest.param((2, 40), marks=pytest.mark.every), (0, 2)],
    ids=["fused", "chain", "both", "quantised"],
)
def test_ranks_that_pass_other_bounds_get_an_error(bounds, tmp_path):
    how = str(tmp_path), bounds
    ends = launch(2, ranks_that_pass_other_bounds_get_an_error, *how, limit_s=300.0)
    assert [end.error for end in ends] == [""] * 2
    if bounds in ((2, 40), (0, 2)):
        modes = ("a fused launch", "a chain") if bounds[0] else ("a chain", "a fused launch")
        for rank, end in enumerate(ends):
            assert "RankError: all ranks must make a call in the same mode" in end.result
            mine, other = (modes[rank], rank), (modes[1 - rank], 1 - rank)
            assert "got {} on rank {}, {} on rank {}".format(*mine, *other) in end.result
    else:
        assert all("RankError: all ranks must pass the same" in end.result for end in ends)


def test_who_does_not_come_is_named(tmp_path):
    ends = launch(2, who_does_not_come_is_named, str(tmp_path), limit_s=300.0)
    assert [(end.result, end.error) for end in ends] == [(True, "")] * 2


# Mode, where rank 1 is killed, what rank 0 waits for.
DEATHS = {
    "fused-in-a-launch": ("fused", "in a launch", "rank 1 to end the call"),
    "fused-between-calls": ("fused", "between calls", "rank 1 to begin the call"),
    "chain-before-l2": ("chain", "before L2", "rows that rank 1 computes"),
    "chain-before-finish": ("chain", "before finish", "rows that rank 1 computes"),
    "chain-between-calls": ("chain", "between calls", "rank 1 to push its tokens' slots"),
}
ALSO = ("fused-between-calls", "chain-before-finish", "chain-between-calls")
OTHER_DEATHS = dict.fromkeys(ALSO, pytest.mark.every)


@pytest.mark.parametrize("case", [pytest.param(c, marks=OTHER_DEATHS.get(c, ())) for c in DEATHS])
def test_a_rank_that_is_killed_is_named_by_who_is_left_within_the_bound(case, tmp_path):
    mode, where, waited_for = DEATHS[case]
    left, dead = launch(2, who_dies_is_named, str(tmp_path), mode, where, limit_s=120.0)
    assert dead.exitcode == -signal.SIGKILL and dead.result is None
    assert (left.error, left.exitcode) == ("", 0)
    text, seconds = left.result
    assert f"rank 0 waited too long for {waited_for}" in text and "restart the ranks" in text
    assert BOUND_S <= seconds < 3 * BOUND_S + SLACK_S


def test_layers_that_are_alike_share_memory(tmp_path):
    ends = launch(2, layers_that_are_alike_share_memory, str(tmp_path), limit_s=300.0)
    assert [(end.result, end.error) for end in ends] == [(True, "")] * 2
