"""Kernels one step at a time: who runs next, and when a copy or product completes, is decided.

Roles are coroutines; only the one that was picked runs. Every load, store and atomic of global
memory, every operation on an mbarrier, every issue of a copy or product and every wait is a step,
before which a policy (`policies`) picks a role to run or an operation to complete. What a role may
see is held to `memory_model`. A wait with a bound ends by it only when nothing else can happen, so
no clock is read. The same kernel, arguments and policy give the same run.
"""

import threading

import numpy as np

from tests.emulator.memory_model import SEEN, Agents, Memory, Violation

try:
    import greenlet
except ImportError:  # then roles are threads that hand each other a lock: slower
    greenlet = None

MOST_STEPS = 20_000  # of a run; the longest here has 4 000


class Killed(BaseException):
    """Another role failed."""


class _Green:
    """A coroutine of greenlet's."""

    def __init__(self, act, main):
        self.it = greenlet.greenlet(act, main)

    def kill(self):
        if self.it:  # it has begun, and not ended
            self.it.parent = greenlet.getcurrent()
            self.it.throw(Killed)


class _Baton:
    """A thread that runs while it has the baton: that of `Scheduler.run`, or a `_Thread`."""

    def __init__(self):
        self.lock, self.is_killed = threading.Lock(), False
        self.lock.acquire()

    def resume(self, current):
        """Go on here, and stop `current` until it is resumed; None: it has ended."""
        self.lock.release()
        if current is not None:
            current.lock.acquire()
            if current.is_killed:
                raise Killed


class _Thread(_Baton):
    """A coroutine where there is no greenlet."""

    def __init__(self, act, main):
        super().__init__()
        self.act, self.it = act, threading.Thread(target=self._run, daemon=True)
        self.it.start()

    def _run(self):
        self.lock.acquire()
        if not self.is_killed:
            self.act()

    def kill(self):
        if self.it.is_alive():
            self.is_killed = True
            self.lock.release()
            self.it.join()


class Role:
    """One role of one CTA, or a host thread."""

    is_role = True

    def __init__(self, scheduler, act, name, kind, cta, launch, gpu, num_warps, parent):
        self.name, self.kind, self.cta, self.launch, self.gpu = name, kind, cta, launch, gpu
        self.num_warps, self.scheduler, self.is_host = num_warps, scheduler, launch is None
        self.agent = scheduler.agents.add(name)
        self.leader = scheduler.agents.add(name)  # the thread that does its atomics and arrivals
        self.clocks = scheduler.agents.new_clocks() if parent is None else parent.copy()
        self.clocks[SEEN, self.agent] = self.clocks[SEEN, self.leader] = 1
        self.synced = 0  # its stores up to here are known to all its threads
        self.steps, self.waits_for = 0, None
        self.is_bounded = self.is_late = False
        # Since its last tcgen05.fence after a wait, and before an arrival.
        self.has_waited = self.has_used_tensor = False
        self.products = self.copies = None  # of wgmma and cp.async: `device` makes them
        self.rank, self.cluster = 0, None  # of its CTA in a pair (`cta_pair`)
        self.last_launch = None  # a host's
        self.act = act
        self.coroutine = (_Green if greenlet else _Thread)(self._run, scheduler.main)

    def _run(self, *_):
        scheduler = self.scheduler
        np.seterr(all="ignore")  # poison is not a number; numpy keeps this for each coroutine
        try:
            self.act()
            scheduler.finish(self)
            scheduler.leave(self, scheduler.next_or_main())
        except Killed:
            return
        except BaseException as error:
            scheduler.error = error
            scheduler.leave(self, scheduler.main)

    def tick(self):
        """Later accesses have another clock than those before."""
        self.clocks[SEEN, self.agent] += 1
        self.clocks[SEEN, self.leader] += 1

    def sync(self):
        """A barrier of its threads."""
        self.synced = int(self.clocks[SEEN, self.agent])
        self.tick()


class Operation:
    """Something asynchronous, between its issue and its completion."""

    __slots__ = ("act", "is_arrival", "is_done", "kind", "name")
    is_role = False

    def __init__(self, name, act):
        self.name, self.act, self.is_done, self.is_arrival = name, act, False, False


