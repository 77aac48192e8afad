"""Overrides: each that a kernel can have changes the launches; all others are refused by name."""

from dataclasses import replace

import pytest

import megamoe as mm
from megamoe.errors import CapacityError, DTypeError, NotAvailable, RangeError
from megamoe.planner.launches import Gemm, GemmSwapAb
from megamoe.planner.numerics import BLACKWELL_RECIPES
from megamoe.planner.overrides import OVERRIDES, ROUTES, TILE, checked
from megamoe.planner.plan import plan

DECODE = mm.Problem(8, 4096, 2048, 32, 6, 1, "w4a8_block")
PREFILL = replace(DECODE, num_tokens=2048)
W8A8 = replace(PREFILL, recipe="w8a8")


@pytest.mark.parametrize(
    ("problem", "given", "field", "value"),
    [
        (DECODE, {"block_m": 16}, "block_m", 16),
        (DECODE, {"block_k": 128}, "block_k", 128),
        (DECODE, {"num_stages": 3}, "num_stages", 3),
        (DECODE, {"kernel": "gemm"}, "block_m", 128),
        (PREFILL, {"block_m": 64}, "block_m", 64),
        (PREFILL, {"kernel": "swap_ab"}, "block_m", 64),
        (PREFILL, {"decode_ahead": 32}, "decode_ahead", 32),
        (PREFILL, {"schedule": "static"}, "schedule", "static"),
        (W8A8, {"schedule": "dynamic", "group_m": 24}, "group_m", 24),
        (replace(DECODE, recipe="bf16"), {"block_n": 128}, "block_n", 128),
    ],
    ids=str,
)
def test_an_override_reaches_every_launch_and_says_so(problem, given, field, value):
    found = plan(problem, "h200", mode="staged", **given)
    for name in ("l1", "l2"):
        config = found.launch(name).config
        assert isinstance(config, Gemm | GemmSwapAb) and getattr(config, field) == value
    chosen = {c.name: c for c in found.choices}
    for name in given:
        if name in chosen:
            assert chosen[name].why.startswith("given")
    assert all(f"{name} {given[name]}" in chosen["tile"].why for name in given)
    assert found.launches != plan(problem, "h200", mode="staged").launches


def test_fused_launches_take_overrides_too():
    found = plan(DECODE, "h200", block_m=32, num_stages=3, reserve_sms=12, pool_rows=160)
    config = found.mega.config
    assert (config.tile.block_m, config.tile.num_stages) == (32, 3)
    assert found.mega.num_ctas == 120 and config.is_ring and config.pool_rows <= 160


MANY = mm.Problem(340, 4096, 2048, 256, 6, 1, "w8a8")  # its routing has more than 4096 bytes
RANKS = mm.Problem(64, 4096, 2048, 384, 8, 8, "nvfp4")


@pytest.mark.parametrize("hardware", ["h200", "b200"])
@pytest.mark.parametrize("recipe", BLACKWELL_RECIPES)
def test_stages_of_a_fused_launch_are_exact_or_refused(hardware, recipe):
    """Beside a small routing, a large one and that of 48 experts of each of eight ranks."""
    backend = {"h200": "hopper", "b200": "blackwell"}[hardware]
    for one in (replace(MANY, num_tokens=64), MANY, RANKS):
        problem, fitting = replace(one, recipe=recipe), []
        given = {"backend": backend, "mode": "fused"}
        for stages in range(1, 14):
            try:
                found = plan(problem, hardware, num_stages=stages, **given)
            except CapacityError as error:
                assert f"got {stages}" in str(error) and "fit" in str(error)
                continue
            fitting.append(found.tile.num_stages)
            assert found.tile.num_stages == stages and f"num_stages {stages}" in found.mega.why
            sums = found.shared_memory
            assert sums.num_stages == stages and sums.num_bytes <= sums.limit
        assert fitting == list(range(2, fitting[-1] + 1))
        assert plan(problem, hardware, **given).tile.num_stages in fitting


