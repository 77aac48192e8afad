"""`bench.tracing` on the CPU, with a launch that only pretends: all but the kernel is real."""

import pytest
import torch

from megamoe.bench import tracing
from megamoe.bench.cells import Cell, Shape
from megamoe.bench.layer import Settings
from megamoe.errors import CapacityError, NotAvailable, RangeError
from megamoe.trace.beside import Pair
from megamoe.trace.stamps import L1, L2, MATH, Recording
from tests.pretending import pretend_h200
from tests.trace.support import buffer

CELL = Cell(Shape("small", 256, 320, 8, 2), 8)
NUM_CTAS = 6


@pytest.fixture
def pretended(monkeypatch):
    """A fused call that writes stamps of `CELL`; -> how often it ran with them and without."""
    fused = pytest.importorskip("megamoe.engine.fused")
    ran = {True: 0, False: 0}

    def run(call, step, *, trace=None):
        ran[trace is not None] += 1
        assert step.config.tile.slabs == 2
        if trace is not None:
            events = _events(call.topk_idx, step.config.tile.block_m, ran[True])
            trace.copy_(torch.tensor(buffer(NUM_CTAS, events), dtype=torch.int32))
        return call.x.clone()

    monkeypatch.setattr(tracing, "check_device", lambda device: None)
    monkeypatch.setattr(fused, "run", run)
    pretend_h200(monkeypatch, NUM_CTAS)
    return ran


def _events(topk_idx, block_m, run):
    """Every ticket once, in a launch that takes less time than the one before."""
    rows = torch.bincount(topk_idx.flatten(), minlength=8)
    num_tiles = int(-(-rows // block_m).sum())
    kinds = [L1] * 4 * num_tiles + [L2] * num_tiles
    return [
        (t % NUM_CTAS, MATH, kind, t, 10 * t, 10 * t + 1_000_000 // run)
        for t, kind in enumerate(kinds)
    ]


def test_a_recording_is_whole_and_can_be_read(pretended):
    steps = []
    found, is_same = tracing.record(
        CELL,
        "w4a8_block",
        Settings(device="cpu", repeats=2, rounds=2),
        lambda step, done, of: steps.append((done, of)),
    )
    assert is_same and found.faults() == () and found.num_ctas == NUM_CTAS
    assert (found.name, found.block_n, found.num_n_tiles) == ("small/8", 256, (4, 1))
    assert sum(found.counts[0]) == 16 and found.plain_us > 0 and found.traced_us > 0
    assert steps == [(done, 4) for done in range(5)]
    assert pretended[True] == pretended[False] + tracing.LAUNCHES
    assert Recording.from_json(found.to_json()) == found
    assert Pair.of(found).page().count("<canvas>") == 2
    times = sorted(1_000_000 // run for run in range(pretended[True] - 8, pretended[True] + 1))
    longest = max(e.end - e.begin for e in found.events)
    assert longest == times[4], "the median of nine"


def test_batches_that_do_not_fuse_are_refused(pretended):
    many = Cell(CELL.shape, 512)
    with pytest.raises(CapacityError, match=r"128\.0 rows an expert need the tile gemm 128x256"):
        tracing.record(many, "w4a8_block", Settings(device="cpu"))


def test_an_unknown_recipe_and_a_cpu_are_refused():
    with pytest.raises(RangeError, match="recipe must be one of"):
        tracing.record(CELL, "w1a1", Settings(device="cpu"))
    with pytest.raises(NotAvailable, match=r"megamoe trace runs one fused launch.*render"):
        tracing.record(CELL, "w4a8_block", Settings(device="cpu"))
