"""A small traced launch on a Hopper GPU: every ticket once, L2 after its L1, the same bits."""

import pytest
import torch

from megamoe.bench.cells import Cell, Shape
from megamoe.bench.layer import Settings
from megamoe.bench.tracing import record
from megamoe.engine import backends
from megamoe.layout.stamps import POOL
from megamoe.trace.beside import Pair
from megamoe.trace.stamps import L1, L2, MATH, Recording

pytestmark = pytest.mark.gpu

CELL = Cell(Shape("small", 1024, 1024, 32, 4), 32)  # 8 + 4 tiles of weights for each of tokens
CLOCK_US = 0.2  # the GPU's clock ticks, and an end is stamped after what it ends


@pytest.fixture(scope="module")
def traced():
    why = next(b for b in backends.BACKENDS if b.name == "hopper").why_not(torch.device("cuda"))
    if why:
        pytest.skip(why)
    return record(CELL, "w4a8_block", Settings(device="cuda", repeats=5, rounds=2))


def test_stamps_change_no_bit(traced):
    assert traced[1]


def test_every_ticket_is_computed_exactly_once(traced):
    found, _ = traced
    assert found.faults() == ()
    num_tiles = len(found.tiles(0))
    kinds = [e.kind for e in found.events if e.role == MATH]
    assert kinds.count(L1) == 8 * num_tiles and kinds.count(L2) == 4 * num_tiles
    assert Recording.from_json(found.to_json()) == found


def test_l2_begins_after_the_l1_of_its_rows(traced):
    line = Pair.of(traced[0]).measured
    blocks = [s for s in line.spans if s.role == "math"]
    done = {}
    for s in blocks:
        if s.phase == "l1":
            done[s.expert, s.m] = max(done.get((s.expert, s.m), 0.0), s.end_us)
    late = [s for s in blocks if s.phase == "l2" and s.start_us < done[s.expert, s.m] - CLOCK_US]
    assert not late


def test_every_cta_says_what_it_did(traced):
    found, _ = traced
    waited = {e.cta for e in found.events if e.ticket == POOL}
    assert waited == set(range(found.num_ctas))
    pair = Pair.of(found)
    assert {s.sm for s in pair.measured.spans if s.role == "route"} == waited
    assert pair.measured.total_us > 1.0  # how long depends on who else is on the GPU
    rows = {row.name: row.measured for row in pair.rows}
    assert 0 < rows["pool ready"] < rows["on the GPU"]
    assert 0 <= rows["loads, an SM"] <= 1 and rows["first load"] < rows["last load"]
    assert rows["call"] > 0 and rows["stamping"] < 1.0