def test_stages_that_fit_beside_no_routing_say_what_the_routing_leaves():
    with pytest.raises(CapacityError, match=r"from 2 to 4 stages fit beside 2048 bytes.*got 5"):
        plan(RANKS, "h200", mode="fused", num_stages=5)
    found = plan(RANKS, "h200", mode="auto", num_stages=5)
    assert found.mode == "chain" and "from 2 to 4 stages" in found.why


@pytest.mark.parametrize(("mode", "ranks"), [("split", 1), ("chain", 8)])
def test_overrides_are_kept_where_few_sms_change_the_tile(mode, ranks):
    """Too few SMs to decode once per wave: weights are decoded per tile, as wide as was given."""
    problem = replace(PREFILL, hidden=8192, num_ranks=ranks, num_experts=32 * ranks)
    given = {"mode": mode, **({"l1_sms": 16} if ranks == 1 else {"reserve_sms": 114})}
    plain = plan(problem, "h200", **given).launch("l1")
    assert "too few to decode" in plain.why and plain.config.decode_ahead == 0
    asked = plan(problem, "h200", group_m=4, num_stages=2, **given).launch("l1")
    assert (asked.config.group_m, asked.config.num_stages) == (4, 2) != (
        plain.config.group_m, plain.config.num_stages
    )  # fmt: skip
    assert "num_stages 2" in asked.why and "group_m 4" in asked.why


def test_portable_tiles_take_overrides():
    found = plan(PREFILL, "b200", block_m=32, num_warps=8, num_stages=2, group_m=4)
    config = found.launch("l1").config
    assert (config.block_m, config.num_warps, config.num_stages, config.group_m) == (32, 8, 2, 4)


def test_none_is_not_given_and_auto_is_the_choice():
    plain = plan(DECODE, "h200")
    assert plan(DECODE, "h200", **dict.fromkeys(OVERRIDES)) == plain
    assert plan(DECODE, "h200", mode="auto").launches == plain.launches


BAD = [
    (DECODE, {"blockm": 64}, RangeError, "got blockm; did you mean block_m"),
    (DECODE, {"tile": 64}, RangeError, "an override must be one of backend, mode"),
    (DECODE, {"block_m": 48}, RangeError, "block_m must be 8 or 16 or 32 or 64 or 128.*got 48"),
    (DECODE, {"block_m": "64"}, DTypeError, "block_m .tokens of a tile. must be an integer"),
    (DECODE, {"block_m": True}, DTypeError, "must be an integer; got True"),
    (DECODE, {"block_m": 0}, RangeError, "block_m must be positive; got 0"),
    (DECODE, {"mode": 1}, DTypeError, "must be a word; got 1"),
    (DECODE, {"mode": "magic"}, RangeError, "mode must be one of auto, staged, fused"),
    (replace(DECODE, num_ranks=16), {"mode": "split"}, NotAvailable, "takes 8 ranks at most"),
    (DECODE, {"l1_sms": 88}, NotAvailable, "l1_sms parts the SMs of mode split; got mode fused"),
    (DECODE, {"mode": "split", "l1_sms": 90}, CapacityError, "multiple of 8 .* got 90; take 8 to"),
    (DECODE, {"mode": "split", "l1_sms": 128}, CapacityError, "leaves 8 of 132 SMs to L2"),
    (DECODE, {"mode": "split", "reserve_sms": 120}, CapacityError, "split needs 16 of the GPU's"),
    (DECODE, {"mode": "split", "pool_rows": 8}, CapacityError, "windows at most, two of them"),
    (DECODE, {"backend": "cuda"}, RangeError, "backend must be one of auto, hopper"),
    (DECODE, {"block_n": 96}, RangeError, "block_n must be 128 or 256"),
    (DECODE, {"block_n": 128}, NotAvailable, "block_n must be 256: 128 outputs share a scale"),
    (DECODE, {"block_k": 64}, RangeError, "block_k must be 128 or 256"),
    (DECODE, {"num_stages": 1}, CapacityError, "between 2 and the 6 that fit"),
    (DECODE, {"num_stages": 7}, CapacityError, "between 2 and the 6 that fit"),
    (DECODE, {"num_warps": 8}, NotAvailable, "Hopper kernels have fixed roles"),
    (DECODE, {"kernel": "magic"}, RangeError, "kernel must be one of swap_ab, gemm"),
    (DECODE, {"reserve_sms": 132}, CapacityError, "needs 1 of the GPU's 132 SMs at least"),
    (DECODE, {"pool_rows": 8}, CapacityError, "must have .* at least; got pool_rows 8"),
    (replace(DECODE, num_tokens=64), {"mode": "fused", "block_m": 64}, CapacityError,
     "which a fused launch cannot hold"),
    (PREFILL, {"kernel": "swap_ab", "schedule": "static"}, NotAvailable,
     "strides over its tiles; got schedule; kernel='gemm'"),
    (PREFILL, {"kernel": "swap_ab", "block_m": 128}, NotAvailable,
     "block_m must be at most 64: more accumulators spill"),
    (PREFILL, {"kernel": "gemm", "block_m": 64}, RangeError, "block_m must be 128"),
    (PREFILL, {"schedule": "dynamic"}, NotAvailable, "from a counter only with FP8 weights"),
    (PREFILL, {"decode_ahead": 30}, NotAvailable, "a multiple of 4, at most 64; got 30"),
    (W8A8, {"decode_ahead": 16}, NotAvailable, "only FP4 weights are decoded ahead"),
    (W8A8, {"schedule": "fair"}, RangeError, "schedule must be one of strided, static, dynamic"),
    (replace(PREFILL, recipe="bf16"), {"kernel": "gemm"}, NotAvailable, "multiplies FP8"),
    (DECODE, {"backend": "portable", "mode": "fused"}, NotAvailable, "portable has mode auto or"),
    (DECODE, {"backend": "portable", "kernel": "gemm"}, NotAvailable, "one kernel a linear"),
    (DECODE, {"backend": "portable", "block_m": 24}, RangeError, "power of two from 16 on"),
    (DECODE, {"backend": "portable", "block_k": 64}, NotAvailable, "one 1x128 scale"),
    (DECODE, {"backend": "portable", "block_n": 64}, NotAvailable, "block_n must be 128"),
]  # fmt: skip


