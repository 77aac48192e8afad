"""Calls of a chain of which something goes wrong: who says what, and that nobody hangs."""

import functools
from random import Random

import torch

from megamoe.engine import chain
from megamoe.engine.status import GAVE_UP, DeviceStatus
from megamoe.kernels.gluon import exchange
from tests.emulator import device, policies
from tests.emulator.memory_model import Violation
from tests.emulator.scheduler import Scheduler
from tests.proof import targets
from tests.proof.chains import Members, inputs_of, message
from tests.proof.targets import CHAIN, CPU, WIDE, Live, installed, kernels


class Failing(Live):
    """Two ranks of which something goes wrong: who says what is held, and that nobody hangs.

    A call of both comes first, so that their memory is full of what is old.
    """

    def __init__(self, name, second, hold, hurry=0.0, hurried=lambda role: True):
        super().__init__(name, None, 2, is_strict=False, kernels=CHAIN)
        self.second, self.hold, self.hurry, self.hurried = second, hold, hurry, hurried
        w = targets.weights_of("w8a8", 2, 256, 128)
        self.ranks = Members(w, 2, 2, 2, WIDE)
        self.given = inputs_of(((2, 1), (1, 2)), 2, 256, masked=0.0)
        with installed(2, {}):
            self.plans = [
                [self.ranks.plan(parts[r], r) for r in range(2)] for _, parts in self.given
            ]
        self.wanted = None

    def call(self, rank, number, meanwhile=None):
        """One call of a rank; `meanwhile` before it says that its rows are home."""
        call = self.ranks.call(self.given[number][1][rank], rank, self.status[rank])
        plan = self.plans[number][rank]
        found = []
        for y in chain.phases(self.members[rank], call, plan):
            found.append(y)
            if len(found) == 3 and meanwhile is not None:
                device.synchronize()
                meanwhile(self.status[rank])
        return found[-1]

    def run(self, policy, log=None):
        self.memory, self.members = self.ranks.make(self.plans[0][0].call)
        self.status = [DeviceStatus(CPU) for _ in range(2)]
        self.results, self.is_over = [[], []], [False, False]
        for name in CHAIN:
            kernels()[name].hold = self.memory
        if self.hurry and hasattr(policy, "seed"):
            policy = policies.Hurried(policy, Random(policy.seed), self.hurry, self.hurried)
        scheduler = Scheduler(policy, agents=1600)
        scheduler.log, scheduler.memory.is_strict = log, False

        def host(rank):
            self.results[rank].append(self.call(rank, 0))
            device.synchronize()
            self.second(self, rank)
            device.synchronize()
            self.is_over[rank] = True

        with installed(2, {name: kernels()[name] for name in CHAIN}):
            scheduler.run(*(functools.partial(host, rank) for rank in range(2)))
        self.hold(self)
        return scheduler


def absent_case():
    """Rank 0 makes its second call when rank 1 has long given it up."""

    def second(it, rank):
        scheduler, host = device._now()
        if rank == 0:
            rows = it.members[0].buffer.rows.zero_().clone()
            for peer in [r for r in scheduler.roles if r.is_host and r is not host]:
                scheduler.wait((peer,), lambda: it.is_over[1], peer.name)
            it.had = rows, it.members[0].buffer.rows.clone()
            it.theirs = it.memory[1].clone()
        it.call(rank, 1)

    def hold(it):
        assert torch.equal(*it.had), "rows of a call that was given up"
        it.members[1].buffer.state[exchange.STOP.value] = 2  # both say so; the last word stands
        assert torch.equal(it.memory[1], it.theirs), "who comes late still writes"
        assert "rank 1 waited too long for rank 0 to push" in message(it.status[1])
        assert "rank 1 gave up and said so" in message(it.status[0])
        assert all(int(me.buffer.state[exchange.STOP.value]) for me in it.members)

    return Failing("chain-absent", second, hold)


def given_up_case():
    """The GEMMs of rank 1 gave up: its rows are worthless, and all get a report."""

    def second(it, rank):
        def broken(status):
            status.bad_slot[:] = GAVE_UP

        it.call(rank, 1, broken if rank == 1 else None)

    def hold(it):
        # The rank that is named may have learned it from a peer, and signalled in its turn.
        for status in it.status:
            assert "gave up and said so" in message(status)

    return Failing("chain-given-up", second, hold)


def hurried_case(name="chain-hurried", hurry=0.0005, **how):
    """Waits run out at any time: a rank has the right result, or says that it has not."""

    def second(it, rank):
        it.results[rank].append(it.call(rank, 1))

    def hold(it):
        if it.wanted is None:
            it.wanted = [[y.clone() for y in of] for of in it.results]
        it.num_reported = 0
        for rank, status in enumerate(it.status):
            report = message(status)
            it.num_reported += bool(report)
            if not report and not all(map(torch.equal, it.results[rank], it.wanted[rank])):
                raise Violation(f"a wrong result of rank {rank}, and nobody says so")

    return Failing(name, second, hold, hurry, **how)


def late_case():
    """The same, but only GEMMs wait in vain for the tokens of a tile, or for L1's tiles."""
    return hurried_case("chain-late", 0.003, hurried=lambda role: role.kind != "kernel")
