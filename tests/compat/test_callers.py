"""Released packages' calls of DeepGEMM bind to our signatures (tests/data/deep_gemm_calls.json)."""

import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megamoe.compat import deep_gemm
from megamoe.compat.deep_gemm import __main__ as runner

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "data" / "deep_gemm_calls.json"
READ = json.loads(TABLE.read_text())
# Of DeepGEMM's grouped GEMMs, which are no part of MegaMoE.
NOT_OURS = {"utils/layout.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor"}


def ours(name):
    file, _, last = name.rpartition(".")
    module = file.removesuffix("/__init__").replace("/", ".")
    return getattr(importlib.import_module(f"megamoe.compat.deep_gemm.{module}"), last)


@pytest.mark.parametrize("name", sorted(set(READ["signatures"]) - NOT_OURS))
def test_parameters_have_upstreams_names_and_order(name):
    mine = list(inspect.signature(ours(name)).parameters)
    theirs = READ["signatures"][name]
    assert mine[: len(theirs)] == theirs


@pytest.mark.parametrize("name", sorted({row["name"] for row in READ["calls"]}))
def test_every_call_in_the_wheels_binds(name):
    signature = inspect.signature(getattr(deep_gemm, name))
    rows = [row for row in READ["calls"] if row["name"] == name]
    assert rows
    for row in rows:
        args, kwargs = [None] * row["by_position"], dict.fromkeys(row["by_name"])
        bind = signature.bind_partial if row["has_more"] else signature.bind
        try:
            bind(*args, **kwargs)
        except TypeError as error:
            pytest.fail(f"{row['wheel']} {row['file']}:{row['line']}: {error}")


def test_the_table_has_calls_of_every_engine():
    wheels = {row["wheel"].split("-")[0] for row in READ["calls"]}
    assert wheels == {"vllm", "sglang", "flashinfer_python", "transformers"}
    assert READ["upstream"] == "sgl_deep_gemm-0.2.5"


def test_what_engines_look_for_before_they_share_experts():
    """vLLM looks up these names; NVFP4, beside which shared experts are not built, lacks one."""
    names = {"num_shared_experts", "shared_l1_weights", "shared_l2_weights"}
    api = {
        call: set(inspect.signature(getattr(deep_gemm, call)).parameters)
        for call in ("get_symm_buffer_for_mega_moe", "fp8_fp4_mega_moe", "bf16_mega_moe",
                     "NVFP4SymmBuffer", "nvfp4_mega_moe")
    }  # fmt: skip
    assert names <= api["get_symm_buffer_for_mega_moe"] | api["fp8_fp4_mega_moe"]
    assert names <= api["get_symm_buffer_for_mega_moe"] | api["bf16_mega_moe"]
    assert not names <= api["NVFP4SymmBuffer"] | api["nvfp4_mega_moe"]


@pytest.mark.every
def test_the_table_is_what_the_wheels_say():
    """Half a minute: those parts of the wheels that are read come from PyPI, or from a folder."""
    folder = os.environ.get("MEGAMOE_WHEELS")
    command = [sys.executable, ROOT / "scripts" / "wheel_calls.py", *([folder] if folder else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode and not folder and "Error" in done.stderr:
        last = done.stderr.strip().splitlines()[-1]
        if "URLError" in last or "HTTPError" in last or "timed out" in last:
            pytest.skip(f"the wheels cannot be had from PyPI: {last}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == READ


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        ([], 2, "give a Python file to run; got nothing"),
        (["nowhere.py"], 2, "got nowhere.py"),
        (["--help"], 0, ""),
    ],
)
def test_the_runner_of_files_says_what_it_wants_and_how(given, code, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["deep_gemm", *given])
    try:
        ended = runner.main() or 0
    except SystemExit as stop:
        ended = stop.code
    out, err = capsys.readouterr()
    assert ended == code and said in err and runner.USAGE in out + err
