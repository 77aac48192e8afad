"""Ranks, shared experts, quantised tokens, masks, NaN: what must hold for every recipe."""

import pytest
import torch

import megamoe as mm
from megamoe import reference
from megamoe.formats.spec import recipe_named
from megamoe.problem import RECIPES, Options
from megamoe.routing.samplers import SKEWS, sample_routing

H, I, E, K = 192, 96, 8, 3


@pytest.fixture(scope="module", params=RECIPES)
def weights(request):
    return experts(request.param)


def experts(recipe, num=E, seed=0, **extra):
    rng = torch.Generator().manual_seed(seed)
    w13 = (torch.randn(num, 2 * I, H, generator=rng) / H**0.5).bfloat16()
    w2 = (torch.randn(num, H, I, generator=rng) / I**0.5).bfloat16()
    return mm.ExpertWeights.quantize(w13, w2, recipe, **extra)


def tokens(count, seed=0, skew="uniform", **options):
    x = torch.randn(count, H, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return x, *sample_routing(count, E, K, skew=skew, seed=seed, **options)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("skew", SKEWS)
def test_any_number_of_ranks_gives_the_bits_of_one(weights, num_ranks, skew):
    if skew == "hot_rank" and E // num_ranks < K:
        skew = "hot_expert"
    counts = [0, 5, 1, 9, 2, 0, 3, 4][:num_ranks]
    parts = [
        tokens(n, seed=r, skew=skew, num_ranks=num_ranks, masked_ratio=0.2)
        for r, n in enumerate(counts)
    ]
    owners = [weights.for_rank(r, num_ranks) for r in range(num_ranks)]
    got = reference.expert_parallel(*map(list, zip(*parts, strict=True)), owners)
    assert [len(y) for y in got] == counts
    for y, part in zip(got, parts, strict=True):
        assert torch.equal(y, mm.moe(*part, weights))


def test_received_counts_every_unmasked_slot_once():
    parts = [tokens(n, seed=n, masked_ratio=0.3)[1] for n in (4, 0, 7, 1)]
    got = reference.received(parts, E, 4)
    assert got.shape == (4, 2)
    flat = torch.cat(parts).flatten()
    assert got.flatten().tolist() == [int((flat == e).sum()) for e in range(E)]


def test_a_token_does_not_depend_on_its_batch(weights):
    x, idx, weight = tokens(40)
    whole = mm.moe(x, idx, weight, weights)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    assert torch.equal(mm.moe(x[order], idx[order], weight[order], weights), whole[order])
    for t in (0, 17, 39):
        one = slice(t, t + 1)
        assert torch.equal(mm.moe(x[one], idx[one], weight[one], weights), whole[one])


def test_masked_slots_add_nothing_and_no_expert_is_zero(weights):
    x, idx, weight = tokens(6)
    idx[2, 1] = -1
    idx[4] = -1
    weight[4] = float("nan")  # a masked slot's weight is never read
    y = mm.moe(x, idx, weight, weights)
    keep = torch.tensor([0, 2])
    two = mm.moe(x[2:3], idx[2:3, keep].contiguous(), weight[2:3, keep].contiguous(), weights)
    assert torch.equal(y[2:3], two)
    assert torch.equal(y[4], torch.zeros(H, dtype=torch.bfloat16))


def test_the_same_expert_twice_counts_twice(weights):
    x, idx, weight = tokens(5)
    idx[:, 1] = idx[:, 0]
    weight[:, 1] = weight[:, 0]
    weight[:, 2] = 0.0
    y = mm.moe(x, idx, weight, weights, weight_at="combine")
    once = mm.moe(
        x, idx[:, :1].contiguous(), weight[:, :1].contiguous(), weights, weight_at="combine"
    )
    assert torch.allclose(y.float(), 2 * once.float(), rtol=2**-7)
    assert y.abs().max() > 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_token_that_is_not_finite_spoils_only_itself(weights, bad):
    x, idx, weight = tokens(12)
    clean = mm.moe(x, idx, weight, weights)
    x[3, 7] = bad
    y = mm.moe(x, idx, weight, weights)
    others = [t for t in range(12) if t != 3]
    assert torch.equal(y[others], clean[others])
    assert y[3].isnan().any()


@pytest.mark.parametrize("top_k", [1, K])
def test_no_tokens_and_one_token(weights, top_k):
    x, idx, weight = tokens(1)
    idx, weight = idx[:, :top_k].contiguous(), weight[:, :top_k].contiguous()
    assert mm.moe(x[:0], idx[:0], weight[:0], weights).shape == (0, H)
    assert mm.moe(x, idx, weight, weights).shape == (1, H)


def test_quantised_tokens_give_the_bits_of_bf16_tokens(weights):
    x, idx, weight = tokens(7)
    q = mm.quantize(x, recipe_named(weights.recipe).acts.name)
    assert torch.equal(mm.moe(q, idx, weight, weights), mm.moe(x, idx, weight, weights))


@pytest.mark.parametrize("shared_recipe", ["bf16", "w8a8", "w4a4"])
@pytest.mark.parametrize("weight_at", ["l1", "combine"])
def test_shared_experts_are_extra_slots_with_weight_one(weights, shared_recipe, weight_at):
    if shared_recipe != weights.recipe:
        shared = experts(shared_recipe, num=2, seed=9)
        x, idx, weight = tokens(5)
        idx[1] = -1
        y = mm.moe(x, idx, weight, weights, shared=shared, weight_at=weight_at)
        every = torch.arange(2).repeat(5, 1)
        alone = mm.moe(x, every, torch.ones(5, 2), shared, weight_at=weight_at)
        assert torch.equal(y[1], alone[1])  # no routed expert: the shared ones alone
        routed = mm.moe(x, idx, weight, weights, weight_at=weight_at)
        assert torch.allclose(y.float(), routed.float() + alone.float(), atol=0.03)
    # In the same recipe they are the same thing as further slots of one table of experts.
    shared = weights[:2]
    x, idx, weight = tokens(5)
    slots = torch.cat([idx, torch.tensor([[0, 1]] * 5)], dim=1)
    ones = torch.cat([weight, torch.ones(5, 2)], dim=1)
    y = mm.moe(x, idx, weight, weights, shared=shared, weight_at=weight_at)
    assert torch.equal(y, mm.moe(x, slots, ones, weights, weight_at=weight_at))


def test_nvfp4_global_scales_of_the_activations_enter():
    x, idx, weight = tokens(9)
    plain = mm.moe(x, idx, weight, experts("nvfp4"))
    per_expert = torch.linspace(0.01, 0.02, E)
    scaled = mm.moe(x, idx, weight, experts("nvfp4", x_global=0.37, acts_global=per_expert))
    assert not torch.equal(plain, scaled)
    assert (plain.float() - scaled.float()).norm() / plain.float().norm() < 0.2


def test_the_weight_multiplies_where_weight_at_says(weights):
    x, idx, weight = tokens(8)
    l1 = mm.moe(x, idx, weight, weights, weight_at="l1").float()
    late = mm.moe(x, idx, weight, weights, weight_at="combine").float()
    assert (l1 - late).norm() / late.norm() < 0.2
    half = mm.moe(x, idx, weight / 2, weights, weight_at="combine").float()
    assert torch.equal(half, late / 2)  # an exact power of two passes through every rounding


def test_only_touched_experts_are_dequantised(weights, monkeypatch):
    seen = []
    real = reference.layer.dequantize

    def spy(q, dtype):
        seen.append(q.shape)
        return real(q, dtype)

    monkeypatch.setattr(reference.layer, "dequantize", spy)
    x, idx, weight = tokens(4)
    idx.fill_(5)
    reference.moe(x, idx, weight, weights, Options())
    assert seen.count((2, I, H)) == 1
    assert seen.count((H, I)) == 1
