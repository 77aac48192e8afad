"""`megamoe bench` as a script sees it."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
import torch


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def megamoe_cli(megamoe):
    """The command in this process, as a finished one looks."""
    return lambda *args: Done(*megamoe(*args))


OR_CPU, GPU_ALONE = ("layer", "gemm", "calls", "fixed"), ("headline", "sweep", "overlap", "split")
QUICK = ("--device", "cpu", "--repeats", "1", "--rounds", "1")


def test_layer_prints_a_table_and_writes_a_folder(megamoe_cli, tmp_path):
    done = megamoe_cli(
        "bench", "layer", "--workloads", "tiny/8", "--backends", "reference,torch-fp8",
        "--recipes", "w8a8", "--out", str(tmp_path), *QUICK,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for words in ("x floor", "tiny/8", "reference", "absent", "needs a GPU", "ceilings: copy"):
        assert words in done.stdout
    assert {p.name for p in tmp_path.iterdir()} >= {"layer.json", "layer.csv"}


@pytest.mark.parametrize("how", [
    pytest.param(signal.SIGINT, id="ctrl-c"),
    pytest.param(signal.SIGTERM, id="terminated", marks=pytest.mark.every),
])  # fmt: skip
def test_an_interrupted_run_prints_the_cells_that_were_done(tmp_path, how):
    run = subprocess.Popen(
        [sys.executable, "-m", "megamoe", "bench", "layer", "--workloads", "tiny/1,tiny/4096",
         "--backends", "reference", "--recipes", "w8a8", "--out", str(tmp_path), "--device", "cpu"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(how, signal.SIG_DFL),  # a job in the background ignores it
    )  # fmt: skip
    for _ in range(600):
        if (tmp_path / "layer.csv").exists() or run.poll() is not None:
            break
        time.sleep(0.2)
    run.send_signal(how)
    out, err = run.communicate(timeout=120)
    assert run.returncode == 130, err
    assert "interrupted" in err and "tiny/1 " in out and "tiny/4096" not in out


def test_layer_json_is_for_machines(megamoe_cli):
    done = megamoe_cli(
        "bench", "layer", "--workloads", "tiny", "--tokens", "2,4", "--backends", "reference",
        "--recipes", "w4a16", "--peers", "megamoe/bench/peers.json", "--json", *QUICK,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert [r["cell"] for r in found["rows"]] == ["tiny/2", "tiny/4"]
    assert found["exit_code"] == done.returncode == 0 and done.stderr == ""


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("layer", "--workloads", "huge"), 2, "workload must be one of"),
        (("layer", "--workloads", "tiny", "--tokens", "some"), 2, "whole numbers"),
        (("layer", "--peers", "nowhere.json"), 2, "must be readable"),
        (("layer", "--workloads", "tiny/8", "--flush", "magic", "--device", "cpu"), 2, "flush"),
        (("layer", "--workloads", "tiny/8", "--device", "cuda:99"), 3, "use --device cpu"),
        (("layer", "--workloads", "tiny/8", "--backends", "hopper", *QUICK), 3, ""),
        (("gemm", "--shapes", "Z"), 2, "shape must be one of A, B, C, D"),
        (("fixed", "--workloads", "huge"), 2, "workload must be one of"),
        (("overlap", "--workloads", "huge"), 2, "workload must be one of"),
        (("split", "--workloads", "huge"), 2, "workload must be one of"),
        (("split", "--l1-sms", "88,few"), 2, "must be whole numbers, or plan"),
        (("fixed", "--workloads", "tiny", "--touched", "2,4,9"), 2, "between top_k (2) and"),
        (("fixed", "--workloads", "tiny", "--touched", "1,4,8"), 2, "got 1"),
        (("fixed", "--workloads", "tiny", "--touched", "few"), 2, "experts touched must be whole"),
        (("fixed", "--workloads", "tiny", "--touched", "2,8"), 2, "at least 3"),
        (("fixed", "--workloads", "tiny", "--graph-calls", "101", *QUICK), 2, "between 1 and 100"),
        (("layer", "--out", "/proc/nowhere", *QUICK), 2, "--out must be a folder that can be"),
        (("calls", "--out", "/proc/nowhere", *QUICK[:2]), 2, "--out must be a folder that can be"),
        (("layer", "--workloads", "tiny/8", "--seed", "-1", *QUICK), 2, "seed must lie between"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else None,
)
def test_errors_are_one_readable_line_and_an_exit_code(megamoe, args, code, words):
    found, _, err = megamoe("bench", *args)
    assert found == code
    assert words in err
    assert "Traceback" not in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be timed")
@pytest.mark.parametrize("name", (*OR_CPU, *GPU_ALONE))
def test_without_a_gpu_nothing_is_begun(megamoe, name):
    code, out, err = megamoe("bench", name)
    assert (code, out) == (3, "") and "benchmark times a GPU; got none on this machine" in err
    assert ("--device cpu" in err) == (name in OR_CPU)


@pytest.mark.parametrize("name", GPU_ALONE)
def test_what_runs_on_a_gpu_alone_refuses_the_cpu_without_naming_it_again(megamoe, name):
    code, out, err = megamoe("bench", name, "--device", "cpu")
    assert (code, out) == (3, "") and "this benchmark times a GPU; got the CPU" in err
    assert "reference" not in err and "--device" not in err


def test_a_cpu_has_no_columns_of_what_it_reads(megamoe):
    code, out, _ = megamoe("bench", "layer", "--workloads", "tiny/2", *QUICK)
    assert code == 0 and "x floor" in out and "read us" not in out and "x read" not in out


@pytest.mark.parametrize("text", ["{}", "[]", "no json", '{"rows": [{"cell": 1}]}', '"rows"'])
@pytest.mark.parametrize(
    "args", [("plot",), ("headline", "--from"), ("overlap", "--from")], ids=" ".join
)
def test_what_is_no_record_is_refused_in_words(megamoe, tmp_path, args, text):
    (tmp_path / "a.json").write_text(text)
    code, out, err = megamoe("bench", *args, str(tmp_path / "a.json"))
    words = (
        "must have a cell"
        if args[0] == "overlap" and text in ("[]", "{}")
        else "must be a JSON file of"
    )
    assert (code, out) == (2, "") and f"the record {words}" in err
    assert "Error(" not in err


def test_help_lists_them_all(megamoe):
    text = megamoe("bench", "--help")[1]
    names = (
        "headline",
        "quantize",
        "layer",
        "gemm",
        "plot",
        "sweep",
        "calls",
        "fixed",
        "overlap",
        "split",
    )
    assert all(f" {name} " in text for name in names)


def test_a_record_is_drawn_again(megamoe_cli, tmp_path):
    pytest.importorskip("matplotlib")
    done = megamoe_cli(
        "bench", "layer", "--workloads", "tiny/2", "--backends", "reference", "--recipes", "w8a8",
        "--out", str(tmp_path), *QUICK,
    )  # fmt: skip
    assert done.returncode == 0
    again = megamoe_cli("bench", "plot", f"{tmp_path}/layer.json", "--out", str(tmp_path / "new"))
    assert again.returncode == 0, again.stderr
    names = {p.name for p in (tmp_path / "new").iterdir()}
    assert names == {"layer-times.png", "layer-roofline.png"}


def test_calls_are_timed_and_kept(megamoe_cli, tmp_path):
    done = megamoe_cli(
        "bench", "calls", "--workloads", "tiny/2", "--recipe", "w8a8", "--rounds", "1",
        "--device", "cpu", "--out", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0 and "host us" in done.stdout and "same" in done.stdout
    (row,) = json.loads((tmp_path / "calls.json").read_text())
    assert row["how"] == "eager" and row["host_us"] > 0


def test_the_fixed_cost_is_printed_beside_the_bar_and_kept(megamoe_cli, tmp_path):
    done = megamoe_cli(
        "bench", "fixed", "--workloads", "tiny", "--tokens", "8", "--touched", "2,4,8",
        "--backends", "reference,portable", "--recipes", "w8a8", "--out", str(tmp_path), *QUICK,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for words in ("fixed us", "bar us", " 20.0 ", "us an expert", "GB/s", "worst off us",
                  "tiny/8@4", "x floor", "off us", "ceilings: copy", "perf_counter"):  # fmt: skip
        assert words in done.stdout, words
    found = json.loads((tmp_path / "fixed.json").read_text())
    cost = next(c for c in found["fixed"] if c["contestant"] == "reference")
    assert [touched for touched, _ in cost["points"]] == [2, 4, 8] and cost["expert_bytes"] > 0
    assert f"{cost['line']['intercept']:,.1f}" in done.stdout and "torch" in found["provenance"]
    assert len((tmp_path / "fixed.csv").read_text().splitlines()) == 1 + len(found["rows"]) == 7


def test_the_fixed_cost_is_for_machines_too(megamoe_cli):
    done = megamoe_cli(
        "bench", "fixed", "--workloads", "tiny/4", "--backends", "reference", "--recipes", "w8a8",
        "--json", *QUICK,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["exit_code"] == done.returncode == 0 and done.stderr == ""
    assert found["fixed"][0]["cell"] == "tiny/4" and len(found["fixed"][0]["points"]) == 6


@pytest.mark.parametrize("args", [("--sweep",), ("sweep", "--workloads", "tiny/8")], ids=" ".join)
def test_a_sweep_needs_a_hopper(megamoe_cli, args):
    done = megamoe_cli("bench", *args, *(() if args == ("--sweep",) else ("--device", "cpu")))
    assert done.returncode in (0, 3) and "Traceback" not in done.stderr
    assert done.returncode == 0 or "hopper" in done.stderr or "GPU" in done.stderr


def test_a_sweep_is_shown_cell_by_cell(monkeypatch, capsys):
    """The command in this process, with rows that were not measured."""
    import typer

    from megamoe.bench import sweep as sweeping
    from megamoe.bench.cells import cells_named
    from megamoe.bench.floors import Ceilings
    from megamoe.bench.record import FAILED, OK, Report, Row
    from megamoe.cli import bench_more

    (cell,) = cells_named(["flash-ep8/64"])
    labels = [sweeping.label(t) for t in sweeping.tiles_at(cell, "w4a8_block")][:3]
    rows = [
        Row(cell.name, name, "w4a8_block", True, OK, "", "here", us=us, spread=0.01)
        for name, us in zip(labels, (110.0, 100.0, 120.0), strict=True)
    ]
    rows.append(Row(cell.name, "wide", "w4a8_block", True, FAILED, "no shared memory", "here"))
    report = Report("", "on this GPU", "so", Ceilings(1, 1, {}, 0, ""), tuple(rows))
    choice = sweeping.choice_of(cell, "w4a8_block", report)
    made = sweeping.Sweep("w4a8_block", report, (choice,))
    monkeypatch.setattr(bench_more, "gpu_named", lambda name, or_cpu: "cpu")
    monkeypatch.setattr(sweeping, "sweep", lambda *args, **options: made)
    with pytest.raises(typer.Exit) as stop:
        bench_more.sweep(workloads=cell.name)
    text = capsys.readouterr().out
    assert stop.value.exit_code == 0 and choice.worse_by == pytest.approx(0.1)
    assert f"{labels[0]} is 10.0% above the best" in text and "the table's" in text
    assert "failed flash-ep8/64 wide: no shared memory" in text and "on this GPU" in text
    assert text.index(labels[1]) < text.index("110.0")
