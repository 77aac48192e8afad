"""The simulator: conservation, order, bounds, the overlap rule, and how long it takes."""

import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.errors import RangeError
from megamoe.hardware import Figure, Hardware, Rate
from megamoe.problem import Problem
from megamoe.planner.floor import overlap_limit
from megamoe.studies.deep_gemm.plan import plan
from megamoe.simulator.sample import sample_counts
from megamoe.simulator.simulate import simulate
from megamoe.simulator.timeline import Timeline
from megamoe.simulator.traffic import local_rows
from tests.studies.support import all_blocks

H200 = Hardware.named("h200")
TINY = replace(H200, num_sms=16)
LEGAL = settings(deadline=None, derandomize=True, max_examples=40, database=None)


def scaled(hw, **factors):
    """The machine with some of its reached speeds times a factor."""
    changed = {}
    for name, factor in factors.items():
        rate = getattr(hw, name)
        reached = Figure(rate.reached.value * factor, "test")
        changed[name] = Rate(rate.paper, reached)
    return replace(hw, **changed)


@st.composite
def predictions(draw):
    ranks = draw(st.sampled_from([1, 2, 4]))
    problem = Problem(
        draw(st.sampled_from([0, 1, 5, 64, 300])), 512, 256, 8, 2, ranks,
        draw(st.sampled_from(["w8a8", "w4a8_block", "bf16"])),
    )  # fmt: skip
    skew = draw(st.sampled_from(["even", "uniform", "zipf", "hot_expert", "masked"]))
    given = {
        "mode": draw(st.sampled_from(["fused", "split", "staged"])),
        "deal": draw(st.sampled_from(["static", "ticket", "largest_first"])),
        "block_m": 16,
        "block_n": 64,
        "lag": draw(st.sampled_from([None, 0, 2])),
        "ring_rows": draw(st.sampled_from([None, 16 * 16])) if problem.num_tokens <= 64 else None,
    }
    return simulate(plan(problem, TINY, **given), skew=skew, seed=draw(st.integers(0, 3)))


@LEGAL
@given(predictions())
def test_every_block_runs_once_on_one_sm(found):
    local = found.plan.problem.num_local_experts
    for rank in range(found.plan.problem.num_ranks):
        ran = Counter(
            (s.phase, s.expert, s.m, s.n)
            for s in found.timeline.spans
            if s.rank == rank and s.role == "math"
        )
        rows = local_rows(found.counts, rank, local)
        assert ran == Counter(dict.fromkeys(all_blocks(found.plan.grid, rows), 1))


@LEGAL
@given(predictions())
def test_no_place_does_two_things_at_once(found):
    last = {}
    for span in found.timeline.spans:
        place = (span.rank, span.sm)
        assert span.start_us >= last.get(place, 0.0) - 1e-9, span
        last[place] = span.end_us


@LEGAL
@given(predictions())
def test_an_l2_block_starts_when_all_l1_blocks_of_its_rows_have_ended(found):
    math = [s for s in found.timeline.spans if s.role == "math"]
    ends = {}
    for s in math:
        if s.phase == "l1":
            key = (s.rank, s.expert, s.m)
            ends[key] = max(ends.get(key, 0.0), s.end_us)
    assert all(s.start_us >= ends[s.rank, s.expert, s.m] - 1e-9 for s in math if s.phase == "l2")


@LEGAL
@given(predictions())
def test_no_call_beats_its_floor_and_steps_add_up(found):
    assert found.time_us >= found.floor.time_us
    assert sum(us for _, us in found.steps) >= found.time_us - 1e-6
    for share in (found.usage.tensor, found.usage.hbm, found.usage.nvlink):
        assert 0.0 <= share <= 1.0
    assert 0.0 <= found.exposed_us <= found.time_us


@pytest.mark.parametrize("machine", ["h200", "h20", "b200"])
@pytest.mark.parametrize("tokens", [1, 64, 1024])
@pytest.mark.parametrize("mode", ["fused", "split", "staged"])
def test_real_layers_stay_above_their_floor(machine, tokens, mode):
    problem = Problem(tokens, 4096, 2048, 64, 6, 2, "w4a8")
    found = simulate(plan(problem, machine, mode=mode))
    assert found.floor.time_us < found.time_us < 12 * found.floor.time_us + 100


def test_the_same_call_gives_the_same_timeline():
    how = plan(Problem(128, 1024, 512, 16, 4, 4, "w4a8"), H200)
    assert simulate(how, seed=1) == simulate(how, seed=1)
    assert simulate(how, seed=1).timeline != simulate(how, seed=2).timeline


