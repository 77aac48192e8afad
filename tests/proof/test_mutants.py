"""Every synchronisation of the kernels, dropped or changed by a tool: the scheduler finds it.

Here a sixth of them; `scripts/proof.sh` looks for all, from three first seeds. Seeds begin at
MEGAMOE_INTERLEAVINGS_FROM. `python -m tests.proof.test_mutants` prints the table: each mutant, who
found it, or why it changes nothing.
"""

import contextlib
import os
import sys

import pytest

from tests.emulator import mutate
from tests.emulator.exploring import is_found
from tests.kernels.support import INTERPRETED
from tests.proof import campaign, excused, targets

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")

SHARES = [6, pytest.param(1, marks=pytest.mark.every)]  # one bug in so many is looked for
MODULES = [mutate.short_name(module.__name__) for module in targets.MODULES]
FROM = int(os.environ.get("MEGAMOE_INTERLEAVINGS_FROM", "0"))


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("module", MODULES)
def test_planted_bugs_are_found(module, share):
    bugs = [b for b in campaign.planted_bugs().values() if b.module == module][::share]
    missed = [
        bug.name for bug in bugs
        if bug.name not in excused.EXCUSED and campaign.hunt(bug, FROM) is None
    ]  # fmt: skip
    assert not missed


def test_there_are_many_and_excuses_are_of_mutants():
    bugs = campaign.planted_bugs()
    assert len(bugs) - len(excused.EXCUSED) >= 300
    assert not set(excused.EXCUSED) - set(bugs)


@pytest.mark.parametrize("share", SHARES)
def test_no_excuse_is_needless(share):
    found = {
        name: campaign.hunt(campaign.planted_bugs()[name], 0, 1, 0)
        for name in list(excused.EXCUSED)[::share]
    }
    assert not any(found.values()), found


@pytest.mark.parametrize("name", excused.TOGETHER)
def test_what_one_of_several_holds_is_found_without_all(name):
    bugs = [campaign.planted_bugs()[part] for part in excused.TOGETHER[name]]
    where = [c for c in campaign.CASES if all(c in campaign.places(b) for b in bugs)]
    assert where
    with contextlib.ExitStack() as stack:
        for bug in bugs:
            stack.enter_context(mutate.planted(bug))
        assert any(is_found(campaign.case(c), range(10))[1] is not None for c in where)


@pytest.mark.parametrize("base", [0, 10_000, 20_000])
def test_the_race_that_once_shipped_is_found(base):
    bug = campaign.planted_bugs()[excused.SHIPPED_ONCE]
    case, _, error = campaign.hunt(bug, base, seeds=1)
    assert "has a copy write" in str(error) and "not ordered after math" in str(error), case


def test_a_variable_that_the_compiler_does_not_carry_is_found():
    """An alias before a loop that sets it again: compiled, the loop keeps the first value."""
    traps = [trap for module in targets.MODULES for trap in mutate.carried_traps(module)]
    assert traps
    missed = [trap.name for trap in traps if campaign.hunt(trap) is None]
    assert not missed


def main():
    for name, bug in campaign.planted_bugs().items():
        if name in excused.EXCUSED:
            print(f"excused | {name} | {excused.EXCUSED[name]}")
        else:
            case, seed, error = campaign.hunt(bug, FROM) or ("", "", "MISSED")
            print(f"{case} {seed} | {name} | {str(error)[:120]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
