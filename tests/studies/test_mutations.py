"""Planted bugs: exploring finds each of them, and nothing where none is planted."""

import re
from pathlib import Path

import pytest

import megamoe.studies.deep_gemm.protocol as protocol
from megamoe.studies.deep_gemm.explore import CASES, MUTATIONS, explore_many
from megamoe.studies.deep_gemm.explore.__main__ import main

RUNS = 200


@pytest.mark.parametrize("name", MUTATIONS)
def test_exploring_finds_the_planted_bug(name):
    case = CASES[MUTATIONS[name][1]]
    planted = explore_many(case, RUNS, mutations=[name])
    assert not planted.ok, f"{name} was not found in {RUNS} runs"
    clean = explore_many(case, planted.num_runs)
    assert clean.ok, clean.found


def test_every_switch_in_the_protocol_is_a_named_mutation_and_stands_once():
    text = "".join(path.read_text() for path in Path(protocol.__file__).parent.glob("*.py"))
    switches = re.findall(r'"(\w+)" (?:not )?in (?:self\.)?k\.bugs', text)
    assert set(switches) == set(MUTATIONS)
    assert len(MUTATIONS) >= 30
    twice = {name for name in switches if switches.count(name) > 1}
    assert twice <= {"loaders_not_awaited"}  # both loaders


@pytest.mark.parametrize(
    ("name", "sign"),
    [
        ("mask_without_release", "early read|race"),
        ("mask_without_acquire", "race"),
        ("clean_skips_done_count", "not clean: l2_done_count"),
        ("arrival_of_whole_block", "deadlock"),
        ("abort_not_polled", "did not drain"),
        ("stats_overwritten", "statistics"),
        ("loaders_not_awaited", "deadlock"),
    ],
)
def test_a_bug_shows_itself_as_it_would(name, sign):
    found = explore_many(CASES[MUTATIONS[name][1]], RUNS, mutations=[name]).found
    assert re.search(sign, found.violation)


def test_the_command_says_what_it_found(capsys):
    assert main(["2"]) == 0
    assert capsys.readouterr().out.count("ok") >= len(CASES)
    assert main(["2", "mask_wrong_bit"]) == 1
    assert "waits for mask" in capsys.readouterr().out
