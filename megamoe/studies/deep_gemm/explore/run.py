"""`explore`: one interleaving of one case. `explore_many`: many, until one breaks a rule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from megamoe.errors import one_of
from megamoe.studies.deep_gemm.explore.case import Case
from megamoe.studies.deep_gemm.explore.mutations import MUTATIONS
from megamoe.studies.deep_gemm.explore.policies import POLICIES
from megamoe.studies.deep_gemm.explore.symbolic import Symbolic
from megamoe.studies.deep_gemm.protocol.launch import NO_BUGS
from megamoe.studies.deep_gemm.protocol.machine import Choose, Waiting
from megamoe.studies.deep_gemm.protocol.ops import Violation
from megamoe.studies.deep_gemm.protocol.world import ROLES, Absent, World

# When plain stores become visible: at once, at some moment, or only at a release.
DRAINS = {"at once": 1.0, "some time": 0.1, "at release": 0.0}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. It can be repeated from case, policy, seed and mutations alone."""

    case: str
    policy: str
    seed: int
    stores: str
    num_steps: int
    violation: str = ""  # empty: every rule held
    waiting: tuple[Waiting, ...] = ()  # in a deadlock: everyone who waits, and for what

    @property
    def ok(self) -> bool:
        return not self.violation

    def __str__(self) -> str:
        head = f"{self.case}, {self.policy}, seed {self.seed}, stores {self.stores}"
        lines = [f"{head}: {self.violation or 'ok'} after {self.num_steps} steps"]
        return "\n  ".join(lines + [str(w) for w in self.waiting])


@dataclass(frozen=True, slots=True)
class Report:
    """Many runs of one case."""

    num_runs: int
    num_steps: int
    found: Outcome | None  # the first that broke a rule

    @property
    def ok(self) -> bool:
        return self.found is None


class _Deadlock(Violation):
    def __init__(self, what: str, waiting: list[Waiting]) -> None:
        super().__init__(what)
        self.waiting = tuple(waiting)


def explore(
    case: Case,
    seed: int = 0,
    policy: str = "uniform",
    *,
    mutations: Iterable[str] = (),
    stores: str | None = None,
) -> Outcome:
    """Run `case` once, every choice drawn from `seed`, and say whether every rule held.

    stores  a name of DRAINS; None lets the seed choose
    """
    one_of(policy, tuple(POLICIES), "policy")
    bugs = frozenset(mutations)
    for name in bugs:
        one_of(name, tuple(MUTATIONS), "mutation")
    rng = Random(f"{policy} {seed}")
    stores = rng.choice(list(DRAINS)) if stores is None else stores
    one_of(stores, tuple(DRAINS), "stores")
    run = _Run(case, rng, DRAINS[stores], bugs or NO_BUGS)
    waiting: tuple[Waiting, ...] = ()
    broken = ""
    try:
        run.all_calls(POLICIES[policy](rng, case.shape))
    except Violation as error:
        broken = str(error)
        waiting = error.waiting if isinstance(error, _Deadlock) else ()
    return Outcome(case.name, policy, seed, stores, run.world.machine.time, broken, waiting)


def explore_many(
    case: Case,
    num_runs: int,
    *,
    first_seed: int = 0,
    policies: Iterable[str] = tuple(POLICIES),
    mutations: Iterable[str] = (),
) -> Report:
    """Runs with seeds first_seed, first_seed + 1, ..., the policies in turn, up to a violation."""
    names, bugs = tuple(policies), frozenset(mutations)
    steps = 0
    for i in range(num_runs):
        outcome = explore(case, first_seed + i, names[i % len(names)], mutations=bugs)
        steps += outcome.num_steps
        if not outcome.ok:
            return Report(i + 1, steps, outcome)
    return Report(num_runs, steps, None)


class _Run:
    """The world of one run and what is asked of it."""

    def __init__(self, case: Case, rng: Random, drain: float, bugs: frozenset[str]) -> None:
        self.case, self.rng = case, rng
        self.payload = Symbolic(case)
        self.world = World(case.shape, self.payload, rng=rng, drain=drain, bugs=bugs)

    def all_calls(self, choose: Choose) -> None:
        calls, first = self.case.calls, 0
        if self.case.fault is not None:
            self._faulty_call(choose)
            self.world.reset()
            first = 1
        self.world.queue(calls[first:])
        self.world.machine.run(choose)
        if self.world.machine.live:
            raise _Deadlock("deadlock", self.world.machine.waiting())
        for number in range(first, len(calls)):
            self.payload.check_call(number)
        self._check_workspace(first)

    def _check_workspace(self, first: int) -> None:
        calls = range(first, len(self.case.calls))
        for rank in range(self.case.shape.num_ranks):
            self.world.check_clean(rank)
            each = [self.payload.received(number)[rank] for number in calls]
            wanted = [sum(column) for column in zip(*each, strict=True)]
            stats = self.world.read("recv_stats", rank)
            if stats != wanted:
                raise Violation(f"statistics of rank {rank} must be {wanted}; got {stats}")

    def _faulty_call(self, choose: Choose) -> None:
        """The first call goes wrong: one wait runs past its bound, and then everyone leaves."""
        world, shape = self.world, self.case.shape
        absent: Absent | None = None
        if self.case.fault == "role":
            absent = (
                self.rng.randrange(shape.num_ranks),
                self.rng.randrange(shape.num_sms),
                self.rng.choice(list(ROLES)),
            )
        elif self.case.fault == "rank":
            absent = (self.rng.randrange(shape.num_ranks), -1, "host")
        world.queue(self.case.calls[:1], absent)
        if self.case.fault == "timeout":
            world.machine.run(choose, self.rng.randrange(20, 600))
            while not world.waiters() and world.machine.runnable:
                world.machine.run(choose, world.machine.time + 1)
        else:
            world.machine.run(choose)
        late = world.waiters()
        if not late:
            return  # the call was over before its timeout, or there is no other rank
        world.time_out(self.rng.choice(late))
        world.machine.run(choose)
        for actor in [a for a in world.machine.live if (a.rank, a.sm, a.role) == absent]:
            world.machine.kill(actor)
        world.machine.run(choose)
        self._check_drained()

    def _check_drained(self) -> None:
        if self.world.machine.live:
            raise _Deadlock("did not drain after an abort", self.world.machine.waiting())
        ranks = range(self.case.shape.num_ranks)
        record = [self.world.read("timeout_record", rank) for rank in ranks]
        if not self.world.aborted or not any(fields[0] for fields in record):
            raise Violation(f"a rank must hold the record of the timeout; got {record}")
