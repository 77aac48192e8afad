"""Samplers of routing: from even to hopeless, so that every claim is tested under skew."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from megamoe.errors import RangeError, ShapeError, one_of, require
from megamoe.problem import check_top_k, check_touched

# fmt: off
SKEWS = {
    "uniform":    "every expert equally likely",
    "zipf":       "expert e with probability ~ 1 / (rank of e), ranks shuffled",
    "dirichlet":  "probabilities drawn from Dirichlet(0.3): a few hot experts, many cold ones",
    "hot_expert": "every token sends one slot to the same expert, the others are uniform",
    "hot_rank":   "every token goes to experts of one rank only",
    "masked":     "every slot is -1",
}
# fmt: on


def sample_routing(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    skew: str = "uniform",
    num_ranks: int = 1,
    masked_ratio: float = 0.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Distinct experts per token with the given skew, and positive weights that sum to one.

    returns  topk_idx int64 [T, top_k] and topk_weights float32 [T, top_k], on the CPU
    A share `masked_ratio` of the slots is then masked with -1 (their weights stay).
    """
    one_of(skew, tuple(SKEWS), "skew")
    check_top_k(top_k, num_experts)
    require(
        0.0 <= masked_ratio <= 1.0,
        "masked_ratio must lie between 0 and 1",
        got=masked_ratio,
        kind=RangeError,
    )
    rng = torch.Generator("cpu").manual_seed(seed)
    logits = _log_popularity(skew, num_experts, top_k, num_ranks, rng)
    # Gumbel top-k: sampling without replacement in proportion to popularity.
    noise = torch.empty(num_tokens, num_experts, dtype=torch.float32, device="cpu")
    noise = -noise.exponential_(generator=rng).log()
    topk_idx = (logits + noise).topk(top_k, dim=1).indices
    topk_weights = _weights(num_tokens, top_k, rng)
    if skew == "masked":
        topk_idx.fill_(-1)
    elif masked_ratio:
        topk_idx[_uniform(num_tokens, top_k, rng) < masked_ratio] = -1
    return topk_idx, topk_weights


def even_routing(
    num_tokens: int, num_experts: int, top_k: int, num_touched: int, *, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Distinct experts per token out of `num_touched`, each used as often as the others, up to one.

    returns  as `sample_routing`; the seed picks the experts, more of them with all that fewer have
    """
    check_touched(num_touched, num_tokens, num_experts, top_k)
    rng = torch.Generator("cpu").manual_seed(seed)
    touched = torch.randperm(num_experts, generator=rng, device="cpu")[:num_touched]
    cycle = (
        torch.arange(num_tokens * top_k, device="cpu") % num_touched
    )  # top_k turns in a row are distinct
    return touched[cycle].view(num_tokens, top_k), _weights(num_tokens, top_k, rng)


def _uniform(num_tokens: int, top_k: int, rng: torch.Generator) -> Tensor:
    return torch.rand(num_tokens, top_k, dtype=torch.float32, device="cpu", generator=rng)


def _weights(num_tokens: int, top_k: int, rng: torch.Generator) -> Tensor:
    weights = _uniform(num_tokens, top_k, rng).add_(0.1)
    return weights.div_(weights.sum(dim=1, keepdim=True))


def _log_popularity(
    skew: str, num_experts: int, top_k: int, num_ranks: int, rng: torch.Generator
) -> Tensor:
    """Unnormalised log-probability of each expert; -inf never, +inf always chosen."""
    logits = torch.zeros(num_experts, dtype=torch.float32, device="cpu")
    hot = int(torch.randint(num_experts, (1,), generator=rng, device="cpu"))
    if skew == "zipf":
        places = torch.arange(1, num_experts + 1, dtype=torch.float32, device="cpu")
        logits = -places.log()[torch.randperm(num_experts, generator=rng, device="cpu")]
    elif skew == "dirichlet":
        draw = numpy.random.default_rng(rng.initial_seed()).dirichlet([0.3] * num_experts)
        logits = torch.from_numpy(draw).float().clamp_min(1e-30).log()
    elif skew == "hot_expert":
        logits[hot] = float("inf")
    elif skew == "hot_rank":
        require(
            num_experts % num_ranks == 0 and num_experts // num_ranks >= top_k,
            "a hot rank needs at least top_k experts",
            got=f"{num_experts} experts over {num_ranks} ranks, top_k {top_k}",
            kind=ShapeError,
        )
        per_rank = num_experts // num_ranks
        first = hot // per_rank * per_rank
        logits = torch.full((num_experts,), float("-inf"), dtype=torch.float32, device="cpu")
        logits[first : first + per_rank] = 0.0
    return logits
