"""Plans of the Blackwell backend: opt-in, made anywhere, every launch with its configuration."""

import pytest
import torch

import megamoe as mm
from megamoe.errors import CapacityError, DTypeError, NotAvailable, RangeError
from megamoe.formats.spec import recipe_named
from megamoe.hardware import SMEM_PER_CTA
from megamoe.kernels.blackwell.weights import ROW_BLOCK, place_scales
from megamoe.layout.tiles import placed_scales
from megamoe.planner import chain
from megamoe.planner.blackwell import num_rows, pick
from megamoe.planner.call import CallSpec, SharedSpec
from megamoe.planner.grouped import GroupedSpec, plan_grouped
from megamoe.planner.launches import GemmTmem
from megamoe.planner.numerics import BLACKWELL_RECIPES
from megamoe.planner.plan import choose_backend
from megamoe.planner.tables import blackwell as tables

PROBLEM = mm.Problem(512, 4096, 2048, 32, 6, 1, "w4a8")


def test_auto_takes_it_only_where_the_machine_has_proven_it():
    assert mm.plan(PROBLEM, "b200").backend == "portable"
    assert "portable is compiled for Blackwell, not yet run there" in str(mm.plan(PROBLEM, "b200"))
    assert "not yet run" not in str(mm.plan(PROBLEM, "h200", backend="portable"))
    assert mm.plan(CallSpec(PROBLEM, is_certified=True), "b200").backend == "blackwell"
    assert mm.plan(CallSpec(PROBLEM, is_certified=True), "h200").backend == "hopper"
    there = dict.fromkeys(("blackwell", "portable", "reference"), "")
    assert choose_backend("auto", "auto", there)[0] == "portable"
    assert choose_backend("auto", "auto", there, not_certified="")[0] == "blackwell"


def test_it_is_refused_by_name_where_it_cannot_run():
    with pytest.raises(NotAvailable, match="needs sm_100a, this is sm_90a"):
        mm.plan(PROBLEM, "h200", backend="blackwell")
    w = mm.ExpertWeights.quantize(
        torch.zeros(2, 64, 64).bfloat16(), torch.zeros(2, 64, 32).bfloat16(), "w4a8"
    )
    x, idx = torch.zeros(1, 64).bfloat16(), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(NotAvailable, match="needs a B200, B300 or GB200"):
        mm.moe(x, idx, torch.ones(1, 1), w, backend="blackwell")
    with pytest.raises(NotAvailable, match="has mode auto or staged or fused or chain;"):
        mm.plan(PROBLEM, "b200", backend="blackwell", mode="split")
    with pytest.raises(mm.CapacityError, match=r"mode fused must fit the call; .* 96\.0 rows an"):
        mm.plan(PROBLEM, "b200", backend="blackwell", mode="fused")


@pytest.mark.parametrize("recipe", BLACKWELL_RECIPES)
@pytest.mark.parametrize("given", [{}, {"pool_rows": 5000}, {"schedule": "dynamic"}])
def test_a_chain_over_ranks_is_planned(recipe, given):
    """Experts and windows begin at whole tiles; rows come as the recipe says, go home in BF16."""
    p = mm.Problem(512, 4096, 2048, 256, 6, 8, recipe)
    call = CallSpec(p, combine="fp8", max_tokens=512)
    plan = mm.plan(call, "b200", backend="blackwell", mode="chain", **given)
    assert "not yet run on the hardware" in plan.why and plan.overlaps
    source, *owner = plan.passes
    assert [one.name for one in source.launches][-1] == "exchange"
    for one in owner:
        assert [step.name for step in one.launches] == ["rows", "pull", "l1", "l2"]
        rows, m = one["rows"].config, plan.tile.block_m
        assert rows.row_align == m and rows.pool_rows % m == 0 == rows.first_row % m
        l1_sms = 148 if given.get("schedule") == "dynamic" else 132
        assert one["l1"].num_ctas == l1_sms and one["l2"].num_ctas == 148
    assert (len(owner) > 1) == ("pool_rows" in given)
    assert [one.name for one in plan.rest] == ["finish", "rows_to_fp8", "combine"]
    fmt = recipe_named(recipe).acts
    words = chain.words_of(call, "blackwell")
    assert words.data == 4096 * fmt.element.bits // 32
    exchange = next(b for b in plan.buffers if b.kind == "symmetric")
    assert exchange.num_bytes == chain.memory(call, "blackwell").num_bytes


