"""Huge calls: CUDA ends every axis of a grid but the first at 65 535 programs."""

from types import SimpleNamespace

import pytest
import torch
from triton.runtime.jit import JITFunction

import megamoe as mm
from megamoe.engine.call import Call
from megamoe.engine.portable import PORTABLE
from megamoe.kernels.portable import graph_io
from megamoe.kernels.portable.acts import CODES
from megamoe.kernels.portable.dispatch import dispatch
from megamoe.planner import copies
from megamoe.planner.call import CallSpec
from megamoe.problem import Options, Problem
from tests.kernels.steps import rows_step
from tests.kernels.support import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter has no limit, nor launches")

META = torch.device("meta")  # sizes without memory: enough for a launcher
T, E, I, H, TOP_K = 1_000_000, 8, 256, 7168, 8
LONGEST = 65_535


@pytest.fixture
def grids(monkeypatch):
    """Kernel -> grid, of all that would have been launched."""
    found = {}

    def keep(kernel, *args, grid, warmup, **constants):
        found[kernel.__name__] = grid

    monkeypatch.setattr(JITFunction, "run", keep)
    return found


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device=META)


def fits(grids):
    return all(size <= LONGEST for grid in grids.values() for size in grid[1:])


@pytest.mark.parametrize(
    ("recipe", "has_mx", "first"),
    [("w8a8", False, "_dispatch_kernel"), ("w4a4", True, "_pack_kernel")],
)
def test_every_launch_of_a_layer_takes_a_million_tokens(recipe, has_mx, first, grids):
    small = torch.zeros(E, 2 * I, H, dtype=torch.bfloat16), torch.zeros(E, H, I).bfloat16()
    weights = mm.ExpertWeights.quantize(*small, recipe).to(META)
    idx, gates = empty(T, TOP_K, dtype=torch.int32), empty(T, TOP_K, dtype=torch.float32)
    options = Options(combine="fp8")
    status = SimpleNamespace(bad_slot=empty(1, dtype=torch.int32))
    plan = mm.plan(
        CallSpec(Problem(T, H, I, E, TOP_K, recipe=recipe), combine="fp8"),
        "b200" if has_mx else "h200", backend="portable",
    )  # fmt: skip
    PORTABLE.run(Call(empty(T, H), idx, gates, weights, options, None, status), plan)
    assert grids[first] == (H // 1024, LONGEST, 8) and grids["_combine_kernel"] == (4, LONGEST, 16)
    assert len(grids) == 7 and fits(grids)


def test_rows_on_their_way_to_an_fp8_combine_may_be_many(grids):
    """16 384 tokens of top-8 are 131 072 rows: more than 65 535 programs of two."""
    rows = 16_384 * TOP_K
    out, scale = empty(rows, H, dtype=torch.uint8), empty(rows, H // 128, dtype=torch.uint8)
    acts = CODES["fp8_combine"]
    dispatch(empty(rows, H), out, scale, acts, step=rows_step(rows, H, acts))
    assert grids == {"_dispatch_kernel": (7, LONGEST, 2)} and rows // 2 == LONGEST + 1


def test_the_inputs_and_the_output_of_a_graph_may_be_many(grids):
    held = graph_io.Inputs.empty(T, H, TOP_K, META)
    now = empty(graph_io.WORDS, dtype=torch.int64)
    steps = copies.around(T, H, TOP_K)
    graph_io.copy_inputs(now, held, steps.copy_inputs)
    graph_io.copy_output(now, empty(T, H), steps.copy_output)
    assert grids == {"_copy_inputs_kernel": (T, 7), "_copy_output_kernel": (T, 7)} and fits(grids)
