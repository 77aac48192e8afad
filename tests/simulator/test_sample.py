"""Counts without tensors: the same skews as the torch samplers, and nothing is lost."""

import pytest

from megamoe.errors import DTypeError, RangeError, ShapeError
from megamoe.problem import Problem
from megamoe.routing.samplers import SKEWS as TORCH_SKEWS
from megamoe.simulator.sample import SKEWS, checked, sample_counts
from megamoe.simulator.traffic import local_rows, peeled, row_blocks
from megamoe.studies.deep_gemm.peeling import sources

SMALL = Problem(64, 256, 128, 32, 4, 4)


def test_every_skew_of_the_torch_sampler_is_known_here():
    assert set(TORCH_SKEWS) <= set(SKEWS)
    assert set(SKEWS) - set(TORCH_SKEWS) == {"even"}


@pytest.mark.parametrize("skew", [s for s in SKEWS if s != "masked"])
def test_every_rank_sends_each_token_to_top_k_experts(skew):
    counts = sample_counts(SMALL, skew, seed=3)
    assert [sum(row) for row in counts] == [64 * 4] * 4
    if skew != "even":
        assert max(map(max, counts)) <= 64, "a token's experts are distinct"
    assert counts == sample_counts(SMALL, skew, seed=3) == checked(SMALL, counts)


def test_skews_do_what_they_say():
    assert sum(map(sum, sample_counts(SMALL, "masked"))) == 0
    hot = sample_counts(SMALL, "hot_expert", 1)
    assert any(all(row[e] == 64 for row in hot) for e in range(32))
    rank = sample_counts(SMALL, "hot_rank", 1)
    assert sorted(sum(local_rows(rank, r, 8)) > 0 for r in range(4)) == [False] * 3 + [True]
    even = sample_counts(SMALL, "even")
    totals = [sum(row[e] for row in even) for e in range(32)]
    assert max(totals) - min(totals) <= 1
    zipf = sorted(map(sum, zip(*sample_counts(SMALL, "zipf"), strict=True)))
    assert zipf[-1] > 4 * zipf[16]


def test_another_seed_gives_other_counts():
    assert sample_counts(SMALL, seed=0) != sample_counts(SMALL, seed=1)


@pytest.mark.parametrize("counts", [(4, 3, 2, 1), (0, 5, 0, 5), (7,), (3, 0, 9, 1, 2), (0, 0)])
def test_peeled_counts_what_the_peeling_order_gives(counts):
    order = list(sources(counts))
    for slots in range(sum(counts) + 1):
        wanted = [sum(s.rank == r for s in order[:slots]) for r in range(len(counts))]
        assert peeled(counts, slots) == wanted


def test_row_blocks_hold_every_row_of_every_rank_once():
    counts = sample_counts(SMALL, "zipf", 5)
    for rank in range(4):
        found = row_blocks(counts, rank, 8, block_m=16)
        assert all(0 < block.rows <= 16 and sum(block.by_rank) == block.rows for block in found)
        for source in range(4):
            came = sum(block.by_rank[source] for block in found)
            assert came == sum(counts[source][rank * 8 : rank * 8 + 8])


@pytest.mark.parametrize(
    ("counts", "error", "words"),
    [
        ([[0] * 32] * 3, ShapeError, "4 ranks by 32 experts; got 3 by"),
        ([[0] * 31] * 4, ShapeError, "got 4 by \\[31\\]"),
        ([[0] * 31 + [-1]] * 4, DTypeError, "got -1"),
        ([[0] * 31 + [1.5]] * 4, DTypeError, "got 1.5"),
        ([[64] * 32] * 4, ShapeError, "at most num_tokens \\* top_k = 256 rows; got 2048"),
    ],
)
def test_wrong_counts_are_refused(counts, error, words):
    with pytest.raises(error, match=words):
        checked(SMALL, counts)


def test_wrong_skews_are_refused():
    with pytest.raises(RangeError, match="skew must be one of even, uniform"):
        sample_counts(SMALL, "wild")
    with pytest.raises(ShapeError, match="hot rank needs at least top_k experts"):
        sample_counts(Problem(8, 256, 128, 8, 4, 4), "hot_rank")
