"""The oracle against a float64 evaluation of the rules, and every rounding step in its place."""

import functools

import numpy as np
import pytest
import torch

import megamoe as mm
from megamoe.problem import RECIPES
from megamoe.routing.samplers import sample_routing
from tests.reference import rules64

BOUND = 3e-3


def random_case(seed, hidden, intermediate, experts, top_k, tokens, masked=0.0, twice=False):
    rng = torch.Generator().manual_seed(seed)
    w13 = torch.randn(experts, 2 * intermediate, hidden, generator=rng) / hidden**0.5
    w2 = torch.randn(experts, hidden, intermediate, generator=rng) / intermediate**0.5
    x = torch.randn(tokens, hidden, generator=rng).bfloat16()
    idx, weight = sample_routing(tokens, experts, top_k, masked_ratio=masked, seed=seed)
    if twice and top_k > 1:
        idx[:, 1] = idx[:, 0]
    return x, idx, weight, w13.bfloat16(), w2.bfloat16()


# seed, hidden, intermediate, experts, top_k, tokens, masked, twice. Empty experts wherever
# tokens * top_k is small against experts; widths from 128 to 7168, 2880 and odd multiples of 32.
CASES = [
    (0, 128, 128, 4, 1, 5, 0.0, False),
    (1, 128, 128, 16, 8, 3, 0.3, False),
    (2, 256, 160, 8, 8, 4, 0.0, True),
    (3, 2880, 96, 4, 1, 3, 0.0, False),
    (4, 192, 2880, 3, 1, 2, 0.5, False),
    (5, 7168, 128, 2, 1, 1, 0.0, False),
    (6, 128, 7168, 2, 1, 1, 0.0, False),
    (7, 320, 224, 9, 8, 6, 0.1, True),
    (8, 128, 128, 4, 1, 0, 0.0, False),
]
OPTIONS = [
    {},
    {"clamp": 0.7},
    {"activation": "gpt_oss", "bias": True},
    {"activation": "situ"},
    {"activation": "geglu", "clamp": 3.0},
    {"activation": "geglu_tanh", "bias": True},
    {"weight_at": "combine", "combine": "fp8", "clamp": 10.0},
    {"combine": "fp8", "gate_up": "interleaved", "bias": True},
]


