"""The simulator: conservation, order, bounds, the overlap rule, and what it says of a study."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.errors import CapacityError, NotAvailable, ShapeError
from megamoe.hardware import Figure, Hardware, Rate
from megamoe.planner.call import CallSpec, SharedSpec
from megamoe.planner.floor import overlap_limit
from megamoe.planner.plan import plan
from megamoe.problem import Problem
from megamoe.simulator.blocks import num_m_blocks
from megamoe.simulator.ranks import with_shared
from megamoe.simulator.schedule import Schedule
from megamoe.simulator.simulate import simulate
from megamoe.simulator.traffic import local_rows
from megamoe.studies.deep_gemm.plan import plan as study_plan
from megamoe.studies.deep_gemm.schedule import schedule_of

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


def study(problem, hw, **given):
    """The reference system's schedule."""
    return schedule_of(study_plan(problem, hw, **given))


RECIPE = st.sampled_from(["w8a8", "w4a8_block", "bf16", "w4a8"])
SKEW = st.sampled_from(["even", "uniform", "zipf", "hot_expert", "masked"])


@st.composite
def own_calls(draw):
    """Calls of this library: fused, fused in waves or in passes, staged, portable."""
    ranks = draw(st.sampled_from([1, 2, 4]))
    kind = draw(st.sampled_from(["fused", "ring", "staged", "portable"]))
    tokens = draw(st.sampled_from([1, 5, 64] if kind != "staged" else [1, 64, 300]))
    problem = Problem(tokens, 512, 256, 8, 2, ranks, draw(RECIPE))
    given = {"mode": "fused" if kind == "ring" else kind}
    if kind == "portable":
        given = {"backend": "portable"}
    if kind == "ring" and tokens * ranks > 60:
        given["pool_rows"] = 160
    return plan(problem, TINY, **given)


@st.composite
def studies(draw):
    """Calls of the reference system."""
    ranks = draw(st.sampled_from([1, 2, 4]))
    problem = Problem(draw(st.sampled_from([1, 5, 64, 300])), 512, 256, 8, 2, ranks, draw(RECIPE))
    return study(
        problem, TINY, block_m=16, block_n=64, block_k=128,
        mode=draw(st.sampled_from(["fused", "split", "staged"])),
        deal=draw(st.sampled_from(["static", "ticket", "largest_first"])),
        lag=draw(st.sampled_from([None, 0, 2])),
        ring_rows=draw(st.sampled_from([None, 16 * 16])) if problem.num_tokens <= 64 else None,
    )  # fmt: skip


@st.composite
def predictions(draw):
    how = draw(st.one_of(own_calls(), studies()))
    return simulate(how, skew=draw(SKEW), seed=draw(st.integers(0, 3)))


def blocks_of(found, rank):
    """Every (phase, expert, m, n) that must run on a rank, straight from the counts."""
    how = found.schedule
    rows = local_rows(with_shared(how, found.counts), rank, how.experts.num_local)
    return {
        (phase, e, m, n)
        for e, count in enumerate(rows)
        for m in range(num_m_blocks(count, how.experts.block_m))
        for phase in ("l1", "l2")
        for n in range(how.experts.linear(phase).num_n)
    }


@LEGAL
@given(predictions())
def test_every_block_runs_once_on_one_sm(found):
    if found.schedule.num_passes > 1:  # each launch has its part of the rows
        return
    for rank in range(found.schedule.problem.num_ranks):
        ran = Counter(
            (s.phase, s.expert, s.m, s.n)
            for s in found.timeline.spans
            if s.rank == rank and s.role == "math"
        )
        assert ran == Counter(dict.fromkeys(blocks_of(found, rank), 1))


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
    if found.schedule.num_passes > 1:
        return
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
@pytest.mark.parametrize("mode", ["auto", "fused", "split", "staged"])
def test_real_layers_stay_above_their_floor(machine, tokens, mode):
    problem = Problem(tokens, 4096, 2048, 64, 6, 2, "w4a8")
    how = plan(problem, machine) if mode == "auto" else study(problem, machine, mode=mode)
    found = simulate(how)
    assert found.floor.time_us < found.time_us < 12 * found.floor.time_us + 100


def test_the_same_call_gives_the_same_timeline():
    how = plan(Problem(128, 1024, 512, 16, 4, 4, "w4a8"), H200)
    assert simulate(how, seed=1) == simulate(how, seed=1)
    assert simulate(how, seed=1).timeline != simulate(how, seed=2).timeline


