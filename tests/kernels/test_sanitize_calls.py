"""The calls that the sanitizers run on a GPU also run in the interpreter; how a run is judged."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megamoe.engine import backends
from scripts import sanitize, sanitize_calls
from tests import emulator
from tests.kernels.support import INTERPRETED

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(INTERPRETED, reason="starts an interpreter of its own")
@pytest.mark.parametrize("parts", [
    ["quantisers", "graphs"], pytest.param(["w4a16"], marks=pytest.mark.every),
])  # fmt: skip
def test_the_sanitizers_calls_run(parts):
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "scripts/sanitize_calls.py", *parts]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"done {part}" for part in parts]


@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")
def test_the_sanitizers_calls_launch_every_kernel_of_the_chain(monkeypatch):
    kernels = emulator.install(monkeypatch, num_sms=4)
    monkeypatch.setattr(backends, "resolve", lambda *wanted: None)
    monkeypatch.setattr(sanitize_calls, "DEVICE", torch.device("cpu"))
    sanitize_calls.chain_layer("w8a8")
    wanted = {"gemm_swap_ab_kernel", "_count_kernel", "_scan_kernel", "_place_kernel",
              "_quantize_kernel", "exchange_kernel", "_rows_kernel", "pull_kernel",
              "finish_kernel", "scales_kernel", "_combine_kernel"}  # fmt: skip
    assert {name for name in wanted if not kernels[name].launches} == set()
    assert "chain-w4a4" in sanitize.TOOLS["memcheck"]


CLEAN = "done w8a8\n========= ERROR SUMMARY: 0 errors\n"


@pytest.mark.parametrize(
    ("tool", "code", "output", "is_clean"),
    [
        ("memcheck", 0, CLEAN, True),
        ("racecheck", 0, "done w8a8\n========= RACECHECK SUMMARY: 0 hazards displayed\n", True),
        ("memcheck", 9, "done w8a8\n========= ERROR SUMMARY: 2 errors\n", False),
        ("memcheck", 0, "done w8a8\n========= ERROR SUMMARY: 10 errors\n", False),
        ("memcheck", 0, "done w8a8\n", False),  # no summary: the tool did not run
        ("memcheck", 0, "========= ERROR SUMMARY: 0 errors\n", False),  # the part did not
        ("memcheck", 124, CLEAN, False),
        ("consan", 0, "done w8a8\n", True),
        ("consan", 1, "x.py:1: Assertion `Buffer being accessed has outstanding writes`", False),
    ],
)
def test_only_a_run_that_ended_and_found_nothing_is_clean(tool, code, output, is_clean):
    assert sanitize.judge(tool, "w8a8", code, output, 1.0).is_clean is is_clean


def test_the_record_has_a_line_for_every_tool_and_part(tmp_path, monkeypatch):
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(
        "#!/bin/sh\nfor last; do :; done\necho done $last\necho ERROR SUMMARY: 0 errors\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sanitize, "compile_first", lambda parts, jobs: None)
    tools = "memcheck,racecheck"
    monkeypatch.setattr(
        sys, "argv", ["", str(tmp_path), "--tools", tools, "--parts", "w8a8,graphs"]
    )
    assert sanitize.main() == 0
    lines = (tmp_path / "sanitizer.txt").read_text().splitlines()
    assert lines[1].startswith("4 of 4 clean")
    assert [line.partition(":")[0] for line in lines[2:]] == [
        f"{tool} {part}" for tool in tools.split(",") for part in ("w8a8", "graphs")
    ]
