"""Who may see what: causality of PTX's memory model, as clocks.

Every role, every stream of asynchronous operations and every mbarrier that copies complete on is an
agent with a clock of its own. A role carries three clocks for every agent:

  SEEN    events that happen before whatever it does next: its own, and those that a release and
          an acquire of sufficient scope, an mbarrier, a wait or a launch's boundary brought
  GLOBAL  of these, accesses to global memory after which a fence of the async proxy stands on the
          way here: a copy by TMA that it issues comes after them
  SHARED  likewise of shared memory: copies into it and operands of wgmma come after them

Every access leaves the agent's clock where it was made. One that meets an access of another agent
that it is not ordered after is a violation, whichever value it would have got: a plain store is in
nobody's sight until causality brings it there, and an asynchronous operation may happen at any time
between its issue and its completion. (Copies from global memory read whole blocks, rows beyond a
tile's end too: what they read without order is poison, which shows in the result if it is used.)
The generic proxy needs SEEN; the async proxy needs SEEN of
what the async proxy did, and GLOBAL or SHARED of what the generic proxy did. What an asynchronous
operation did is ordered by its completion, which fences by itself.
"""

from bisect import bisect_right
from collections import defaultdict

import numpy as np

SEEN, GLOBAL, SHARED = range(3)


class Violation(AssertionError):
    """The kernel does what PTX does not promise, or something that nobody can answer for."""


class Agents:
    """Names and numbers of those who have clocks."""

    def __init__(self, most):
        self.names, self.most = [], most

    def add(self, name):
        assert len(self.names) < self.most, "more agents than clocks: raise `agents`"
        self.names.append(name)
        return len(self.names) - 1

    def new_clocks(self):
        return np.zeros((3, self.most), dtype=np.int32)


def join(into, clocks):
    np.maximum(into, clocks, out=into)


class Word:
    """A word of global memory that atomics, acquires and releases use."""

    __slots__ = ("by_gpu", "met", "narrowest", "seen", "system", "users", "wrote")

    def __init__(self):
        self.by_gpu = {}  # GPU -> clocks that releases of its threads left
        self.system = None  # likewise of releases of scope sys
        self.seen, self.wrote = {}, {}  # agent -> clock of its last access, and of its last write
        self.met = {}  # agent -> `seen` as its last atomic left it: coherence puts these before
        self.users, self.narrowest = {}, 2  # (GPU, launch, CTA) -> name; the narrowest scope used

    def check_scope(self, role, scope, where):
        """All who use a word must do so at a scope that has them all in it."""
        self.users[role.gpu, role.cta, id(role.launch)] = role.name
        self.narrowest = min(self.narrowest, ("cta", "gpu", "sys").index(scope))
        gpus = {gpu for gpu, _, _ in self.users}
        if (self.narrowest == 0 and len(self.users) > 1) or (self.narrowest < 2 and len(gpus) > 1):
            names = " and ".join(list(self.users.values())[-2:])
            raise Violation(f"{names} use {where}, not all at a scope that has both")


