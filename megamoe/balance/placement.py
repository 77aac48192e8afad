"""Placement: which experts lie on which rank, hot ones more than once; and a proposal for one.

A *logical* expert is one of the model's; a *physical* one is a place on a rank that holds a copy of
it. Place i of rank r is physical expert r * slots_per_rank + i. Every copy gives the same bits, so
a placement changes who works, never the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from heapq import heapify, heapreplace
from pathlib import Path
from typing import Any

from megamoe.balance.files import read_json, write_json
from megamoe.errors import FileError, MegaMoEError, RangeError, ShapeError, require
from megamoe.problem import check_even

KIND, VERSION = "megamoe.placement", 1


@dataclass(frozen=True, slots=True)
class Placement:
    """slots[rank][i] is the logical expert in place i of a rank; all ranks have as many places."""

    num_experts: int  # logical experts of the layer
    slots: tuple[tuple[int, ...], ...]  # by rank: the logical expert of each place

    def __post_init__(self) -> None:
        widths = {len(row) for row in self.slots}
        require(
            len(widths) == 1 and min(widths) >= 1,
            "every rank must hold as many experts, at least one",
            got=[len(row) for row in self.slots],
            kind=ShapeError,
        )
        for rank, row in enumerate(self.slots):
            wrong = next((e for e in row if not 0 <= e < self.num_experts), None)
            require(
                wrong is None,
                f"experts must lie between 0 and {self.num_experts - 1}",
                got=f"{wrong} on rank {rank}",
                kind=RangeError,
            )
            twice = next((e for e in row if row.count(e) > 1), None)
            require(
                twice is None,
                "a rank must not hold the same expert twice",
                got=f"{twice} on rank {rank}",
                kind=RangeError,
            )
        missing = sorted(set(range(self.num_experts)).difference(*self.slots))
        require(
            not missing,
            "every expert must stand on some rank",
            got=f"none of {missing[:8]}",
            kind=RangeError,
        )

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int) -> Placement:
        """The default: expert e on rank e // (num_experts / num_ranks), each once.

        num_experts  over all ranks, a multiple of num_ranks
        """
        check_even(num_experts, num_ranks)
        local = num_experts // num_ranks
        return cls(
            num_experts,
            tuple(tuple(range(r * local, (r + 1) * local)) for r in range(num_ranks)),
        )

    @classmethod
    def from_dict(cls, parts: Any) -> Placement:
        """Out of the parts that JSON keeps.

        parts  a dictionary of num_experts and slots
        """
        return cls(parts["num_experts"], tuple(map(tuple, parts["slots"])))

    def save(self, path: str | Path) -> None:
        """Write JSON."""
        write_json(path, {"kind": KIND, "version": VERSION, **asdict(self)})

    @classmethod
    def load(cls, path: str | Path) -> Placement:
        """Read what `save`, or `megamoe balance --out`, wrote."""
        data = read_json(path, KIND, VERSION)
        try:
            return cls.from_dict(data)
        except (KeyError, TypeError, MegaMoEError) as error:
            raise FileError(f"{path} must hold a placement; got {error!r}") from error

    @property
    def num_ranks(self) -> int:
        return len(self.slots)

    @property
    def slots_per_rank(self) -> int:
        return len(self.slots[0])

    @property
    def num_physical(self) -> int:
        """Places over all ranks."""
        return self.num_ranks * self.slots_per_rank

    @property
    def is_contiguous(self) -> bool:
        """Whether logical and physical ids are the same."""
        flat = [e for row in self.slots for e in row]
        return flat == list(range(self.num_experts))

    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The physical ids of every logical expert, ascending."""
        places: list[list[int]] = [[] for _ in range(self.num_experts)]
        for rank, row in enumerate(self.slots):
            for place, expert in enumerate(row):
                places[expert].append(rank * self.slots_per_rank + place)
        return tuple(tuple(ids) for ids in places)

    def rank_loads(self, loads: Sequence[float]) -> tuple[float, ...]:
        """Load of each rank when the copies of an expert share its load evenly."""
        counts = [len(ids) for ids in self.replicas()]
        return tuple(sum(loads[e] / counts[e] for e in row) for row in self.slots)

    def imbalance(self, loads: Sequence[float]) -> float:
        """The busiest rank over the mean; 1 is even."""
        ranks = self.rank_loads(loads)
        total = sum(ranks)
        return max(ranks) * len(ranks) / total if total else 1.0

    def spread(self, sent: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """Rows per physical expert out of rows per logical one, [rank][expert] both.

        sent  rows that each rank's tokens ask of each logical expert

        Copies share alike; what does not divide goes to the copies in turn, by rank and expert.
        """
        replicas = self.replicas()
        rows = []
        for rank, row in enumerate(sent):
            out = [0] * self.num_physical
            for expert, num in enumerate(row):
                ids = replicas[expert]
                each, rest = divmod(num, len(ids))
                for i, physical in enumerate(ids):
                    out[physical] += each + ((i - rank - expert) % len(ids) < rest)
            rows.append(tuple(out))
        return tuple(rows)


def propose(
    loads: Sequence[float],
    num_ranks: int,
    slots_per_rank: int,
    current: Placement | None = None,
) -> Placement:
    """A placement that evens out `loads`, the rows of every logical expert. Deterministic.

    slots_per_rank  places of a rank, each for a copy of one expert
    current         a placement in use, or None

    Spare places go one by one to the expert whose copies are busiest; then the copies, busiest
    first, each to the least busy rank with a free place and no such expert yet. `current` is kept
    if it has as many places and is no worse.
    """
    _check(loads, num_ranks, slots_per_rank)
    counts = _copies(loads, num_ranks, num_ranks * slots_per_rank)
    pieces = [(loads[e] / counts[e], e) for e in range(len(loads)) for _ in range(counts[e])]
    pieces.sort(key=lambda piece: (-piece[0], piece[1]))
    ranks: list[set[int]] = [set() for _ in range(num_ranks)]
    busy = [0.0] * num_ranks
    share = {e: loads[e] / counts[e] for e in range(len(loads))}
    for load, expert in pieces:
        free = [r for r in range(num_ranks) if len(ranks[r]) < slots_per_rank]
        fit = [r for r in free if expert not in ranks[r]]
        target = min(fit or free, key=lambda r: (busy[r], r))
        if not fit:
            target = _free_place(expert, target, ranks, busy, share)
        ranks[target].add(expert)
        busy[target] += load
    placement = Placement(len(loads), tuple(tuple(sorted(experts)) for experts in ranks))
    if (
        current is not None
        and (current.num_ranks, current.slots_per_rank) == (num_ranks, slots_per_rank)
        and current.num_experts == len(loads)
        and current.imbalance(loads) <= placement.imbalance(loads)
    ):
        return current
    return placement


def _check(loads: Sequence[float], num_ranks: int, slots_per_rank: int) -> None:
    experts = len(loads)
    require(
        num_ranks >= 1 and slots_per_rank >= 1,
        "ranks and slots per rank must be at least 1",
        got=f"{num_ranks} and {slots_per_rank}",
        kind=ShapeError,
    )
    require(
        num_ranks * slots_per_rank >= experts,
        f"{experts} experts need as many places",
        got=f"{num_ranks} ranks with {slots_per_rank} each",
        fix=f"use at least {-(-experts // num_ranks)} slots per rank",
        kind=ShapeError,
    )
    require(
        slots_per_rank <= experts,
        f"a rank holds at most all {experts} experts",
        got=f"{slots_per_rank} slots per rank",
        kind=ShapeError,
    )
    wrong = next((load for load in loads if not load >= 0), None)
    require(wrong is None, "loads must not be negative", got=wrong, kind=RangeError)


def _copies(loads: Sequence[float], num_ranks: int, num_physical: int) -> list[int]:
    """Copies of each expert, at most one a rank."""
    counts = [1] * len(loads)
    heap = [(-load, expert) for expert, load in enumerate(loads)]
    heapify(heap)
    for _ in range(num_physical - len(loads)):
        while counts[heap[0][1]] == num_ranks:
            heapreplace(heap, (float("inf"), heap[0][1]))
        expert = heap[0][1]
        counts[expert] += 1
        heapreplace(heap, (-loads[expert] / counts[expert], expert))
    return counts


def _free_place(
    expert: int, target: int, ranks: list[set[int]], busy: list[float], share: dict[int, float]
) -> int:
    """All ranks with a free place hold `expert` already: one of another rank's moves to `target`.

    There is one: a full rank holds more experts than `target`, and some rank lacks `expert`.
    """
    others = [r for r in range(len(ranks)) if expert not in ranks[r]]
    options = [
        (abs(share[e] - share[expert]), r, e) for r in others for e in ranks[r] - ranks[target]
    ]
    _, giver, moved = min(options)
    ranks[giver].remove(moved)
    busy[giver] -= share[moved]
    ranks[target].add(moved)
    busy[target] += share[moved]
    return giver
