"""`megamoe bench layer` and `bench gemm` as a script sees them."""

import json
import subprocess
import sys

import pytest


def megamoe_cli(*args):
    return subprocess.run(
        [sys.executable, "-m", "megamoe", *args], capture_output=True, text=True, timeout=300
    )


QUICK = ("--device", "cpu", "--repeats", "1", "--rounds", "1")


def test_layer_prints_a_table_and_writes_a_folder(tmp_path):
    done = megamoe_cli(
        "bench", "layer", "--workloads", "tiny/8", "--backends", "reference,torch-fp8",
        "--recipes", "w8a8", "--out", str(tmp_path), *QUICK,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for words in ("x floor", "tiny/8", "reference", "absent", "needs a GPU", "ceilings: copy"):
        assert words in done.stdout
    assert {p.name for p in tmp_path.iterdir()} >= {"layer.json", "layer.csv"}


def test_layer_json_is_for_machines():
    done = megamoe_cli(
        "bench", "layer", "--workloads", "tiny", "--tokens", "2,4", "--backends", "reference",
        "--recipes", "w4a16", "--peers", "benchmarks/h200/peers.json", "--json", *QUICK,
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
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else None,
)
def test_errors_are_one_readable_line_and_an_exit_code(args, code, words):
    done = megamoe_cli("bench", *args)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_help_lists_all_three():
    text = megamoe_cli("bench", "--help").stdout
    assert all(name in text for name in ("quantize", "layer", "gemm"))