class Region:
    """One allocation of global memory."""

    def __init__(self, start, data, name):
        self.start, self.data, self.name = start, data, name
        self.views, self.words, self.reads = {}, {}, []
        self.by = self.at = None  # agent and clock of the last store, by byte
        self.mark = None

    def view(self, stored):
        found = self.views.get(stored)
        if found is None:
            size = np.dtype(stored).itemsize
            usable = self.data[: len(self.data) // size * size]
            found = self.views[stored] = usable.view(stored)
        return found

    def forget(self):
        """All that happened is known to everybody."""
        self.words, self.reads, self.by, self.at = {}, [], None, None

    def _blame(self, memory, what, agent, by, offset):
        memory.blame(agent, f"{what} {self.name}[byte {offset}]", by)

    def unordered(self, agent, offset, order):
        """Which bytes `offset` have a store that is not before, by the clocks `order` [agents]."""
        if self.by is None:
            return None
        by, at = self.by[offset], self.at[offset]
        late = order[by] < at
        late &= by != agent
        return late if np.count_nonzero(late) else None  # any() goes through Python

    def check_stores(self, memory, agent, offset, order, what):
        """All stores to bytes `offset` must come before."""
        late = self.unordered(agent, offset, order)
        if late is not None:
            first = int(offset[int(np.argmax(late))])
            self._blame(memory, what, agent, int(self.by[first]), first)

    def copied(self, agent, offset, order):
        """A copy by TMA reads; -> which bytes hold nobody knows what, or None.

        Blocks are wider than tiles: that others store to rows beyond a tile's end is no violation
        unless what was read there is used.
        """
        return self.unordered(agent, offset, order)

    def read(self, memory, agent, clock, offset, order, what="reads"):
        """A plain load, or a cp.async."""
        self.check_stores(memory, agent, offset, order, what)
        if self.words:
            self._check_words(memory, agent, offset, order, what, is_write=False)
        self.reads.append((agent, clock, offset))

    def write(self, memory, agent, clock, offset, order):
        """A plain store: `order` are the clocks SEEN."""
        self.check_stores(memory, agent, offset, order, "stores to")
        if self.words:
            self._check_words(memory, agent, offset, order, "stores to", is_write=True)
        if self.reads:
            self._check_reads(memory, agent, offset, order)
        if self.by is None:
            self.by = np.zeros(len(self.data), dtype=np.int32)
            self.at = np.zeros(len(self.data), dtype=np.int32)
        self.by[offset], self.at[offset] = agent, clock

    def _check_reads(self, memory, agent, offset, order):
        for reader, clock, where in self.reads:
            if order[reader] >= clock or reader == agent:
                continue
            if self.mark is None:
                self.mark = np.zeros(len(self.data), dtype=bool)
            self.mark[offset] = True
            hit = self.mark[where]
            self.mark[offset] = False
            if np.count_nonzero(hit):
                first = int(where[int(np.argmax(hit))])
                self._blame(memory, "stores to", agent, reader, first)

    def _check_words(self, memory, agent, offset, order, what, is_write):
        low, high = int(offset.min()), int(offset.max())
        for at, word in list(self.words.items()):
            if low <= at <= high and np.count_nonzero(offset == at):
                met = word.met.get(agent, {})
                for by, clock in (word.seen if is_write else word.wrote).items():
                    if order[by] < clock and met.get(by, 0) < clock:
                        self._blame(memory, what, agent, by, at)
                if is_write:
                    del self.words[at]

    def strong(self, memory, role, offset, is_write, scope):
        """An atomic or an acquiring load at one word; -> its releases."""
        word = self.words.get(offset)
        if word is None:
            word = self.words[offset] = Word()
        at = np.array([offset])
        self.check_stores(memory, role.agent, at, role.clocks[SEEN], "meets at")
        if is_write and self.reads:
            self._check_reads(memory, role.agent, at, role.clocks[SEEN])
        clock = int(role.clocks[SEEN, role.leader])
        word.seen[role.leader] = clock
        if is_write:
            word.wrote[role.leader] = clock
            word.met[role.agent] = dict(word.seen)
        word.check_scope(role, scope, f"{self.name}[byte {offset}]")
        return word


class Memory:
    """Global memory of a scheduler: all allocations, by address.

    is_strict  whether what is not ordered is a violation; not so once a launch has given up
    """

    def __init__(self, agents):
        self.agents, self.is_strict = agents, True
        self.starts, self.regions = [], []

    def hold(self, start, data, name):
        at = bisect_right(self.starts, start)
        if len(data) == 0 or (at and self.starts[at - 1] == start):
            return
        self.starts.insert(at, start)
        self.regions.insert(at, Region(start, data, name))

    def blame(self, agent, what, by):
        if self.is_strict:
            names = self.agents.names
            raise Violation(f"{names[agent]} {what}, not ordered after {names[by]}")

    def forget(self):
        for region in self.regions:
            region.forget()

    def region(self, address, size):
        at = bisect_right(self.starts, address) - 1
        if at < 0 or address + size > self.starts[at] + len(self.regions[at].data):
            raise Violation(f"no allocation holds {size} bytes at {address:#x}")
        return self.regions[at]

    def parts(self, address, size):
        """(region, offsets, which of the addresses) of int64 addresses [n]."""
        low, high = int(address.min()), int(address.max())
        region = self.region(low, size)
        if high + size <= region.start + len(region.data):
            yield region, self._aligned(address - region.start, size), slice(None)
            return
        left = np.ones(len(address), dtype=bool)
        while left.any():
            region = self.region(int(address[left].min()), size)
            inside = left & (address + size <= region.start + len(region.data))
            yield region, self._aligned(address[inside] - region.start, size), inside
            left &= ~inside

    @staticmethod
    def _aligned(offset, size):
        if np.count_nonzero(offset % size):
            raise Violation(f"an address is not a multiple of {size} bytes")
        return offset


class Cells:
    """An allocation of shared memory: its bytes, and who touched which row (or stage) of it."""

    def __init__(self, data, row_bytes, name):
        self.data, self.row, self.name = data, row_bytes, name
        num = -(-len(data) // row_bytes)
        self.writes = [(0, 0, False)] * num  # agent, clock, whether by the async proxy
        # Since its last write, row -> {agent: (clock, whether by the async proxy)}.
        self.reads = defaultdict(dict)

    def _blame(self, memory, what, agent, by, row):
        memory.blame(agent, f"{what} {self.name}[{row}]", by)

    def read(self, memory, agent, clock, rows, clocks, through_async, reader=None):
        """By a role, or by wgmma (`reader`) for it."""
        reader = agent if reader is None else reader
        for row in rows:
            by, at, is_async = self.writes[row]
            order = clocks[SHARED if through_async and not is_async else SEEN]
            if order[by] < at and (through_async or by != agent):
                what = "has wgmma read" if through_async else "reads"
                self._blame(memory, what, agent, by, row)
            self.reads[row][reader] = clock, through_async

    def write(self, memory, agent, clock, rows, clocks, through_async, writer=None):
        """By a role, or by a copy (`writer`) that it issues."""
        what = "has a copy write" if through_async else "writes"
        for row in rows:
            by, at, is_async = self.writes[row]
            order = clocks[SHARED if through_async and not is_async else SEEN]
            if order[by] < at and (through_async or by != agent):
                self._blame(memory, what, agent, by, row)
            for reader, (at, is_async) in self.reads.pop(row, {}).items():
                order = clocks[SHARED if through_async and not is_async else SEEN]
                if order[reader] < at and (through_async or reader != agent):
                    self._blame(memory, what, agent, reader, row)
            self.writes[row] = (agent if writer is None else writer), clock, through_async
