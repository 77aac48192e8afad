"""Plans of the reference system fit, explain themselves, and obey checked overrides."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

import megamoe as mm
from megamoe.errors import CapacityError, DTypeError, NotAvailable, RangeError, ShapeError
from megamoe.formats.spec import RECIPES
from megamoe.hardware import MACHINES
from megamoe.simulator.simulate import simulate
from megamoe.studies.deep_gemm.choice import num_registers
from megamoe.studies.deep_gemm.deal import deal
from megamoe.studies.deep_gemm.plan import plan as plan_of
from megamoe.studies.deep_gemm.schedule import schedule_of

from .support import SETTINGS, Case, all_blocks, run

FLASH = mm.Problem(512, 4096, 2048, 256, 6, 8, "w4a8")
PRO = mm.Problem(8192, 7168, 3072, 384, 6, 8, "w4a8")
SMALL = mm.Problem(8, 256, 256, 8, 2, 2, "w4a8_block")

PROBLEMS = st.builds(
    lambda tokens, hidden, inter, local, ranks, top_k, recipe: mm.Problem(
        tokens, hidden, inter, local * ranks, min(top_k, local * ranks), ranks, recipe
    ),
    st.one_of(st.integers(0, 64), st.integers(0, 9000)),
    st.sampled_from([32, 256, 2880, 4096, 7168]),
    st.sampled_from([32, 416, 2048, 2880, 3072]),
    st.integers(1, 64),
    st.sampled_from([1, 2, 8]),
    st.integers(1, 9),
    st.sampled_from(list(RECIPES)),
)
MACHINE = st.sampled_from(list(MACHINES))


@SETTINGS
@given(PROBLEMS, MACHINE)
def test_every_plan_fits_its_machine(problem, name):
    plan = plan_of(problem, name)
    hw = plan.hardware
    assert plan.smem.num_bytes <= hw.smem_per_sm and plan.num_stages >= 2
    assert num_registers(plan.roles) <= hw.registers_per_sm
    assert plan.workspace.num_bytes <= hw.hbm_bytes
    assert 1 <= plan.experts_per_wave <= problem.num_local_experts
    assert plan.capacity.ring_rows % plan.tiles.block_m == 0
    assert all(choice.why for choice in plan.choices)
    assert plan.floor.time_us >= 0


@SETTINGS
@given(PROBLEMS, MACHINE)
def test_the_printed_plan_names_every_choice_and_its_reason(problem, name):
    plan = plan_of(problem, name)
    text = str(plan)
    for choice in plan.choices:
        assert choice.name in text and choice.why in text
    for role in plan.roles:
        assert role.name in text
    for word in ("shared memory", "workspace of a rank", "floor"):
        assert word in text


@SETTINGS
@given(st.integers(0, 4096), st.integers(0, 4096), MACHINE, st.sampled_from(list(RECIPES)))
def test_the_workspace_is_the_same_for_every_batch_of_a_layer(one, other, name, recipe):
    made = [
        plan_of(mm.Problem(n, 4096, 2048, 64, 6, 8, recipe), name, max_tokens=4096).workspace
        for n in (one, other)
    ]
    assert made[0] == made[1]


@SETTINGS
@given(
    st.lists(st.integers(0, 60), min_size=4, max_size=4),
    st.sampled_from(["static", "ticket", "largest_first"]),
    st.one_of(st.none(), st.integers(0, 4)),
    st.booleans(),
)
def test_a_plan_runs_every_block_once_and_never_deadlocks(rows, how, lag, has_ring):
    problem = mm.Problem(64, 256, 256, 8, 2, 2, "w4a8_block")
    ring = {"ring_rows": 128} if has_ring else {}
    plan = plan_of(problem, "h200", deal=how, lag=lag, block_m=8, reserve_sms=125, **ring)
    order = list(plan.blocks(rows))
    assert {tuple(b)[1:] for b in order} == all_blocks(plan.grid, rows)
    assert len(order) == plan.grid.num_blocks(rows)
    slots = plan.ring_blocks if plan.capacity.is_ring else None
    case = Case(plan.grid, rows, plan.experts_per_wave, slots, plan.lag, plan.num_sms)
    assert plan.num_sms == 7
    assert run(deal(order, plan.num_sms, how), case)


def test_prefill_on_b200_takes_the_published_configuration():
    plan = plan_of(PRO, "b200")
    assert (plan.backend, plan.mode) == ("blackwell", "fused")
    assert (plan.tiles.block_m, plan.tiles.block_n, plan.tiles.block_k) == (192, 128, 128)
    assert plan.num_waves == 24 and plan.experts_per_wave == 2


def test_split_takes_the_published_partition():
    plan = plan_of(PRO, "b200", mode="split")
    assert (plan["k1_sms"], plan["k2_sms"]) == (96, 52)  # B001
    assert plan_of(PRO, "h200", mode="split", k1_sms=64)["k2_sms"] == 68


def test_ranks_beyond_nvlink_run_staged():
    wide = dataclasses.replace(PRO, num_ranks=64)
    assert plan_of(wide, "h200").mode == "staged"
    assert plan_of(wide, "gb200").mode == "fused"


def test_a_batch_too_large_for_memory_becomes_a_ring():
    huge = dataclasses.replace(PRO, num_tokens=65536)
    plan = plan_of(huge, "h200")
    assert plan.capacity.is_ring
    assert plan["ring_rows"] == plan.capacity.ring_rows < plan.capacity.pool_rows
    rows = [0] * 48
    rows[5] = 8 * 65536 * 6  # everything to one expert
    waves = plan.waves(rows)
    assert len(waves) > 1
    blocks = sum(part.num_m for wave in waves for part in wave)
    assert blocks == -(-rows[5] // plan.tiles.block_m)
    assert all(sum(part.num_m for part in wave) <= plan.ring_blocks for wave in waves)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_m", 64),
        ("block_n", 64),
        ("block_k", 128),
        ("num_stages", 3),
        ("experts_per_wave", 5),
        ("deal", "static"),
        ("wave_rule", "divisor"),
        ("lag", 2),
        ("mode", "staged"),
        ("max_tokens", 1024),
        ("ring_rows", 4096),
        ("combine", "fp8"),
        ("reserve_sms", 4),
    ],
)
def test_an_override_beats_the_choice_and_says_so(name, value):
    plan = plan_of(FLASH, "h200", **{name: value})
    assert plan[name] == value
    assert plan.choice(name).why.startswith("given")
    assert plan_of(FLASH, "h200", **{name: None}) == plan_of(FLASH, "h200")


def test_auto_is_the_choice():
    assert plan_of(FLASH, "h200", mode="auto") == plan_of(FLASH, "h200")


BAD = [
    ({"blockm": 64}, RangeError, "got blockm; did you mean block_m"),
    ({"tile": 64}, RangeError, "an override must be one of mode, block_m"),
    ({"block_m": 48}, RangeError, "block_m must be one of 8, 16, 32, 64, 128, 256; got 48"),
    ({"block_m": "64"}, DTypeError, "block_m must be an integer; got '64'"),
    ({"block_m": True}, DTypeError, "block_m must be an integer"),
    ({"block_n": 96}, RangeError, "block_n must be one of 64, 128, 256"),
    ({"block_k": 96}, RangeError, "block_k must be one of 64, 128, 256"),
    ({"block_k": 64}, ShapeError, "block_k must be a multiple of 128"),
    ({"block_m": 64, "block_n": 256}, CapacityError, "block_m must be at most 32"),
    ({"num_stages": 1}, RangeError, "num_stages must be at least 2 and at most 32; got 1"),
    ({"num_stages": 30}, CapacityError, r"must not exceed 232448 bytes.*take at most 7 stages"),
    ({"experts_per_wave": 0}, RangeError, "at least 1 and at most 32; got 0"),
    ({"experts_per_wave": 33}, RangeError, "at least 1 and at most 32; got 33"),
    ({"ring_rows": 1000}, ShapeError, "positive multiple of 128.*got 1000; take 1024"),
    ({"ring_rows": 0}, ShapeError, "positive multiple of 128"),
    ({"max_tokens": 100}, CapacityError, "at most max_tokens = 100 tokens per rank; got 512"),
    ({"max_tokens": 0}, RangeError, "max_tokens must be at least 1"),
    ({"max_tokens": 10**8}, CapacityError, "must fit in the 141000000000 bytes"),
    ({"mode": "magic"}, RangeError, "mode must be one of fused, staged, split; got 'magic'"),
    ({"deal": "fair"}, RangeError, "deal must be one of static, ticket, largest_first"),
    ({"lag": -1}, RangeError, "lag must be at least 0"),
    ({"wave_rule": "x"}, RangeError, "wave_rule must be one of divisor, tail"),
    ({"combine": "fp4"}, RangeError, "combine must be one of bf16, fp8"),
    ({"reserve_sms": 132}, RangeError, "reserve_sms must be at least 0 and at most 131"),
    ({"mode": "split", "k1_sms": 20}, ShapeError, "multiple of 8; got 20; take 24"),
    ({"mode": "split", "k1_sms": 128}, RangeError, "at most 124"),
    ({"mode": "split", "reserve_sms": 120}, CapacityError, "split needs at least 16 SMs"),
]


@pytest.mark.parametrize(("given", "error", "says"), BAD, ids=lambda x: str(x)[:40])
def test_an_override_that_breaks_a_constraint_is_refused(given, error, says):
    with pytest.raises(error, match=says):
        plan_of(FLASH, "h200", **given)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: mm.Problem(8, 256, 256, 10, 2, 4), ShapeError, "10 experts over 4 ranks"),
        (lambda: mm.Problem(8, 256, 256, 4, 5), ShapeError, "top_k 5 with 4 experts"),
        (lambda: plan_of(SMALL, "a100"), RangeError, "got 'a100'"),
        (
            lambda: plan_of(dataclasses.replace(PRO, num_ranks=64), "h200", mode="fused"),
            NotAvailable,
            "fused reaches at most 8 ranks.*got 64; use mode staged",
        ),
        (lambda: plan_of(SMALL, "h200").waves([1, 2]), ShapeError, "each of 4 local experts"),
        (
            lambda: plan_of(SMALL, "h200").waves([33, 0, 0, 0]),
            CapacityError,
            "at most 32 rows; got 33; raise max_tokens",
        ),
        (lambda: plan_of(SMALL, "h200")["tile"], RangeError, "a plan has the choices backend"),
        (
            lambda: plan_of(
                SMALL, dataclasses.replace(mm.Hardware.named("h200"), smem_per_sm=30000)
            ),
            CapacityError,
            "two stages must fit in 30000 bytes",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(make, error, says):
    with pytest.raises(error, match=says):
        make()


def test_a_rank_without_tokens_has_a_plan():
    plan = plan_of(dataclasses.replace(FLASH, num_tokens=0), "h200")
    assert list(plan.blocks([0] * 32)) == []


@pytest.mark.parametrize("machine", ["h200", "b200"])
@pytest.mark.parametrize("mode", ["fused", "split", "staged"])
def test_what_is_simulated_of_it_says_that_it_is_a_study(machine, mode):
    plan = plan_of(mm.Problem(64, 2048, 1024, 32, 4, 2, "w4a8"), machine, mode=mode)
    found = simulate(schedule_of(plan))
    says = "study: not a launch of this library (deep_gemm)"
    assert found.schedule.mode == mode and found.timeline.study == says
    assert says in str(found) and says in str(found.timeline) and says in str(plan)
    assert found.floor.time_us < found.time_us
