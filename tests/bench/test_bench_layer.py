"""The layer benchmark: what it measures, what it refuses to time, what it writes."""

import csv
import json
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from megamoe.bench import plots
from megamoe.bench.cells import cells_named
from megamoe.bench.contestants import Contestant, contestants, ours
from megamoe.bench.gate import Gate, poisoned_memory
from megamoe.bench.inputs import Weights, make_job
from megamoe.bench.layer import Settings, measure
from megamoe.bench.peers import Peers
from megamoe.bench.record import ABSENT, FAILED, OK, WRONG, read, write
from megamoe.bench.timer import Timer
from megamoe.errors import FileError, NotAvailable, RangeError

CPU = torch.device("cpu")
QUICK = Settings(backends=("reference",), recipes=("w8a8",), repeats=2, rounds=2)
TINY = cells_named(["tiny/8"])


@pytest.fixture(scope="module")
def report():
    settings = replace(
        QUICK, backends=("reference", "portable", "torch-bf16", "torch-fp8"), recipes=("w4a16",)
    )
    peers = Peers("here", "so", {"tiny/8": {"a": 1.0, "b": 4.0}})
    return measure(cells_named(["tiny/8", "tiny/40"]), settings, peers=peers)


def planted(spoil):
    """The reference as a contestant of ours, its output spoiled."""
    make = ours("reference", "w4a16")

    def wrong(job):
        entry = make(job)
        return replace(entry, run=lambda: spoil(entry.run()))

    return Contestant("planted", "w4a16", True, wrong)


def spoil_one_row(y):
    y = y.clone()
    y[-1] *= 1.5
    return y


def spoil_with_nan(y):
    y = y.clone()
    y[3, 5] = float("nan")
    return y


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_one_row, "above"),
        (spoil_with_nan, "1 rows not finite, first token 3"),
        (lambda y: y[:-1], "shape"),
        (lambda y: y * 1.02, "above 3.0e-03"),
    ],
    ids=["one row", "nan", "shape", "all a little"],
)
def test_a_wrong_result_is_not_timed(spoil, words):
    made = measure(TINY, QUICK, field=[planted(spoil)])
    (row,) = made.rows
    assert row.status == WRONG and row.us is None and words in row.note
    assert made.exit_code == 1


def test_a_row_outside_the_sample_is_screened():
    cell = cells_named(["tiny/200"])[0]
    job = make_job(cell, Weights(cell.shape, CPU, 0), 0)
    gate = Gate(job)
    layer = ours("reference", "w8a8")(job)
    y = layer.run()
    assert gate.judge(y, "w8a8", layer.bound).ok
    outside = next(t for t in range(200) if t not in gate.sample.tolist())
    y[outside] = y[outside - 1]
    assert f"token {outside} is off" in gate.judge(y, "w8a8", layer.bound).why


def test_what_turns_wrong_later_is_not_kept():
    calls = []

    def late(y):
        calls.append(y)
        return y if len(calls) < 5 else y * 2

    (row,) = measure(TINY, QUICK, field=[planted(late)]).rows
    assert row.status == WRONG and "wrong after it" in row.note and row.us is None


def test_who_raises_is_reported_and_the_others_go_on():
    def boom(job):
        raise ValueError("no luck\nsecond line")

    def absent(job):
        raise NotAvailable("not here")

    good = Contestant("reference", "w8a8", True, ours("reference", "w8a8"))
    field = [Contestant("boom", "x", False, boom), Contestant("gone", "x", True, absent), good]
    made = measure(TINY, QUICK, field=field)
    assert [r.status for r in made.rows] == [FAILED, ABSENT, OK]
    assert made.rows[0].note == "ValueError: no luck" and made.exit_code == 0
    assert measure(TINY, QUICK, field=[replace(field[0], ours=True)]).exit_code == 70
    assert measure(TINY, QUICK, field=[field[1]]).exit_code == 3


