"""Ranks of a chain that share an H200: what the simulator says of the recorded cells."""

from dataclasses import replace
from pathlib import Path

import pytest

from megamoe.bench.overlap_model import NAMES, counts_of, measured, plan_of, simulated
from megamoe.bench.overlap_picture import load
from megamoe.errors import RangeError
from megamoe.simulator.schedule import Schedule
from megamoe.simulator.simulate import simulate

RECORD = Path(__file__).parents[2] / "benchmarks" / "h200" / "overlap.json"
ROWS = load(RECORD)
BAR = 0.15


@pytest.mark.parametrize("row", [
    pytest.param(
        row, id=f"{row.cell}-{row.recipe}", marks=pytest.mark.every if "8192" in row.cell else ()
    ) for row in ROWS
])  # fmt: skip
def test_measured_cells_come_out(row):
    """Compute alone, links alone and both, within 15%; three constants were set on them."""
    assert len(ROWS) == 18
    for name, said, seen in zip(NAMES, simulated(row), measured(row), strict=True):
        assert abs(said / seen - 1) <= BAR, (name, said, seen)


def test_a_rank_that_shares_a_gpu_has_a_part_of_it():
    row = ROWS[0]
    plan = plan_of(row, "h200")
    how = Schedule.of_plan(plan)
    whole, part = plan.hardware, how.hardware
    assert (how.num_sms, part.num_sms, how.pull_sms) == (row.sms, row.sms, row.pull_sms)
    assert part.hbm_gbs.reached.value == pytest.approx(whole.hbm_gbs.reached.value / 8)
    assert part.nvlink_gbs.reached.value == pytest.approx(row.links_gbs)
    assert part.tensor("fp8").reached.value == pytest.approx(
        whole.tensor("fp8").reached.value * 16 / 132
    )
    assert part.l2_bytes == whole.l2_bytes // 8
    assert sum(map(sum, counts_of(row))) == 8 * 512 * 6


def test_slow_links_are_felt_and_links_alone_do_not_compute():
    row = ROWS[0]
    how, counts = Schedule.of_plan(plan_of(row, "h200")), counts_of(row)
    slow = simulate(how.over_links(5.0), counts)
    assert slow.time_us > 2 * simulate(how, counts).time_us
    alone = simulate(replace(how, links_alone=True), counts)
    assert not any(span.role == "math" for span in alone.timeline.spans)
    assert alone.step("pull") > 0 and alone.step("results home") > 0


def test_dealt_tiles_of_l1_are_not_for_sms_that_pull():
    """They come to L2 when the pull is over; where tiles are drawn they come to L1 too."""
    dealt, drawn = (next(r for r in ROWS if r.recipe == name) for name in ("w4a8_block", "w8a8"))
    for row, phases in ((dealt, {"l2"}), (drawn, {"l1", "l2"})):
        how = Schedule.of_plan(plan_of(row, "h200"))
        spans = simulate(how, counts_of(row)).timeline.spans
        pullers = range(how.num_sms - how.pull_sms, how.num_sms)
        assert {s.phase for s in spans if s.role == "math" and s.sm in pullers} == phases


def test_a_record_of_other_tiles_is_refused():
    with pytest.raises(RangeError, match="has the tile that was measured, another"):
        plan_of(replace(ROWS[0], tile="another"), "h200")