def test_auto_takes_the_chain_on_blackwell_only_with_a_certificate():
    p = mm.Problem(512, 4096, 2048, 256, 6, 8, "w4a8")
    plain = mm.plan(CallSpec(p, max_tokens=512), "b200", backend="blackwell")
    assert plain.mode == "staged" and "no certificate" in plain.why
    assert "mode='chain' takes it" in plain.why
    proven = mm.plan(CallSpec(p, max_tokens=512, is_certified=True), "b200")
    assert (proven.backend, proven.mode) == ("blackwell", "chain")
    assert "certificate" in proven.why
    many = mm.plan(mm.Problem(512, 4096, 2048, 256, 6, 16, "w4a8"), "b200", backend="blackwell")
    assert many.mode == "staged" and "8 ranks at most" in many.why


def test_a_chain_on_blackwell_is_simulated_with_its_own_constants():
    p = mm.Problem(2048, 4096, 2048, 256, 6, 8, "w4a8")
    chained, staged = (
        mm.simulate(mm.plan(p, "b200", backend="blackwell", mode=mode))
        for mode in ("chain", "staged")
    )
    assert chained.note and chained.schedule.backend == "blackwell"
    assert 0 < chained.time_us < staged.time_us
    assert chained.exposed_us < 0.5 * staged.exposed_us


@pytest.mark.parametrize("recipe", BLACKWELL_RECIPES)
def test_every_launch_is_planned(recipe):
    for tokens in (1, 64, 2048, 32768):
        plan = mm.plan(mm.Problem(tokens, 4096, 2048, 32, 6, 1, recipe), "b200",
                       backend="blackwell")  # fmt: skip
        names = [one.name for one in plan.launches]
        assert names[-4:] == ["permute", "l1", "l2", "combine"] and plan.mode == "staged"
        tile = plan.tile
        assert isinstance(tile, GemmTmem) and plan["tmem_columns"] <= 512
        assert plan.shared_memory.num_bytes <= SMEM_PER_CTA and tile.num_stages >= 3
        assert plan.launch("permute").config.row_align == tile.block_m
        assert "tmem" in str(plan)


def test_tiles_follow_the_rows_of_an_expert():
    widths = [pick("w4a8", rows)[0].block_m for rows in (1, 8, 20, 40, 400)]
    assert widths == [8, 16, 32, 64, 128]
    depths = [pick("w4a4", rows)[0].block_k for rows in (1, 40, 96, 400)]
    assert depths == [256, 256, 128, 256]  # by band, as published
    assert {pick("nvfp4", rows)[0].block_k for rows in (1, 96, 400)} == {256}
    assert pick("w4a8", 40)[0].num_sums == 2 and pick("w4a8", 400)[0].num_sums == 1
    assert pick("w8a8", 400)[0].block_m == 64 and pick("bf16", 1)[0].block_m == 16
    assert num_rows(10, 4, 16) == 80  # any of four experts may end with a tile of one row


@pytest.mark.parametrize(
    ("recipe", "given", "kind", "match"),
    [
        ("w4a8", {"block_m": 96}, RangeError, "8 or 16 or 32 or 64 or 128"),
        ("w8a8", {"block_m": 128}, RangeError, "16 or 32 or 64"),
        ("w8a8", {"block_k": 256}, RangeError, "block_k of w8a8 must be 128"),
        ("w4a8", {"block_k": 64}, RangeError, "four scales or more"),
        ("w4a8", {"block_n": 128}, NotAvailable, "is given by block_k, block_m"),
        ("w4a8", {"num_stages": 9}, CapacityError, "between 2 and the"),
        ("w4a4", {"block_k": 64}, RangeError, "must be 128 or 256 or 512"),
        ("w4a8", {"block_k": 512}, RangeError, "block_k of w4a8 must be 64 or 128 or 256"),
        ("w4a8", {"schedule": "static"}, RangeError, "must be one of strided, dynamic, sorted"),
    ],
)
def test_tiles_that_no_kernel_has_are_refused(recipe, given, kind, match):
    problem = mm.Problem(512, 4096, 2048, 32, 6, 1, recipe)
    with pytest.raises(kind, match=match):
        mm.plan(problem, "b200", backend="blackwell", **given)


