"""Pairs of CTAs under the scheduler: shared mbarriers, copies by halves, one tensor core for both.

A kernel of two CTAs is one program in Gluon; here each CTA runs its roles by itself, on its part of
every tensor, as the hardware does. What Triton 3.8 makes of the program, its own words:

  an mbarrier of both   lies in the first CTA; its count is doubled; `expect` and `arrive` of both
                        count there; the first CTA alone waits, for the second a wait is nothing
  a copy                brings the CTA's part; with multicast and no part, the first CTA brings it
                        to both, and the bytes count twice
  tcgen05               the first CTA issues for both: M = 256, weights and sums of each, tokens
                        half from each; a commit arrives at the barriers of both

Both CTAs wait for each other before their roles begin, since mbarriers are then initialised, and
when they have ended, since arrivals from the other CTA may still come: the compiler puts those
cluster barriers there (`test_pairs_compile`). Not seen: which of them it leaves out.
"""

import copy

import numpy as np

from tests.emulator import device
from tests.emulator.arrays import Value
from tests.emulator.memory_model import Violation, join

HALF = 2  # CTAs


class Cluster:
    """Two CTAs: what each of them has allocated, in order, and where they wait for each other."""

    def __init__(self):
        self.cells, self.barriers, self.shared = ([], []), ([], []), {}
        self.met, self.clocks = 0, None

    # -- memory

    @staticmethod
    def own_shape(shape, layout):
        """A CTA's part of an allocation."""
        shape, bases = list(shape), getattr(layout, "cga_layout", None) or [()]
        for dim, step in enumerate(bases[0], len(shape) - len(bases[0])):
            shape[dim] //= HALF if step else 1
        return shape

    def made(self, role, cells):
        """Remember an allocation: both CTAs make the same ones in the same order."""
        cells.number = len(self.cells[role.rank])
        self.cells[role.rank].append(cells)

    def other(self, role, view):
        """The same place of the other CTA's memory."""
        theirs = self.cells[1 - role.rank]
        if view.cells.number >= len(theirs):
            raise Violation(f"the other CTA has not allocated its {view.cells.name}")
        if getattr(view, "parent", None) is not None:
            return self.other(role, view.parent).reshape(view.shape)
        found = copy.copy(view)
        found.cells, own = theirs[view.cells.number], view.cells.data
        at = view.v.__array_interface__["data"][0] - own.__array_interface__["data"][0]
        found.v = np.ndarray(view.v.shape, view.v.dtype, found.cells.data, at, view.v.strides)
        return found

    def copies(self, role, descriptor, at, into, multicast):
        """(descriptor, place, memory) of the copies that a CTA issues."""
        (steps,) = descriptor.layout.cga_layout
        if not any(steps):  # both CTAs have all of it
            if not multicast:
                return [(descriptor, at, into)]
            return [] if role.rank else [
                (descriptor, at, to) for to in (into, self.other(role, into))
            ]  # fmt: skip
        part = copy.copy(descriptor)
        part.block, at = list(part.block), list(at)
        dim = steps.index(1)
        part.block[dim] //= HALF
        at[dim] = at[dim] + role.rank * part.block[dim]
        part.nbytes = descriptor.nbytes // HALF
        return [(part, at, into)]

    # -- barriers of both

    def sync(self, scheduler, role):
        """A barrier of the cluster."""
        role.sync()
        self.clocks = self.clocks if self.met % HALF else scheduler.agents.new_clocks()
        join(self.clocks, role.clocks)
        self.met += 1
        want = -(-self.met // HALF) * HALF
        clocks = self.clocks
        scheduler.wake(self)
        scheduler.wait((self,), lambda: self.met >= want, "the other CTA of the cluster")
        join(role.clocks, clocks)


class OfPair:
    """Which barrier of a pair of CTAs one is."""

    def __init__(self, cluster, number, is_shared):
        self.cluster, self.number, self.is_shared = cluster, number, is_shared

    def is_awaited_by(self, role):
        return not self.is_shared or role.rank == 0


def barriers_of(num, count, is_shared):
    """`kernels.blackwell.pair.barriers_of`."""
    scheduler, role = device._now()
    cluster, rank = role.cluster, role.rank
    number = len(cluster.barriers[rank])
    made = cluster.shared.get(number)
    if made is None:
        name = device._named(3)
        made = [device.Barrier(f"{name}[{i}] of {role.cta}", scheduler.agents) for i in range(num)]
        for i, barrier in enumerate(made):
            device.init(barrier, int(count) * (HALF if is_shared else 1))
            barrier.cluster = OfPair(cluster, (number, i), is_shared)
        if is_shared:
            cluster.shared[number] = made
    cluster.barriers[rank].append(made)
    return device.Barriers(made)


def barriers_of_commit(role, barrier):
    """Where a commit arrives: at both CTAs' barriers."""
    if barrier.cluster is None:
        return [barrier]
    if barrier.cluster.is_shared:
        raise Violation(f"a commit to {barrier.name}, of which there is one for both CTAs")
    number, i = barrier.cluster.number
    return [made[number][i] for made in role.cluster.barriers]


def part_of(num, layout=None):
    """`kernels.blackwell.pair.part_of`: here a CTA has only its own part of a tensor."""
    rank = device._now()[1].rank
    return Value(np.arange(rank * int(num), (rank + 1) * int(num), dtype=np.int32))


def each(role, *operands):
    """The operands of an instruction, of every CTA that takes part."""
    if role.cluster is None:
        return [operands]
    others = [None if one is None else role.cluster.other(role, one) for one in operands]
    return [operands, others]
