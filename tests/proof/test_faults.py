"""Launches that give up: whatever happens when, they end, and say so."""

from random import Random

import pytest

from megamoe.errors import MegaMoETimeout
from megamoe.kernels.gluon.mega import sync
from tests.emulator import policies
from tests.emulator.exploring import attempt
from tests.kernels.support import INTERPRETED
from tests.proof import campaign, targets
from tests.proof.waits import WAITS

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")


def given(case):
    return case.launches[0][2]


def outcomes(case, seeds, hurry=None):
    """What each run reports: 0, or the number of the wait that was given up first.

    A run that stores where no memory is, or does not end, is an error.
    """
    found, was = [], (case.is_strict, case.wanted)
    case.is_strict = False  # who goes on after a report reads what nobody ordered
    try:
        for seed in seeds:
            case.wanted = None
            policy = policies.policy_of(seed)
            if hurry is not None:
                policy = policies.Hurried(policy, Random(seed), hurry)
            error = attempt(case, policy)
            assert error is None, f"seed {seed}: {error}"
            report = given(case)["report"]
            found.append(int(report[3]) if int(report[0]) else 0)
    finally:
        case.is_strict, case.wanted = was  # cases are shared with tests that are strict
    return found


def test_a_rank_that_never_says_it_is_done_is_reported_in_every_interleaving():
    case = targets.fused_case(absent=0)
    assert set(outcomes(case, range(16))) == {sync.WAIT_DONE.value}


@pytest.mark.parametrize("value", [-1_000_003, 1_000_003])
@pytest.mark.parametrize("word", WAITS)
def test_a_poisoned_counter_is_reported_by_who_waits_for_it(word, value):
    case = targets.fused_case(poison=(getattr(sync, word).value, value))
    assert set(outcomes(case, range(6))) <= WAITS[word]
    if word == "EXIT":  # the result is right all the same
        y = given(case)["y"].clone()
        targets.fused_case().learn()
        assert y.equal(given(targets.fused_case())["y"]) and given(case)["counters"].any()


HURRIED = {
    "one": lambda: targets.fused_case(stages=2),
    "ranks": targets.local_case,
    "ring": lambda: targets.fused_case(
        tokens=16, experts=3, pool_rows=32, intermediate=128, stages=2
    ),
}


@pytest.mark.parametrize("name", HURRIED)
def test_waits_that_run_out_at_any_time_leave_nobody_waiting_and_store_nowhere_else(name):
    found = outcomes(HURRIED[name](), range(12), hurry=0.05)
    assert any(found)


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_whose_peer_makes_no_call_reports_it(seed):
    case = targets.apart_case(calls=((2, 1),), ctas=2, absent=0)
    with pytest.raises(MegaMoETimeout, match="rank 1 waited too long for rank 0 to begin the call"):
        case.run(policies.policy_of(seed))


def test_a_chain_waits_for_its_tiles_as_long_as_the_layer_says():
    """The calls here have timeout_s = 30."""
    _, l1, l2 = campaign.case("chain").launches
    assert all(given["bound_us"] == 30_000_000 for _, _, given in (l1, l2))


@pytest.mark.parametrize("name", ["chain-late", "fused-late"])
def test_some_that_wait_in_vain_report_it_and_some_need_not(name):
    """`A wrong result, and nobody says so` could not be seen if all of them reported."""
    case = campaign.case(name)
    runs = (case.run(policies.policy_of(seed)) for seed in range(12))
    assert len({bool(run and case.num_reported) for run in runs}) == 2
