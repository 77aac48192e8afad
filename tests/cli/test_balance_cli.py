"""`megamoe balance` as a user meets it."""

import json
import subprocess
import sys

import pytest

from megamoe.balance.placement import Placement
from megamoe.balance.statistics import Statistics
from megamoe.problem import Problem
from megamoe.simulator.sample import sample_counts

RANKS, EXPERTS = 4, 16


@pytest.fixture
def stats(tmp_path):
    """The path of recorded statistics: zipf routing over four ranks."""
    problem = Problem(256, 1024, 512, EXPERTS, 4, RANKS, "w4a8")
    sent = sample_counts(problem, "zipf", 1)
    place = Placement.contiguous(EXPERTS, RANKS)
    total = [sum(row[e] for row in sent) for e in range(EXPERTS)]
    received = tuple(tuple(total[e] for e in held) for held in place.slots)
    path = tmp_path / "stats.json"
    Statistics(1024, 512, 4, "w4a8", place, sent, received).save(path)
    return str(path)


def test_it_shows_both_placements_and_the_predicted_gain(megamoe, stats, tmp_path):
    out = tmp_path / "placement.json"
    code, text, _ = megamoe("balance", stats, "--slots-per-rank", "6", "--out", str(out))
    assert code == 0
    for words in ("before", "after", "imbalance", "predicted gain", "replicas", "hottest experts"):
        assert words in text
    place = Placement.load(out)
    assert (place.num_ranks, place.slots_per_rank) == (RANKS, 6)


def test_json_is_for_machines_and_the_same_every_time(megamoe, stats):
    args = ("balance", stats, "--slots-per-rank", "6", "--json")
    found = json.loads(megamoe(*args)[1])
    assert found == json.loads(megamoe(*args)[1])
    before, after = found["before"], found["after"]
    assert before["imbalance"] > after["imbalance"] >= 1.0
    assert found["gain"] == before["predicted_us"] / after["predicted_us"] > 1.0
    assert sum(after["replicas"]) == 6 * RANKS == sum(map(len, after["slots"]))


def test_a_placement_with_replicas_is_predicted_in_the_mode_that_takes_it(megamoe, stats):
    args = ("balance", stats, "--tokens", "16", "--json")
    found = json.loads(megamoe(*args, "--slots-per-rank", "6")[1])
    assert (found["before"]["mode"], found["after"]["mode"]) == ("fused", "chain")
    code, _, errors = megamoe(*args, "--slots-per-rank", "6", "--mode", "fused")
    assert code == 3 and "contiguous experts, each once" in errors


def test_other_ranks_and_nothing_to_gain(megamoe, stats, tmp_path):
    found = json.loads(megamoe("balance", stats, "--ranks", "8", "--mode", "staged", "--json")[1])
    assert found["num_ranks"] == 8 and found["before"]["mode"] == "staged"
    assert len(found["after"]["slots"]) == 8
    even = Statistics(64, 32, 1, "bf16", Placement.contiguous(4, 2), ((5,) * 4,) * 2,
                      ((10, 10), (10, 10)))  # fmt: skip
    even.save(tmp_path / "even.json")
    assert "nothing to change" in megamoe("balance", str(tmp_path / "even.json"))[1]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--ranks", "3"), "16 experts over 3 ranks"),
        (("--slots-per-rank", "2"), "use at least 4 slots per rank"),
        (("--slots-per-rank", "17"), "at most all 16 experts"),
        (("--hardware", "h900"), "hardware must be one of"),
        (("--tokens", "-1"), "must not be negative"),
        (("--out", "/proc/nope/placement.json"), "the folder of --out must be"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_bad_input_says_what_got_and_fix(megamoe, stats, args, words):
    code, _, errors = megamoe("balance", stats, *args)
    assert code == 2 and words in errors and "Traceback" not in errors


def test_a_missing_file_is_refused(megamoe):
    code, _, errors = megamoe("balance", "/nowhere.json")
    assert code == 2 and "must be a JSON file" in errors


def test_no_torch_is_loaded(stats):
    code = (
        "import sys; from megamoe.cli.main import app; "
        f"app(['balance', {stats!r}], standalone_mode=False); "
        "sys.exit(bool({'torch', 'triton', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
