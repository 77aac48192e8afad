"""LocalWorld: real rows through the protocol give the bits of the reference and of one rank."""

from functools import partial

import pytest
import torch

import megamoe as mm
from megamoe import reference
from megamoe.errors import MegaMoEError, MegaMoETimeout
from megamoe.formats.spec import recipe_named
from megamoe.problem import RECIPES, Options
from megamoe.routing.samplers import sample_routing
from megamoe.studies.deep_gemm import local_world as local
from megamoe.studies.deep_gemm.local_world import LocalWorld
from megamoe.studies.deep_gemm.plan import plan as study_plan

H, I, E, K = 192, 96, 8, 3
COUNTS = [3, 0, 7, 1, 2, 0, 4, 5]


def experts(recipe, num=E, seed=0, **extra):
    rng = torch.Generator().manual_seed(seed)
    w13 = (torch.randn(num, 2 * I, H, generator=rng) / H**0.5).bfloat16()
    w2 = (torch.randn(num, H, I, generator=rng) / I**0.5).bfloat16()
    return mm.ExpertWeights.quantize(w13, w2, recipe, **extra)


def biased(recipe):
    rng = torch.Generator().manual_seed(5)
    b13, b2 = torch.randn(E, 2 * I, generator=rng) / 8, torch.randn(E, H, generator=rng) / 8
    return experts(recipe, b13=b13.bfloat16(), b2=b2.bfloat16())


def inputs(num_ranks, counts=COUNTS, **options):
    parts = []
    for rank, num in enumerate(counts[:num_ranks]):
        x = torch.randn(num, H, generator=torch.Generator().manual_seed(rank)).bfloat16()
        parts.append((x, *sample_routing(num, E, K, seed=rank, **options)))
    return [list(part) for part in zip(*parts, strict=True)]


def check(weights, num_ranks, options=None, shared=None, world=None, given=None, **run):
    """The same bits as the reference, and its counts."""
    x, idx, gates = given or inputs(num_ranks, masked_ratio=0.2)
    owners = [weights.for_rank(r, num_ranks) for r in range(num_ranks)]
    world = world or LocalWorld(num_ranks, num_sms=2, block_m=4)
    got, stats = world.run(x, idx, gates, owners, options, shared, **run)
    wanted = reference.expert_parallel(x, idx, gates, owners, options, shared)
    assert len(got) == num_ranks
    for y, w in zip(got, wanted, strict=True):
        assert y.dtype == torch.bfloat16 and torch.equal(y, w)
    assert torch.equal(torch.stack(stats), reference.received(idx, E, num_ranks))
    return got


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_every_recipe_gives_the_bits_of_the_reference_and_of_one_rank(recipe, num_ranks):
    weights = experts(recipe)
    x, idx, gates = given = inputs(num_ranks, masked_ratio=0.2)
    got = check(weights, num_ranks, given=given)
    for y, *one in zip(got, x, idx, gates, strict=True):
        assert torch.equal(y, mm.moe(*one, weights))


@pytest.mark.parametrize("weight_at", ["l1", "combine"])
@pytest.mark.parametrize("combine", ["bf16", "fp8"])
@pytest.mark.parametrize("activation", ["swiglu", "gpt_oss"])
def test_every_option(weight_at, combine, activation):
    options = Options(activation=activation, clamp=2.0, weight_at=weight_at, combine=combine)
    check(biased("w4a16"), 4, options, shared=experts("w8a8", num=2, seed=9))


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantised_tokens_and_shared_experts(recipe):
    weights = experts(recipe)
    x, idx, gates = inputs(2)
    x = [mm.quantize(t, recipe_named(recipe).acts.name) for t in x]
    check(weights, 2, shared=weights[:2], given=(x, idx, gates))


def test_global_scales_of_each_owner_are_its_own():
    weights = experts("nvfp4", x_global=0.37, acts_global=torch.linspace(0.01, 0.02, E))
    check(weights, 4)


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_steps_gives_the_same_bits(seed):
    world = LocalWorld(4, num_sms=3, block_m=2, experts_per_wave=1)
    check(experts("w4a8"), 4, world=world, seed=seed)


