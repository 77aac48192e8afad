"""Routers against plain loops over one token at a time."""

import math

import pytest
import torch

import megamoe as mm
from megamoe.bench.workloads import MODELS
from megamoe.errors import MegaMoEError


def by_hand(logits, router, bias):
    """The five steps of `Router` for one token, in Python floats."""
    if router.score == "softmax":
        top = max(logits)
        powers = [math.exp(v - top) for v in logits]
        scores = [p / sum(powers) for p in powers]
    elif router.score == "sigmoid":
        scores = [1 / (1 + math.exp(-v)) for v in logits]
    else:
        scores = [math.sqrt(math.log1p(math.exp(v))) for v in logits]
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(logits) // router.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(router.num_groups)]
    if router.num_groups > 1:
        marks = [sum(sorted(choice[e] for e in g)[-2:]) for g in groups]
        best = sorted(range(len(groups)), key=lambda g: -marks[g])[: router.num_kept_groups]
        allowed = [e for g in best for e in groups[g]]
    else:
        allowed = list(range(len(logits)))
    chosen = sorted(sorted(allowed), key=lambda e: -choice[e])[: router.top_k]
    weights = [scores[e] for e in chosen]
    total = sum(weights) if router.renormalize else 1.0
    return chosen, [w / total * router.scale for w in weights]


ROUTERS = [
    mm.Router(16, 4),
    mm.Router(16, 4, renormalize=False, scale=3.0),
    mm.Router(16, 1, "sigmoid"),
    mm.Router(32, 6, "sqrt_softplus", scale=1.5),
    mm.Router(32, 4, "sigmoid", num_groups=8, num_kept_groups=2, scale=2.5),
    *(model.router for model in MODELS.values()),
]


@pytest.mark.parametrize("router", ROUTERS, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_routing_follows_the_five_steps(router, with_bias):
    rng = torch.Generator().manual_seed(router.num_experts + router.top_k)
    logits = torch.randn(20, router.num_experts, generator=rng)
    bias = torch.randn(router.num_experts, generator=rng) / 4 if with_bias else None
    idx, weights = mm.route(logits, router, bias)
    assert idx.dtype == torch.int64 and weights.dtype == torch.float32
    zeros = [0.0] * router.num_experts
    for t in range(20):
        chosen, expected = by_hand(
            logits[t].tolist(), router, zeros if bias is None else bias.tolist()
        )
        assert idx[t].tolist() == chosen
        assert weights[t].tolist() == pytest.approx(expected, rel=1e-5)


def test_the_bias_steers_the_choice_but_not_the_weight():
    router = mm.Router(4, 1, "sigmoid", renormalize=False)
    logits = torch.tensor([[2.0, 0.0, 0.0, 0.0]])
    bias = torch.tensor([0.0, 0.0, 5.0, 0.0])
    idx, weights = mm.route(logits, router, bias)
    assert idx.item() == 2
    assert weights.item() == 0.5


def test_nan_in_the_bias_makes_all_weights_nan():
    router = mm.Router(4, 2, renormalize=False)
    bias = torch.tensor([0.0, float("nan"), 0.0, float("-inf")])
    assert mm.route(torch.randn(3, 4), router, bias)[1].isnan().all()
    assert mm.route(torch.randn(3, 4), router, bias.nan_to_num(0.0))[1].isfinite().all()


def test_groups_can_shut_out_the_best_expert():
    router = mm.Router(4, 1, "sigmoid", num_groups=2, num_kept_groups=1)
    logits = torch.tensor([[3.0, -9.0, 1.0, 1.0]])  # group marks: 0.95 against 1.46
    assert mm.route(logits, router)[0].item() == 2


def test_ties_go_to_the_lower_expert():
    idx, weights = mm.route(torch.zeros(3, 64), mm.Router(64, 5))
    assert idx.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert torch.equal(weights, torch.full((3, 5), 0.2))


def test_gpt_oss_softmax_over_the_chosen_is_renormalised_softmax():
    logits = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    idx, weights = mm.route(logits, mm.Router(32, 4))
    assert torch.allclose(weights, logits.gather(1, idx).softmax(dim=1), rtol=1e-5)


def test_a_row_depends_on_itself_alone():
    logits = torch.randn(9, 32, generator=torch.Generator().manual_seed(0))
    router = mm.Router(32, 4, "sigmoid", num_groups=4, num_kept_groups=2)
    idx, weights = mm.route(logits, router)
    logits[4] = float("nan")
    again, others = mm.route(logits, router)
    keep = [t for t in range(9) if t != 4]
    assert torch.equal(idx[keep], again[keep]) and torch.equal(weights[keep], others[keep])
    assert others[4].isnan().all() and again[4].min() >= 0 and again[4].max() < 32


@pytest.mark.parametrize(
    "make",
    [
        lambda: mm.Router(8, 9),
        lambda: mm.Router(8, 0),
        lambda: mm.Router(8, 2, "tanh"),
        lambda: mm.Router(8, 2, num_groups=3),
        lambda: mm.Router(8, 2, num_groups=8, num_kept_groups=4),
        lambda: mm.Router(8, 2, num_groups=4, num_kept_groups=5),
        lambda: mm.Router(8, 4, num_groups=4, num_kept_groups=1),
        lambda: mm.Router(8, 2, scale=0.0),
        lambda: mm.route(torch.zeros(3, 7), mm.Router(8, 2)),
        lambda: mm.route(torch.zeros(8), mm.Router(8, 2)),
        lambda: mm.route(torch.zeros(3, 8, dtype=torch.int64), mm.Router(8, 2)),
        lambda: mm.route([[1.0, 2.0]], mm.Router(2, 1)),
        lambda: mm.route(torch.zeros(3, 8), 8),
        lambda: mm.route(torch.zeros(3, 8), mm.Router(8, 2), [0.0] * 8),
        lambda: mm.route(torch.zeros(3, 8), mm.Router(8, 2), torch.zeros(7)),
    ],
)
def test_bad_routers_and_logits_are_refused(make):
    with pytest.raises(MegaMoEError, match="got"):
        make()
