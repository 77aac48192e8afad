"""Timeline: when who did what. Simulated or measured, the same value; pictures are made of it.

A span is one thing that one place did without a break. A place is an SM of a rank, or one of the
rank's two lanes: rows coming in over the links, results going out. A place does one thing at a
time, except that an SM loads weights beside it. Every figure here is computed from the spans alone,
so a measured timeline answers the same questions as a simulated one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from megamoe.errors import RangeError, require

ROWS_IN, RESULTS_OUT = -1, -2  # the `sm` of a lane
LANES = {ROWS_IN: "rows in", RESULTS_OUT: "results out"}

# fmt: off
# role -> what the place does. Lanes have pull and scatter, SMs the others; load only if measured.
ROLES = {
    "launch":  "the host's launch reaches the GPU",
    "route":   "tokens are counted per expert and the ranks exchange the counts",
    "pull":    "rows of tokens come in from the ranks that own them",
    "math":    "one block of a matrix product, its epilogue included",
    "stage":   "rows are moved and nothing else: permute, activation, tokens into the pool",
    "wait":    "nothing to do yet; the phase says what is waited for",
    "scatter": "finished rows go home over the links",
    "combine": "each token's rows are added up",
    "load":    "weights of one block come in, beside whatever else the SM does",
}
# phase of a wait -> what is waited for
WAITS = {
    "rows":    "rows that have not arrived: exposed communication",
    "tokens":  "the rank's own tokens, on their way into expert order",
    "l1":      "L1 blocks that an L2 block reads",
    "weights": "the first weights of a block",
    "results": "results still on their way home: exposed communication",
    "ranks":   "ranks that have more work",
    "barrier": "the barrier between ranks, or between the SMs of one",
}
# fmt: on
EXPOSED = ("rows", "results")


class Span(NamedTuple):
    """What one place did from start to end. -1 where a field has no meaning."""

    rank: int
    sm: int  # or ROWS_IN, RESULTS_OUT
    role: str
    start_us: float
    end_us: float
    phase: str = ""  # "l1", "l2", "dispatch", ...; of a wait: what is waited for
    wave: int = -1
    expert: int = -1  # local
    m: int = -1
    n: int = -1

    @property
    def time_us(self) -> float:
        """How long."""
        return self.end_us - self.start_us


class Summary(NamedTuple):
    """The figures of a timeline."""

    total_us: float
    busy: tuple[tuple[str, float], ...]  # role -> share of all SMs, or of all lanes of its kind
    exposed_us: float  # waiting for rows or results: mean over all SMs
    tail_us: float  # from the mean end of an SM's last block to the rank's last: worst rank
    imbalance: float  # the busiest rank's matrix time over the mean, 1 is even


@dataclass(frozen=True, slots=True, repr=False)
class Timeline:
    """All spans of one call on all ranks."""

    name: str
    num_ranks: int
    num_sms: int  # per rank
    spans: tuple[Span, ...]
    source: str = "simulated"
    study: str = ""  # what must be said where this is no launch of this library
    note: str = ""  # what must be said beside every figure

    def __post_init__(self) -> None:
        require(
            self.num_ranks >= 1 and self.num_sms >= 1,
            "a timeline needs at least one rank and one SM",
            got=f"{self.num_ranks} ranks of {self.num_sms} SMs",
            kind=RangeError,
        )
        wrong = next((s for s in self.spans if not self._is_legal(s)), None)
        require(
            wrong is None,
            f"a span must have a role of {', '.join(ROLES)}, a place that exists and a start >= 0 "
            "that is not after its end",
            got=wrong,
            kind=RangeError,
        )

    def _is_legal(self, span: Span) -> bool:
        rank, sm, role, start, end = span[:5]
        place = -2 <= sm < self.num_sms and 0 <= rank < self.num_ranks
        return place and role in ROLES and 0.0 <= start <= end

    @property
    def total_us(self) -> float:
        """When the last span ends."""
        return max((span.end_us for span in self.spans), default=0.0)

    @property
    def num_waves(self) -> int:
        """Waves of the rank that has most."""
        return max((span.wave for span in self.spans), default=-1) + 1

    def summary(self) -> Summary:
        """Every figure, in one pass over the spans."""
        total = self.total_us
        sums = dict.fromkeys(ROLES, 0.0)
        exposed = 0.0
        math = [0.0] * self.num_ranks
        ends = [[0.0] * self.num_sms for _ in range(self.num_ranks)]
        for rank, sm, role, start, end, phase, *_ in self.spans:
            sums[role] += end - start
            if role == "math":
                math[rank] += end - start
                ends[rank][sm] = max(ends[rank][sm], end)
            elif role == "wait" and phase in EXPOSED:
                exposed += end - start
        places = dict.fromkeys(ROLES, self.num_ranks * self.num_sms)
        places.update(pull=self.num_ranks, scatter=self.num_ranks)
        mean = sum(math) / len(math)
        return Summary(
            total_us=total,
            busy=tuple(
                (role, sums[role] / places[role] / total if total else 0.0) for role in sums
            ),
            exposed_us=exposed / places["wait"],
            tail_us=max(_tail(rank) for rank in ends),
            imbalance=max(math) / mean if mean else 1.0,
        )

    @property
    def remarks(self) -> tuple[str, ...]:
        """What every picture and file says of it beside its source."""
        return tuple(text for text in (self.study, self.note) if text)

    def __repr__(self) -> str:
        places = f"{self.num_ranks} x {self.num_sms} SMs, {len(self.spans)} spans"
        return f"Timeline({self.name}: {places}, {self.source})"

    def __str__(self) -> str:
        s = self.summary()
        busy = ", ".join(f"{role} {share:.1%}" for role, share in s.busy if share >= 0.0005)
        return "\n".join(
            (
                f"{self.name} ({self.source}): {self.num_ranks} x {self.num_sms} SMs, "
                f"{len(self.spans)} spans",
                *self.remarks,
                f"  total      {s.total_us:>11,.1f} us",
                f"  exposed    {s.exposed_us:>11,.1f} us  of communication, mean over SMs",
                f"  tail       {s.tail_us:>11,.1f} us  of the worst rank",
                f"  imbalance  {s.imbalance:>11.2f}     busiest rank over the mean",
                f"  busy       {busy}",
            )
        )


def _tail(ends: list[float]) -> float:
    worked = [end for end in ends if end > 0.0]
    return max(worked) - sum(worked) / len(worked) if worked else 0.0


def merged(
    intervals: Iterable[tuple[float, float, int]], gap_us: float
) -> list[tuple[float, float, int]]:
    """(start, end, wave) intervals with those of one wave joined across gaps up to `gap_us`.

    >>> merged([(0.0, 1.0, 0), (1.1, 2.0, 0), (2.0, 3.0, 1)], 0.2)
    [(0.0, 2.0, 0), (2.0, 3.0, 1)]
    """
    joined: list[tuple[float, float, int]] = []
    for start, end, wave in intervals:
        if joined and joined[-1][2] == wave and start <= joined[-1][1] + gap_us:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end), wave)
        else:
            joined.append((start, end, wave))
    return joined
