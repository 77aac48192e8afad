"""The grouped GEMM benchmark and its registry; the read kernel in Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch

from megamoe.bench import gemm
from megamoe.bench.cells import GemmShape
from megamoe.bench.reading import Reader
from megamoe.bench.record import ABSENT, OK, WRONG
from megamoe.bench.timer import Timer
from megamoe.errors import RangeError

SHAPE = GemmShape("t", 64, 96, (3, 0, 5))


def by_hand(inputs, recipe="bf16", factor=1.0):
    def run():
        parts = inputs.x.split(list(inputs.shape.rows))
        y = torch.cat([x @ inputs.w[g].T for g, x in enumerate(parts)])
        return y * factor

    return gemm.GemmEntry(
        run, inputs.check(recipe, 3e-3), 2 * inputs.w.numel(), 2 * inputs.x.numel(), "bf16",
        recipe, True,
    )  # fmt: skip


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(gemm, "CONTESTANTS", dict(gemm.CONTESTANTS))


def test_registered_contestants_are_checked_and_timed(registry):
    gemm.register("right", by_hand)
    gemm.register("wrong", lambda inputs: by_hand(inputs, factor=1.1))
    names = ["right", "wrong", "torch-fp8"]
    report = gemm.measure([SHAPE], names, device="cpu", repeats=2, rounds=1)
    right, wrong, absent = report.rows
    assert right.status == OK and right.us > 0 and right.cell == "gemm-t"
    assert right.flops == 2 * 8 * 64 * 96
    assert right.num_bytes == 2 * (3 * 64 * 96 + 8 * 96 + 8 * 64)
    assert wrong.status == WRONG and wrong.us is None and report.exit_code == 1
    assert absent.status == ABSENT and "needs a GPU" in absent.note


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="runs in the interpreter")
def test_kernels_that_cannot_run_here_are_said_so():
    report = gemm.measure([SHAPE], ["portable-nvfp4"], device="cpu", repeats=1, rounds=1)
    assert report.rows[0].status == ABSENT and report.exit_code == 3
    assert "needs a GPU" in report.rows[0].note


def test_every_variant_of_ours_is_measured_in_the_interpreter():
    code = """
from megamoe.bench import gemm
from megamoe.bench.cells import GemmShape
names = [n for n in gemm.CONTESTANTS if n.startswith("portable-nvfp4")] + ["portable-w8a8-dynamic"]
shape = GemmShape("t", 64, 96, (3, 0, 5))
report = gemm.measure([shape], names, device="cpu", repeats=1, rounds=1)
assert len(report.rows) == 5 and report.exit_code == 0, report.rows
assert all(r.ours and r.us > 0 and r.floor_us > 0 and r.error <= 1.5e-2 for r in report.rows)
assert report.rows[0].weight_bytes == 3 * 64 * (96 // 2 + 96 // 16) + 3 * 4
"""
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_quantised_inputs_differ_from_bf16_as_their_formats_say():
    inputs = gemm.GemmInputs(SHAPE, torch.device("cpu"), 0)
    plain = inputs.exact("bf16")
    for recipe, low, high in (("w8a8", 0.01, 0.08), ("nvfp4", 0.05, 0.3), ("w4a16", 0.05, 0.3)):
        assert low < gemm.relative(inputs.exact(recipe), plain) < high


def test_unknown_contestants_are_refused():
    with pytest.raises(RangeError, match="contestant must be one of"):
        gemm.measure([SHAPE], ["cutlass"], device="cpu")


def test_a_reader_reads_what_it_is_asked_to():
    cpu = torch.device("cpu")
    reader, timer = Reader(cpu), Timer(cpu, repeats=2, rounds=1)
    one = reader.prepare(4096, timer)
    assert one.call() == reader._words[:1024].sum()
    reader.prepare(1 << 16, timer)
    assert reader._words.numel() == 1 << 14 and one.call().isfinite()


def test_the_read_kernel_adds_up_every_word():
    code = """
import torch
from megamoe.bench.read_kernel import read
words = torch.arange(5000, dtype=torch.int32)
sums = torch.full((4,), -1, dtype=torch.int32)
out = read(words, sums, chunks=2, chunk=1024, num_warps=4)
assert out.tolist() == [words[:2048].sum(), words[2048:4096].sum(), words[4096:].sum()]
assert sums[3] == -1
"""
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
