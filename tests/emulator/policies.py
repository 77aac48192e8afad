"""Who takes the next step: a role, or an asynchronous operation that completes.

A policy sees the roles that can run and the operations in flight, and is reproducible from its
seed. By default a role runs until it waits, and operations complete when nobody can run.
"""

from random import Random

ROLES_PER_TURN = 40  # steps, about, between two changes of a policy that keeps to a role


class Uniform:
    """Any of them, with equal chance."""

    def __init__(self, rng):
        self.random = rng.random

    def pick(self, scheduler):
        roles, operations = scheduler.runnable, scheduler.operations
        at = int(self.random() * (len(roles) + len(operations)))
        return roles[at] if at < len(roles) else operations[at - len(roles)]


class Bursts:
    """A random one for a random number of steps; operations late, early or in between."""

    def __init__(self, rng):
        self.rng, self.left, self.current = rng, 0, None
        self.completes = rng.choice((0.0, 0.02, 0.2, 1.0))

    def _role(self, roles):
        self.left -= 1
        if self.left <= 0 or self.current not in roles:
            self.current = roles[int(self.rng.random() * len(roles))]
            self.left = 1 + int(self.rng.random() * ROLES_PER_TURN)
        return self.current

    def pick(self, scheduler):
        roles, operations = scheduler.runnable, scheduler.operations
        if operations and (not roles or self.rng.random() < self.completes):
            return operations[int(self.rng.random() * len(operations))]
        return self._role(roles)


class Slow(Bursts):
    """One role, of one CTA or of all, or all copies, or a whole CTA: only when nobody else can."""

    def __init__(self, rng):
        super().__init__(rng)
        self.key = None

    def _slow(self, scheduler):
        """Chosen as the launch's roles are known: by name, by name and CTA, or by CTA."""
        if self.key is None and len(scheduler.runnable) > 2:
            role = scheduler.runnable[int(self.rng.random() * len(scheduler.runnable))]
            if role.is_host or role.kind == "kernel":
                return ()
            self.key = self.rng.choice(
                (("kind", role.kind), ("name", role.name), ("cta", role.cta), ("name", role.name))
            )
        return self.key

    def pick(self, scheduler):
        key = self._slow(scheduler)
        roles, operations = scheduler.runnable, scheduler.operations
        if not key:
            return super().pick(scheduler)
        others = [role for role in roles if getattr(role, key[0]) != key[1]]
        if operations and (not others or self.rng.random() < self.completes):
            return operations[int(self.rng.random() * len(operations))]
        return self._role(others or roles)


class Priorities:
    """Fixed random priorities, of which a few change on the way: finds what few changes need."""

    def __init__(self, rng, changes=3, steps=1500):
        self.rng, self.rank, self.step = rng, {}, 0
        self.changes = {rng.randrange(steps) for _ in range(changes)}

    def pick(self, scheduler):
        self.step += 1
        rank, random = self.rank, self.rng.random
        best = None
        for one in (*scheduler.runnable, *scheduler.operations):
            if one not in rank:
                rank[one] = random()
            if best is None or rank[one] > rank[best]:
                best = one
        if self.step in self.changes:
            rank[best] = -self.step
        return best


class Calm:
    """No preemption: a role runs until it waits, operations complete when nobody can run."""

    def __init__(self, rng=None):
        pass

    def pick(self, scheduler):
        roles = scheduler.runnable
        if scheduler.now in roles:
            return scheduler.now
        return roles[0] if roles else scheduler.operations[0]


class Starved(Calm):
    """`Calm`, but a role, by its name, runs only when nobody else can."""

    def __init__(self, name):
        self.name = name

    def pick(self, scheduler):
        others = [role for role in scheduler.runnable if role.name != self.name]
        if scheduler.now in others:
            return scheduler.now
        if others or scheduler.operations:
            return others[0] if others else scheduler.operations[0]
        return scheduler.runnable[0]


class Hurried:
    """A policy under which time may also run out early for waits that have a bound.

    of  which roles' waits
    """

    def __init__(self, policy, rng, chance=0.02, of=lambda role: True):
        self.policy, self.rng, self.chance, self.of = policy, rng, chance, of

    def pick(self, scheduler):
        if self.rng.random() < self.chance:
            waiting = [
                role for role in scheduler.roles
                if role.is_bounded and role.waits_for is not None and self.of(role)
            ]  # fmt: skip
            if waiting:
                scheduler.time_out(self.rng.choice(waiting))
        return self.policy.pick(scheduler)


KINDS = (Slow, Bursts, Slow, Priorities, Slow, Uniform, Bursts, Slow)


def policy_of(seed):
    """The policy of a seed; neighbouring seeds have different kinds."""
    policy = KINDS[seed % len(KINDS)](Random(seed))
    policy.seed = seed
    return policy


class _Places:
    """Names for the decisions of a run: a role, its step, and which decision at that step."""

    def __init__(self):
        self.last, self.again = None, 0

    def next(self, scheduler):
        place = scheduler.place()
        self.again = self.again + 1 if place == self.last else 0
        self.last = place
        return (*place, self.again)


class Recorded:
    """A policy, and what it did that `Calm` would not: {decision: name of what was picked}."""

    def __init__(self, policy):
        self.policy, self.calm, self.changes, self.places = policy, Calm(), {}, _Places()

    def pick(self, scheduler):
        place = self.places.next(scheduler)
        picked = self.policy.pick(scheduler)
        if picked is not self.calm.pick(scheduler):
            self.changes[place] = picked.name
        return picked


class Replayed:
    """`Calm` but for some recorded changes; one that cannot be made is left out."""

    def __init__(self, changes):
        self.changes, self.calm, self.places = changes, Calm(), _Places()
        self.made = {}

    def pick(self, scheduler):
        place = self.places.next(scheduler)
        name = self.changes.get(place)
        if name is not None:
            for one in (*scheduler.runnable, *scheduler.operations):
                if one.name == name:
                    self.made[place] = name
                    return one
        return self.calm.pick(scheduler)
