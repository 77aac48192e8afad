"""Plans: what runs, in which mode and why, with which launches and memory."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import megamoe as mm
from megamoe.errors import CapacityError, DTypeError, NotAvailable, RangeError
from megamoe.formats.spec import RECIPES
from megamoe.hardware import MACHINES, SMEM_PER_CTA
from megamoe.planner import chain
from megamoe.planner.buckets import group_modes
from megamoe.planner.call import CallSpec, SharedSpec
from megamoe.planner.floor import overlap_limit
from megamoe.planner.launches import Gemm, Mega
from megamoe.planner.load import even_rows, touched_experts
from megamoe.planner.numerics import HOPPER_RECIPES
from megamoe.planner.plan import choose_backend, plan, plan_call
from megamoe.planner.portable import GRID_AXIS
from megamoe.planner.tables import hopper as hopper_tables

SETTINGS = settings(deadline=None, derandomize=True, max_examples=120, database=None)
FLASH = mm.Problem(512, 4096, 2048, 256, 6, 8, "w4a8")
PRO = mm.Problem(8192, 7168, 3072, 384, 6, 8, "w4a8")
ONE = mm.Problem(8, 4096, 2048, 32, 6, 1, "w4a8_block")
PUBLIC = mm.Problem(128, 6144, 2048, 48, 8, 1, "w4a8_block")

PROBLEMS = st.builds(
    lambda tokens, hidden, inter, local, ranks, top_k, recipe: mm.Problem(
        tokens, hidden, inter, local * ranks, min(top_k, local * ranks), ranks, recipe
    ),
    st.one_of(st.integers(0, 64), st.integers(0, 9000)),
    st.sampled_from([32, 256, 2880, 4096, 7168]),
    st.sampled_from([32, 416, 2048, 2880, 3072]),
    st.integers(1, 64),
    st.sampled_from([1, 2, 8, 16]),
    st.integers(1, 9),
    st.sampled_from(list(RECIPES)),
)


@SETTINGS
@given(PROBLEMS, st.sampled_from(list(MACHINES)))
def test_every_plan_can_be_launched(problem, name):
    found = plan(problem, name)
    assert found.backend in ("hopper", "portable")
    assert found.mode in ("fused", "staged", "chain")
    is_hopper = found.hardware.arch == "sm_90a" and problem.recipe in HOPPER_RECIPES
    assert (found.backend == "hopper") == is_hopper
    assert bool(found.launches) == (problem.num_tokens > 0)
    for one in found.launches:
        assert one.why and all(n >= 1 for n in one.grid)
        assert all(n <= GRID_AXIS for n in one.grid[1:]) and one.grid[0] < 2**31
        assert one.config.constants()
    if found.shared_memory is not None:
        sums = found.shared_memory
        assert sums.num_bytes <= sums.limit <= SMEM_PER_CTA
        assert sums.num_stages == found.tile.num_stages
        has_routing = "routing" in {term.name for term in sums.fixed}
        assert has_routing == (found.mode == "fused")
    local = {one.name: one.num_bytes for one in found.buffers if one.kind == "local"}
    assert bool(local) == bool(found.launches) and all(local.values()), "tests/plan/test_memory.py"
    text = str(found)
    for choice in found.choices:
        assert choice.why and choice.name in text and choice.why in text
    for one in found.launches:
        assert one.kernel in text


@SETTINGS
@given(PROBLEMS)
def test_a_fused_plan_keeps_the_limits_of_its_kernel(problem):
    found = plan(problem, "h200")
    if found.mega is None:
        return
    config = found.mega.config
    assert isinstance(config, Mega) and config.tile.block_m <= 32
    slots = problem.num_ranks * problem.num_tokens * problem.top_k
    if problem.num_ranks == 1:
        assert slots <= config.max_slots <= 4096
    else:
        assert config.max_slots == 0 and slots <= 16384
    assert found.num_passes == 1
    assert config.max_experts >= problem.num_local_experts
    assert config.max_top_k >= problem.top_k and problem.num_ranks <= 8


def test_the_public_names_lead_here():
    assert isinstance(mm.plan(FLASH, mm.Hardware.named("h200")), mm.Plan)
    assert mm.plan(FLASH, "h200") == mm.plan(FLASH, mm.Hardware.named("H200"))


def test_a_plan_needs_no_torch():
    code = (
        "import sys, megamoe as mm\n"
        "mm.plan(mm.Problem(8, 256, 256, 8, 2), 'h200')\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=root)


CHAIN = ["quantize", "count", "scan", "place", "exchange", "rows", "pull", "l1", "l2", "finish",
         "combine"]  # fmt: skip


def names(found):
    return [one.name for one in found.launches]


@pytest.mark.parametrize(
    ("problem", "mode", "wanted"),
    [
        (ONE, "fused", ["mega"]),
        (replace(ONE, num_tokens=120), "fused", ["mega"]),  # 22.5 rows an expert
        (replace(ONE, num_tokens=121), "staged", ["permute", "l1", "l2", "combine"]),
        (PUBLIC, "fused", ["mega"]),  # 1024 slots
        (replace(PUBLIC, num_tokens=129), "staged", ["place", "permute", "l1", "l2", "combine"]),
        (replace(ONE, num_tokens=8192, recipe="w8a8"), "staged",
         ["count", "scan", "place", "permute", "l1", "l2", "combine"]),
        (replace(FLASH, num_tokens=120), "fused", ["put", "mega"]),  # 22.5 rows an expert
        (replace(FLASH, num_tokens=121), "chain", CHAIN),
        (replace(PRO, num_ranks=16, num_tokens=8), "staged",
         ["quantize", "permute", "l1", "l2", "combine"]),
    ],
)  # fmt: skip
def test_what_auto_launches_on_h200(problem, mode, wanted):
    found = plan(problem, "h200")
    assert found.mode == mode and names(found) == wanted and len(found.why) > 10


def test_other_gpus_run_portable_launches():
    for machine in ("b200", "gb200", "b300"):
        found = plan(ONE, machine)
        assert (found.backend, found.mode) == ("portable", "staged")
        assert names(found) == ["dispatch", "count", "scan", "place", "l1", "l2", "combine"]


SHARED = SharedSpec(1, "w4a8_block", 2048)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (CallSpec(ONE, is_quantized=True), DTypeError, "takes BF16 tokens; these come quantised"),
        (CallSpec(ONE, is_captured=True), NotAvailable, "no counters of its own; MoE has them"),
        (CallSpec(replace(FLASH, num_tokens=8), shared=SHARED, max_tokens=8), NotAvailable,
         "no shared experts"),
        (CallSpec(replace(FLASH, num_tokens=8), is_placed=True, max_tokens=8), NotAvailable,
         "contiguous experts, each once"),
        (CallSpec(replace(FLASH, num_tokens=8, num_ranks=16), max_tokens=8), NotAvailable,
         "8 ranks at most"),
        (CallSpec(replace(FLASH, num_tokens=8)), CapacityError, "need max_tokens_per_rank"),
        (CallSpec(ONE, shared=replace(SHARED, apart="a bias")), NotAvailable, "got a bias"),
        (CallSpec(replace(ONE, num_tokens=1000)), CapacityError, "4096 slots at most; got 6000"),
        (CallSpec(replace(ONE, num_tokens=600)), CapacityError, "112.5 rows an expert need"),
    ],
    ids=lambda value: "" if isinstance(value, CallSpec) else None,
)  # fmt: skip
def test_fused_runs_or_is_refused_and_auto_says_why(call, error, says):
    with pytest.raises(error, match=says):
        plan(call, "h200", mode="fused")
    auto = plan(call, "h200")
    is_taken = call.is_group and chain.why_not(call) is None
    assert auto.mode == ("chain" if is_taken else "staged") and says.split(";")[0] in auto.why
    if is_taken:
        assert "as 8 ranks of one H200" in auto.why
        assert "no mode has run on several GPUs" in auto.why


def test_auto_takes_the_chain_where_a_fused_launch_cannot(monkeypatch):
    """One word of the tables takes it back."""
    calls = (
        CallSpec(replace(FLASH, num_tokens=121), max_tokens=121),
        CallSpec(replace(FLASH, recipe="bf16"), max_tokens=FLASH.num_tokens),
        CallSpec(replace(FLASH, num_tokens=8), shared=SHARED, max_tokens=8),
        CallSpec(replace(FLASH, num_tokens=8), is_placed=True, max_tokens=8),
    )
    taken = [plan(call, "h200") for call in calls]
    assert [one.mode for one in taken] == ["chain"] * 4 and names(taken[0]) == CHAIN
    monkeypatch.setattr(hopper_tables, "AUTO_TAKES_CHAIN", False)
    plan_call.cache_clear()
    back = [plan(call, "h200") for call in calls]
    plan_call.cache_clear()
    assert [one.mode for one in back] == ["staged"] * 4 and "is opt-in" in back[0].why


def test_one_layer_shares_memory_for_both_modes_and_its_calls_follow_their_bound():
    flash = replace(FLASH, recipe="w4a8_block", num_tokens=0)
    modes = group_modes(CallSpec(flash, max_tokens=4096), {})
    assert [one[:2] for one in modes] == [(120, "fused"), (4096, "chain")]
    few = CallSpec(replace(flash, num_tokens=8), max_tokens=8, shared_tokens=4096)
    many = CallSpec(replace(flash, num_tokens=8), max_tokens=4096)
    found = [plan(call, "h200") for call in (few, many)]
    assert [one.mode for one in found] == ["fused", "chain"]
    shared = [{b.about: b.num_bytes for b in one.buffers if b.kind == "symmetric"} for one in found]
    assert shared[0] == shared[1] and [about.split(":")[0] for about in shared[0]] == [
        "fused", "chain",
    ]  # fmt: skip
    assert group_modes(CallSpec(flash, max_tokens=64), {})[0][:2] == (64, "fused")
    assert group_modes(CallSpec(flash), {})[0].mode == "staged"


def test_shared_experts_join_the_launches_or_have_their_own():
    joined = plan(CallSpec(ONE, shared=SHARED), "h200")
    assert joined.mode == "fused" and joined.mega.config.max_top_k == 8
    staged = plan(CallSpec(ONE, shared=SHARED), "h200", mode="staged")
    assert [one.experts for one in staged.passes] == ["routed and shared"]
    apart = plan(CallSpec(ONE, shared=replace(SHARED, apart="a bias")), "h200")
    assert [one.experts for one in apart.passes] == ["routed", "shared"]
    assert names(apart).count("l1") == 2 and names(apart)[-1] == "combine"


def test_a_layer_over_a_group_is_planned_for_its_largest_call():
    big = CallSpec(replace(FLASH, num_tokens=8), max_tokens=512)
    found = plan(big, "h200", mode="fused")
    assert found.num_passes == 5 and names(found) == ["put", *["mega"] * 5]
    assert plan(big, "h200").mode == "chain"
    assert "5 fused launches" in plan(big, "h200").why


def test_the_limit_of_a_launch_over_ranks_is_rows_an_expert():
    flash = replace(FLASH, recipe="w4a8_block", num_tokens=8)
    most = int(22.5 * flash.num_experts / (flash.num_ranks * flash.top_k))
    assert most == 120  # 5760 slots of all ranks
    for tokens, mode in ((most, "fused"), (most + 1, "chain")):
        assert plan(CallSpec(flash, max_tokens=tokens), "h200").mode == mode


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (CallSpec(ONE), NotAvailable, "the chain is for ranks"),
        (CallSpec(FLASH), CapacityError, "needs max_tokens_per_rank"),
        (CallSpec(replace(FLASH, num_ranks=16), max_tokens=8), NotAvailable, "8 ranks at most"),
    ],
    ids=lambda value: "" if isinstance(value, CallSpec) else None,
)  # fmt: skip
def test_a_chain_runs_or_is_refused(call, error, says):
    with pytest.raises(error, match=says):
        plan(call, "h200", mode="chain")


def test_a_chain_shares_less_than_the_bar_and_its_pool_can_be_bounded():
    pro = replace(PRO, num_tokens=8192)
    found = plan(pro, "h200", mode="chain")
    sizes = {b.name: b for b in found.buffers}
    assert sizes["exchange"].kind == "symmetric" and sizes["exchange"].num_bytes < 1.2e9
    small = plan(pro, "h200", mode="chain", pool_rows=100_000)
    local = {b.name: b.num_bytes for b in small.buffers}
    assert small["pool_passes"] == 4 and 3.9 * local["tokens"] < sizes["tokens"].num_bytes
    with pytest.raises(CapacityError, match="in 32 passes; got pool_rows 8"):
        plan(pro, "h200", mode="chain", pool_rows=8)


def test_which_launches_of_a_chain_follow_tiles_is_said():
    def why(recipe, tokens, **given):
        given |= {"mode": "chain"}
        found = plan(replace(FLASH, recipe=recipe, num_tokens=tokens), "h200", **given)
        return found.launch("l1"), found.launch("l2")

    l1, l2 = why("w8a8", 512)
    assert "follows the pull" in l1.why and "follows L1" in l2.why and l1.num_ctas == 132
    l1, l2 = why("w4a8_block", 2048)
    assert "follows the pull" in l1.why and "waits for all of L1" in l2.why
    assert (l1.num_ctas, l2.num_ctas) == (116, 132)


def test_fp8_combine_rounds_rows_in_a_launch_of_its_own():
    staged = plan(CallSpec(ONE, combine="fp8"), "h200", mode="staged")
    assert names(staged)[-2:] == ["rows_to_fp8", "combine"]


def test_memory_of_a_rank():
    fused = {b.name: b for b in plan(replace(FLASH, num_tokens=64), "h200").buffers}
    assert fused["exchange"].kind == "symmetric"
    w8a8 = {b.name for b in plan(replace(ONE, recipe="w8a8"), "h200").buffers}
    assert "exchange" not in w8a8
    expert = 3 * 4096 * 2048 * 17 // 32
    (elsewhere,) = (b for b in plan(ONE, "b200").buffers if b.kind == "weights")
    assert elsewhere.num_bytes == ONE.num_experts * expert
    assert fused["experts"].num_bytes == 32 * expert  # one copy
    block = plan(replace(FLASH, num_tokens=64, recipe="w4a8_block"), "h200").buffers[0].num_bytes
    assert 0.97 * 32 * expert < block < 0.98 * 32 * expert  # four-bit exponents


def test_no_tokens_are_no_launches():
    found = plan(replace(FLASH, num_tokens=0), "h200")
    assert found.launches == () and found.tile is None and "no launches" in str(found)


def test_a_choice_and_a_launch_are_found_by_name():
    found = plan(ONE, "h200")
    assert found["block_m"] == 8 and found.launch("mega").num_ctas == 132
    with pytest.raises(RangeError, match=r"a plan has the choices backend, mode.*got tiles"):
        found["tiles"]
    with pytest.raises(RangeError, match="the plan's launches are mega; got l1"):
        found.launch("l1")


REASONS = {"hopper": "", "portable": "", "reference": ""}


def test_backends_best_first_and_passed_over_with_the_reason():
    assert choose_backend("auto", "auto", REASONS) == ("hopper", "")
    name, why = choose_backend("auto", "auto", REASONS, "a scale of 2**-127")
    assert name == "portable" and "2**-127" in why
    assert choose_backend("auto", "auto", {**REASONS, "hopper": "no"})[0] == "portable"
    with pytest.raises(NotAvailable, match=r"\(no GPU\); got .* use portable or reference"):
        choose_backend("hopper", "auto", {**REASONS, "hopper": "no GPU"})
    with pytest.raises(NotAvailable, match='backend="portable", which can'):
        choose_backend("hopper", "auto", REASONS, "a scale of 2**-127")
    with pytest.raises(NotAvailable, match="backend portable has mode auto or staged"):
        choose_backend("portable", "fused", REASONS)


@pytest.mark.parametrize(
    ("tokens", "shape", "floor_us"),
    [
        (8, (4096, 2048, 32, 6), 72.7),
        (64, (4096, 2048, 32, 6), 93.3),
        (2048, (4096, 2048, 32, 6), 414),
        (8192, (4096, 2048, 32, 6), 1657),
        (64, (7168, 3072, 48, 6), 366.9),
        (2048, (7168, 3072, 48, 6), 1088),
        (64, (7168, 2048, 32, 8), 163.3),
        (2048, (7168, 2048, 32, 8), 967),
    ],
)
def test_floors_agree_with_those_computed_beside_measurements(tokens, shape, floor_us):
    problem = mm.Problem(tokens, *shape, 1, "w4a8_block")
    assert plan(problem, "h200").floor.time_us == pytest.approx(floor_us, rel=0.02)


def test_the_overlap_rule_of_the_paper():
    assert overlap_limit(PRO) == 6144  # A082: 2 d
    floor = plan(PRO, "b200").floor
    assert floor.flops == 6 * 8192 * 6 * 7168 * 3072  # A083
    rows = 8192 * 6 * 7 // 8
    assert floor.nvlink_bytes == rows * (7168 + 7168 // 32 + 2 * 7168)
    assert plan(replace(PRO, num_ranks=1), "b200").floor.nvlink_bytes == 0


def test_the_bytes_of_a_call_term_by_term():
    # one expert of 256 x 128 in FP4 (17 bytes a group of 32), 3 tokens, FP8 rows with FP32 scales
    problem = mm.Problem(3, 256, 128, 1, 1, 1, "w4a8_block")
    assert dict(plan(problem, "h200").floor.hbm) == {
        "weights": 3 * 256 * 128 * 17 // 32,
        "rows in": 3 * (256 + 8),
        "activation": 3 * 2 * (128 + 4),  # written by L1, read by L2
        "rows out": 3 * 256 * 2,
    }
    small = plan(CallSpec(problem, combine="fp8"), "h200").floor
    assert dict(small.hbm)["rows out"] == 3 * (256 + 4)


def test_even_routing_spreads_every_row():
    assert sum(even_rows(FLASH)) == 512 * 6
    assert max(even_rows(FLASH)) - min(even_rows(FLASH)) <= 1
    assert touched_experts(ONE) == pytest.approx(25, abs=0.1)


def test_decode_ahead_is_for_many_rows_and_says_its_chunk():
    found = plan(replace(ONE, num_tokens=8192), "h200")
    tile = found.tile
    assert isinstance(tile, Gemm) and tile.decode_ahead == 64 and tile.decode_chunk == 4
    assert found.launch("l1").config.constants()["launch_cooperative_grid"]


def test_a_plan_counts_its_ranks_in_words():
    one, many = plan(replace(FLASH, num_ranks=1), "h200"), plan(FLASH, "h200")
    assert "x 1 rank," in repr(one) and "a rank, 1 rank," in str(one)
    assert f"x {FLASH.num_ranks} ranks," in repr(many)