@pytest.mark.parametrize("mode", ["fused", "split", "staged"])
@pytest.mark.parametrize("what", ["hbm_gbs", "nvlink_gbs"])
@pytest.mark.parametrize("tokens", [16, 2048])
def test_more_bandwidth_is_never_slower(mode, what, tokens):
    """Up to 1%: with tickets, faster blocks may fall to other SMs, as list schedules do."""
    problem = Problem(tokens, 4096, 1024, 32, 4, 4, "w8a8")
    times = []
    for factor in (0.25, 0.5, 1.0, 2.0):
        how = plan(problem, scaled(H200, **{what: factor}), mode=mode, block_n=128)
        times.append(simulate(how).time_us)
    for slow, fast in pairwise(times):
        assert fast <= slow * 1.01
    is_no_limit = (tokens, mode, what) == (16, "split", "nvlink_gbs")
    assert times[-1] < times[0] or is_no_limit


def test_the_overlap_rule_falls_out_of_the_model():
    """C/B <= 2d (A082): communication hides up to there and shows beyond.

    C is what the blocks really reach here, and B counts the rows that cross a link: with four
    ranks a quarter stays at home.
    """
    problem = Problem(4096, 4096, 3072, 64, 6, 4, "w8a8")
    fast = simulate(plan(problem, scaled(H200, nvlink_gbs=1000.0)), skew="even")
    sustained = problem.flops / fast.step("blocks") / 1e6  # TFLOP/s
    remote = (problem.num_ranks - 1) / problem.num_ranks

    def at(ratio):
        link = sustained * 1e3 * remote / (ratio * overlap_limit(problem))
        factor = link / H200.nvlink_gbs.reached.value
        return simulate(plan(problem, scaled(H200, nvlink_gbs=factor)), skew="even")

    for ratio in (0.2, 0.5, 0.8):
        assert at(ratio).exposed_share < 0.03
    for ratio in (1.3, 2.0):
        hidden = at(ratio)
        wanted = 1.0 - 1.0 / ratio  # the rest of the link's time
        assert hidden.exposed_share == pytest.approx(wanted, abs=0.1)
    assert at(2.0).time_us > 1.6 * at(0.5).time_us


def test_fused_hides_what_staged_exposes():
    problem = Problem(2048, 4096, 2048, 64, 6, 4, "w8a8")
    fused, staged = (simulate(plan(problem, H200, mode=mode)) for mode in ("fused", "staged"))
    assert fused.exposed_share < 0.05 < staged.exposed_share
    assert fused.time_us < staged.time_us


@pytest.mark.parametrize("mode", ["fused", "split", "staged"])
def test_one_rank_exposes_no_communication(mode):
    found = simulate(plan(Problem(256, 4096, 2048, 32, 6, 1, "w8a8"), H200, mode=mode))
    assert found.exposed_us == 0.0 and found.usage.nvlink == 0.0


def test_skew_shows_as_imbalance_and_time():
    how = plan(Problem(512, 2048, 1024, 64, 4, 4, "w8a8"), H200)
    even, hot = simulate(how, skew="even"), simulate(how, skew="hot_rank")
    assert even.summary.imbalance < 1.05 < 3.0 < hot.summary.imbalance
    assert hot.time_us > 2 * even.time_us


def test_split_runs_l1_and_l2_on_their_own_sms():
    how = plan(Problem(256, 2048, 1024, 32, 4, 2, "w8a8"), H200, mode="split")
    for span in simulate(how).timeline.spans:
        if span.role == "math":
            assert (span.phase == "l1") == (span.sm < how["k1_sms"])


def test_measured_counts_are_used_as_they_are():
    problem = Problem(8, 512, 256, 8, 2, 2, "w8a8")
    counts = [[16, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 16]]
    found = simulate(plan(problem, H200), counts)
    assert {(s.rank, s.expert) for s in found.timeline.spans if s.role == "math"} == {
        (0, 0),
        (1, 3),
    }
    assert found.usage.nvlink == 0.0, "every row stays at home"
    assert found.exposed_us == 0.0


def test_no_rows_is_a_legal_call():
    found = simulate(plan(Problem(8, 512, 256, 8, 2, 2), H200), skew="masked")
    assert found.floor.time_us == 0.0 and 0 < found.time_us < 50 and "no rows" in str(found)


def test_a_prediction_prints_the_floor_beside_the_time():
    text = str(simulate(plan(Problem(64, 2048, 1024, 32, 4, 2, "w8a8"), H200)))
    for words in ("predicted", "floor", "times that", "exposed", "tail", "imbalance", "NVLink in"):
        assert words in text


def test_grouped_launches_belong_to_staged_mode():
    with pytest.raises(RangeError, match="grouped launches need mode staged; got fused"):
        simulate(plan(Problem(8, 512, 256, 8, 2), H200), is_grouped=True)


def test_deepseek_v4_pro_on_eight_ranks_takes_less_than_ten_seconds():
    problem = Problem(8192, 7168, 3072, 384, 6, 8, "w4a8")
    began = time.process_time()
    found = simulate(plan(problem, "b200"))
    assert time.process_time() - began < 10.0
    assert sum(s.role == "math" for s in found.timeline.spans) > 200_000
    assert isinstance(found.timeline, Timeline)
    assert len(sample_counts(problem)) == 8