@pytest.mark.parametrize("ring_rows", [2, 4, 8])
def test_a_ring_that_is_reused_gives_the_same_bits(ring_rows):
    world = LocalWorld(2, block_m=2, ring_rows=ring_rows)
    check(experts("w4a8"), 2, world=world, given=inputs(2, [9, 11], skew="hot_expert"), seed=1)


@pytest.mark.parametrize("overrides", [{}, {"lag": 0}, {"block_m": 8, "ring_rows": 16}], ids=str)
def test_a_plan_gives_tile_waves_ring_and_lag(overrides):
    problem = mm.Problem(11, H, I, E, K, 2, "w4a8_block")
    plan = study_plan(problem, "h200", **overrides)
    check(experts("w4a8_block"), 2, given=inputs(2, [9, 11]), plan=plan)


@pytest.mark.parametrize("expert", [0, 5])
def test_all_tokens_to_one_expert_the_same_one_twice(expert):
    x, idx, gates = inputs(4)
    idx = [torch.full_like(i, expert) for i in idx]
    check(experts("w4a4"), 4, given=(x, idx, gates))


def test_no_tokens_and_no_experts():
    got = check(experts("bf16"), 4, given=inputs(4, [0, 0, 0, 0]))
    assert all(y.shape == (0, H) for y in got)
    x, idx, gates = inputs(2)
    idx = [torch.full_like(i, -1) for i in idx]
    gates = [torch.full_like(g, float("nan")) for g in gates]  # never read
    got = check(experts("bf16"), 2, given=(x, idx, gates))
    assert all(not y.any() for y in got)


def test_a_nan_token_spoils_only_itself():
    x, idx, gates = inputs(2, [5, 4])
    clean = check(experts("w4a8"), 2, given=(x, idx, gates))
    x[0][2, 7] = float("nan")
    x = [t.clone() for t in x]
    owners = [experts("w4a8").for_rank(r, 2) for r in range(2)]
    (y0, y1), _ = LocalWorld(2).run(x, idx, gates, owners)
    keep = [0, 1, 3, 4]
    assert torch.equal(y0[keep], clean[0][keep]) and torch.equal(y1, clean[1])
    assert y0[2].isnan().any()


def test_progress_counts_blocks():
    seen = []
    check(experts("bf16"), 2, progress=lambda done, of: seen.append((done, of)))
    total = seen[-1][1]
    assert seen == [(i, total) for i in range(1, total + 1)] and total > 0


def test_a_stuck_protocol_says_who_waited_for_what(monkeypatch):
    bugged = partial(local.World, bugs=frozenset({"mask_wrong_bit"}))
    monkeypatch.setattr(local, "World", bugged)
    with pytest.raises(MegaMoETimeout, match="rank 0 waited too long for mask") as caught:
        check(experts("bf16"), 2)
    error = caught.value
    assert (error.rank, error.expected, error.seen) == (0, 1, 2)
    assert "l2_arrival_mask[" in error.barrier and isinstance(error, TimeoutError)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda a: a.update(x=a["x"][:1]),
        lambda a: a.update(weights=a["weights"] * 2),
        lambda a: a.update(weights=[a["weights"][0], experts("w4a8", num=4)]),
        lambda a: a.update(x=[t[:, :96] for t in a["x"]]),
        lambda a: a["topk_idx"][0].fill_(E),
        lambda a: a.update(topk_weights=[g[:, :2] for g in a["topk_weights"]]),
    ],
    ids=["ranks", "owners", "recipes", "width", "ids", "slots"],
)
def test_bad_input_is_refused(spoil):
    x, idx, gates = inputs(2)
    owners = [experts("bf16").for_rank(r, 2) for r in range(2)]
    args = {"x": x, "topk_idx": idx, "topk_weights": gates, "weights": owners}
    spoil(args)
    with pytest.raises(MegaMoEError, match="got"):
        LocalWorld(2).run(**args)


def test_a_world_needs_a_rank():
    with pytest.raises(MegaMoEError, match="at least 1"):
        LocalWorld(0)