def test_a_pair_of_ctas_is_planned_only_where_it_is_asked_for():
    """Half as many clusters as CTAs, half of the tokens in each: more stages, or as many."""
    one, two = (
        mm.plan(PROBLEM, "b200", backend="blackwell", block_m=128, **given)
        for given in ({}, {"cta_pair": True})
    )
    assert one.tile.num_ctas == 1 and two.tile.num_ctas == 2 and "pairs of CTAs" in str(two)
    assert 2 * two.launch("l1").grid[0] == one.launch("l1").grid[0] == 148
    assert two.tile.num_stages == one.tile.num_stages + 1
    assert two.launch("l1").config.constants().items() >= {"PAIR": True, "num_ctas": 2}.items()
    assert not one.launch("l1").config.constants().keys() & {"PAIR", "num_ctas"}
    for tokens in (1, 32768):
        assert mm.plan(
            mm.Problem(tokens, 4096, 2048, 32, 6, 1, "w4a8"), "b200", backend="blackwell"
        ).tile.num_ctas == 1  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "hardware", "given", "match"),
    [
        ("w8a8", "b200", {"backend": "blackwell"}, "pair of CTAs .* got w8a8"),
        ("w4a8", "b200", {"backend": "blackwell", "block_m": 8}, "16 tokens or more; got w4a8"),
        ("w4a8", "b200", {"backend": "portable"}, "cta_pair"),
        ("w4a8", "h200", {"backend": "hopper"}, "cta_pair"),
        (
            "w8a8",
            "b200",
            {},
            "asked for with backend=.blackwell.*got backend auto",
        ),
    ],
)
def test_a_pair_of_ctas_is_refused_by_name_elsewhere(recipe, hardware, given, match):
    problem = mm.Problem(512, 4096, 2048, 32, 6, 1, recipe)
    with pytest.raises(NotAvailable, match=match):
        mm.plan(problem, hardware, cta_pair=True, **given)


def test_no_certificate_lets_auto_take_pairs_which_certify_never_ran():
    call = CallSpec(PROBLEM, max_tokens=PROBLEM.num_tokens, is_certified=True)
    assert mm.plan(call, "b200").backend == "blackwell"
    with pytest.raises(NotAvailable, match="no certificate is of them; got backend auto"):
        mm.plan(call, "b200", cta_pair=True)
    pair = mm.plan(call, "b200", backend="blackwell", cta_pair=True)
    assert pair.tile.num_ctas == 2
    rng = torch.Generator().manual_seed(0)
    w13, w2 = torch.randn(2, 64, 32, generator=rng), torch.randn(2, 32, 32, generator=rng)
    w = mm.ExpertWeights.quantize(w13.bfloat16(), w2.bfloat16(), "w4a8")
    inputs = torch.zeros(1, 32).bfloat16(), torch.zeros(1, 1).int(), torch.ones(1, 1)
    with pytest.raises(NotAvailable, match="no certificate is of them; got backend auto"):
        mm.moe(*inputs, w, overrides={"cta_pair": True})
    with pytest.raises(NotAvailable, match="no certificate is of them; got backend auto"):
        mm.MoE(w, 2, 1, overrides={"cta_pair": True})
    with pytest.raises(NotAvailable, match="a grouped GEMM alone has one CTA a tile"):
        plan_grouped(
            GroupedSpec("w4a8", 512, 4, 4096, 512), "b200", backend="blackwell", cta_pair=True
        )


@pytest.mark.parametrize("tokens", [64, 2048, 32768])
def test_schedules_reach_every_launch_with_a_reason(tokens):
    """Drawn tiles are a constant of the GEMMs, sorted ones of the launch that lists the tiles."""
    problem = mm.Problem(tokens, 4096, 2048, 32, 6, 1, "w4a4")
    for schedule in ("strided", "dynamic", "sorted"):
        plan = mm.plan(problem, "b200", backend="blackwell", schedule=schedule)
        drawn = {plan.launch(name).config.constants()["DYNAMIC"] for name in ("l1", "l2")}
        lists = [one.config for one in plan.launches if one.name in ("place", "permute")]
        assert drawn == {schedule != "strided"} and plan["schedule"] == schedule
        assert {one.constants()["SORTED"] for one in lists} == {schedule == "sorted"}
        (choice,) = [one for one in plan.choices if one.name == "schedule"]
        assert choice.why == f"given; {tables.SCHEDULES[schedule]}"
    assert mm.plan(problem, "b200", backend="blackwell")["schedule"] == "strided"


