"""Blackwell's GEMM under the scheduler: no interleaving breaks PTX's order, every bug is found.

MEGAMOE_INTERLEAVINGS multiplies how many interleavings are tried, as for Hopper's kernels.
"""

import os

import pytest

from tests.emulator import mutate, policies
from tests.emulator.exploring import explore, is_found
from tests.kernels.support import INTERPRETED
from tests.proof import blackwell
from tests.proof.test_faults import outcomes

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")

TIMES = float(os.environ.get("MEGAMOE_INTERLEAVINGS", "0.1"))
FROM = int(os.environ.get("MEGAMOE_INTERLEAVINGS_FROM", "0"))
NUM_GEMM, NUM_FUSED = 160, 30  # of each case


@pytest.mark.parametrize("name", blackwell.CASES)
def test_no_interleaving_breaks_an_order_or_changes_a_bit(name):
    num = max(int(NUM_GEMM * TIMES), 1)
    assert explore(blackwell.case(name), range(FROM, FROM + num)) == num


@pytest.mark.parametrize("name", blackwell.CALLS)
def test_no_interleaving_of_a_chain_breaks_an_order_or_changes_a_bit(name):
    """Two calls of two ranks; and waits for tiles that run out: right, or reported."""
    num = max(int(60 * TIMES), 1)
    assert explore(blackwell.case(name), range(FROM, FROM + num)) == num


def test_some_waits_for_tiles_that_run_out_are_reported_and_some_need_not_be():
    case = blackwell.case("chain-late")
    runs = (case.run(policies.policy_of(seed)) for seed in range(12))
    assert len({bool(run and case.num_reported) for run in runs}) == 2


def test_a_wait_that_is_given_up_without_a_report_is_found():
    blackwell.planted_bugs()  # translates the kernels
    bugs = mutate.mutants((blackwell.tile_scheduler,), ())
    (bug,) = [b for n, b in bugs.items() if "wait_for_tile" in n and "GIVE_UP" in n]
    with mutate.planted(bug):
        assert is_found(blackwell.case("chain-late"), range(20))[0] is not None


def test_every_planted_bug_is_found():
    bugs = blackwell.planted_bugs()
    assert len(bugs) - len(blackwell.EXCUSED) >= 120
    missed = [
        name for name, bug in bugs.items()
        if name not in blackwell.EXCUSED and blackwell.hunt(bug) is None
    ]  # fmt: skip
    assert not missed


def test_excuses_are_of_mutants_and_none_is_needless():
    bugs = blackwell.planted_bugs()
    assert not set(blackwell.EXCUSED) - set(bugs)
    assert not [name for name in blackwell.EXCUSED if blackwell.hunt(bugs[name], seeds=1)]


def test_a_copy_of_scales_that_may_overtake_a_product_is_a_violation():
    """One place for the scales of all stages: PTX does not order a copy after earlier products."""
    name = next(n for n in blackwell.planted_bugs() if "'WHICH' for" in n)
    found = blackwell.hunt(blackwell.planted_bugs()[name], seeds=1)
    assert found is not None and "has a cp write scales" in str(found[2])


# -- the fused launch ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", blackwell.FUSED)
def test_no_interleaving_of_a_fused_launch_breaks_an_order_or_changes_a_bit(name):
    num = max(int(NUM_FUSED * TIMES), 1)
    assert explore(blackwell.case(name), range(FROM, FROM + num)) == num


def missed(names):
    bugs = blackwell.fused_bugs()
    return [
        name for name in names
        if name not in blackwell.FUSED_EXCUSED
        and blackwell.hunt(bugs[name], cases=blackwell.FUSED) is None
    ]  # fmt: skip


def test_a_sample_of_the_bugs_in_the_fused_launch_is_found():
    names = list(blackwell.fused_bugs())
    assert len(names) - len(blackwell.FUSED_EXCUSED) >= 50
    assert not missed(names[::4])


@pytest.mark.every
def test_every_bug_in_the_fused_launch_is_found():
    assert not missed(blackwell.fused_bugs())
    assert not set(blackwell.FUSED_EXCUSED) - set(blackwell.fused_bugs())


@pytest.mark.parametrize("name", ["fused", "fused-ring", "fused-ranks"])
def test_waits_that_run_out_at_any_time_leave_nobody_waiting_and_store_nowhere_else(name):
    assert any(outcomes(blackwell.case(name), range(6), hurry=0.05))


def test_rows_whose_destinations_may_be_garbage_are_not_stored():
    """After a report: without the guard a fused launch writes where no allocation is."""
    blackwell.fused_bugs()  # translates the kernels
    bug = mutate.edited(blackwell.kernel, "_finish", "report == 0", "report >= report")
    with mutate.planted(bug), pytest.raises(AssertionError, match="no allocation holds"):
        outcomes(blackwell.case("fused"), range(40), hurry=0.05)
