"""How the fitted constants are found: least squares of log ratios over measured cells.

A cell is one rank's share of a layer, timed phase by phase on a pipeline of grouped GEMMs. The fit
changes the FITTED constants alone, by Gauss-Newton on their logarithms, from any start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import exp, log
from typing import NamedTuple

from megamoe.formats.spec import recipe_named
from megamoe.hardware import Hardware
from megamoe.layout.rows import stored_bytes
from megamoe.problem import Problem
from megamoe.simulator.constants import DEFAULT, FITTED, Constants
from megamoe.simulator.sample import Counts, sample_counts
from megamoe.simulator.schedule import Experts, Linear, Phases, Schedule, Step
from megamoe.simulator.staged import run_staged

NUM_STEPS = 4  # of Gauss-Newton; from far off the fifth changes less than 1 in 1000
NUDGE = 0.02  # of a constant's logarithm, for the slopes
SHARES = ("stream_share", "row_share")  # cannot exceed 1
BLOCK = 128  # weight rows and columns of the peer's tiles
FIXED = 40_000  # bytes of its shared memory that are no stages, about


class Times(NamedTuple):
    """Times of one cell in us. The first two are launches alone; chain is L1, activation, L2."""

    l1: float
    l2: float
    chain: float
    full: float


class Cell(NamedTuple):
    """One measured cell: a problem of one rank, the experts that had a row, and the times."""

    name: str
    problem: Problem
    touched: int
    hardware: str
    times: Times

    @property
    def schedule(self) -> Schedule:
        """The peer: 64 rows where they cover an expert, else 128, by 128 weight rows of 128."""
        p, hw = self.problem, Hardware.named(self.hardware)
        block_m = 64 if p.tokens_per_expert <= 64 else 128
        stage = (BLOCK + block_m) * BLOCK + 4 * block_m
        ring = (hw.smem_per_sm - FIXED) // stage * stage
        num_n = (2 * p.intermediate // BLOCK, p.hidden // BLOCK)
        linears = (Linear(block_m, BLOCK, num, ring) for num in num_n)
        tokens = stored_bytes(p.hidden, recipe_named(p.recipe).acts)
        acts = stored_bytes(p.intermediate, recipe_named(p.recipe).acts)
        return Schedule(
            problem=p,
            hardware=hw,
            backend="hopper",
            mode="staged",
            combine="bf16",
            experts=Experts(p, p.num_experts, "fp8", *linears),
            num_sms=hw.num_sms,
            order=Phases(),
            steps=(
                Step("permute", "move", row_bytes=2 * tokens),
                Step("l1", "gemm"),
                Step("activation", "move", row_bytes=4 * p.intermediate + acts),
                Step("l2", "gemm"),
                Step("combine", "combine"),
            ),
            assignment="static",
            writes_gate_up=True,
            study="grouped GEMM peer",
        )

    @property
    def counts(self) -> Counts:
        """As many experts as had a row; sampled where that is all of them."""
        experts, rows = self.problem.num_experts, self.problem.num_tokens * self.problem.top_k
        if self.touched == experts:
            return sample_counts(self.problem, "uniform")
        each, rest = divmod(rows, self.touched)
        full = tuple(each + (e < rest) for e in range(self.touched))
        return (full + (0,) * (experts - self.touched),)

    def predicted(self, constants: Constants = DEFAULT) -> Times:
        """What the simulator says: its steps, without the pictures."""
        how, counts = _prepared(self)
        steps = run_staged(how, counts, constants).steps
        us = dict(steps)
        start, l1, l2 = us["launch"], us["l1"], us["l2"]
        chain = start + l1 + l2 + us["activation"] + 2 * constants.gap_us
        return Times(start + l1, start + l2, chain, sum(time for _, time in steps))


@cache
def _prepared(cell: Cell) -> tuple[Schedule, Counts]:
    return cell.schedule, cell.counts


def log_ratios(cells: Sequence[Cell], constants: Constants) -> list[float]:
    """log(predicted / measured) of every time of every cell."""
    return [
        log(said / measured)
        for cell in cells
        for said, measured in zip(cell.predicted(constants), cell.times, strict=True)
    ]


def fit(cells: Sequence[Cell], start: Constants = DEFAULT) -> Constants:
    """The constants of FITTED that bring all log ratios of the cells nearest to zero."""
    constants = start
    for _ in range(NUM_STEPS):
        here = log_ratios(cells, constants)
        slopes = []
        for name in FITTED:
            there = log_ratios(cells, _moved(constants, {name: -NUDGE}))
            slopes.append([(h - t) / NUDGE for h, t in zip(here, there, strict=True)])
        normal = [[_dot(a, b) for b in slopes] for a in slopes]
        for i, row in enumerate(normal):
            row[i] += 1e-6  # a constant without influence stays where it is
        step = _solve(normal, [-_dot(a, here) for a in slopes])
        constants = _moved(constants, dict(zip(FITTED, step, strict=True)))
    return constants


def _moved(constants: Constants, by: dict[str, float]) -> Constants:
    """Constants times exp(by), at most a factor of two in one step; shares stop at 1."""
    values = {}
    for name, delta in by.items():
        value = getattr(constants, name) * exp(min(max(delta, -log(2)), log(2)))
        values[name] = min(value, 1.0) if name in SHARES else value
    return replace(constants, **values)


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small positive definite system by elimination."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [b - factor * a for a, b in zip(rows[i], rows[j], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution
