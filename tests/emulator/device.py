"""What scheduled kernels do to memory: loads, barriers, copies, products, launches.

`Scheduled` stands for a kernel, as `running.Emulated` does, on a `Scheduler`.
"""

import contextlib
import ctypes
import functools
import inspect
import itertools
import linecache
import math
import re
import sys
from types import SimpleNamespace

import numpy as np
import torch
import triton.language as tl
from triton.experimental.gluon import language as gluon_language
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from megamoe.kernels.common import compat
from megamoe.kernels.common.numbers import Kind
from megamoe.kernels.gluon.compat import reinterpret
from megamoe.kernels.gluon.tile_scheduler import GIVE_UP
from megamoe.kernels.hopper.weights.decode import NV_TO_BF16
from tests.emulator import arrays, assembly, running, values
from tests.emulator.arrays import Pointer, Value, decoded, encoded, raw
from tests.emulator.memory_model import GLOBAL, SEEN, SHARED, Cells, Violation, join
from tests.emulator.scheduler import Scheduler


def _now():
    """(the scheduler, the role that runs)."""
    scheduler = Scheduler.current
    return scheduler, scheduler.now


# -- global memory ---------------------------------------------------------------------------------


def _flat(pointer, mask):
    """int64 addresses [n], which of them are meant or None for all, and their shape."""
    address, keep = pointer.address, raw(mask)
    if keep is None:
        address = np.asarray(address, dtype=np.int64)
        return address.reshape(-1), None, address.shape
    address, keep = np.broadcast_arrays(np.asarray(address, dtype=np.int64), np.asarray(keep))
    return address.reshape(-1), keep.reshape(-1), address.shape


