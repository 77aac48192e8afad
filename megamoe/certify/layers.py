"""What the checks compute: layers whose results are known beforehand, and layers at random."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from megamoe.engine.weights import ExpertWeights
from megamoe.errors import one_of
from megamoe.formats.spec import recipe_named
from megamoe.routing.samplers import sample_routing

NUM_GATE = 32  # columns that a gate adds up: 32 * 4 = 128, where silu(g) is g in FP32
NUM_OUT = 8  # activations that a result adds up: few enough for BF16 to hold it
KNOWN_INTERMEDIATE, LONG_HIDDEN = 64, 256  # of layers whose results are known, of long sums

Inputs = tuple[Tensor, Tensor, Tensor]  # x, topk_idx, topk_weights


class Known(NamedTuple):
    """A layer of small integers and powers of two, its inputs, and its result in exact numbers."""

    weights: ExpertWeights
    inputs: Inputs
    y: Tensor  # bf16 [T, H]
    magnitude: Tensor  # float64 [T, H]: the sum of all terms' sizes in L2 of one slot at most


def known_hidden(hidden: int) -> int:
    """Of layers whose results are known: their gates leave room for other columns."""
    return max(256, hidden // 4)


def known(
    recipe: str, num_tokens: int, num_experts: int, hidden: int, intermediate: int, *, is_long: bool
) -> Known:
    """A layer that every format of its recipe holds exactly, and what it must give.

    Tokens are +-4 (NVFP4: with a 6 in each block, so that its scale is exact), weights +-1 and 0;
    gates are so large that silu(g) = g, activations small integers times a power of two.

    is_long  L2 adds up all activations: a long climb, then down again, and a small rest
    """
    rng = torch.Generator().manual_seed(num_tokens)
    is_nvfp4 = recipe_named(recipe).acts.has_global
    sizes = torch.tensor(
        [6.0, 4.0, 3.0, 2.0, 1.0] if is_nvfp4 else [4.0, 2.0, 1.0], dtype=torch.float32
    )
    signs = torch.randint(0, 2, (hidden,), generator=rng) * 2.0 - 1.0
    columns = torch.arange(hidden)
    peaks = (columns % 16 == 0) & is_nvfp4
    token = torch.where(peaks, 6.0, 4.0) * signs
    free = columns[~peaks]

    def draw(num: int) -> Tensor:
        return free[torch.randperm(len(free), generator=rng)[:num]]

    ups = sizes[torch.randint(len(sizes), (num_experts, intermediate), generator=rng)]
    ups[:, ::16] = sizes[0]  # the largest of every block
    ups *= torch.randint(0, 2, ups.shape, generator=rng) * 2.0 - 1.0
    if is_long:
        ups[:, intermediate // 2 :] = ups[:, : intermediate // 2]  # a column and its twin
    w13 = torch.zeros(num_experts, 2, intermediate, hidden, dtype=torch.float32)
    for expert in range(num_experts):
        for row in range(intermediate):
            gate, up = draw(NUM_GATE), draw(int(abs(ups[expert, row])))
            w13[expert, 0, row, gate] = signs[gate]
            w13[expert, 1, row, up] = signs[up] * ups[expert, row].sign()
    w2 = _long(ups, hidden, rng) if is_long else _sparse(ups, hidden, rng)
    scale = 2.0 ** torch.randint(-1, 2, (num_tokens, 1), generator=rng)
    idx, _ = sample_routing(num_tokens, num_experts, 1, seed=num_tokens)
    gates = torch.full((num_tokens, 1), 0.125, dtype=torch.float32)
    acts = (4 * NUM_GATE * scale * 4 * scale * 0.125) * ups[idx[:, 0]]  # gate, up, weight
    y = torch.einsum("ti,thi->th", acts.double(), w2[idx[:, 0]].double())
    size = torch.einsum("ti,thi->th", acts.abs().double(), w2[idx[:, 0]].abs().double())
    weights = ExpertWeights.quantize(w13.flatten(1, 2).bfloat16(), w2.bfloat16(), recipe)
    return Known(weights, ((token * scale).bfloat16(), idx, gates), y.bfloat16(), size)


def _sparse(ups: Tensor, hidden: int, rng: torch.Generator) -> Tensor:
    num_experts, intermediate = ups.shape
    w2 = torch.zeros(num_experts, hidden, intermediate, dtype=torch.float32)
    at = (
        torch.rand(num_experts, hidden, intermediate, dtype=torch.float32, generator=rng)
        .topk(NUM_OUT)
        .indices
    )
    signs = torch.randint(0, 2, at.shape, generator=rng) * 2.0 - 1.0
    return w2.scatter_(2, at, signs)


def _long(ups: Tensor, hidden: int, rng: torch.Generator) -> Tensor:
    """Up over the first half of K, down over the twins of the second, but for NUM_OUT of them."""
    num_experts, intermediate = ups.shape
    half = intermediate // 2
    up = ups[:, None, :half].sign().expand(num_experts, hidden, half)
    w2 = torch.cat([up, -up], dim=2).contiguous()
    left_out = (
        torch.rand(num_experts, hidden, half, dtype=torch.float32, generator=rng)
        .topk(NUM_OUT)
        .indices
    )
    return w2.scatter_(2, left_out + half, 0.0)


@functools.lru_cache(maxsize=4)  # a stage's checks share them, and quantising takes a second
def random_experts(
    recipe: str,
    num: int,
    hidden: int,
    intermediate: int,
    *,
    seed: int = 0,
    has_bias: bool = False,
) -> ExpertWeights:
    """Gaussian experts, on the CPU; nobody may write to them."""
    rng = torch.Generator().manual_seed(seed)
    w13 = (
        torch.randn(num, 2 * intermediate, hidden, dtype=torch.float32, generator=rng) / hidden**0.5
    )
    w2 = (
        torch.randn(num, hidden, intermediate, dtype=torch.float32, generator=rng)
        / intermediate**0.5
    )
    b13 = (
        torch.randn(num, 2 * intermediate, dtype=torch.float32, generator=rng) if has_bias else None
    )
    b2 = torch.randn(num, hidden, dtype=torch.float32, generator=rng) if has_bias else None
    return ExpertWeights.quantize(w13.bfloat16(), w2.bfloat16(), recipe, b13=b13, b2=b2)


# fmt: off
ROUTINGS = {
    "uniform":  "every expert equally likely",
    "zipf":     "a few busy experts",
    "masked":   "a fifth of the slots masked, one token without any",
    "repeated": "the same expert in every slot of a token",
    "one":      "all tokens to one expert",
    "all_masked": "every slot masked",
}
# fmt: on


def random_inputs(
    num_tokens: int, num_experts: int, top_k: int, hidden: int, routing: str, seed: int = 0
) -> Inputs:
    """Gaussian tokens and a routing of ROUTINGS, on the CPU."""
    one_of(routing, tuple(ROUTINGS), "routing")
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, hidden, dtype=torch.float32, generator=rng).bfloat16()
    skew = "zipf" if routing in ("zipf", "masked") else "uniform"
    masked = 0.2 if routing == "masked" else 0.0
    idx, gates = sample_routing(
        num_tokens, num_experts, top_k, skew=skew, masked_ratio=masked, seed=seed
    )
    if routing == "masked" and num_tokens:
        idx[-1] = -1
    elif routing == "repeated":
        idx[:] = idx[:, :1].clone()
    elif routing == "one":
        idx[:] = num_experts - 1
    elif routing == "all_masked":
        idx[:] = -1
    return x, idx, gates
