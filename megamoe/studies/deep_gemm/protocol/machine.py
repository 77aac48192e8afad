"""Machine: memory that keeps its secrets, and actors that take steps on it in any order.

Memory model. A plain store goes into its actor's buffer and becomes visible at some later moment,
in any order, at the latest when the actor releases. Atomics act on memory at once; with release
they first empty the actor's buffer. A plain load must see something that became visible before
the actor's last acquire: otherwise the device could have loaded it early, and that is a race. Time
is global, so release and acquire are cumulative, as on the device; scopes are not told apart.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from megamoe.studies.deep_gemm.protocol.ops import (
    ADD,
    ARRIVE,
    CALL,
    LOAD,
    STORE,
    WAIT,
    WAITS,
    Op,
    Steps,
    Violation,
)
from megamoe.studies.deep_gemm.protocol.words import Words


class Actor:
    """One role of one SM (or a rank's host, sm -1): its steps, its stores on the way, its clock."""

    __slots__ = (
        "acquired_at", "buffer", "is_listed", "is_parked", "op", "rank", "role", "sm", "steps",
    )  # fmt: skip

    def __init__(self, rank: int, sm: int, role: str, steps: Steps, now: int) -> None:
        self.rank, self.sm, self.role, self.steps = rank, sm, role, steps
        self.buffer: dict[int, object] = {}
        self.acquired_at = now
        self.is_parked = False
        self.is_listed = False  # among the machine's `buffered`
        self.op: Op = next(steps)

    def __repr__(self) -> str:
        return f"rank {self.rank} SM {self.sm} {self.role}" if self.sm >= 0 else f"host {self.rank}"


class Waiting(NamedTuple):
    """Who waits for what: the fields of a timeout record."""

    rank: int
    sm: int
    role: str
    what: str
    tag: int
    word: str
    expected: int
    seen: int

    def __str__(self) -> str:
        who = f"rank {self.rank} SM {self.sm} {self.role}" if self.sm >= 0 else f"host {self.rank}"
        return (
            f"{who} waits for {self.what} {self.tag}: {self.word} "
            f"expected {self.expected:#x}, seen {self.seen:#x}"
        )


class Cells(dict[int, Any]):
    """Memory that is zero until it is written; only touched cells cost anything."""

    def __missing__(self, cell: int) -> int:
        return 0


Choose = Callable[[list[Actor]], int]  # the place of the next actor among those that can run


class Machine:
    """Cells, actors, and the one loop that runs them."""

    def __init__(self, words: Words, *, rng: Random, drain: float) -> None:
        """`drain`: the chance per step that one buffered store becomes visible; 1.0 is at once."""
        self.words, self.rng, self.drain = words, rng, drain
        self.cells: Cells = Cells()
        self.written: dict[int, tuple[int, Actor | None]] = {}  # when and by whom
        self.runnable: list[Actor] = []
        self.parked: dict[int, list[Actor]] = {}
        self.live: dict[Actor, None] = {}  # in order of start: runs are reproducible
        self.buffered: list[Actor] = []
        self.time = 0
        self.abort_cells = [words.at("abort_flag", r) for r in range(words.shape.num_ranks)]
        self.on_end: Callable[[Actor], None] = lambda actor: None

    # -- actors --------------------------------------------------------------------------------

    def start(self, rank: int, sm: int, role: str, steps: Steps) -> Actor:
        """Add an actor; it may take its first step."""
        actor = Actor(rank, sm, role, steps, self.time)
        self.live[actor] = None
        self.runnable.append(actor)
        return actor

    def run(self, choose: Choose, limit: int = 1 << 62) -> None:
        """Take steps until nobody can, or until `limit` steps were taken."""
        runnable, cells, drain, random = self.runnable, self.cells, self.drain, self.rng.random
        lazy = 0.0 < drain < 1.0
        while self.time < limit:
            if not runnable and not self._settle():
                return
            place = choose(runnable)
            actor = runnable[place]
            op = actor.op
            self.time += 1
            if op[0] == WAIT:
                value = cells[op[1]]
                if value & op[2] != op[3]:
                    self._block(place, actor, op)
                    continue
                if op[6]:
                    actor.acquired_at = self.time
            else:
                value = self._act(actor, op)
            try:
                actor.op = actor.steps.send(value)
            except StopIteration:
                self._leave(place)
                self._end(actor)
            if lazy and random() < drain:
                self._drain_one()

    def waiting(self) -> list[Waiting]:
        """Everyone who waits, and for what; the likely cause comes first."""
        found = []
        for actor in self.live:
            if actor.op[0] == WAIT:
                _, cell, mask, expected, what, tag, _, _ = actor.op
                seen = self.cells[cell] & mask
                word = self.words.name(cell)
                found.append(
                    Waiting(actor.rank, actor.sm, actor.role, what, tag, word, expected, seen)
                )
        return sorted(found, key=lambda w: (WAITS.index(w.what), *w))

    def replace(self, actor: Actor, steps: Steps) -> None:
        """Let an actor go on with other steps: a wait that ran past its bound."""
        actor.steps.close()
        actor.steps, actor.op = steps, next(steps)
        if actor.is_parked:
            self._wake(actor)

    def kill(self, actor: Actor) -> None:
        """End an actor that never runs: what tearing down its launch does."""
        actor.steps.close()
        self._end(actor)

    def wake_rank(self, rank: int) -> None:
        """Let every waiting role of a rank look at its abort flag."""
        for actor in self.live:
            if actor.is_parked and actor.rank == rank:
                self._wake(actor)

    def _block(self, place: int, actor: Actor, op: Op) -> None:
        self._leave(place)
        if op[7] and self.cells[self.abort_cells[actor.rank]]:
            actor.steps.close()
            self._end(actor)
        else:
            actor.is_parked = True
            self.parked.setdefault(op[1], []).append(actor)

    def _leave(self, place: int) -> None:
        last = self.runnable.pop()
        if place < len(self.runnable):
            self.runnable[place] = last

    def _wake(self, actor: Actor) -> None:
        actor.is_parked = False
        self.runnable.append(actor)

    def _end(self, actor: Actor) -> None:
        del self.live[actor]
        self.on_end(actor)

    # -- memory --------------------------------------------------------------------------------

    def write(self, cell: int, value: object, by: Actor | None = None) -> None:
        """Make a value visible, and wake who waits for the cell."""
        self.cells[cell] = value
        self.written[cell] = (self.time, by)
        if cell in self.parked:
            for actor in self.parked.pop(cell):
                if actor.is_parked:
                    self._wake(actor)

    def flush(self, actor: Actor) -> None:
        """Make all stores of an actor visible."""
        buffer, actor.buffer = actor.buffer, {}
        for cell, value in buffer.items():
            self.write(cell, value, actor)

    def _settle(self) -> bool:
        """Nobody can run: stores on their way arrive at last. Whether that woke someone."""
        for actor in self.buffered:
            actor.is_listed = False
            self.flush(actor)
        self.buffered.clear()
        return bool(self.runnable)

    def _drain_one(self) -> None:
        if not self.buffered:
            return
        actor = self.rng.choice(self.buffered)
        if actor.buffer:
            cell = self.rng.choice(list(actor.buffer))
            self.write(cell, actor.buffer.pop(cell), actor)
        else:
            actor.is_listed = False
            self.buffered.remove(actor)

    def _act(self, actor: Actor, op: Op) -> object:
        code, cell = op[0], op[1]
        if code == LOAD:
            if cell in actor.buffer:
                return actor.buffer[cell]
            at, by = self.written.get(cell, (0, None))
            if at > actor.acquired_at and by is not actor:
                raise Violation(
                    f"race: {actor} loads {self.words.name(cell)}, "
                    f"written by {by} after its last acquire"
                )
            return self.cells[cell]
        if code == STORE:
            if self.drain == 1.0:
                self.write(cell, op[2], actor)
                return None
            if not actor.is_listed:
                actor.is_listed = True
                self.buffered.append(actor)
            actor.buffer[cell] = op[2]
            return None
        if code == CALL:
            return op[2]()
        if code == ARRIVE:
            self._arrive(actor, cell)
            return None
        if op[4]:
            self.flush(actor)
        elif cell in actor.buffer:
            self.write(cell, actor.buffer.pop(cell), actor)
        old: int = self.cells[cell]
        new = (old + op[2]) & op[3] if code == ADD else old | op[2]
        self.write(cell, new, actor)
        if cell in self.abort_cells:
            self.wake_rank(self.abort_cells.index(cell))
        return old

    def _arrive(self, actor: Actor, cell: int) -> None:
        self.flush(actor)
        left, total = self.cells[cell + 1]
        if left > 1:
            self.cells[cell + 1] = (left - 1, total)
        else:
            self.cells[cell + 1] = (total, total)
            self.write(cell, self.cells[cell] ^ 1, actor)