@pytest.mark.parametrize("mode", ["own", "fused", "split", "staged"])
@pytest.mark.parametrize("what", ["hbm_gbs", "nvlink_gbs"])
@pytest.mark.parametrize("tokens", [16, 2048])
def test_more_bandwidth_is_never_slower(mode, what, tokens):
    """Up to 1%: with tickets, faster blocks may fall to other SMs, as list schedules do."""
    problem = Problem(tokens, 4096, 1024, 32, 4, 4, "w8a8")
    times = []
    for factor in (0.25, 0.5, 1.0, 2.0):
        machine = scaled(H200, **{what: factor})
        how = plan(problem, machine) if mode == "own" else study(problem, machine, mode=mode)
        times.append(simulate(how).time_us)
    for slow, fast in pairwise(times):
        assert fast <= slow * 1.01
    is_no_limit = (tokens, mode, what) == (16, "split", "nvlink_gbs")
    assert times[-1] < times[0] or is_no_limit


def test_the_overlap_rule_falls_out_of_the_model():
    """C/B <= 2d: communication hides up to there and shows beyond, in a kernel that overlaps all.

    C is what the blocks really reach here, and B counts the rows that cross a link: with four
    ranks a quarter stays at home.
    """
    problem = Problem(2048, 4096, 3072, 64, 6, 4, "w8a8")
    fast = simulate(study(problem, scaled(H200, nvlink_gbs=1000.0)), skew="even")
    sustained = problem.flops / fast.step("blocks") / 1e6  # TFLOP/s
    remote = (problem.num_ranks - 1) / problem.num_ranks

    def at(ratio):
        link = sustained * 1e3 * remote / (ratio * overlap_limit(problem))
        factor = link / H200.nvlink_gbs.reached.value
        return simulate(study(problem, scaled(H200, nvlink_gbs=factor)), skew="even")

    for ratio in (0.2, 0.5, 0.8):
        assert at(ratio).exposed_share < 0.03
    for ratio in (1.3, 2.0):
        wanted = 1.0 - 1.0 / ratio  # the rest of the link's time
        assert at(ratio).exposed_share == pytest.approx(wanted, abs=0.1)
    assert at(2.0).time_us > 1.6 * at(0.5).time_us


def test_the_reference_system_hides_what_staged_launches_expose():
    problem = Problem(2048, 4096, 2048, 64, 6, 4, "w8a8")
    fused, staged = simulate(study(problem, H200)), simulate(plan(problem, H200, mode="staged"))
    chain = simulate(plan(problem, H200, mode="chain"))
    assert chain.schedule.mode == "chain" and chain.exposed_share < staged.exposed_share
    assert fused.time_us < chain.time_us < staged.time_us
    assert fused.exposed_share < 0.05 < staged.exposed_share
    assert fused.time_us < staged.time_us


def test_tokens_of_a_fused_call_cross_the_links_quantised_and_rows_in_bf16():
    problem = Problem(16, 4096, 2048, 8, 2, 2, "w8a8")
    found = simulate(plan(problem, H200, mode="fused"), [[4] * 8, [4] * 8])
    link = H200.nvlink_gbs.reached.value * 1e3
    crossed = found.usage.nvlink * found.time_us * link  # bytes into one rank
    assert crossed == pytest.approx(4 * 4 * ((4096 + 128) + 2 * 4096), rel=1e-6)


@pytest.mark.parametrize("tokens", [64, 256])
def test_one_rank_exposes_no_communication(tokens):
    found = simulate(plan(Problem(tokens, 4096, 2048, 32, 6, 1, "w8a8"), H200))
    assert found.exposed_us == 0.0 and found.usage.nvlink == 0.0


def test_skew_shows_as_imbalance_and_time():
    how = plan(Problem(512, 2048, 1024, 64, 4, 4, "w8a8"), H200)
    even, hot = simulate(how, skew="even"), simulate(how, skew="hot_rank")
    assert even.summary.imbalance < 1.05 < 3.0 < hot.summary.imbalance
    assert hot.time_us > 2 * even.time_us


def test_split_runs_l1_and_l2_on_their_own_sms():
    how = study(Problem(256, 2048, 1024, 32, 4, 2, "w8a8"), H200, mode="split")
    for span in simulate(how).timeline.spans:
        if span.role == "math":
            assert (span.phase == "l1") == (span.sm < how.l1_sms)


def names(found):
    return [name for name, _ in found.steps if name not in ("gaps", "barrier")]


