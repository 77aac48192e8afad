"""Statistics of repeated timings. Standard library only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megamoe.errors import RangeError, require


@dataclass(frozen=True, slots=True)
class Timing:
    """All times of one contestant, a tuple per round, in microseconds."""

    rounds: tuple[tuple[float, ...], ...]
    how: str  # "graph" or "eager"

    def __post_init__(self) -> None:
        require(
            len(self.rounds) > 0 and all(self.rounds),
            "a timing needs at least one time in every round",
            got=self.rounds,
            kind=RangeError,
        )

    @property
    def us(self) -> float:
        """Median of all times."""
        return statistics.median(t for one in self.rounds for t in one)

    @property
    def low_us(self) -> float:
        return min(t for one in self.rounds for t in one)

    @property
    def count(self) -> int:
        return sum(map(len, self.rounds))

    @property
    def spread(self) -> float:
        """Largest distance between two rounds' medians, relative to the median."""
        medians = [statistics.median(one) for one in self.rounds]
        return (max(medians) - min(medians)) / self.us if self.us else 0.0


@dataclass(frozen=True, slots=True)
class Line:
    """A straight line."""

    intercept: float
    slope: float

    def at(self, x: float) -> float:
        return self.intercept + self.slope * x


def line_through(points: Sequence[tuple[float, float]]) -> Line:
    """The line nearest to some points (x, y), by least squares.

    >>> line_through([(1.0, 5.0), (2.0, 7.0), (4.0, 11.0)])
    Line(intercept=3.0, slope=2.0)
    """
    require(
        len({x for x, _ in points}) >= 2,
        "a line needs points at two places or more",
        got=list(points),
        kind=RangeError,
    )
    xs, ys = zip(*points, strict=True)
    slope, intercept = statistics.linear_regression(xs, ys)
    return Line(intercept, slope)


def geomean(values: Sequence[float]) -> float:
    """The geometric mean of positive values.

    >>> round(geomean([1.0, 4.0]), 6)
    2.0
    """
    require(
        len(values) > 0 and all(v > 0 for v in values),
        "a geometric mean needs positive values",
        got=list(values),
        kind=RangeError,
    )
    return math.exp(sum(map(math.log, values)) / len(values))