class Scheduler:
    """Runs host threads, the launches that they make, and all their roles."""

    current = None  # the one that runs now

    def __init__(self, policy, agents=400):
        self.policy = policy
        self.agents = Agents(agents)
        self.memory = Memory(self.agents)
        self.roles, self.runnable, self.operations = [], [], []
        self.waiting = {}  # what is waited for -> roles
        self.now = self.main = self.error = None
        self.steps, self.log, self.kept = 0, None, []
        self.numbers = {}

    # -- roles ------------------------------------------------------------------------------------

    def add(
        self, act, name, *, kind="host", cta=None, launch=None, gpu=0, num_warps=1, parent=None
    ):
        role = Role(self, act, name, kind, cta, launch, gpu, num_warps, parent)
        self.roles.append(role)
        self.runnable.append(role)
        return role

    def run(self, *hosts):
        """Run functions as host threads, GPU i for host i, until all have ended."""
        assert Scheduler.current is None, "one scheduler at a time"
        Scheduler.current = self
        self.main = greenlet.getcurrent() if greenlet else _Baton()
        try:
            for i, act in enumerate(hosts):
                self.add(act, f"host {i}", gpu=i)
            self._go(self._next(), None)
            if self.error is None and (self.roles or self.operations):
                raise Violation("the end came too early")
            if self.error is not None:
                raise self.error
        finally:
            Scheduler.current = None
            for role in self.roles:
                role.coroutine.kill()

    def _go(self, role, current):
        """Run `role`; `current` waits (None: the main thread does)."""
        self.now = role
        if greenlet:
            role.coroutine.it.switch()
        else:
            role.coroutine.resume(self.main if current is None else current.coroutine)

    def leave(self, role, to):
        """`role` has ended; `to` goes on."""
        if to is not self.main:
            self.now, to = to, to.coroutine.it if greenlet else to.coroutine
        if greenlet:
            role.coroutine.it.parent = to
        else:
            to.resume(None)

    def next_or_main(self):
        if not self.roles:  # an arrival that nobody waits for comes after the last role
            for operation in [one for one in self.operations if one.is_arrival]:
                self.complete(operation)
        return self._next() if self.roles or self.operations else self.main

    def finish(self, role):
        self.roles.remove(role)
        self.runnable.remove(role)
        self.wake(role)

    # -- steps ------------------------------------------------------------------------------------

    def place(self):
        """Where the run stands: a role and its step."""
        return (self.now.name, self.now.steps) if self.now else ("", 0)

    def step(self, what=""):
        """The role that runs is about to do something that others may see."""
        role = self.now
        role.steps += 1
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise Violation(f"no end after {MOST_STEPS} steps")
        to = self._next()
        if to is not role:
            self._switch(role, to)
        if self.log is not None:
            self.log.append((role.name, what))

    def _switch(self, role, to):
        self._go(to, role)
        self.now = role

    def _next(self):
        """The role that runs next; operations that are picked complete on the way."""
        while True:
            if not self.runnable and not self.operations:
                self._nothing_left()
            picked = self.policy.pick(self)
            if picked.is_role:
                return picked
            self.complete(picked)

    def complete(self, operation):
        self.operations.remove(operation)
        operation.is_done = True
        if self.log is not None:
            self.log.append((operation.name, "completes"))
        operation.act()

    def issue(self, name, act):
        number = self.numbers[name] = self.numbers.get(name, 0) + 1
        operation = Operation(f"{name}, number {number}", act)
        self.operations.append(operation)
        return operation

    def wait(self, keys, is_over, what, is_bounded=False):
        """The role waits until it is over; -> whether it is, or its bound has come."""
        role = self.now
        while not is_over():
            role.waits_for, role.is_bounded, role.is_late = what, is_bounded, False
            role.is_over = is_over
            for key in keys:
                self.waiting.setdefault(key, []).append(role)
            self.runnable.remove(role)
            to = self._next()
            if to is not role:
                self._switch(role, to)
            for key in keys:
                there = self.waiting.get(key, ())
                if role in there:
                    there.remove(role)
                if not there:
                    self.waiting.pop(key, None)
            if role.is_late:
                role.waits_for = None
                return is_over()
        role.waits_for = None
        return True

    def wake(self, key):
        """Something has changed that roles wait for."""
        for role in self.waiting.get(key, ()):
            if role not in self.runnable and role.is_over():
                self.runnable.append(role)

    def _nothing_left(self):
        """Only time can go on."""
        late = [role for role in self.roles if role.is_bounded and role.waits_for is not None]
        if not late:
            waits = "; ".join(f"{role.name} waits for {role.waits_for}" for role in self.roles)
            raise Violation(f"nobody can go on: {waits}")
        self.time_out(late[0])

    def time_out(self, role):
        """The bound of a role's wait has come."""
        role.is_late = True
        if role not in self.runnable:
            self.runnable.append(role)

    def forget(self, host):
        """All launches are over: what they did is known, and their names are free."""
        self.memory.forget()
        del self.agents.names[:]
        host.agent, host.leader = self.agents.add(host.name), self.agents.add(host.name)
        host.clocks[:] = 0
        host.clocks[SEEN, :2] = 1
