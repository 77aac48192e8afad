"""Where kernels run in these tests: Triton's interpreter if TRITON_INTERPRET=1, else a GPU."""

import os

import pytest
import torch

import megamoe as mm
from megamoe.formats.spec import FP8_COMBINE_FACTOR, INTERPRETER_FACTOR, recipe_named
from megamoe.routing.samplers import sample_routing
from tests.kernels import interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    interpreter.install()
DEVICE = "cpu" if INTERPRETED else "cuda"
# Without the interpreter these are GPU tests; `./test` runs them in the interpreter as well, and
# there nothing else: what needs neither ran before.
MARKS = [pytest.mark.interpreted] if INTERPRETED else [pytest.mark.gpu]


def in_interpreter(reason="TRITON_INTERPRET=1"):
    """A mark of what needs the interpreter."""
    return pytest.mark.interpreted if INTERPRETED else pytest.mark.skip(reason=reason)


def tolerance(recipe, combine="bf16"):
    factor = FP8_COMBINE_FACTOR if combine == "fp8" else 1.0
    return recipe_named(recipe).tolerance * factor * (INTERPRETER_FACTOR if INTERPRETED else 1.0)


def experts(recipe, num, intermediate, hidden, *, seed=0, bias=False, **extra):
    """Random experts on DEVICE."""
    rng = torch.Generator().manual_seed(seed)
    w13 = torch.randn(num, 2 * intermediate, hidden, generator=rng) / hidden**0.5
    w2 = torch.randn(num, hidden, intermediate, generator=rng) / intermediate**0.5
    if bias:
        extra["b13"] = torch.randn(num, 2 * intermediate, generator=rng) / 4
        extra["b2"] = torch.randn(num, hidden, generator=rng) / 4
    return mm.ExpertWeights.quantize(w13.bfloat16(), w2.bfloat16(), recipe, **extra).to(DEVICE)


def tokens(num, num_experts, top_k, hidden, *, seed=0, **routing):
    """Tokens, ids and weights on DEVICE."""
    x = torch.randn(num, hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()
    idx, weight = sample_routing(num, num_experts, top_k, seed=seed, **routing)
    return x.to(DEVICE), idx.to(DEVICE), weight.to(DEVICE)


def error(got, wanted):
    """Relative Frobenius distance; NaN never passes."""
    got, wanted = got.double().cpu(), wanted.double().cpu()
    if wanted.numel() == 0 or not wanted.norm():
        return float(got.norm())
    return float((got - wanted).norm() / wanted.norm())
