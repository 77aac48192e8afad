"""The grouped GEMM benchmark and its registry; the read kernel in Triton's interpreter."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from megamoe.bench import gemm, hopper_gemm
from megamoe.bench.cells import GEMM_SHAPES, GemmShape
from megamoe.bench.gate import relative
from megamoe.bench.reading import Reader
from megamoe.bench.record import ABSENT, OK, WRONG
from megamoe.bench.timer import Timer
from megamoe.errors import RangeError
from megamoe.formats.quantize import dequantize
from megamoe.formats.spec import recipe_named
from megamoe.planner.hopper import label, tile_of
from megamoe.planner.numerics import HOPPER_RECIPES as RECIPES
from megamoe.planner.tables.hopper import Shape
from megamoe.simulator.costs import HELD_BITS

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
from megamoe.bench.gate import relative
names = [n for n in gemm.CONTESTANTS if f"{n}-".startswith("portable-nvfp4-")]
names.append("portable-w8a8-dynamic")
shape = GemmShape("t", 64, 96, (3, 0, 5))
report = gemm.measure([shape], names, device="cpu", repeats=1, rounds=1)
assert len(report.rows) == 5 and report.exit_code == 0, report.rows
assert all(r.ours and r.us > 0 and r.floor_us > 0 and r.error <= 1.5e-2 for r in report.rows)
assert report.rows[0].weight_bytes == 3 * 64 * (96 // 2 + 96 // 16) + 3 * 4
"""
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def hopper_inputs(recipe, rows=(3, 0, 8, 21)):
    pytest.importorskip("triton")
    from megamoe.kernels.hopper import launch

    inputs = gemm.GemmInputs(GemmShape("t", 64, 384, rows), torch.device("cpu"), 0)
    return inputs, launch.arithmetic(recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_pool_made_by_hand_holds_the_rows_tile_by_tile(recipe):
    """What a kernel would read there gives the exact product, each row at its place."""
    inputs, how = hopper_inputs(recipe)
    row = recipe_named(recipe)
    pool = hopper_gemm.pooled(inputs, recipe, tile_of(recipe, Shape(8, 2, 1)), how)
    w = dequantize(inputs.weights_as(row.weights.name), torch.float64)
    y = torch.full((32, 64), float("nan"), dtype=torch.bfloat16)
    tiles = pool.tiles[: int(pool.num_tiles[0])].tolist()
    for group, first, end, _ in tiles:
        assert first % 8 == 0 and 0 < end - first <= 8
        x = pool.data[first:end].double()
        if how.to_e4m3:  # columns as they were: `device.columns`
            x = x.unflatten(1, (-1, 8, 4, 4)).transpose(2, 3).flatten(1)
        if how.is_promoted:
            x = x * pool.scale[:, first:end].T.double().repeat_interleave(128, 1)
        y[pool.dest[first:end].long()] = (x[:, :384] @ w[group].T).bfloat16()
    assert [group for group, *_ in tiles] == [0, 2, 3, 3, 3]
    assert inputs.check(recipe, 1e-6)(y).ok


HELD = [("w4a8_block", HELD_BITS["w4a8_block"]), ("w8a8", 8), ("nvfp4", 4.5)]


@pytest.mark.parametrize(("recipe", "bits"), HELD)
def test_hopper_launches_its_second_linear_and_counts_bytes_as_it_holds_them(
    recipe, bits, monkeypatch
):
    inputs, how = hopper_inputs(recipe, (8, 8))
    calls = []
    monkeypatch.setattr(hopper_gemm.backends, "resolve", lambda *wanted: None)
    monkeypatch.setattr(
        "megamoe.kernels.hopper.launch.linear", lambda *args, **more: calls.append((args, more))
    )
    entry = hopper_gemm.hopper(inputs, recipe)
    assert entry.run().shape == (16, 64)
    ((pool, packed, _, step, arithmetic, _), more) = calls[0]
    assert arithmetic == how and step.config.block_m == 8 and label(step.config) == entry.note
    assert int(pool.num_tiles[0]) == 2 and (more["acts_factor"] is not None) == (recipe == "nvfp4")
    values = 2 * 64 * 384 if recipe == "w8a8" else 2 * 256 * 512  # images are padded
    factors = 0 if packed.factor is None else 4 * packed.factor.numel()
    assert entry.weight_bytes == values * bits / 8 + factors


def test_hoppers_tile_holds_the_largest_group():
    wanted = {"32x8": 8, "32x16": 16, "32x32": 32, "32x64": 64, "8x1024": 128, "8x4096": 128}
    for name, tokens in wanted.items():
        for recipe in ("w4a8_block", "w8a8"):
            assert hopper_gemm.tile_for(recipe, GEMM_SHAPES[name]).block_m == tokens


def test_tiles_after_an_at_sign_are_spelled_out():
    shape = GEMM_SHAPES["32x8"]
    labels = hopper_gemm.tiles_by_label("w8a8", shape)
    every = gemm.field_of(["torch-fp8", "hopper-w8a8@all"], shape)
    assert list(every) == ["torch-fp8", *(f"hopper-w8a8@{text}" for text in labels)]
    last = list(labels)[-1]
    (one,) = gemm.field_of([f"hopper-w8a8@{last}"], shape).values()
    assert one.keywords["tile"] == labels[last] and len(labels) >= 4
    for bad, words in (
        ("hopper-w8a8@9", "tile must be one of"),
        ("portable-w8a8@all", "backend with a choice of tiles"),
        ("torch-fp9", "contestant must be one of"),
    ):
        with pytest.raises(RangeError, match=words):
            gemm.field_of([bad], shape)


def test_hopper_is_absent_where_there_is_none():
    names = ["hopper-w4a8_block", "hopper-w8a8@all"]
    report = gemm.measure([SHAPE], names, device="cpu", repeats=1, rounds=1)
    assert len(report.rows) >= 5 and all(r.status == ABSENT and r.ours for r in report.rows)


def test_blackwell_is_absent_where_there_is_none():
    names = [n for n in gemm.CONTESTANTS if f"{n}-".startswith("blackwell-nvfp4-")]
    report = gemm.measure([SHAPE], names, device="cpu", repeats=1, rounds=1)
    assert len(report.rows) == 5 and all(r.status == ABSENT and r.ours for r in report.rows)
    assert "needs a B200" in report.rows[0].note


def test_blackwells_contestant_is_right_where_it_runs(monkeypatch):
    """On the emulator: what is timed is the plan's launches."""
    from tests.emulator import blackwell

    blackwell.install_grouped(monkeypatch)
    inputs = gemm.GemmInputs(GemmShape("t", 128, 128, (9, 0, 5)), torch.device("cpu"), 0)
    entry = gemm.CONTESTANTS["blackwell-nvfp4-dynamic-sorted"](inputs)
    assert entry.check(entry.run()).ok


def test_ours_is_compared_with_the_others_of_the_same_run(registry):
    gemm.register("right", by_hand)
    gemm.register("torch-mine", lambda inputs: replace(by_hand(inputs), ours=False))
    report = gemm.measure([SHAPE], ["right", "torch-mine"], device="cpu", repeats=2, rounds=1)
    right, other = report.rows
    assert right.versus == {"torch-mine": right.us / other.us} and other.versus == {}
    assert right.weight_gbs == pytest.approx(2 * 3 * 64 * 96 / right.us / 1e3)
    assert report.rivals == ("torch-mine",) and "/ torch-mine" in report.geomeans()["right bf16"]


def test_quantised_inputs_differ_from_bf16_as_their_formats_say():
    inputs = gemm.GemmInputs(SHAPE, torch.device("cpu"), 0)
    plain = inputs.exact("bf16")
    for recipe, low, high in (("w8a8", 0.01, 0.08), ("nvfp4", 0.05, 0.3), ("w4a16", 0.05, 0.3)):
        assert low < relative(inputs.exact(recipe), plain) < high


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
    chained = reader.prepare(1 << 16, Timer(cpu, repeats=2, rounds=1, graph_calls=2))
    assert reader._words.numel() == 1 << 14 and chained.call() == reader._words.sum()


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
