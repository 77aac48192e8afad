"""The chain as the simulator plays it: communication under the GEMMs, SMs that pull first."""

import json

import pytest

import megamoe as mm
from megamoe.planner.plan import plan
from megamoe.simulator.constants import TABLE, Constants
from megamoe.simulator.schedule import Schedule
from megamoe.trace.perfetto import perfetto

FLASH = (4096, 2048, 256, 6)


def predicted(tokens, mode, recipe="w8a8", ranks=8, **how):
    made = plan(mm.Problem(tokens, *FLASH, ranks, recipe), "h200", mode=mode)
    return mm.simulate(made, **how)


@pytest.mark.parametrize("recipe", ["w8a8", "w4a8_block"])
def test_a_chain_hides_most_of_what_staged_calls_expose(recipe):
    chain, staged = predicted(2048, "chain", recipe), predicted(2048, "staged", recipe)
    alone = mm.simulate(plan(mm.Problem(2048, 4096, 2048, 32, 6, 1, recipe), "h200"))
    assert chain.exposed_us < 0.15 * staged.exposed_us
    # FP4 tiles are dealt: the SMs that pull have none of L1.
    slower, gain = (1.12, 1.3) if recipe == "w8a8" else (1.15, 1.25)
    assert alone.time_us < chain.time_us < slower * alone.time_us
    assert staged.time_us > gain * chain.time_us


def test_what_crosses_the_links_is_what_the_floor_says():
    found = predicted(512, "chain")
    moved = found.usage.nvlink * found.time_us
    assert moved == pytest.approx(found.floor.nvlink_us, rel=0.06)  # that of the fullest rank


def test_sms_that_pull_compute_once_the_pull_is_over():
    found = predicted(512, "chain")
    schedule = Schedule.of_plan(plan(mm.Problem(512, *FLASH, 8, "w8a8"), "h200", mode="chain"))
    late = schedule.num_sms - schedule.pull_sms
    spans = [s for s in found.timeline.spans if s.rank == 0 and s.role == "math"]
    first = {sm: min(s.start_us for s in spans if s.sm == sm) for sm in {s.sm for s in spans}}
    pulled = max(s.end_us for s in found.timeline.spans if s.rank == 0 and s.role == "pull")
    assert all(at >= pulled for sm, at in first.items() if sm >= late)
    assert min(first.values()) < pulled


def test_slow_pulls_are_felt():
    table = dict(TABLE, pull_gbs=TABLE["pull_gbs"]._replace(value=2.0))
    slow = predicted(2048, "chain", constants=Constants.of(table))
    assert slow.time_us > 1.3 * predicted(2048, "chain").time_us


def test_the_trace_shows_pulls_under_l1_and_rows_home_under_l2():
    """On a lane of each rank, and on the SMs that pull, beside the others' blocks."""
    found = predicted(2048, "chain")
    events = [e for e in json.loads(perfetto(found.timeline))["traceEvents"] if e["ph"] == "X"]
    for rank in range(8):
        own = [e for e in events if e["pid"] == rank]
        blocks = {
            phase: [e for e in own if e["cat"] == "math" and e["args"]["phase"] == phase]
            for phase in ("l1", "l2")
        }
        for lane, phase in (("pull", "l1"), ("scatter", "l2")):
            begin = min(e["ts"] for e in blocks[phase])
            end = max(e["ts"] + e["dur"] for e in blocks[phase])
            moved = [(e["ts"], e["ts"] + e["dur"]) for e in own if e["cat"] == lane]
            beside = sum(max(0.0, min(last, end) - max(at, begin)) for at, last in moved)
            assert beside > 0.8 * sum(last - at for at, last in moved) > 0, (rank, lane)
        copies = {e["tid"] for e in own if e.get("args", {}).get("phase") == "pull"}
        assert len(copies) == found.schedule.pull_sms == 16