def test_rows_have_figures_bounds_and_provenance(report):
    rows = {(r.cell, r.contestant): r for r in report.rows}
    assert len(rows) == 8 and report.exit_code == 0
    mine = rows["tiny/8", "reference"]
    assert mine.status == OK and mine.error == 0.0 and mine.how == "eager" and mine.count == 4
    assert mine.tflops == pytest.approx(6 * 16 * 256 * 128 / mine.us / 1e6)
    assert mine.gbs == pytest.approx(mine.num_bytes / mine.us / 1e3)
    assert mine.weight_bytes == mine.touched * 3 * 256 * 128 * 17 // 32
    assert mine.of_floor == pytest.approx(mine.us / mine.floor_us) and mine.read_us is None
    assert mine.versus == {"best": mine.us, "a": mine.us, "b": mine.us / 4}
    assert rows["tiny/8", "portable"].status in (ABSENT, OK)
    assert rows["tiny/8", "torch-fp8"].status == ABSENT
    foreign = rows["tiny/40", "torch-bf16"]
    assert foreign.status in (OK, FAILED, ABSENT)
    assert all("torch" in r.provenance for r in report.rows)
    assert report.geomeans()["reference w4a16"]["/ best"] == (pytest.approx(mine.us), 1)


def test_files_hold_every_row(report, tmp_path):
    as_json, as_csv = write(report, tmp_path / "new", "layer")
    found = json.loads(as_json.read_text())
    assert len(found["rows"]) == 8 and found["ceilings"]["copy_gbs"] > 0
    assert found["peers"]["provenance"] == "here" and "perf_counter" in found["method"]
    with as_csv.open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 8 and lines[0]["vs_best"] and lines[0]["provenance"]
    assert float(lines[0]["us"]) == report.rows[0].us


def test_plots_are_written(report, tmp_path):
    pytest.importorskip("matplotlib")
    made = plots.write(report, tmp_path, "layer")
    assert [p.name for p in made] == ["layer-times.png", "layer-roofline.png"]
    assert all(p.stat().st_size > 5000 for p in made)
    cells, series = plots.times_of(report)
    assert cells == ["tiny/8", "tiny/40"] and series["best recorded peer"][0] == 1.0
    ours = series["reference w4a16"]
    assert ours == [r.us for r in report.rows if r.contestant == "reference"]


def test_many_series_of_ours_are_drawn_as_the_fastest(report, tmp_path):
    pytest.importorskip("matplotlib")
    mine = [r for r in report.rows if r.contestant == "reference"]
    many = [replace(r, recipe=f"r{i}", us=r.us * (2 - i / 4)) for i in range(5) for r in mine]
    crowd = replace(report, rows=tuple(many))
    _, series = plots.times_of(crowd)
    assert series["ours, fastest recipe"] == [r.us for r in mine]
    empty = replace(report, rows=())
    for some in (crowd, replace(crowd, peers=None), empty):
        assert plots.write(some, tmp_path, "layer")[0].stat().st_size > 5000


def test_a_record_reads_as_it_was_written(report, tmp_path):
    as_json, _ = write(report, tmp_path, "layer")
    assert read(as_json) == report
    slow = Peers("there", "so", {"tiny/8": {"c": 2.0}})
    found = read(as_json, slow)
    mine = found.rows[0]
    assert found.peers == slow and mine.versus == {"best": mine.us / 2, "c": mine.us / 2}
    for text in ("{", "[]", '{"rows": [{}]}', json.dumps({"rows": [], "peers": None})):
        as_json.write_text(text)
        with pytest.raises(FileError, match="JSON file of megamoe bench"):
            read(as_json)
    with pytest.raises(FileError, match="readable"):
        read(tmp_path / "none.json")