@pytest.mark.parametrize(
    ("problem", "given", "wanted"),
    [
        (Problem(8, 4096, 2048, 32, 6, 1, "w4a8_block"), {},
         ["launch", "route", "blocks", "results home", "combine"]),
        (Problem(8, 4096, 2048, 32, 6, 1, "w4a8_block"), {"mode": "staged"},
         ["launch", "permute", "l1", "l2", "combine"]),
        (Problem(512, 4096, 2048, 32, 6, 1, "w4a8_block"), {},
         ["launch", "place", "permute", "l1", "l2", "combine"]),
        (Problem(2048, 4096, 2048, 32, 6, 1, "w8a8"), {},
         ["launch", "count", "scan", "place", "permute", "l1 and l2", "combine"]),
        (Problem(512, 4096, 2048, 256, 6, 8, "w4a8_block"), {"mode": "chain"},
         ["launch", "quantize", "count", "scan", "place", "exchange", "rows", "blocks",
          "results home", "rows home", "combine"]),
        (Problem(512, 4096, 2048, 256, 6, 8, "w4a8_block"), {"mode": "staged"},
         ["launch", "quantize", "rows sent", "place", "permute", "l1", "l2", "results sent",
          "combine"]),
        (Problem(64, 4096, 2048, 32, 6, 1, "w4a16"), {"backend": "portable"},
         ["launch", "dispatch", "count", "scan", "place", "l1", "l2", "combine"]),
    ],
    ids=["fused", "staged", "placed", "drawn", "chain", "group", "portable"],
)  # fmt: skip
def test_the_steps_are_the_launches_of_the_plan(problem, given, wanted):
    how = plan(problem, H200, **given)
    assert names(simulate(how)) == wanted
    if how.mode == "staged":
        launched = [one.name for one in how.launches]
        played = [step.name for step in Schedule.of_plan(how).steps if "sent" not in step.name]
        assert played == launched


def test_a_plan_gives_tiles_grid_and_waves():
    how = plan(Problem(64, 4096, 2048, 32, 6, 1, "w4a8_block"), H200, reserve_sms=32, pool_rows=400)
    played = Schedule.of_plan(how)
    assert played.num_sms == 100 == how.mega.num_ctas
    assert (played.experts.block_m, played.experts.l1.block_n) == (16, 256)
    assert (played.experts.l1.num_n, played.experts.l2.num_n) == (16, 16)
    assert played.order.wave_rows == how.mega.config.wave_rows > 0
    assert simulate(how).timeline.num_waves == simulate(how, seed=1).timeline.num_waves >= 2


def test_waves_of_a_ring_come_in_the_order_of_the_kernel():
    how = Schedule.of_plan(
        plan(Problem(64, 4096, 2048, 32, 6, 1, "w4a8_block"), H200, pool_rows=400)
    )
    order = how.order.blocks(how.experts, [12] * 32)
    runs = [(b.phase, b.wave) for b in order if b.n == 0]
    order = [one for i, one in enumerate(runs) if i == 0 or one != runs[i - 1]]
    last = max(wave for _, wave in order)
    wanted = [("l1", 0), ("l1", 1)]
    for wave in range(last + 1):
        wanted += [("l2", wave), ("l1", wave + 2)]
    assert order == [(phase, wave) for phase, wave in wanted if wave <= last]


def test_a_call_in_several_fused_launches_plays_each():
    problem = Problem(200, 4096, 2048, 256, 6, 8, "w4a8_block")
    how = plan(problem, H200, mode="fused")
    found = simulate(how)
    assert how.num_passes == 2 and names(found).count("blocks") == 2
    one = simulate(plan(replace(problem, num_tokens=64), H200))
    assert found.time_us > 1.8 * one.time_us


@pytest.mark.parametrize("tokens", [8, 512])
@pytest.mark.parametrize("apart", ["", "with bias"])
def test_shared_experts_cost_time(tokens, apart):
    problem = Problem(tokens, 4096, 2048, 32, 6, 1, "w4a8_block")
    shared = SharedSpec(1, "w4a8_block", 2048, apart=apart)
    more = simulate(plan(CallSpec(problem, shared=shared), H200, mode="staged"))
    assert more.time_us > simulate(plan(problem, H200, mode="staged")).time_us
    assert names(more).count("l1") == 1 + bool(apart)


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


def test_progress_counts_blocks():
    seen = []
    how = plan(Problem(4096, 2048, 1024, 32, 4, 2, "w8a8"), H200)
    found = simulate(how, progress=lambda done, of: seen.append((done, of)))
    total = sum(s.role == "math" for s in found.timeline.spans)
    assert seen[0] == (0, total) and seen[-1] == (total, total) and len(seen) >= 3
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: plan(Problem(10**6, 4096, 2048, 256, 6, 8), H200), CapacityError,
         "at most 2,000,000 blocks; got .*; simulate fewer tokens"),
        (lambda: plan(Problem(0, 512, 256, 8, 2), H200), ShapeError, "has launches; got 0 tokens"),
        (lambda: plan(Problem(8, 512, 256, 8, 2), H200, backend="reference"), NotAvailable,
         "has launches; got backend reference"),
        (lambda: plan(CallSpec(Problem(8, 512, 256, 8, 2, 2), local_ranks=2), H200), NotAvailable,
         "simulated as a chain; got mode fused, 2 ranks on one GPU"),
    ],
)  # fmt: skip
def test_what_cannot_be_played_is_refused(make, error, says):
    with pytest.raises(error, match=says):
        simulate(make(), skew="even")


def test_every_block_of_a_large_call_is_played():
    found = simulate(plan(Problem(2048, 7168, 3072, 384, 6, 8, "w4a8_block"), "h200"))
    assert sum(s.role == "math" for s in found.timeline.spans) > 30_000
