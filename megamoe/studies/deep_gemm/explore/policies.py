"""Policies: who takes the next step. All are reproducible from their random generator."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from megamoe.studies.deep_gemm.protocol.machine import Actor, Choose
from megamoe.studies.deep_gemm.protocol.words import Shape
from megamoe.studies.deep_gemm.protocol.world import ROLES

NUM_CHANGES = 4  # of priorities in one run
RUN_STEPS = 2000  # about the length of a run, in which those changes fall


def uniform(rng: Random, shape: Shape) -> Choose:
    """Any of them, with equal chance."""
    random = rng.random
    return lambda runnable: int(random() * len(runnable))


def round_robin(rng: Random, shape: Shape) -> Choose:
    """One step each in turn, from a random start."""
    at = rng.randrange(64)

    def choose(runnable: list[Actor]) -> int:
        nonlocal at
        at += 1
        return at % len(runnable)

    return choose


def newest(rng: Random, shape: Shape) -> Choose:
    """Last in, first out: whoever woke last runs until it waits."""
    return lambda runnable: len(runnable) - 1


def oldest(rng: Random, shape: Shape) -> Choose:
    """The first of the list runs until it waits."""
    return lambda runnable: 0


def bursts(rng: Random, shape: Shape) -> Choose:
    """A random one takes a random number of steps, up to 60."""
    current: Actor | None = None
    left = 0

    def choose(runnable: list[Actor]) -> int:
        nonlocal current, left
        left -= 1
        if left > 0 and current in runnable:
            return runnable.index(current)
        place = int(rng.random() * len(runnable))
        current, left = runnable[place], rng.randint(1, 60)
        return place

    return choose


def priorities(rng: Random, shape: Shape) -> Choose:
    """Each has a random priority and the highest runs; a few times it drops to the lowest."""
    ranks: dict[Actor, float] = {}
    changes = sorted((rng.randrange(RUN_STEPS) for _ in range(NUM_CHANGES)), reverse=True)
    now = 0

    def priority(actor: Actor) -> float:
        if actor not in ranks:
            ranks[actor] = rng.random()
        return ranks[actor]

    def choose(runnable: list[Actor]) -> int:
        nonlocal now
        now += 1
        best = max(runnable, key=priority)
        if changes and now >= changes[-1]:
            ranks[best] = -float(changes.pop())
            best = max(runnable, key=priority)
        return runnable.index(best)

    return choose


def _starve(rng: Random, is_starved: Callable[[Actor], bool]) -> Choose:
    def choose(runnable: list[Actor]) -> int:
        place = int(rng.random() * len(runnable))
        if not is_starved(runnable[place]):
            return place
        others = [i for i, actor in enumerate(runnable) if not is_starved(actor)]
        return rng.choice(others) if others else place

    return choose


def starve_rank(rng: Random, shape: Shape) -> Choose:
    """One rank, its host too, moves only when nobody else can."""
    late = rng.randrange(shape.num_ranks)
    return _starve(rng, lambda actor: actor.rank == late)


def starve_sm(rng: Random, shape: Shape) -> Choose:
    """One SM moves only when nobody else can."""
    late = rng.randrange(shape.num_ranks), rng.randrange(shape.num_sms)
    return _starve(rng, lambda actor: (actor.rank, actor.sm) == late)


def starve_role(rng: Random, shape: Shape) -> Choose:
    """One role of one SM moves only when nobody else can."""
    late = rng.randrange(shape.num_ranks), rng.randrange(shape.num_sms), rng.choice(list(ROLES))
    return _starve(rng, lambda actor: (actor.rank, actor.sm, actor.role) == late)


def starve_kind(rng: Random, shape: Shape) -> Choose:
    """One kind of role, on all SMs but one, moves only when nobody else can."""
    role, spared = rng.choice(list(ROLES)), rng.randrange(shape.num_sms)
    return _starve(rng, lambda actor: actor.role == role and actor.sm != spared)


POLICIES: dict[str, Callable[[Random, Shape], Choose]] = {
    "uniform": uniform,
    "round_robin": round_robin,
    "newest": newest,
    "oldest": oldest,
    "bursts": bursts,
    "priorities": priorities,
    "starve_rank": starve_rank,
    "starve_sm": starve_sm,
    "starve_role": starve_role,
    "starve_kind": starve_kind,
}