@functools.lru_cache(maxsize=1)
def stored(w13, w2, recipe):
    """The weights as the rules store them; w13 [E, 2, I, H]. Options in turn share a case's."""
    split13 = w13.float().numpy().reshape(len(w13), 2, w13.shape[1] // 2, -1)
    return tuple(rules64.weights_as(w, recipe) for w in (split13, w2.float().numpy()))


def both(recipe, case, *, bias=False, gate_up="split", without="", seed=0, **options):
    """The package's result and the rules' result, as float32 arrays."""
    x, idx, weight, w13, w2 = case
    experts, rows, _ = w13.shape
    rng = torch.Generator().manual_seed(1000 + seed)
    b13 = torch.randint(-4, 5, (experts, rows), generator=rng) / 4 if bias else None
    b2 = torch.randint(-4, 5, (experts, w13.shape[2]), generator=rng) / 4 if bias else None
    given13, given_b13 = w13, b13
    if gate_up == "interleaved":
        given13 = w13.view(experts, 2, -1, w13.shape[2]).transpose(1, 2).reshape(w13.shape)
        given_b13 = None if b13 is None else b13.view(experts, 2, -1).transpose(1, 2).flatten(1)
    weights = mm.ExpertWeights.quantize(given13, w2, recipe, b13=given_b13, b2=b2, gate_up=gate_up)
    y = mm.moe(x, idx, weight, weights, **options)
    wanted = rules64.layer(
        x.float().numpy(), idx.numpy(), weight.numpy(),
        *stored(w13, w2, recipe), recipe,
        b13=None if b13 is None else b13.numpy().reshape(experts, 2, -1),
        b2=None if b2 is None else b2.numpy(), without=without,
        **{"clamp": 7.0 if options.get("activation") == "gpt_oss" else np.inf, **options},
    )  # fmt: skip
    return y.float().numpy(), wanted


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_the_layer_follows_the_rules(recipe, case):
    data, seed = random_case(*case), case[0]
    is_wide = max(case[1:3]) >= 2880  # what an option does depends on no width: some of them
    for number in range(seed % 3, len(OPTIONS), 3) if is_wide else range(len(OPTIONS)):
        options = OPTIONS[number]
        y, wanted = both(recipe, data, seed=number, **options)
        error = np.linalg.norm(y - wanted) / max(np.linalg.norm(wanted), 1e-30)
        assert error <= BOUND, (options, error)


def integer_case(recipe, seed, tokens=16, top_k=3):
    """Small integers whose scales are powers of two in every format, so that all sums are exact."""
    rng = torch.Generator().manual_seed(seed)
    experts, intermediate, hidden = 4, 128, 512
    top = 7 if recipe == "w8a8" else 3
    w13 = torch.randint(-3, 4, (experts, 2 * intermediate, hidden), generator=rng)
    w2 = torch.randint(-3, 4, (experts, hidden, intermediate), generator=rng)
    for w in (w13, w2):
        w[:, ::16, ::16] = top
        if recipe.startswith("nvfp4"):
            w[:, 0, 0] = 21  # g = 21 / 2688 = 2 ** -7
    x = torch.randint(-7, 8, (tokens, hidden), generator=rng)
    x[:, ::64] = 7  # amax 7: the FP32 scale is 7 / 448 = 2 ** -6
    idx, weight = sample_routing(tokens, experts, top_k, masked_ratio=0.1, seed=seed)
    idx[0, 1] = idx[0, 0]
    # Sums near the activation's bend, so that gate, up and clamp all matter.
    return x.bfloat16() / 16, idx, weight, w13.bfloat16() / 16, w2.bfloat16() / 16


# Each step with a setting in which leaving it out must be seen.
SETTINGS = {
    "bf16_gate_up": {},
    "clamp": {"clamp": 1.5},
    "clamp_after_rounding": {"clamp": 1.503},
    "quantise_acts": {},
    "weight_before_quantise": {},
    "weight_on_bias": {"bias": True},
    "bf16_slot": {},
    "fp8_slot": {"combine": "fp8"},
    "product_rounded": {"weight_at": "combine"},
    "ascending": {"weight_at": "combine"},
    "fp32_sum": {"weight_at": "combine"},
}
assert tuple(SETTINGS) == rules64.STEPS

# FP32 roundings hide behind the BF16 output unless sums cancel: experts of the three slots relative
# to the first (None: masked), and their weights.
THIRD = np.float32(1) / np.float32(3)
ROUTED = {
    "product_rounded": ((0, 0, None), (THIRD, -np.nextafter(THIRD, np.float32(1)), 0.0)),
    "ascending": ((0, 0, 1), (1e6, -1e6, 1.0)),
    "fp32_sum": ((0, 1, 0), (1e6, 1.0, -1e6)),
    # A weight near FP32's smallest numbers: FP32 scales lose bits only if it comes first.
    "weight_before_quantise": ((0, None, None), (1e-38, 0.0, 0.0)),
}


def routed(case, step):
    """The case with the slots that make the step visible."""
    if step not in ROUTED:
        return case
    x, idx, _, w13, w2 = case
    first = torch.arange(len(x)) % len(w13)
    experts, weights = ROUTED[step]
    idx = torch.stack(
        [torch.full_like(first, -1) if e is None else (first + e) % len(w13) for e in experts], 1
    )
    return x, idx, torch.tensor([weights], dtype=torch.float32).repeat(len(x), 1), w13, w2


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clamp": 1.503},
        {"bias": True, "weight_at": "combine"},
        {"activation": "gpt_oss", "bias": True, "gate_up": "interleaved"},
        {"combine": "fp8", "weight_at": "combine", "clamp": 1.5},
        {"combine": "fp8"},
    ],
    ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()) or "plain",
)
def test_exact_sums_give_the_rules_bits(recipe, seed, options):
    y, wanted = both(recipe, integer_case(recipe, seed), seed=seed, **options)
    assert np.array_equal(y.view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("step", rules64.STEPS)
def test_leaving_a_step_out_is_seen(recipe, step):
    case = routed(integer_case(recipe, 5, tokens=48), step)
    y, wanted = both(recipe, case, seed=5, **SETTINGS[step])
    assert np.array_equal(y, wanted)
    _, mutant = both(recipe, case, seed=5, without=step, **SETTINGS[step])
    assert not np.array_equal(y, mutant)