def taken_back(placed, groups):
    """The inverse of `place_scales`: bytes [blocks, 128, groups]."""
    _, blocks, wide, _, _ = placed.shape
    parts = placed.view(blocks, wide, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return parts.reshape(blocks, ROW_BLOCK, wide * 4)[:, :, :groups]


def test_placed_scales_are_the_map_and_go_back():
    scale = torch.arange(256 * 8).to(torch.int32).view(2, 128, 8)
    low = (scale & 255).to(torch.uint8)
    order = placed_scales(256, 8).order()
    assert place_scales(low).flatten().tolist() == low.flatten()[order].tolist()
    assert torch.equal(taken_back(place_scales(low), 8), low)
    there = placed_scales(256, 8)
    assert all(there.inverse(there.forward(i)) == i for i in range(there.size))


# -- fused -----------------------------------------------------------------------------------------


def fused(tokens, recipe="w4a8", experts=256, **given):
    problem = mm.Problem(tokens, 4096, 2048, experts, 6, 1, recipe)
    return mm.plan(problem, "b200", backend="blackwell", mode="fused", **given)


@pytest.mark.parametrize("recipe", BLACKWELL_RECIPES)
def test_a_fused_plan_is_one_launch_whose_memory_is_a_sum(recipe):
    plan = fused(64, recipe)
    (step,) = plan.launches
    assert (step.kernel, step.grid) == ("mega_tmem_kernel", (148,)) and plan.tile.num_stages >= 3
    assert plan["tmem_columns"] <= 512 and plan.shared_memory.num_bytes <= SMEM_PER_CTA
    assert plan.tile.num_sums % 2 == 0 and plan.max_fused_tokens >= 256 * 13 // 6
    text = str(plan)
    assert "routing" in text and "not yet run on the hardware" in text
    auto = mm.plan(plan.problem, "b200", backend="blackwell")
    assert auto.mode == "staged" and "neither mode has been timed" in auto["mode"] + auto.why


@pytest.mark.parametrize(
    ("call", "kind", "match"),
    [
        (CallSpec(mm.Problem(512, 4096, 2048, 16, 6, 1, "w4a8")), CapacityError, "64 tokens a"),
        (CallSpec(mm.Problem(64, 4096, 2048, 16, 6, 1, "w8a8")), CapacityError, "16 tokens a tile"),
        (CallSpec(mm.Problem(1000, 4096, 2048, 256, 6, 1, "w4a4")), CapacityError, "4096 slots"),
        (CallSpec(PROBLEM, is_quantized=True), DTypeError, "takes BF16 tokens"),
        (CallSpec(PROBLEM, is_captured=True), NotAvailable, "no counters of its own"),
        (CallSpec(PROBLEM, shared=SharedSpec(1, "w4a8", 2048, apart="x")), NotAvailable, "shared"),
    ],
)  # fmt: skip
def test_what_no_fused_launch_takes_is_refused_with_the_reason(call, kind, match):
    with pytest.raises(kind, match=match):
        mm.plan(call, "b200", backend="blackwell", mode="fused")


def test_a_ring_of_a_fused_launch_has_halves_of_whole_tiles():
    for recipe, rows in (("w4a8", 400), ("w8a8", 600), ("nvfp4", 333)):
        config = fused(128, recipe, 64, pool_rows=rows).mega.config
        assert config.is_ring and config.pool_rows <= rows
        m = config.tile.block_m
        assert config.pool_rows % (2 * m) == 0 and config.wave_rows % m == 0
        assert config.wave_rows + m == config.pool_rows // 2


def test_ranks_share_what_their_tokens_take_in_the_recipes_format():
    """An inbox of FP4 has half the bytes of one of FP8; NVFP4 twice the scales of MXFP4."""
    sizes = {}
    for recipe in ("w4a8", "w4a4", "nvfp4", "bf16"):
        problem = mm.Problem(64, 4096, 2048, 256, 6, 8, recipe)
        plan = mm.plan(problem, "b200", backend="blackwell", mode="fused")
        assert plan.num_passes == 1 and plan.fused_tokens == 64
        where = plan.exchange
        sizes[recipe] = tuple(where[f"inbox_{name}"].shape[-1] for name in ("tokens", "scale"))
    assert sizes == {
        "w4a8": (4096, 32), "w4a4": (2048, 32), "nvfp4": (2048, 64), "bf16": (8192, 4),
    }  # fmt: skip
