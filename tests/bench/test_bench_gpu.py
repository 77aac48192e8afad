"""The timer, the ceilings and the gate on a GPU, small."""

import os
from dataclasses import replace

import pytest
import torch

from megamoe.bench import ceilings, gemm
from megamoe.bench.cells import GemmShape, cells_named
from megamoe.bench.gate import poisoned_call
from megamoe.bench.layer import Settings, measure
from megamoe.bench.reading import Reader
from megamoe.bench.record import ABSENT, OK
from megamoe.bench.timer import Timer
from megamoe.errors import MegaMoEError
from megamoe.planner.numerics import HOPPER_RECIPES

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def test_graphs_are_timed_and_their_output_is_poisoned():
    a = torch.randn(2048, 2048, device=CUDA)
    timer = Timer(CUDA, repeats=5, rounds=2)
    one = timer.prepare(lambda: a @ a)
    assert one.how == "graph"
    assert torch.equal(poisoned_call(one, timer), a @ a)
    timing = timer.time({"one": one})["one"]
    assert timing.count == 10 and 5 < timing.us < 10_000


def test_a_call_that_synchronises_is_refused():
    a = torch.randn(8, device=CUDA)
    with pytest.raises(MegaMoEError, match="capturable"):
        Timer(CUDA, repeats=1, rounds=1).prepare(lambda: a * float(a.sum().item()))
    torch.cuda.synchronize()
    assert (a + 1).isfinite().all()


def test_the_read_kernel_reads_at_the_speed_of_memory():
    found = ceilings.measure(CUDA, Reader(CUDA))
    assert found.read_gbs > 0.8 * found.copy_gbs and found.tflops["bf16"] > 10


def test_a_chain_is_a_graph_of_calls_that_stay_cold():
    settings = Settings(device="cuda", graph_calls=3, repeats=3, rounds=1)
    cells = cells_named(["tiny/100"])  # of a few tokens one that differs by a scale is too much
    made = measure(cells, settings)
    assert [r.status for r in made.rows] == [OK] and "134 MB" in made.method
    eager = measure(cells, replace(settings, eager=True))
    assert {r.status for r in eager.rows} == {ABSENT} and "CUDA graph" in eager.rows[0].note
    a = torch.randn(8 << 20, device=CUDA)  # 32 MB: would stay in L2
    times = {}
    for chain in (1, 8):
        timer = Timer(CUDA, repeats=9, rounds=2, graph_calls=chain)
        one = timer.prepare(lambda: a.sum())
        assert one.how == "graph" and torch.equal(poisoned_call(one, timer), a.sum())
        times[chain] = timer.time({"sum": one})["sum"].us
    assert 32e6 / 6e6 < times[8] < 1.1 * times[1]  # microseconds: no faster than any memory


def test_a_flushed_read_is_slower_than_a_cached_one():
    if os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1":
        pytest.skip("a time beside other workers' launches says nothing: run it without -n")
    words = torch.zeros(8 << 20, dtype=torch.int32, device=CUDA)  # 32 MB: fits in L2
    times = {}
    for flush in ("none", "memset", "read"):
        timer = Timer(CUDA, flush=flush, repeats=20, rounds=1)
        times[flush] = timer.time({"sum": timer.prepare(lambda: words.sum())})["sum"].us
    assert min(times["memset"], times["read"]) > times["none"]


@pytest.mark.parametrize("cell", ["tiny/8", "tiny/600"])
def test_contestants_on_a_gpu(cell):
    settings = Settings(
        backends=("reference", "torch-bf16", "torch-fp8"), recipes=("w8a8", "w4a16"),
        device="cuda", repeats=3, rounds=2,
    )  # fmt: skip
    report = measure(cells_named([cell]), settings)
    by_name = {r.label: r for r in report.rows}
    assert by_name["reference w8a8"].status == OK and by_name["reference w8a8"].how == "eager"
    assert by_name["torch-bf16"].status in (OK, ABSENT), by_name["torch-bf16"].note
    if torch.cuda.get_device_capability() == (9, 0):
        assert by_name["torch-fp8"].status == OK, by_name["torch-fp8"].note


@pytest.mark.parametrize("rows", [(8, 0, 17, 40), (300, 129, 0, 1)], ids=str)
def test_hoppers_grouped_gemm_is_right_in_every_tile(rows):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs an sm_90 GPU; this is another")
    shape = GemmShape("t", 320, 512, rows)
    names = [f"hopper-{r}" for r in HOPPER_RECIPES] + ["hopper-w4a8_block@all"]
    report = gemm.measure([shape], names, device="cuda", repeats=3, rounds=1)
    assert {r.contestant: r.note for r in report.rows if r.status != OK} == {}
    assert all(r.ours and r.weight_gbs > 0 and r.read_us > 0 for r in report.rows)