@pytest.mark.parametrize(("problem", "given", "error", "says"), BAD, ids=lambda x: str(x)[:40])
def test_what_no_kernel_can_do_is_refused_with_the_reason(problem, given, error, says):
    with pytest.raises(error, match=says):
        plan(problem, "h200", **given)


def test_names_that_are_arguments_of_their_own_are_sent_there():
    for name in ROUTES:
        with pytest.raises(RangeError, match=f"pass {name}= as an argument of its own"):
            checked({name: "auto"}, legal=TILE)
    assert checked({"num_stages": 3, "block_m": 8, "block_n": None}, legal=TILE) == (
        ("block_m", 8),
        ("num_stages", 3),
    )


@pytest.mark.parametrize(
    "given",
    [
        {"block_m": 7}, {"block_n": 24}, {"block_k": 4096}, {"num_warps": 3}, {"num_warps": 64},
        {"kernel": "both"}, {"schedule": "any"},
    ],
    ids=str,
)  # fmt: skip
def test_the_reference_refuses_what_no_backend_takes(given):
    with pytest.raises(RangeError, match=next(iter(given))):
        plan(DECODE, "h200", backend="reference", **given)
    for legal in ({"block_m": 64}, {"num_warps": 4}, {"schedule": "sorted"}, {"kernel": "gemm"}):
        assert plan(DECODE, "h200", backend="reference", **legal).launches == ()


def test_portable_refuses_warps_that_no_gpu_has():
    with pytest.raises(RangeError, match="num_warps must be a power of two from 1 to 32; got 3"):
        plan(DECODE, "h200", backend="portable", num_warps=3)


@pytest.mark.parametrize("backend", ["hopper", "reference"])
def test_one_rank_alone_has_no_chain(backend):
    with pytest.raises(NotAvailable, match="the chain is for ranks"):
        plan(DECODE, "h200", backend=backend, mode="chain")
    ranks = replace(DECODE, num_experts=256, num_ranks=8)
    assert plan(ranks, "h200", backend=backend, mode="chain").mode == "chain"
