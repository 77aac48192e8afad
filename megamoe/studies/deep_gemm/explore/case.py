"""Case: a tiny layer and the calls that run on it back to back; and the cases worth running."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from megamoe.studies.deep_gemm.blocks import Grid
from megamoe.studies.deep_gemm.protocol.words import Shape

FAULTS = ("role", "rank", "timeout")

Table = tuple[tuple[int, ...], ...]  # [tokens][top_k] of one rank; -1 is masked


@dataclass(frozen=True, slots=True)
class Case:
    """What runs.

    calls  [calls][ranks] tables of experts
    fault  None, or what goes wrong in the first call, which must then drain on every rank before
           a reset and the other calls: a "role" that never starts, a "rank" that never launches,
           or a "timeout" at any moment although nothing is wrong
    """

    name: str
    shape: Shape
    calls: tuple[tuple[Table, ...], ...]
    fault: str | None = None

    def __str__(self) -> str:
        return self.name


def table(rng: Random, num_tokens: int, top_k: int, num_experts: int, masked: float = 0.0) -> Table:
    """A random table; the same expert may stand twice in a row."""
    return tuple(
        tuple(-1 if rng.random() < masked else rng.randrange(num_experts) for _ in range(top_k))
        for _ in range(num_tokens)
    )


def random_calls(
    seed: int, tokens: Sequence[Sequence[int]], top_k: int, num_experts: int, masked: float = 0.0
) -> tuple[tuple[Table, ...], ...]:
    """One call for each row of `tokens`, which holds the number of tokens of each rank."""
    rng = Random(seed)
    return tuple(
        tuple(table(rng, num, top_k, num_experts, masked) for num in ranks) for ranks in tokens
    )


def same(calls: Sequence[Sequence[int]], row: Sequence[int]) -> tuple[tuple[Table, ...], ...]:
    """Every token of every rank has the same experts."""
    return tuple(tuple((tuple(row),) * num for num in ranks) for ranks in calls)


def random_case(seed: int) -> Case:
    """A small case of any kind: ranks, SMs, tiles, waves, ring, lag, tokens, masks, calls."""
    rng = Random(seed)
    num_ranks, local = rng.choice((1, 2, 2, 3, 4)), rng.randint(1, 3)
    num_experts, max_tokens = num_ranks * local, rng.randint(1, 4)
    block_m = rng.randint(1, 3)
    shape = Shape(
        num_ranks=num_ranks,
        num_sms=rng.randint(1, 4),
        num_experts=num_experts,
        top_k=rng.randint(1, min(3, num_experts)),
        max_tokens=max_tokens,
        grid=Grid(block_m, rng.randint(1, 3), rng.randint(1, 3)),
        experts_per_wave=rng.randint(1, local),
        ring_rows=rng.choice((None, block_m, 2 * block_m, 3 * block_m)),
        lag=rng.choice((None, None, 0, 1, 2)),
        num_stages=rng.randint(1, 3),
    )
    tokens = [[rng.randint(0, max_tokens) for _ in range(num_ranks)] for _ in range(3)]
    masked = rng.choice((0.0, 0.3))
    calls = random_calls(seed, tokens, shape.top_k, num_experts, masked)
    return Case(f"random {seed}", shape, calls)


# Two ranks of four SMs: the case that is explored most.
_TWO = Shape(2, 4, 4, 2, 4, Grid(2, 2, 2), experts_per_wave=1)
_MIXED = random_calls(5, [(3, 2), (1, 4)], 2, 4, masked=0.15)


def _cases() -> tuple[Case, ...]:
    one = Shape(1, 3, 3, 2, 5, Grid(2, 2, 1), experts_per_wave=2)
    four = Shape(4, 2, 8, 2, 3, Grid(2, 2, 1), experts_per_wave=2)
    ring = replace(_TWO, num_sms=2, max_tokens=5)  # 20 rows at most, 12 blocks of 2 with padding
    wide = Shape(2, 2, 2, 1, 2, Grid(2, 64, 1), experts_per_wave=1)
    wider = replace(wide, grid=Grid(2, 66, 1))
    skewed = same([(5, 4), (2, 5)], (1, 1))
    return (
        Case("two ranks", _TWO, _MIXED),
        Case("one rank", one, random_calls(1, [(5,), (0,), (3,)], 2, 3, masked=0.2)),
        Case("four ranks, some empty", four, random_calls(2, [(0, 3, 1, 0), (2, 0, 0, 3)], 2, 8)),
        Case("no tokens at all", _TWO, random_calls(3, [(0, 0), (2, 1), (0, 0)], 2, 4)),
        Case("all to one expert", replace(_TWO, max_tokens=5), same([(5, 4), (1, 5)], (3, 3))),
        Case("same expert twice", _TWO, same([(3, 2), (2, 3)], (0, 0))),
        Case("everything masked", _TWO, same([(3, 2), (2, 2)], (-1, -1))),
        Case("half a ring", replace(ring, ring_rows=10), skewed),
        Case("quarter of a ring", replace(ring, ring_rows=6), skewed),
        Case("ring of one block", replace(ring, ring_rows=2), random_calls(6, [(5, 3)], 2, 4)),
        Case("L2 behind L1", replace(_TWO, lag=1, experts_per_wave=2), _MIXED),
        Case("64 blocks in a mask", wide, same([(2, 1)], (1,))),
        Case("66 blocks in a mask", wider, same([(1, 1)], (0,))),
        Case("five calls", replace(_TWO, num_sms=2), random_calls(
            8, [(1, 1), (0, 2), (2, 0), (1, 2), (2, 1)], 2, 4, masked=0.2)),
        Case("absent role", replace(_TWO, num_sms=2), _MIXED, "role"),
        Case("absent rank", replace(_TWO, num_sms=2), _MIXED, "rank"),
        Case("planted timeout", replace(ring, ring_rows=6), skewed, "timeout"),
    )  # fmt: skip


CASES: dict[str, Case] = {case.name: case for case in _cases()}
