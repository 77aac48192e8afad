"""Blackwell's GEMM under the scheduler: no interleaving breaks PTX's order, every bug is found.

MEGAMOE_INTERLEAVINGS multiplies how many interleavings are tried, as for Hopper's kernels.
"""

import os

import pytest

from tests.emulator.exploring import explore
from tests.kernels.support import INTERPRETED
from tests.proof import blackwell

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")

TIMES = float(os.environ.get("MEGAMOE_INTERLEAVINGS", "0.1"))
FROM = int(os.environ.get("MEGAMOE_INTERLEAVINGS_FROM", "0"))
NUM = max(int(160 * TIMES), 1)


@pytest.mark.parametrize("name", blackwell.CASES)
def test_no_interleaving_breaks_an_order_or_changes_a_bit(name):
    assert explore(blackwell.case(name), range(FROM, FROM + NUM)) == NUM


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