def test_contestants_by_name():
    found = contestants(["auto", "reference", "torch-bf16"], ["bf16", "w8a8"], CPU)
    assert [(c.name, c.ours) for c in found if not c.ours] == [("torch-bf16", False)]
    assert ("reference", "w8a8") in [(c.name, c.recipe) for c in found]
    assert len({(c.name, c.recipe) for c in found}) == len(found)
    for names, recipes, words in (
        (["cutlass"], ["bf16"], "backend must be one of"),
        (["reference:warp"], ["bf16"], "mode must be one of"),
        (["reference"], ["w2a2"], "recipe must be one of"),
        ([], ["bf16"], "at least one backend"),
    ):
        with pytest.raises(RangeError, match=words):
            contestants(names, recipes, CPU)


def test_poisoned_memory_is_nan_and_then_as_before():
    before = torch.are_deterministic_algorithms_enabled()
    with poisoned_memory():
        assert torch.empty(1000).isnan().all()
    assert torch.are_deterministic_algorithms_enabled() == before


def test_the_timer_is_bounded():
    calls = []

    def slow():
        calls.append(1)
        torch.zeros(1).exp()
        time.sleep(0.02)
        return torch.zeros(1)

    timer = Timer(CPU, repeats=1000, rounds=2, budget_s=0.1)
    timing = timer.time({"slow": timer.prepare(slow)})["slow"]
    assert timing.count <= 10 and len(calls) < 20 and timing.us > 15_000
    for bad in (
        {"repeats": 0},
        {"rounds": -1},
        {"flush": "magic"},
        {"graph_calls": 101},
        {"graph_calls": 0},
    ):
        with pytest.raises(RangeError):
            Timer(CPU, **bad)


def test_calls_of_a_chain_are_timed_each():
    calls = []

    def run():
        calls.append(1)
        time.sleep(0.02)
        return torch.tensor([len(calls)])

    timer = Timer(CPU, repeats=2, rounds=1, graph_calls=4)
    one = timer.prepare(run)
    assert len(calls) == 4 and one.call().item() == 8
    assert 20_000 < timer.time({"one": one})["one"].us < 70_000  # not the 80 ms of all four
    assert "each the mean of 4 in a row" in timer.method


def test_a_chain_is_judged_like_a_call():
    made = measure(cells_named(["tiny/4"]), replace(QUICK, graph_calls=3))
    assert [r.status for r in made.rows] == [OK] and made.rows[0].us > 0

    def wrong_behind_the_first(job):
        entry, calls = ours("reference", "w8a8")(job), []

        def run():
            calls.append(1)
            return entry.run() * min(len(calls), 2)

        return replace(entry, run=run)

    field = [Contestant("wrong", "w8a8", True, wrong_behind_the_first)]
    made = measure(cells_named(["tiny/4"]), replace(QUICK, graph_calls=3), field=field)
    assert [r.status for r in made.rows] == [WRONG] and made.rows[0].us is None


def test_gpt_oss_biases_pass_the_gate():
    cell = cells_named(["gpt-oss-120b/40"])[0]
    shape = replace(cell.shape, hidden=64, intermediate=32, num_experts=4, top_k=2)
    made = measure([replace(cell, shape=shape)], replace(QUICK, recipes=("w4a16",)))
    assert [r.status for r in made.rows] == [OK]


def test_interrupted_runs_leave_the_cells_before():
    seen = []
    measure(cells_named(["tiny/1", "tiny/2"]), QUICK, on_cell=lambda r: seen.append(len(r.rows)))
    assert seen == [1, 2]


def test_contestants_are_shuffled_call_by_call():
    timer = Timer(torch.device("cpu"), repeats=20, rounds=2)
    seen = []
    ready = {n: timer.prepare(lambda n=n: seen.append(n) or torch.zeros(1)) for n in "ab"}
    times = timer.time(ready)
    assert {n: [len(r) for r in t.rounds] for n, t in times.items()} == {
        "a": [20, 20],
        "b": [20, 20],
    }
    first, second = seen[-80:-40], seen[-40:]
    for one in (first, second):
        assert one.count("a") == 20 and sum(x != y for x, y in pairwise(one)) > 5
    assert first != second
