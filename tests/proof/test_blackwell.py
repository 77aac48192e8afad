"""Blackwell's GEMM under the scheduler: no interleaving breaks PTX's order, every bug is found.

MEGAMOE_INTERLEAVINGS multiplies how many interleavings are tried, as for Hopper's kernels.
"""

import os
from pathlib import Path

import pytest

from tests.emulator import mutate, policies
from tests.emulator.exploring import explore, is_found
from tests.kernels.support import INTERPRETED
from tests.proof import blackwell
from tests.proof.test_faults import outcomes
from tests.proof.test_interleavings import TIMES
from tests.proof.test_mutants import SHARES

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")

FROM = int(os.environ.get("MEGAMOE_INTERLEAVINGS_FROM", "0"))
# Of each case: 500 and more of the GEMM, of the chain (two calls of two ranks; waits for tiles that
# run out: right, or reported) and of the fused launch.
NUM = {
    **{name: 100 if name.startswith("chain") else 60 for name in blackwell.CASES | blackwell.CALLS},
    **dict.fromkeys(blackwell.FUSED, 72),
}


@pytest.mark.parametrize("name", NUM)
def test_no_interleaving_breaks_an_order_or_changes_a_bit(name):
    num = max(int(NUM[name] * TIMES), 1)
    assert explore(blackwell.case(name), range(FROM, FROM + num)) == num


def test_the_page_has_these_numbers():
    page = (Path(__file__).parents[2] / "docs" / "proof.md").read_text()
    for what, of in {
        "Blackwell's GEMM": [n for n in blackwell.CASES if not n.startswith("chain")],
        "Blackwell's chain": [n for n in NUM if n.startswith("chain")],
        "Blackwell's fused launch": list(blackwell.FUSED),
    }.items():
        num = sum(NUM[name] for name in of)
        assert num >= 500 and f"| {what} ({len(of)} cases) | {num:,} |" in page


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


@pytest.mark.parametrize("share", SHARES)
def test_planted_bugs_are_found(share):
    bugs = blackwell.planted_bugs()
    assert len(bugs) - len(blackwell.EXCUSED) >= 120
    missed = [
        name for name, bug in list(bugs.items())[::share]
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


@pytest.mark.parametrize("share", SHARES)
def test_bugs_in_the_fused_launch_are_found(share):
    bugs = blackwell.fused_bugs()
    assert len(bugs) - len(blackwell.FUSED_EXCUSED) >= 50
    assert not set(blackwell.FUSED_EXCUSED) - set(bugs)
    missed = [
        name for name in list(bugs)[::share]
        if name not in blackwell.FUSED_EXCUSED
        and blackwell.hunt(bugs[name], cases=blackwell.FUSED) is None
    ]  # fmt: skip
    assert not missed


@pytest.mark.parametrize("name", ["fused", "fused-ring", "fused-ranks"])
def test_waits_that_run_out_at_any_time_leave_nobody_waiting_and_store_nowhere_else(name):
    assert any(outcomes(blackwell.case(name), range(6), hurry=0.05))


def test_rows_whose_destinations_may_be_garbage_are_not_stored():
    """After a report: without the guard a fused launch writes where no allocation is."""
    blackwell.fused_bugs()  # translates the kernels
    bug = mutate.edited(blackwell.kernel, "_finish", "report == 0", "report >= report")
    with mutate.planted(bug), pytest.raises(AssertionError, match="no allocation holds"):
        outcomes(blackwell.case("fused"), range(40), hurry=0.05)
