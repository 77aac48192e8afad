"""Planted bugs: exploring finds each of them, and nothing where none is planted."""

import re
from pathlib import Path

import pytest

import megamoe.studies.deep_gemm.protocol as protocol
from megamoe.studies.deep_gemm.explore import CASES, MUTATIONS, explore, explore_many
from megamoe.studies.deep_gemm.explore.__main__ import main

RUNS = 200

# name -> how the bug shows itself, where that is part of the claim
SIGNS = {
    "mask_without_release": "early read|race",
    "mask_without_acquire": "race",
    "clean_skips_done_count": "not clean: l2_done_count",
    "arrival_of_whole_block": "deadlock",
    "abort_not_polled": "did not drain",
    "stats_overwritten": "statistics",
    "loaders_not_awaited": "deadlock",
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_exploring_finds_the_planted_bug(name):
    """Within RUNS runs, as it would show itself; the same run without the bug keeps every rule."""
    case = CASES[MUTATIONS[name][1]]
    found = explore_many(case, RUNS, mutations=[name]).found
    assert found is not None, f"{name} was not found in {RUNS} runs"
    assert re.search(SIGNS.get(name, ""), found.violation)
    clean = explore(case, found.seed, found.policy, stores=found.stores)
    assert clean.ok, clean


def test_every_switch_in_the_protocol_is_a_named_mutation_and_stands_once():
    text = "".join(path.read_text() for path in Path(protocol.__file__).parent.glob("*.py"))
    switches = re.findall(r'"(\w+)" (?:not )?in (?:self\.)?k\.bugs', text)
    assert set(switches) == set(MUTATIONS)
    assert len(MUTATIONS) >= 30
    twice = {name for name in switches if switches.count(name) > 1}
    assert twice <= {"loaders_not_awaited"}  # both loaders


def test_the_command_says_what_it_found(capsys):
    assert main(["1"]) == 0
    assert capsys.readouterr().out.count("ok") >= len(CASES)
    assert main(["1", "mask_wrong_bit"]) == 1
    assert "waits for mask" in capsys.readouterr().out
