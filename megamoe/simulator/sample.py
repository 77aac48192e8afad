"""Counts without tensors: how many rows each rank sends to each expert, sampled or given.

counts[rank][expert] is over all experts. `routing/samplers.py` draws real indices with torch;
this one draws the same skews with the standard library, because the simulator needs sums only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from random import Random

from megamoe.errors import DTypeError, ShapeError, one_of, require
from megamoe.problem import Problem

Counts = tuple[tuple[int, ...], ...]

# fmt: off
SKEWS = {
    "even":       "perfectly even: every expert gets the same rows, up to one",
    "uniform":    "every expert equally likely",
    "zipf":       "expert e with probability ~ 1 / (rank of e), ranks shuffled",
    "dirichlet":  "probabilities drawn from Dirichlet(0.3): a few hot experts, many cold ones",
    "hot_expert": "every token sends one slot to the same expert, the others are uniform",
    "hot_rank":   "every token goes to experts of one rank only",
    "masked":     "every slot is masked: no rows at all",
}
# fmt: on
LEAST = (
    1e-4  # of the mean popularity: no expert is so cold that drawing top_k of them takes forever
)


def sample_counts(problem: Problem, skew: str = "uniform", seed: int = 0) -> Counts:
    """Rows from each rank to each expert; the same seed gives the same counts everywhere.

    A token's experts are distinct: drawn one after the other, a repeat is drawn again.
    """
    one_of(skew, tuple(SKEWS), "skew")
    ranks, experts = range(problem.num_ranks), problem.num_experts
    if skew == "masked":
        return tuple((0,) * experts for _ in ranks)
    if skew == "even":
        return tuple(_even(problem, rank) for rank in ranks)
    rng = Random(seed)
    hot = rng.randrange(experts)
    always = hot if skew == "hot_expert" else None
    popularity = _popularity(problem, skew, hot, rng)
    return tuple(_draw(problem, popularity, always, rng) for _ in ranks)


def checked(problem: Problem, counts: Sequence[Sequence[int]]) -> Counts:
    """Given counts as a value, or an error: one row per rank, one column per expert."""
    ranks, experts = problem.num_ranks, problem.num_experts
    widths = {len(row) for row in counts}
    require(
        len(counts) == ranks and widths == {experts},
        f"counts must be {ranks} ranks by {experts} experts",
        got=f"{len(counts)} by {sorted(widths)}",
        fix="counts[rank][expert] are the rows that a rank sends to an expert",
        kind=ShapeError,
    )
    wrong = next((c for row in counts for c in row if not isinstance(c, int) or c < 0), None)
    require(
        wrong is None,
        "counts must be integers that are not negative",
        got=repr(wrong),
        kind=DTypeError,
    )
    max_slots = problem.num_tokens * problem.top_k
    sent = max(sum(row) for row in counts)
    require(
        sent <= max_slots,
        f"a rank sends at most num_tokens * top_k = {max_slots} rows",
        got=sent,
        fix="plan for more tokens",
        kind=ShapeError,
    )
    return tuple(tuple(row) for row in counts)


def _even(problem: Problem, rank: int) -> tuple[int, ...]:
    # Ranks take turns with the remainder, so that every expert gets the same over all of them.
    experts = problem.num_experts
    each, rest = divmod(problem.num_tokens * problem.top_k, experts)
    first = rank * rest
    return tuple(each + ((e - first) % experts < rest) for e in range(experts))


def _popularity(problem: Problem, skew: str, hot: int, rng: Random) -> list[float]:
    experts = problem.num_experts
    if skew == "zipf":
        weights = [1.0 / (place + 1) for place in range(experts)]
        rng.shuffle(weights)
    elif skew == "dirichlet":
        weights = [rng.gammavariate(0.3, 1.0) for _ in range(experts)]
    elif skew == "hot_rank":
        local = problem.num_local_experts
        require(
            local >= problem.top_k,
            "a hot rank needs at least top_k experts",
            got=f"{local} experts a rank, top_k {problem.top_k}",
            fix="use fewer ranks, or another skew",
            kind=ShapeError,
        )
        return [float(e // local == hot // local) for e in range(experts)]
    else:
        weights = [1.0] * experts
    least = LEAST * sum(weights) / experts
    return [max(weight, least) for weight in weights]


def _draw(
    problem: Problem, popularity: list[float], always: int | None, rng: Random
) -> tuple[int, ...]:
    counts = [0] * problem.num_experts
    cumulative = list(accumulate(popularity))
    everyone = range(problem.num_experts)
    top_k = problem.top_k
    fresh = top_k - (always is not None)
    draws = iter(rng.choices(everyone, cum_weights=cumulative, k=problem.num_tokens * fresh))
    for _ in range(problem.num_tokens):
        chosen = {next(draws) for _ in range(fresh)}
        if always is not None:
            chosen.add(always)
        while len(chosen) < top_k:
            chosen.add(rng.choices(everyone, cum_weights=cumulative)[0])
        for expert in chosen:
            counts[expert] += 1
    return tuple(counts)