def load(pointer, mask=None, other=None, volatile=False, **_):
    """Elements that the mask leaves out are `other`, or nobody knows what."""
    scheduler, role = _now()
    scheduler.step("load")
    kind = pointer.element
    if volatile:  # as PTX takes it: relaxed, of scope sys
        view, at, _ = _strong(scheduler, role, int(pointer.address), kind, False, "sys")
        return Value(view[at].item())
    size, stored = kind.size, kind.stored
    if mask is None and not isinstance(pointer.address, np.ndarray):  # of one element
        address = int(pointer.address)
        region = scheduler.memory.region(address, size)
        offset = np.array([address - region.start])
        clock = int(role.clocks[SEEN, role.agent])
        region.read(scheduler.memory, role.agent, clock, offset, role.clocks[SEEN])
        at = (address - region.start) // size
        found = decoded(region.view(stored)[at : at + 1], kind)
        return Value(found[0].item(), kind if kind.is_narrow else None)
    address, keep, shape = _flat(pointer, mask)
    if keep is None:
        found = np.empty(len(address), dtype=stored)
        wanted = address
    else:
        found = np.full(len(address), -1, dtype=np.int64).astype(stored)  # poison
        if other is not None:
            found[:] = encoded(np.asarray(raw(other)), kind)
        wanted = address[keep]
    if len(wanted):
        got = found if keep is None else np.empty(len(wanted), dtype=stored)
        clock = int(role.clocks[SEEN, role.agent])
        for region, offset, which in scheduler.memory.parts(wanted, size):
            region.read(scheduler.memory, role.agent, clock, offset, role.clocks[SEEN])
            got[which] = region.view(stored)[offset // size]
        if keep is not None:
            found[keep] = got
    value = decoded(found, kind).reshape(shape)
    return Value(value.item() if shape == () else value, kind if kind.is_narrow else None)


def store(pointer, value, mask=None, **_):
    scheduler, role = _now()
    scheduler.step("store")
    kind, size = pointer.element, pointer.element.size
    if kind.is_narrow and not (type(value) is Value and value.kind is kind):
        value = (value if type(value) is Value else Value(value)).to(kind)
    given = encoded(raw(value), kind)
    address, keep, shape = _flat(pointer, mask)
    given = np.broadcast_to(given, shape).reshape(-1)
    if keep is not None:
        address, given = address[keep], given[keep]
    if len(address) == 0:
        return
    clock = int(role.clocks[SEEN, role.agent])
    for region, offset, which in scheduler.memory.parts(address, size):
        region.write(scheduler.memory, role.agent, clock, offset, role.clocks[SEEN])
        region.view(kind.stored)[offset // size] = given[which]
        if scheduler.waiting and len(offset) <= 64:
            for at in offset.tolist():
                scheduler.wake(region.start + at)


def _acquire(role, word, scope):
    found = word.by_gpu.get(role.gpu)
    if found is not None:
        join(role.clocks, found)
    if scope == "sys" and word.system is not None:
        join(role.clocks, word.system)


def _release(role, word, scope):
    """By one thread: what others stored since the last barrier of threads is not meant."""
    published = role.clocks.copy()
    published[:, role.agent] = np.minimum(published[:, role.agent], role.synced)
    for kept in (word.by_gpu.get(role.gpu), word.system if scope == "sys" else None):
        if kept is not None:
            join(published, kept)
    word.by_gpu[role.gpu] = published
    if scope == "sys":
        word.system = published.copy()
    role.tick()


def _strong(scheduler, role, address, kind, is_write, scope):
    region = scheduler.memory.region(address, kind.size)
    offset = address - region.start
    word = region.strong(scheduler.memory, role, offset, is_write, scope)
    return region.view(kind.stored), offset // kind.size, word


def _atomic(change):
    def act(pointer, value, mask=None, sem=None, scope=None):
        scheduler, role = _now()
        scheduler.step("atomic")
        if isinstance(pointer.address, np.ndarray):
            assert sem == "relaxed"
            return _many_atomics(scheduler, role, change, pointer, value, mask)
        if np.ndim(raw(mask)):
            raise Violation("many atomics on one address")
        sem, scope = sem or "acq_rel", scope or "gpu"
        if mask is not None and not raw(mask):
            return Value(0)
        view, at, word = _strong(
            scheduler, role, int(pointer.address), pointer.element, True, scope
        )
        if scope == "cta":  # nobody outside the CTA is meant
            sem = "relaxed"
        if sem in ("acquire", "acq_rel"):
            _acquire(role, word, scope)
        if sem in ("release", "acq_rel"):
            _release(role, word, scope)
        old = int(view[at])
        half = 1 << 8 * view.itemsize - 1
        view[at] = (change(old, int(raw(value))) + half) % (2 * half) - half  # it wraps
        scheduler.wake(int(pointer.address))
        return Value(old)

    return act


def _many_atomics(scheduler, role, change, pointer, value, mask):
    """One atomic an element, which nobody waits for; nobody learns what was there."""
    kind, (address, keep, shape) = pointer.element, _flat(pointer, mask)
    given = np.broadcast_to(raw(value), shape).reshape(-1)
    for i in range(len(address)) if keep is None else keep.nonzero()[0]:
        view, at, _ = _strong(scheduler, role, int(address[i]), kind, True, "gpu")
        old = decoded(view[at : at + 1], kind)
        view[at : at + 1] = encoded(change(old, given[i]), kind)


# -- shared memory ---------------------------------------------------------------------------------


@functools.cache
def _left_side(filename, line):
    """The name that a line assigns to."""
    found = re.match(r"\s*(\w+)\s*=", linecache.getline(filename, line))
    return found[1] if found else ""


def _named(depth):
    """What the kernel calls what it allocates now."""
    frame = sys._getframe(depth)
    for _ in range(3):
        name = _left_side(frame.f_code.co_filename, frame.f_lineno)
        if name not in ("", "made"):
            return name
        frame = frame.f_back
    return "memory"


@functools.cache
def _last_byte(shape, strides):
    """Where the last element of an array begins."""
    return sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


class Shared:
    """A descriptor of shared memory: a view of an allocation."""

    __slots__ = ("at", "cells", "kind", "parent", "v")

    def __init__(self, cells, v, kind, at):
        self.cells, self.v, self.kind, self.at = cells, v, kind, at
        self.parent = None  # whose values these are, where they had to be copied

    dtype = property(lambda self: self.kind)
    shape = property(lambda self: list(self.v.shape))

    def index(self, i):
        i = int(i)
        if not 0 <= i < len(self.v):
            raise Violation(f"index {i} of {len(self.v)} of {self.cells.name}")
        return Shared(self.cells, self.v[i], self.kind, self.at + i * self.v.strides[0])

    def slice(self, start, length, dim=0):
        start, length = int(start), int(length)
        where = [slice(None)] * dim + [slice(start, start + length)]
        at = self.at + start * self.v.strides[dim]
        return Shared(self.cells, self.v[tuple(where)], self.kind, at)

    def permute(self, order):
        return Shared(self.cells, self.v.transpose(tuple(order)), self.kind, self.at)

    def reshape(self, shape):
        v = self.v.reshape([int(n) for n in shape])
        made = Shared(self.cells, v, self.kind, self.at)
        made.parent = None if np.may_share_memory(v, self.v) else self
        return made

    def _reinterpret(self, kind, shape, layout):
        shape = [int(n) for n in shape]
        size = math.prod(shape) * kind.size
        flat = self.cells.data[self.at : self.at + size]
        return Shared(self.cells, flat.view(kind.stored).reshape(shape), kind, self.at)

    def rows(self):
        """The rows of the allocation that it touches."""
        row, last = self.cells.row, self.at + _last_byte(self.v.shape, self.v.strides)
        return range(self.at // row, last // row + 1)

    def load(self, layout=None):
        scheduler, role = _now()
        clock = int(role.clocks[SEEN, role.agent])
        self.cells.read(scheduler.memory, role.agent, clock, self.rows(), role.clocks, False)
        kind = self.kind if self.kind.is_narrow else None
        return Value(np.array(decoded(self.v, self.kind)), kind)

    def store(self, value):
        scheduler, role = _now()
        assert value.dtype is self.kind, f"{value.dtype} into {self.kind}"
        clock = int(role.clocks[SEEN, role.agent])
        self.cells.write(scheduler.memory, role.agent, clock, self.rows(), role.clocks, False)
        self.v[...] = encoded(value.a, self.kind)


class Barrier:
    """One mbarrier: `pending` arrivals and `bytes` end its phase."""

    __slots__ = (
        "agent",
        "bytes",
        "cluster",
        "completed",
        "count",
        "issued",
        "name",
        "pending",
        "phase",
        "phases",
        "so_far",
    )  # fmt: skip

    def __init__(self, name, agents):
        self.count = self.pending = self.bytes = self.phase = self.phases = self.issued = 0
        self.name, self.agent = name, None  # the agent: copies that complete on it
        self.cluster = None  # what `cta_pair` knows of one of a pair
        self.so_far, self.completed = agents.new_clocks(), None


class Barriers:
    """mbarriers, made together."""

    def __init__(self, made):
        self.made = made

    def index(self, i):
        i = int(i)
        if not 0 <= i < len(self.made):
            raise Violation(f"mbarrier {i} of {len(self.made)}")
        return self.made[i]


MBARRIERS = object()


def allocate_shared_memory(kind, shape, layout):
    scheduler, role = _now()
    shape = [int(n) for n in shape]
    name = f"{_named(2)} of {role.cta}"
    if layout is MBARRIERS:
        return Barriers([Barrier(f"{name}[{i}]", scheduler.agents) for i in range(shape[0])])
    size = kind.size
    if role.cluster is not None:
        shape = role.cluster.own_shape(shape, layout)
    data = np.full(math.prod(shape) * size, 0xFF, dtype=np.uint8)  # poison
    row = math.prod(shape[1:]) if len(shape) > 1 else min(shape[0], 32)
    cells = Cells(data, row * size, name)
    if role.cluster is not None:
        role.cluster.made(role, cells)
    return Shared(cells, data.view(kind.stored).reshape(shape), kind, 0)


# -- barriers --------------------------------------------------------------------------------------


def _check(scheduler, barrier):
    if barrier.pending < 0:
        raise Violation(f"more arrivals at {barrier.name} than a phase has")
    if barrier.pending == 0 and barrier.bytes == 0:
        barrier.phase ^= 1
        barrier.phases += 1
        barrier.pending = barrier.count
        barrier.completed, barrier.so_far = barrier.so_far, scheduler.agents.new_clocks()
        scheduler.wake(barrier)


def init(barrier, count):
    barrier.count = barrier.pending = int(count)


def _arrive(barrier, count, size):
    """The compiler puts a barrier of the role's threads before it (`test_hopper_compile`)."""
    scheduler, role = _now()
    scheduler.step("arrive")
    if barrier.count == 0:
        raise Violation(f"an arrival at {barrier.name}, which was not initialised")
    if role.has_used_tensor:
        raise Violation(f"{role.name} used tensor memory and arrives at {barrier.name} unfenced")
    role.sync()
    join(barrier.so_far, role.clocks)
    barrier.so_far[:, role.agent] = np.minimum(barrier.so_far[:, role.agent], role.synced)
    barrier.bytes += size
    barrier.pending -= count
    _check(scheduler, barrier)


def expect(barrier, size, pred=True):
    if pred:
        _arrive(barrier, 1, int(size))


def arrive(barrier, count=1):
    _arrive(barrier, int(count), 0)


def wait(barrier, phase):
    scheduler, role = _now()
    phase = int(phase)
    scheduler.step("wait")
    if barrier.cluster is not None and not barrier.cluster.is_awaited_by(role):
        return
    scheduler.wait((barrier,), lambda: barrier.phase != phase, f"phase {phase} of {barrier.name}")
    role.has_waited = True
    if barrier.completed is not None:
        join(role.clocks, barrier.completed)


def fence_async_shared():
    role = _now()[1]
    np.maximum(role.clocks[SHARED], role.clocks[SEEN], out=role.clocks[SHARED])
    role.tick()


def _fence_async_global(role):
    np.maximum(role.clocks[GLOBAL], role.clocks[SEEN], out=role.clocks[GLOBAL])
    role.tick()


def thread_barrier():
    _now()[1].sync()


# -- copies and products ---------------------------------------------------------------------------

_BLOCKS = {}  # (shape, strides, block, where) -> (offsets of its elements, where they lie in it)


class Descriptor:
    """A TMA descriptor: a strided tensor and the block of one copy."""

    def __init__(self, made):
        base = made.base
        self.kind = arrays.NAMES[base.dtype]
        self.start, self.size = base.data_ptr(), base.element_size()
        self.tensor_shape, self.strides = tuple(made.shape), tuple(made.strides)
        self.block, self.layout = list(made.block_shape), made.layout
        self.nbytes = math.prod(self.block) * self.size

    dtype = property(lambda self: self.kind)
    block_type = property(lambda self: SimpleNamespace(shape=self.block, nbytes=self.nbytes))

    def inside(self, at):
        """(bytes from the tensor's start, places in the block) of what lies in the tensor."""
        key = (self.tensor_shape, self.strides, tuple(self.block), self.size, at)
        if key not in _BLOCKS:
            offset, keep = np.zeros((), dtype=np.int64), np.ones((), dtype=bool)
            for dim, (first, num) in enumerate(zip(at, self.block, strict=True)):
                if first < 0:
                    raise Violation("a block begins before its tensor")
                n = first + np.arange(num)
                offset = offset[..., None] + n * self.strides[dim]
                keep = keep[..., None] & (n < self.tensor_shape[dim])
            keep = keep.reshape(-1)
            _BLOCKS[key] = offset.reshape(-1)[keep] * self.size, keep.nonzero()[0]
        return _BLOCKS[key]


def tma_copy(descriptor, at, barrier, into, pred=True, multicast=False):
    if not pred:
        return
    cluster, parts = _now()[1].cluster, [(descriptor, at, into)]
    if cluster is not None:
        parts = cluster.copies(_now()[1], descriptor, at, into, multicast)
    for part, begin, to in parts:
        _copy(part, part.inside(tuple(int(i) for i in begin)), barrier, to, 1)


def tma_gather(descriptor, rows, col, barrier, into, pred=True):
    """The same of rows, each a block of its own; one that the tensor does not have is zero."""
    if not pred:
        return
    rows = np.asarray(rows.a).reshape(-1)
    if descriptor.block[0] != 1 or len(rows) < 4 or len(into.v) != len(rows):
        raise Violation(f"a gather of {len(rows)} rows in blocks of {descriptor.block}")
    found = [descriptor.inside((int(row), int(col))) for row in rows]
    offsets = np.concatenate([offset for offset, _ in found])
    places = np.concatenate([at + i * descriptor.block[1] for i, (_, at) in enumerate(found)])
    _copy(descriptor, (offsets, places), barrier, into, len(rows))


def _copy(descriptor, inside, barrier, into, times):
    scheduler, role = _now()
    scheduler.step("copy")
    offsets, places = inside
    num_bytes = times * descriptor.nbytes
    if barrier.agent is None:
        barrier.agent = scheduler.agents.add(f"copies that complete on {barrier.name}")
    barrier.issued += 1
    number, order = barrier.issued, role.clocks[GLOBAL].copy()
    view = into.v
    if not view.flags.c_contiguous or view.nbytes != num_bytes:
        raise Violation(f"{num_bytes} bytes into {view.nbytes} of {into.cells.name}")
    into.cells.write(
        scheduler.memory, role.agent, number, into.rows(), role.clocks, True, barrier.agent
    )
    flat = view.reshape(-1).view(descriptor.kind.stored)
    flat.view(np.uint8)[:] = 0xFF

    def act():
        memory = scheduler.memory
        region = memory.region(descriptor.start, 1)
        there = offsets + (descriptor.start - region.start)
        late = region.copied(barrier.agent, there, order)
        if len(places) < len(flat):
            flat[:] = 0
        flat[places] = region.view(flat.dtype.type)[there // descriptor.size]
        if late is not None:
            flat.reshape(-1, 1).view(np.uint8)[places[late]] = 0xFF
        barrier.so_far[SEEN, barrier.agent] = max(barrier.so_far[SEEN, barrier.agent], number)
        barrier.bytes -= num_bytes
        _check(scheduler, barrier)

    scheduler.issue(f"copy to {into.cells.name}", act)


class Queue:
    """Asynchronous operations of one role, which complete in order."""

    def __init__(self, scheduler, role, name):
        self.scheduler, self.role = scheduler, role
        self.agent = scheduler.agents.add(f"{name} of {role.name}")
        self.waiting, self.issued, self.grouped = [], 0, []

    def issue(self, name, act):
        self.issued += 1

        def in_order():
            while self.waiting[0] is not operation:
                self.scheduler.complete(self.waiting[0])
            self.waiting.pop(0)
            act()

        operation = self.scheduler.issue(name, in_order)
        self.waiting.append(operation)
        return self.issued

    def wait(self, number):
        """Until operation `number` is complete, and all before it."""
        while self.issued - len(self.waiting) < number:
            self.scheduler.complete(self.waiting[0])
        clocks = self.role.clocks
        clocks[SEEN, self.agent] = max(clocks[SEEN, self.agent], number)


def cp_async(into, pointer, mask=None):
    """cp.async: what the mask leaves out stays as it was."""
    scheduler, role = _now()
    scheduler.step("copy")
    if role.copies is None:
        role.copies = Queue(scheduler, role, "cp.async")
    queue, clocks = role.copies, role.clocks.copy()
    into.cells.write(
        scheduler.memory, role.agent, queue.issued + 1, into.rows(), role.clocks, False, queue.agent
    )
    address, keep, _ = _flat(pointer, mask)
    size, stored, number = pointer.element.size, pointer.element.stored, queue.issued + 1
    flat = into.v.reshape(-1)
    assert np.shares_memory(flat, into.v)
    places = np.arange(len(address)) if keep is None else keep.nonzero()[0]
    flat.view(stored)[places] = np.full(1, -1).astype(stored)

    def act():
        if len(places):
            memory = scheduler.memory
            for region, offset, which in memory.parts(address[places], size):
                region.read(memory, queue.agent, number, offset, clocks[SEEN], "read")
                flat.view(stored)[places[which]] = region.view(stored)[offset // size]

    queue.issue(f"copy to {into.cells.name}", act)


def commit_group():
    queue = _now()[1].copies
    if queue is not None:
        queue.grouped.append(queue.issued)


def wait_group(num_outstanding=0):
    scheduler, role = _now()
    scheduler.step("wait")
    queue = role.copies
    if queue is not None and len(queue.grouped) > num_outstanding:
        queue.wait(queue.grouped[len(queue.grouped) - num_outstanding - 1])


class Product:
    """One wgmma: its sums, once it is waited for; until then they are poison."""

    __slots__ = ("handle", "number", "sums")


def _operand(operand):
    if type(operand) is Value:
        return operand.a
    return decoded(operand.v, operand.kind)


def warpgroup_mma(a, b, acc, use_acc=True, is_async=False):
    scheduler, role = _now()
    scheduler.step("product")
    if role.products is None:
        role.products = Queue(scheduler, role, "wgmma")
        role.pending = []
    queue = role.products
    number = queue.issued + 1
    for operand in (a, b):
        if type(operand) is not Value:
            operand.cells.read(
                scheduler.memory, role.agent, number, operand.rows(), role.clocks, True, queue.agent
            )
    product = Product()
    before = next((p for p in role.pending if p.handle is acc), None)
    product.handle = Value(np.full(np.shape(acc.a), np.nan, dtype=np.float32))
    product.number, product.sums = number, None

    def act():
        found = _operand(a) @ _operand(b)
        if use_acc:
            found = found + (acc.a if before is None else before.sums)
        product.sums = found

    queue.issue(f"product of {role.name}", act)
    role.pending.append(product)
    if not is_async:
        return warpgroup_mma_wait(0, [product.handle])
    return product.handle


def warpgroup_mma_wait(num_outstanding, deps):
    scheduler, role = _now()
    scheduler.step("wait")
    queue = role.products
    if queue is not None:
        queue.wait(queue.issued - int(num_outstanding))
        known = {id(p.handle): p for p in role.pending}
        done = queue.issued - int(num_outstanding)
        found = []
        for dep in deps:
            product = known.get(id(dep))
            is_there = product is not None and product.number <= done
            found.append(Value(product.sums) if is_there else dep)
        role.pending = [p for p in role.pending if p.number > done]
        deps = found
    return deps[0] if len(deps) == 1 else tuple(deps)


# -- PTX -------------------------------------------------------------------------------------------


def _compared(text):
    return {"eq": lambda seen, want: seen == want, "ge": lambda seen, want: seen >= want}[
        re.search(r"setp\.(\w+)\.s32", text)[1]
    ]


def _wait_for_words(text, address, want, report, bound_ns):
    """Until words are what is wanted, or there is a report, or the bound has come."""
    scheduler, role = _now()
    scheduler.step("wait for memory")
    sem, scope = re.search(r"ld\.(\w+)\.(\w+)\.global", text).groups()
    is_reached, memory = _compared(text), scheduler.memory
    wants = np.broadcast_to(np.asarray(raw(want)), np.shape(raw(address))).reshape(-1)
    words = sorted({(int(at), int(value)) for at, value in
                    zip(np.asarray(raw(address)).reshape(-1), wants, strict=True)})  # fmt: skip
    gives_up = int(raw(report))

    def value(at):
        region = memory.region(at, 4)
        return int(region.view(np.int32)[(at - region.start) // 4])

    def all_reached():
        return all(is_reached(value(at), wanted) for at, wanted in words)

    scheduler.wait(
        (*(at for at, _ in words), gives_up),
        lambda: all_reached() or value(gives_up) != 0,
        f"words {[(memory.region(at, 4).name, value(at), wanted) for at, wanted in words]}",
        is_bounded=True,
    )
    for at, wanted in words:
        _, _, word = _strong(scheduler, role, at, arrays.I32, False, scope)
        if sem == "acquire" and scope != "cta" and is_reached(value(at), wanted):
            _acquire(role, word, scope)
    if "fence.proxy.async.global" in text:
        _fence_async_global(role)
    if np.ndim(raw(address)) == 0:
        return Value(value(int(raw(address))))
    return Value(np.vectorize(value, otypes=[np.int32])(raw(address)))


def _signal(text, address, value, mask):
    """Words that become values; what this thread knows of comes before, by the fence's scope."""
    scheduler, role = _now()
    scheduler.step("signal")
    fence = re.search(r"fence\.acq_rel\.(\w+)", text)
    scope = re.search(r"st\.relaxed\.(\w+)", text)[1]
    parts = np.broadcast_arrays(*(np.asarray(raw(v)) for v in (address, value, mask)))
    words = {int(at): int(v) for at, v, keep in zip(*(p.reshape(-1) for p in parts), strict=True)
             if keep}  # fmt: skip
    for at, new in words.items():
        view, place, word = _strong(scheduler, role, at, arrays.I32, True, scope)
        if fence is not None and fence[1] != "cta":  # nobody outside the CTA is meant
            _release(role, word, fence[1])
        view[place] = new
        scheduler.wake(at)
    return Value(0)


def _push_word(text, address, *args):
    """`exchange.SIGNAL`, which releases; or `STORE_IF_MISSED`, where something was missed."""
    scheduler, role = _now()
    at, args = int(raw(address)), [int(raw(v)) for v in args]
    if len(args) == 3:
        seen, want, new = args
        if seen >= want:
            return Value(0)
    else:
        (new,) = args
    scheduler.step("signal")
    sem, scope = re.search(r"st\.(\w+)\.(\w+)\.global", text).groups()
    view, place, word = _strong(scheduler, role, at, arrays.I32, True, scope)
    if sem == "release":
        _release(role, word, scope)
    view[place] = new
    scheduler.wake(at)
    return Value(0)


def _give_up(seen, value, given_up, error):
    """Whoever did not see enough says so, to others and to the host."""
    if bool(np.all(raw(seen) >= raw(value))):
        return Value(0)
    scheduler, role = _now()
    scheduler.step("give up")
    for at, changed in ((int(raw(given_up)), 1), (int(raw(error)), -1)):
        view, place, _ = _strong(scheduler, role, at, arrays.I32, True, "gpu")
        view[place] = changed
        scheduler.wake(at)
    return Value(0)


def _report(report, seen, want, *what):
    """The first who did not see what it wanted writes it."""
    scheduler, role = _now()
    at = int(raw(report))
    operands = np.broadcast_arrays(*(np.asarray(raw(v)) for v in (*what, want, seen)))
    *what, want, seen = (v.reshape(-1) for v in operands)
    wrong = np.flatnonzero(seen != want)
    if len(wrong) == 0:
        return Value(0)
    scheduler.step("report")
    view, first, _ = _strong(scheduler, role, at, arrays.I32, True, "gpu")
    if view[first] == 0:
        view[first : first + 7] = [1, *(int(v[wrong[0]]) for v in (*what, want, seen))]
        scheduler.wake(at)
    return Value(0)


def _nibble_table():
    """FP32 of (exponent, code) as the decoder of FP4 to E4M3 looks it up."""
    shift = np.arange(16, dtype=np.int64)[:, None]
    low, high = shift * 0x08080800 + 0x14100800, shift * 0x08080808 + 0x24201C18
    codes = np.concatenate([half >> 8 * j & 255 for half in (low, high) for j in range(4)], 1)
    values = arrays.E4M3[codes]
    return np.concatenate([values, -values], 1).astype(np.float32)


NIBBLES = _nibble_table()
_DECODED = {}


def _four_to_e4m3(w, s):
    """The four words of a row: E4M3 of each, low and high; the same bytes are decoded once."""
    words, shift = np.ascontiguousarray(w.a), np.broadcast_to(s.a[..., 0], w.a.shape[:-1])
    key = words.tobytes(), shift.tobytes(), words.shape
    if key not in _DECODED:
        found = []
        for step in range(4):
            word = words[..., step].astype(np.int64) & 0xFFFFFFFF
            for first, left in ((0, 0), (16, 4)):
                code = np.stack(
                    [(word >> first + 4 * j & 7) | ((word << left) >> 8 * j + 7 & 1) << 3
                     for j in range(4)], -1,
                )  # fmt: skip
                found.append(NIBBLES[shift[..., None] & 15, code])
        _DECODED[key] = tuple(found)
    return tuple(Value(v, arrays.FP8) for v in _DECODED[key])


def _nv_to_bf16(text, *args):
    """As values are emulated without a scheduler."""
    given = [values.Value(torch.from_numpy(np.array(one.a))) for one in args]
    return tuple(
        Value(one.t.float().numpy(), arrays.BF16)
        for one in assembly.ASSEMBLY[NV_TO_BF16.value](*given)
    )


def _f32(v):
    return np.asarray(raw(v), dtype=np.float32)


def _launch_control(text):
    scheduler, role = _now()
    if "griddepcontrol.launch_dependents" in text:
        role.launch.allow(role)
    elif "griddepcontrol.wait" in text:
        before = role.launch.before
        if before is not None:
            scheduler.wait((before,), lambda: before.is_over, "the launch before this one")
            join(role.clocks, before.end)
    elif "fence.proxy.async.global" in text:
        _fence_async_global(role)
    elif "tcgen05.fence::after" in text:
        role.has_waited = False
    elif "tcgen05.fence::before" in text:
        role.has_used_tensor = False
    return Value(0)


# What a text is known by -> its meaning; the first that fits.
MEANINGS = (
    (NV_TO_BF16.value, _nv_to_bf16),
    ("prmt.b32", lambda text, *args: _four_to_e4m3(*args)),
    (GIVE_UP.value, lambda text, *args: _give_up(*args)),
    ("cas.b32", lambda text, *args: _report(*args)),
    ("@p st.relaxed", _signal),
    ("@p bra done;\nst.release.", _push_word),
    ("@p bra done;\nst.relaxed.", _push_word),
    ("mov.u64 $0, %globaltimer", lambda text: Value(0)),
    ("bfe.u32 $0, $1, 10, 10", lambda text, x: x >> 10 & 1023),
    ("rcp.approx", lambda text, x: Value(np.float32(1.0) / _f32(x))),
    ("mul.rn.f32 q", lambda text, a, b, _: Value(_f32(a) / _f32(b))),
    ("ex2.approx", lambda text, x: Value(np.exp2(_f32(x)))),
    ("mul.rn.f32 $0", lambda text, a, b: Value(_f32(a) * _f32(b))),
    ("min.NaN", lambda text, a, b: Value(np.minimum(_f32(a), _f32(b)))),
    ("max.NaN", lambda text, a, b: Value(np.maximum(_f32(a), _f32(b)))),
    ("cvt.rn.bf16x2", lambda text, x: Value(arrays.rounded(x.a, arrays.BF16))),
    ("prefetch", lambda text, *args: Value(0)),
    ("L2 policy", lambda text, *args: Value(0)),
    ("createpolicy", lambda text: Value(0)),
    (".b64 megamoe", lambda text: Value(0)),
    ("globaltimer_lo", lambda text: Value(0)),
)


def inline_asm_elementwise(text, constraints, args, dtype, is_pure, pack):
    if text == "":
        return args[0]
    act = _meaning(text)
    assert act is not _launch_control or not args, f"no meaning is known for {text!r}"
    return act(text, *args)


@functools.cache
def _meaning(text):
    if re.search(r"\b[Aa][Gg][Aa][Ii][Nn]:", text):
        return _wait_for_words
    return next((act for known, act in MEANINGS if known in text), _launch_control)


# -- launches --------------------------------------------------------------------------------------


class Launch:
    """One launch: its CTAs, and the launch of the same stream before it."""

    def __init__(self, scheduler, host, name, grid, before, num_ctas=1):
        self.scheduler, self.host, self.name, self.grid = scheduler, host, name, grid
        self.num_ctas = math.prod(grid) * num_ctas
        self.before, self.left, self.allowed = before, self.num_ctas, {}
        self.end, self.begin = scheduler.agents.new_clocks(), None

    is_over = property(lambda self: self.left == 0)

    def allow(self, role):
        """One more CTA lets the next launch begin; remembered: after the launch before is over?"""
        end = None if self.before is None else self.before.end[SEEN]
        knows = end is None or (self.before.is_over and bool((role.clocks[SEEN] >= end).all()))
        self.allowed.setdefault(role.cta, knows)
        self.scheduler.wake(self)

    def finish(self, role):
        join(self.end, role.clocks[SEEN])  # the end of a launch fences all proxies
        self.left -= 1
        self.allow(role)

    def may_be_followed(self):
        return len(self.allowed) == self.num_ctas

    def begin_after(self, before):
        """The clocks of its CTAs: a launch that all of `before` waited for first is over.

        Nothing that `before` itself does is known; only griddepcontrol.wait brings that. All CTAs
        of `before` have begun, so what they began with is known here too.
        """
        clocks = self.host.clocks.copy()
        clocks[:] = clocks[SEEN]
        if before is not None and before.begin is not None:
            join(clocks, before.begin)
        if before is not None and before.before is not None and all(before.allowed.values()):
            join(clocks, before.before.end)
        self.begin = clocks.copy()
        return clocks


def _bytes_of(t):
    """All bytes of a tensor's storage."""
    storage = t.untyped_storage()
    start, size = storage.data_ptr(), storage.nbytes()
    if size == 0:
        return start, np.empty(0, dtype=np.uint8)
    return start, np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start))


class Scheduled:
    """A kernel with the launch syntax of Triton, under the current scheduler."""

    make_cluster = None  # `cta_pair` sets it

    def __init__(self, kernel, name=None):
        self.signature = inspect.signature(kernel.fn)
        self.name = name or kernel.fn.__name__
        with world():
            self.kernel = running.translated(kernel)
        self.hold, self.launches = [], 0

    def __getitem__(self, grid):
        return lambda *args, **constants: self._run(tuple(grid), args, constants)

    def _run(self, grid, args, constants):
        scheduler, host = _now()
        known = {k: v for k, v in constants.items() if k in self.signature.parameters}
        bound = self.signature.bind(*args, **known).arguments
        for i, t in enumerate(self.hold):
            scheduler.memory.hold(*_bytes_of(t), f"memory {i}")
        given = {name: self._argument(scheduler, name, v) for name, v in bound.items()}
        scheduler.kept.append((args, constants))  # or its memory would become another tensor's
        self.launches += 1
        before, is_early = host.last_launch, bool(constants.get("launch_pdl"))
        if before is not None:
            is_ready = before.may_be_followed if is_early else lambda: before.is_over
            scheduler.wait((before,), is_ready, "the launch before")
            if not is_early:
                join(host.clocks, before.end)
        num_ctas = constants.get("num_ctas", 1)
        launch = Launch(scheduler, host, self.name, grid, before if is_early else None, num_ctas)
        host.last_launch = launch
        scheduler.step("launch")
        host.tick()
        clocks = launch.begin_after(before)
        clusters = [None if num_ctas == 1 else self.make_cluster() for _ in range(math.prod(grid))]
        each = zip(itertools.product(*map(range, grid)), clusters, strict=True)
        for (ids, cluster), rank in itertools.product(each, range(num_ctas)):
            number = ".".join(map(str, ids if len(ids) > 1 and ids[1] else ids[:1]))
            cta = f"CTA {number}" + (f" of {host.name}" if host.gpu else "")
            cta += f", rank {rank}" if cluster is not None else ""
            act = functools.partial(self._cta, launch, given)
            role = scheduler.add(
                act, f"{self.name} of {cta}", kind="kernel", cta=cta, launch=launch, gpu=host.gpu,
                num_warps=4, parent=clocks,
            )  # fmt: skip
            role.ids, role.rank, role.cluster = ids, rank, cluster
        if not is_early:
            synchronize()

    def _cta(self, launch, given):
        self.kernel(**given)
        launch.finish(_now()[1])

    @staticmethod
    def _argument(scheduler, name, value):
        if isinstance(value, torch.Tensor):
            scheduler.memory.hold(*_bytes_of(value), name)
            return Pointer(value.data_ptr(), arrays.NAMES[value.dtype])
        if isinstance(value, TensorDescriptor):
            scheduler.memory.hold(*_bytes_of(value.base), name)
            return Descriptor(value)
        if isinstance(value, Kind):
            with world():
                return running.kind(value)
        return Value(value) if isinstance(value, int | float) and not name.isupper() else value


def rewrite(tensors, name):
    """A launch of one role that overlaps its neighbours and stores what is there once more.

    It stands for the kernels that fill the memory of a launch before it, or reuse it after it.
    """
    scheduler, host = _now()
    before = host.last_launch
    if before is not None:
        scheduler.wait((before,), before.may_be_followed, "the launch before")
    launch = host.last_launch = Launch(scheduler, host, name, (1,), before)
    given = [Scheduled._argument(scheduler, key, t.view(-1)) for key, t in tensors.items()]
    host.tick()

    def act():
        _, role = _now()
        _launch_control("griddepcontrol.wait")
        launch.allow(role)
        for pointer, t in zip(given, tensors.values(), strict=True):
            at = pointer + Value(np.arange(t.numel()))
            store(at, load(at))
        launch.finish(role)

    role = scheduler.add(
        act, f"{name} of its CTA", kind=name, cta=f"CTA of {name}", launch=launch, gpu=host.gpu,
        num_warps=4, parent=launch.begin_after(before),
    )  # fmt: skip
    role.ids = (0,)


def synchronize():
    """The host waits for its launches."""
    scheduler, host = _now()
    last = host.last_launch
    if last is not None:
        scheduler.wait((last,), lambda: last.is_over, "its launch")
        join(host.clocks, last.end)
        if scheduler.roles == [host] and not scheduler.operations:
            scheduler.forget(host)


def warp_specialize(roles, num_warps, registers):
    """Every role as a coroutine; returns when all have ended."""
    scheduler, parent = _now()
    parent.sync()
    if parent.has_used_tensor:
        raise Violation(f"{parent.name} used tensor memory and begins roles unfenced")
    if parent.cluster is not None:
        parent.cluster.sync(scheduler, parent)
    made = []
    for i, ((act, args), warps) in enumerate(zip(roles, [4, *num_warps], strict=True)):
        name = f"{act.__name__} {i} of {parent.cta}"
        role = scheduler.add(
            functools.partial(act, *args), name, kind=f"{act.__name__} {i}", cta=parent.cta,
            launch=parent.launch, gpu=parent.gpu, num_warps=warps, parent=parent.clocks,
        )  # fmt: skip
        role.ids, role.rank, role.cluster = parent.ids, parent.rank, parent.cluster
        role.has_waited = True
        made.append(role)
    for role in made:
        scheduler.wait((role,), lambda role=role: role not in scheduler.roles, role.name)
        join(parent.clocks, role.clocks)
    if parent.cluster is not None:
        parent.cluster.sync(scheduler, parent)


LANGUAGE = SimpleNamespace(
    **arrays.LANGUAGE,
    load=load, store=store, thread_barrier=thread_barrier, warp_specialize=warp_specialize,
    program_id=lambda axis: Value(_now()[1].ids[axis]),
    num_programs=lambda axis: Value(_now()[1].launch.grid[axis]),
    num_warps=lambda: _now()[1].num_warps,
    inline_asm_elementwise=inline_asm_elementwise,
    allocate_shared_memory=allocate_shared_memory,
    atomic_add=_atomic(lambda old, value: old + value),
    atomic_xchg=_atomic(lambda old, value: value),
    atomic_min=_atomic(min),
)  # fmt: skip

REPLACED = {
    **arrays.REPLACED,
    **dict.fromkeys((compat.HAS_FP8, compat.HAS_PTX), lambda: False),
    compat.HAS_PDL: lambda: True,
    gdc_wait: lambda: _launch_control("griddepcontrol.wait"),
    gdc_launch_dependents: lambda: _launch_control("griddepcontrol.launch_dependents"),
    tl: LANGUAGE,
    gluon_language: LANGUAGE,
    hopper.mbarrier: SimpleNamespace(
        init=init, expect=expect, arrive=arrive, wait=wait, MBarrierLayout=lambda: MBARRIERS
    ),
    hopper.tma: SimpleNamespace(async_copy_global_to_shared=tma_copy, tensor_descriptor=None),
    async_copy: SimpleNamespace(
        async_copy_global_to_shared=cp_async, commit_group=commit_group, wait_group=wait_group
    ),
    reinterpret: lambda desc, *what: desc._reinterpret(*what),
    hopper.fence_async_shared: fence_async_shared,
    hopper.warpgroup_mma: warpgroup_mma,
    hopper.warpgroup_mma_wait: warpgroup_mma_wait,
}

MODULES, FUNCTIONS, KINDS = {}, {}, {}  # kernels as functions, in this language


@contextlib.contextmanager
def world():
    """Kernels are translated into this language, not into that of threads."""
    mine = {
        "REPLACED": REPLACED, "_MODULES": MODULES, "_FUNCTIONS": FUNCTIONS, "_KINDS": KINDS,
        "BUILTINS": {**running.BUILTINS, "range": arrays.run_time_range},
    }  # fmt: skip
    theirs = {name: getattr(running, name) for name in mine}
    try:
        for name, value in mine.items():
            setattr(running, name, value)
        yield
    finally:
        for name, value in theirs.items():
            setattr(running, name, value)
