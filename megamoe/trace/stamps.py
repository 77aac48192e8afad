"""What the roles of a fused launch stamped, as a value and as a file. Standard library only.

`layout.stamps` says what a stamp is and where it lies.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from megamoe.errors import FileError, RangeError, require
from megamoe.layout.regions import ceil_div
from megamoe.layout.stamps import L1, L2, MATH
from megamoe.planner.launches import GemmSwapAb
from megamoe.problem import Problem
from megamoe.simulator.sample import Counts, checked

FORMAT = "megamoe stamps 2"
_WRAP = 1 << 32


class Event(NamedTuple):
    """One event as it was stamped."""

    cta: int
    role: int
    kind: int
    ticket: int
    begin: int  # ns, 32 bits
    end: int


class Tile(NamedTuple):
    """A tile of tokens: which of its expert's."""

    expert: int  # local
    m: int


@dataclass(frozen=True, slots=True)
class Recording:
    """One traced launch, and what is needed to read it."""

    name: str  # "flash-ep8/8"
    problem: Problem
    counts: Counts  # rows that rank r sends to expert e
    block_m: int  # tokens of a tile
    block_n: int  # weight rows
    block_k: int  # columns of a stage
    num_n_tiles: tuple[int, int]  # tiles of weights of one tile of tokens, L1 and L2
    num_ctas: int  # of all ranks
    events: tuple[Event, ...]
    plain_us: float | None = None  # the call without stamps, CUDA events, median
    traced_us: float | None = None  # and with them
    provenance: str = ""
    num_stages: int = 0  # of the ring in shared memory; 0: as many as the planner gives the tile
    tile: GemmSwapAb | None = None  # the plan's; None: a file that has only the sizes

    def __post_init__(self) -> None:
        ranks = self.problem.num_ranks
        checked(self.problem, self.counts)
        require(
            self.num_ctas >= ranks and self.num_ctas % ranks == 0,
            "CTAs must divide evenly over the ranks",
            got=f"{self.num_ctas} CTAs, {ranks} ranks",
            kind=RangeError,
        )
        sizes = (self.block_m, self.block_n, self.block_k, *self.num_n_tiles)
        require(min(sizes) >= 1, "a tile has at least one row", got=sizes, kind=RangeError)
        wrong = next((e for e in self.events if not 0 <= e.cta < self.num_ctas), None)
        require(wrong is None, f"there are {self.num_ctas} CTAs", got=wrong, kind=RangeError)

    @property
    def ctas_per_rank(self) -> int:
        return self.num_ctas // self.problem.num_ranks

    def tiles(self, rank: int) -> tuple[Tile, ...]:
        """The tiles of tokens of a rank, in the order of tickets."""
        local = self.problem.num_local_experts
        own = range(rank * local, (rank + 1) * local)
        blocks = [ceil_div(sum(sent[e] for sent in self.counts), self.block_m) for e in own]
        return tuple(Tile(e, m) for e, count in enumerate(blocks) for m in range(count))

    @property
    def overhead(self) -> float | None:
        """What stamping costs, as a share of the call."""
        if self.plain_us is None or self.traced_us is None:
            return None
        return self.traced_us / self.plain_us - 1

    def faults(self) -> tuple[str, ...]:
        """Why the events are not those of a whole launch; empty where they are."""
        faults = []
        for rank in range(self.problem.num_ranks):
            num = len(self.tiles(rank)) * sum(self.num_n_tiles)
            times = [
                e.ticket
                for e in self.events
                if e.role == MATH and e.kind in (L1, L2) and e.cta // self.ctas_per_rank == rank
            ]
            missing, odd = set(range(num)) - set(times), set(times) - set(range(num))
            twice = len(times) - len(set(times))
            for count, what in ((len(missing), "no block"), (twice, "more than one")):
                if count:
                    faults.append(f"rank {rank}: {count} of {num} tickets have {what}")
            if odd:
                faults.append(f"rank {rank}: tickets beyond {num}, such as {min(odd)}")
        return tuple(faults)

    def to_json(self) -> str:
        """The file: facts, and events as one row of numbers a CTA and role."""
        rows: dict[tuple[int, int], list[int]] = {}
        for e in self.events:
            rows.setdefault((e.cta, e.role), []).extend(e[2:])
        facts = {**asdict(self), "events": [[*key, *row] for key, row in sorted(rows.items())]}
        return json.dumps({"format": FORMAT, **facts}, separators=(",", ":")) + "\n"

    @staticmethod
    def from_json(text: str) -> Recording:
        """Read what `to_json` wrote; anything else is refused."""
        try:
            data = json.loads(text)
            require(
                isinstance(data, dict) and data.pop("format", None) == FORMAT,
                f"a file of stamps says {FORMAT!r} as its format",
                got="another file",
                fix="megamoe trace writes one: stamps.json",
                kind=FileError,
            )
            data["problem"] = Problem(**data["problem"])
            data["counts"] = tuple(map(tuple, data["counts"]))
            if data.get("tile") is not None:
                data["tile"] = GemmSwapAb(**data["tile"])
            data["num_n_tiles"] = tuple(data["num_n_tiles"])
            data["events"] = tuple(_events(data["events"]))
            return Recording(**data)
        except (ValueError, TypeError, KeyError) as error:
            raise FileError(f"stamps must be readable; got {error}") from error


def _events(rows: Iterable[Sequence[int]]) -> Iterable[Event]:
    for cta, role, *numbers in rows:
        require(len(numbers) % 4 == 0, "an event is four numbers", got=len(numbers), kind=FileError)
        for at in range(0, len(numbers), 4):
            yield Event(cta, role, *numbers[at : at + 4])


def events_of(stamps: Any) -> tuple[Event, ...]:
    """The used events of a stamp buffer: nested lists, or an array or tensor that gives them."""
    ctas = stamps.tolist() if hasattr(stamps, "tolist") else stamps
    return tuple(
        Event(cta, role, kind, ticket, begin % _WRAP, end % _WRAP)
        for cta, roles in enumerate(ctas)
        for role, events in enumerate(roles)
        for kind, ticket, begin, end in events
        if kind
    )


def first_ns(events: Sequence[Event]) -> int:
    """The earliest begin, where the 32 bits may have wrapped within the launch.

    >>> first_ns([Event(0, 0, 1, 0, 5, 9), Event(1, 0, 1, 0, 2**32 - 3, 4)])
    4294967293
    """
    if not events:
        return 0
    origin = events[0].begin
    return (origin + min(since(e.begin, origin) for e in events)) % _WRAP


def since(ns: int, first: int) -> int:
    """Nanoseconds from `first` to `ns`, less than 2.1 s apart: negative where it is before."""
    return (ns - first + _WRAP // 2) % _WRAP - _WRAP // 2
