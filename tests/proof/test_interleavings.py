"""Interleavings of the kernels as they stand: no violation of PTX's order, always the same bits.

MEGAMOE_INTERLEAVINGS multiplies how many are tried: a thirtieth of `NUM` without it, 1 for all of
them as in `scripts/proof.sh`, 50 for a night. MEGAMOE_INTERLEAVINGS_FROM is the first seed. A
failure names its seed and the shortest story found; where MEGAMOE_PROOF_TRACES names a folder, that
story is kept there for ui.perfetto.dev.
"""

import os
from pathlib import Path

import pytest

import megamoe as mm
from tests.emulator import policies
from tests.emulator.exploring import explore
from tests.emulator.scheduler import Scheduler
from tests.kernels.support import INTERPRETED, error, tolerance
from tests.proof import campaign, targets

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")

TIMES = float(os.environ.get("MEGAMOE_INTERLEAVINGS", "0.0334"))
FROM = int(os.environ.get("MEGAMOE_INTERLEAVINGS_FROM", "0"))
PER_TEST = 100
# In all: 2 000 of the fused launch over two ranks of two CTAs; 500 and more of each kernel besides.
NUM = {
    "fused-ranks": 2000, "fused": 200, "fused-idle": 100, "fused-fp4": 150, "fused-shared": 100,
    "fused-bf16": 150, "fused-four": 50, "fused-apart": 200, "fused-ring": 100, "fused-late": 100,
    "swap-ab": 100, "swap-ab-fp4": 100, "swap-ab-wide": 100, "swap-ab-bf16": 100,
    "swap-ab-deep": 100, "plain": 100, "plain-static": 100, "plain-dynamic": 150,
    "plain-idle": 100, "plain-fp4": 100, "plain-per-wave": 50, "plain-tail": 100,
    "plain-late": 50, "staged-small": 100, "staged-large": 100, "staged-per-wave": 30,
    "chain": 50, "chain-nvfp4": 50, "chain-static": 50, "chain-dynamic": 50,
    "chain-whole": 100, "chain-replayed": 50, "chain-passes": 50, "chain-ready": 50,
    "chain-apart": 100, "chain-shared": 50, "chain-four": 50, "chain-absent": 50,
    "chain-fp8-rows": 50, "chain-given-up": 50, "chain-late": 50, "chain-hurried": 50,
    "chain-split": 100, "chain-split-per-wave": 50,
}  # fmt: skip


def parts():
    """(case, first seed, number) of each test."""
    for name, num in NUM.items():
        wanted = max(int(num * TIMES), 1)
        for start in range(0, wanted, PER_TEST):
            yield name, FROM + start, min(PER_TEST, wanted - start)


@pytest.mark.parametrize(("name", "first", "num"), list(parts()))
def test_no_interleaving_breaks_an_order_or_changes_a_bit(name, first, num):
    assert explore(campaign.case(name), range(first, first + num)) == num


def test_every_case_is_explored():
    assert set(NUM) == set(campaign.CASES)


def test_the_page_has_these_numbers():
    page = (Path(__file__).parents[2] / "docs" / "proof.md").read_text()
    others = {name: num for name, num in NUM.items() if name != "fused-ranks"}
    rows = [("fused launch over two ranks of two CTAs", NUM["fused-ranks"])]
    for what, prefix in (
        ("other fused launches", "fused"), ("swap-AB GEMM", "swap-ab"), ("plain GEMM", "plain"),
        ("whole staged calls", "staged"), ("the chain", "chain"),
    ):  # fmt: skip
        of = [num for name, num in others.items() if name.startswith(prefix)]
        rows.append((f"{what} ({len(of)} cases)", sum(of)))
    for what, num in rows:
        assert f"{what} | {num:,} |" in page
    assert f"of each of {len(others)} other cases" in page


def test_a_seed_gives_the_same_run_again():
    case = campaign.case("fused")
    runs = []
    for seed in (3, 3, 4):
        log = []
        case.run(policies.policy_of(seed), log)
        runs.append(log)
    assert runs[0] == runs[1] != runs[2] and len(runs[0]) > 500


@pytest.mark.parametrize(
    ("recipe", "tile"),
    [
        ("w8a8", targets.NARROW), ("w4a8_block", targets.NARROW), ("bf16", targets.NARROW),
        ("w8a8", targets.DYNAMIC), ("w4a8_block", targets.PER_TILE),
    ],
)  # fmt: skip
def test_what_is_scheduled_is_the_layer(recipe, tile):
    """Against the reference: what the cases compare their runs with is right."""
    w = targets.weights_of(recipe, 2, 256, 256)
    inputs = targets.tokens_of(5, 2, 256)
    found = []

    def host():
        plan = targets.staged_plan(inputs, w, tile)
        status = targets.DeviceStatus(targets.CPU)
        found.append(
            targets.HOPPER.run(targets.Call(*inputs, w, targets.Options(), None, status), plan)
        )

    with targets.installed(2, targets.kernels()):
        Scheduler(policies.Calm()).run(host)
    wanted = mm.moe(*inputs, w, backend="reference")
    assert error(found[0], wanted) <= tolerance(recipe)


def test_a_fused_case_is_the_layer():
    case = targets.fused_case()
    case.learn()
    given = case.launches[0][2]
    w = targets.weights_of("w8a8", 2, 256, 256)
    wanted = mm.moe(*targets.tokens_of(3, 2, 256), w, backend="reference")
    assert error(given["y"], wanted) <= tolerance("w8a8")


def test_a_cta_without_a_tile_has_seen_the_pool_before_counters_are_cleared():
    """More CTAs than tickets: load_tokens of one that has none may still wait for the pool."""
    case = targets.fused_case(num_sms=4, tokens=1, experts=1, intermediate=128, top_k=1)
    explore(case, range(16))
