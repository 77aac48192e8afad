"""Placements: every expert somewhere, loads even, proposals repeatable; statistics as files."""

import json
from random import Random

import pytest

from megamoe.balance.placement import Placement, propose
from megamoe.balance.statistics import Statistics
from megamoe.errors import FileError, MegaMoEError, ShapeError

LOADS = [1000, 10, 20, 30, 500, 10, 10, 20]


@pytest.mark.parametrize("seed", range(200))
def test_a_proposal_is_legal_repeatable_and_no_worse_than_what_is_there(seed):
    rng = Random(seed)
    num_ranks, num_experts = rng.randint(1, 8), rng.randint(1, 24)
    slots = rng.randint(min(-(-num_experts // num_ranks), num_experts), num_experts)
    loads = [rng.choice([0, 1, 7, 1000, rng.random() * 100]) for _ in range(num_experts)]
    found = propose(loads, num_ranks, slots)  # a Placement checks itself
    assert found == propose(loads, num_ranks, slots)
    assert (found.num_ranks, found.slots_per_rank) == (num_ranks, slots)
    assert sum(map(len, found.replicas())) == num_ranks * slots
    assert sum(found.rank_loads(loads)) == pytest.approx(sum(loads))
    if num_ranks * slots == num_experts:
        rng.shuffle(order := list(range(num_experts)))
        other = Placement(num_experts, tuple(
            tuple(order[r * slots : (r + 1) * slots]) for r in range(num_ranks)))  # fmt: skip
        kept = propose(loads, num_ranks, slots, other)
        assert kept.imbalance(loads) <= other.imbalance(loads)


def test_hot_experts_get_copies_and_ranks_get_even():
    before = Placement.contiguous(8, 4)
    assert before.imbalance(LOADS) == pytest.approx(1010 * 4 / 1600)
    after = propose(LOADS, 4, 3)
    copies = [len(ids) for ids in after.replicas()]
    assert copies == [4, 1, 1, 1, 2, 1, 1, 1]
    assert after.imbalance(LOADS) == pytest.approx(510 * 4 / 1600)
    assert propose(LOADS, 4, 4).imbalance(LOADS) < 1.05
    assert propose(LOADS, 4, 8).imbalance(LOADS) == pytest.approx(1.0)


def test_an_even_placement_is_kept_and_an_uneven_one_is_not():
    before, loads = Placement.contiguous(8, 4), [40, 30, 30, 20, 10, 10, 10, 10]
    assert propose([5] * 8, 4, 2, before) is before
    after = propose(loads, 4, 2, before)
    assert before.is_contiguous and not after.is_contiguous
    assert after.imbalance(loads) < before.imbalance(loads)
    assert propose(loads, 4, 2, after) is after


def test_rows_are_spread_over_the_copies_and_none_is_lost():
    place = propose(LOADS, 4, 3)
    sent = [[7 * r + 3 * e for e in range(8)] for r in range(4)]
    counts = place.spread(sent)
    owner = [e for row in place.slots for e in row]
    for row, back in zip(sent, counts, strict=True):
        found = [0] * 8
        for physical, rows in enumerate(back):
            found[owner[physical]] += rows
        assert found == row
        for ids in place.replicas():
            assert max(back[i] for i in ids) - min(back[i] for i in ids) <= 1


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: propose([1] * 8, 2, 3), "8 experts need as many places; got 2 ranks with 3 each"),
        (lambda: propose([1] * 2, 2, 3), "at most all 2 experts"),
        (lambda: propose([1, -1], 2, 1), "must not be negative"),
        (lambda: propose([1, float("nan")], 2, 1), "must not be negative"),
        (lambda: propose([1, 1], 0, 1), "at least 1"),
        (lambda: Placement.contiguous(6, 4), "6 experts over 4 ranks"),
    ],
    ids=lambda value: None,
)
def test_what_cannot_be_placed_is_refused(act, words):
    with pytest.raises(MegaMoEError, match="got") as caught:
        act()
    assert words in str(caught.value)


def statistics(sent=((5, 1, 0, 0), (3, 1, 1, 1))):
    return Statistics(64, 32, 2, "w4a8", Placement.contiguous(4, 2), sent, ((8, 2), (1, 1)))


def test_statistics_and_placements_come_back_from_their_files(tmp_path):
    found = statistics()
    assert found.logical == (8, 2, 1, 1)
    found.save(tmp_path / "stats.json")
    assert Statistics.load(tmp_path / "stats.json") == found
    place = propose(LOADS, 4, 3)
    place.save(tmp_path / "place.json")
    assert Placement.load(tmp_path / "place.json") == place


def test_an_average_call_keeps_the_shares_and_the_number_of_rows():
    found = statistics()
    counts = found.per_call(2, 30)
    assert counts == ((50, 10, 0, 0), (30, 10, 10, 10))
    assert found.per_call(4, 3) == ((4, 1, 1, 0),) * 4  # other ranks: all alike
    assert statistics(((0,) * 4,) * 2).per_call(2, 30) == ((0,) * 4,) * 2


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"kind": "other"}', '{"kind": "megamoe.stats", "version": 9}',
     '{"kind": "megamoe.stats", "version": 1}',
     json.dumps({"kind": "megamoe.stats", "version": 1, "hidden": 64, "intermediate": 32,
                 "top_k": 2, "recipe": "w4a8", "placement": {"num_experts": 2, "slots": [[0, 1]]},
                 "sent": [[1]], "received": [[1, 2]]})],
    ids=["empty", "a list", "other", "newer", "parts", "widths"],
)  # fmt: skip
def test_a_file_that_is_no_statistics_is_refused(text, tmp_path):
    (tmp_path / "stats.json").write_text(text)
    with pytest.raises(FileError, match="got"):
        Statistics.load(tmp_path / "stats.json")
    with pytest.raises(FileError, match="got"):
        Placement.load(tmp_path / "stats.json")
    with pytest.raises(FileError, match=r"the folder must exist|writable"):
        statistics().save(tmp_path / "stats.json" / "inside.json")


def test_files_go_into_a_folder_that_exists(tmp_path):
    with pytest.raises(FileError, match="the folder must exist"):
        Placement.contiguous(8, 2).save(tmp_path / "nope" / "placement.json")
    assert not (tmp_path / "nope").exists()


def test_ranks_share_experts_evenly():
    for num, words in ((3, "use 1, 2, 4 or 8 ranks"), (0, "num_ranks must be at least 1; got 0")):
        with pytest.raises(ShapeError, match=words):
            Placement.contiguous(8, num)
