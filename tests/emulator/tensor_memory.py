"""Tensor memory and tcgen05 of sm_100a under the scheduler (`device`).

Copies and products of a CTA are operations that complete when the policy says so, in no more order
than PTX gives (9.7.16.6.2): a copy before a later product, products of the same sums, and all that
a thread issued before its commit. What PTX does not order is a violation unless the one who issues
knows by an mbarrier that the earlier one has completed: a copy into scales that a product may still
read, a read of sums that a product may still write. Until an operation completes, what it writes is
poison. Between a wait and what follows, and between a load or a store and an arrival, PTX wants a
tcgen05.fence; without one it is a violation. An MMA's products are exact; the sum is rounded to
FP32 after every instruction (32 bytes of K), so that bits do not depend on BLOCK_K, as they do not
on the hardware.

Not seen here: layouts, swizzles, descriptors (`kernels/descriptors.py` and the compiler), how
padded FP4 lies in shared memory, which thread issues, how the tensor core rounds. Pairs of CTAs are
in `cta_pair`.
"""

import math
from types import SimpleNamespace

import numpy as np
from triton.experimental.gluon.language.nvidia import blackwell

from megamoe.kernels.blackwell import pair
from megamoe.kernels.gluon.compat import get_tmem_reg_layout
from tests.emulator import arrays, cta_pair, device
from tests.emulator.arrays import FP8, Value, decoded, encoded
from tests.emulator.device import _check, _now
from tests.emulator.memory_model import SEEN, Cells, Violation, join

COLUMNS = 512  # of a CTA: 128 lanes x 32 bits each
LANES = 128
DEPTH = {"e2m1": 64, "e4m3": 32, "bf16": 16}  # K of one instruction, by the tokens' element
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class TensorCells(Cells):
    """Places of tensor memory, in the order that PTX gives to a thread's copies and products."""

    def __init__(self, data, row_bytes, name):
        super().__init__(data, row_bytes, name)
        self.how = ["st"] * len(self.writes)  # what wrote a place last: "cp", "mma" or "st"

    def product_reads(self, memory, role, engine, number, row):
        """Scales or decoded weights: a copy by the same thread comes before."""
        by, at, _ = self.writes[row]
        if not (by == engine.agent and self.how[row] == "cp") and role.clocks[SEEN, by] < at:
            self._blame(memory, "has a product read", role.agent, by, row)
        self.reads[row][engine.agent] = number, True

    def written(self, memory, role, engine, number, row, how):
        """By a copy or a product; a product comes after earlier ones of the same sums."""
        by, at, _ = self.writes[row]
        is_pair = by == engine.agent and self.how[row] == how == "mma"
        if not is_pair and role.clocks[SEEN, by] < at:
            self._blame(memory, f"has a {how} write", role.agent, by, row)
        for reader, (at, _) in self.reads[row].items():
            if role.clocks[SEEN, reader] < at:
                self._blame(memory, f"has a {how} write", role.agent, reader, row)
        self.reads[row].clear()
        self.writes[row], self.how[row] = (engine.agent, number, True), how


class Engine:
    """The tensor core of a CTA, as one thread uses it."""

    def __init__(self, scheduler, role):
        self.scheduler, self.issued, self.waiting = scheduler, 0, []
        self.agent = scheduler.agents.add(f"tensor core of {role.name}")

    def issue(self, name, how, place, act):
        """how: "cp" or "mma"; place: the sums of a product."""
        self.issued += 1

        def in_order():
            for earlier in list(self.waiting):
                if earlier is operation:
                    break
                if not earlier.is_done and _comes_before(earlier.kind, operation.kind):
                    self.scheduler.complete(earlier)
            self.waiting.remove(operation)
            act()

        operation = self.scheduler.issue(name, in_order)
        operation.kind = how, place
        self.waiting.append(operation)

    def commit(self, role, barrier):
        """An arrival once all that was issued before is complete.

        What the thread knew when it issued came before its products, and so before the arrival;
        what it stored itself did not (an arrival of a thread releases that).
        """
        number, before, knew = self.issued, list(self.waiting), role.clocks.copy()
        knew[:, role.agent] = 0

        def act():
            for earlier in before:
                if not earlier.is_done:
                    self.scheduler.complete(earlier)
            join(barrier.so_far, knew)
            barrier.so_far[SEEN, self.agent] = max(barrier.so_far[SEEN, self.agent], number)
            barrier.pending -= 1
            _check(self.scheduler, barrier)

        self.scheduler.issue(f"commit to {barrier.name}", act).is_arrival = True


def _comes_before(earlier, later):
    kinds = earlier[0], later[0]
    return kinds == ("cp", "mma") or (kinds == ("mma", "mma") and earlier[1] == later[1])


def _fenced(role, what):
    if role.has_waited:
        raise Violation(f"{role.name} waited, and then comes {what} without a tcgen05.fence")


def _engine():
    scheduler, role = _now()
    if getattr(role, "tensor_core", None) is None:
        role.tensor_core = Engine(scheduler, role)
    return scheduler, role, role.tensor_core


class Tensor:
    """A descriptor of tensor memory: some places of an allocation, each [128, n]."""

    def __init__(self, cells, v, kind, place=None):
        self.cells, self.v, self.kind, self.place = cells, v, kind, place

    dtype = property(lambda self: self.kind)
    shape = property(lambda self: list(self.v.shape))
    type = property(lambda self: SimpleNamespace(layout=None))

    def index(self, i):
        i = int(i)
        if not 0 <= i < len(self.v):
            raise Violation(f"place {i} of {len(self.v)} of {self.cells.name}")
        return Tensor(self.cells, self.v[i], self.kind, i)

    def slice(self, start, length):
        start, length = int(start), int(length)
        if start + length > self.v.shape[-1]:
            raise Violation(f"columns {start} + {length} of {self.cells.name}")
        return Tensor(self.cells, self.v[..., start : start + length], self.kind, self.place)

    def _reinterpret(self, kind, shape, layout):
        """Scales in the columns of FP32: as many of them, of which a byte a row counts."""
        assert self.v.shape[1] == int(shape[1]) and int(shape[0]) % LANES == 0 and kind.size == 1
        flat = self.v.reshape(-1).view(np.uint8)[: math.prod(self.v.shape)]
        return Tensor(self.cells, flat.view(kind.stored).reshape(self.v.shape), kind, self.place)

    def load(self, layout=None):
        scheduler, role = _now()
        scheduler.step("load of sums")
        _fenced(role, f"a load of {self.cells.name}")
        role.has_used_tensor = True
        clock = int(role.clocks[SEEN, role.agent])
        self.cells.read(scheduler.memory, role.agent, clock, (self.place or 0,), role.clocks, False)
        return Value(np.array(decoded(self.v, self.kind)))

    def store(self, value):
        scheduler, role = _now()
        scheduler.step("store to tensor memory")
        _fenced(role, f"a store to {self.cells.name}")
        role.has_used_tensor = True
        place = self.place or 0
        clock = int(role.clocks[SEEN, role.agent])
        self.cells.write(scheduler.memory, role.agent, clock, (place,), role.clocks, False)
        self.cells.how[place] = "st"
        self.v[...] = encoded(value.a, self.kind)


def allocate(kind, shape, layout, value=None):
    _, role = _now()
    shape = [int(n) for n in shape]
    if role.cluster is not None and shape[-2] == 2 * LANES:
        shape[-2] = LANES  # of each CTA
    assert value is None and shape[-2] == LANES
    places, width = (shape[0], shape[2]) if len(shape) == 3 else (1, shape[1])
    columns = places * width // (2 if kind.size == 2 else 1)  # a byte of scales has a column
    used = role.launch.__dict__.setdefault("columns", {})
    used[role.cta] = used.get(role.cta, 0) + columns
    if used[role.cta] > COLUMNS:
        raise Violation(f"{used[role.cta]} columns of tensor memory, of {COLUMNS}")
    data = np.full(math.prod(shape) * kind.size, 0xFF, dtype=np.uint8)
    cells = TensorCells(data, LANES * width * kind.size, f"{device._named(2)} of {role.cta}")
    if role.cluster is not None:
        role.cluster.made(role, cells)
    place = 0 if len(shape) == 2 else None  # one of its own, which needs no index
    return Tensor(cells, data.view(kind.stored).reshape(shape), kind, place)


# -- operations ------------------------------------------------------------------------------------


def copy(source, into):
    """tcgen05.cp of scales from shared memory."""
    scheduler, role, engine = _engine()
    scheduler.step("copy of scales")
    if role.rank:
        return  # the first CTA of a pair issues for both
    _fenced(role, f"a copy to {into.cells.name}")
    if source.shape != into.shape or source.kind.size != into.kind.size:
        raise Violation(f"{source.shape} into {into.shape} of {into.cells.name}")
    number, each = engine.issued + 1, cta_pair.each(role, source, into)
    for source, into in each:
        source.cells.read(
            scheduler.memory, role.agent, number, source.rows(), role.clocks, True, engine.agent
        )
        into.cells.written(scheduler.memory, role, engine, number, into.place or 0, "cp")
        into.v.view(np.uint8)[...] = 0xFF

    def act():
        for source, into in each:
            into.v.view(np.uint8)[...] = source.v.view(np.uint8)

    engine.issue(f"copy to {into.cells.name}", "cp", None, act)


def _values(operand, element, scale, vec):
    """FP64 [rows, k] of an operand as it is now, with its scales."""
    v = operand.v
    if element == "e2m1":
        value = np.stack((E2M1[v & 15], E2M1[v >> 4]), -1).reshape(len(v), -1)
    else:
        value = decoded(np.ascontiguousarray(v), operand.kind).astype(np.float64)
    if scale is None:
        return value
    s = scale.v[: len(value)]
    if scale.kind is FP8:
        factor = decoded(np.ascontiguousarray(s), FP8).astype(np.float64)
    else:
        factor = np.where(s == 255, np.nan, np.exp2(s.astype(np.float64) - 127))
    return value * np.repeat(factor, vec, 1)


def _check_shapes(a, b, acc, scales, elements, num_ctas):
    """What MMAs of sm_100a there are; -> values that share a scale."""
    m, n = acc.shape
    k = a.shape[1] * (2 if elements[0] == "e2m1" else 1)
    step = (16 if scales[0] is None else 8) * num_ctas
    if m != LANES or n % step or not step <= n <= 256:
        raise Violation(f"no MMA has the shape {m} x {n} in {num_ctas} CTAs")
    tokens = [k // (2 if elements[1] == "e2m1" else 1), n // num_ctas]
    if b.shape != tokens or a.shape[0] != m:
        raise Violation(f"{a.shape} times {b.shape} in {elements}")
    if scales[0] is None:
        return 0
    vec = k // scales[0].shape[1]
    is_nv = all(scale.kind is FP8 for scale in scales)
    legal = {("e2m1", "e2m1"): (16 if is_nv else 32,), ("e2m1", "e4m3"): (32,)}
    if vec not in legal.get(tuple(elements), ()) or scales[1].shape != [LANES, k // vec]:
        raise Violation(f"no MMA of {elements} has a scale for {vec} values")
    return vec


def _multiply(a, b, acc, scales, elements, use_acc):
    scheduler, role, engine = _engine()
    scheduler.step("product")
    if role.rank:
        return
    _fenced(role, f"a product into {acc.cells.name}")
    each = cta_pair.each(role, a, b, acc, *scales)
    vec = _check_shapes(a, b, acc, scales, elements, 1 if role.cluster is None else 2)
    number, memory = engine.issued + 1, scheduler.memory
    use_acc, depth = bool(use_acc), DEPTH[elements[1]]
    for a, b, acc, *scales in each:
        for operand in (a, b):
            if isinstance(operand, Tensor):
                operand.cells.product_reads(memory, role, engine, number, operand.place or 0)
            else:
                operand.cells.read(
                    memory, role.agent, number, operand.rows(), role.clocks, True, engine.agent
                )
        for scale in scales:
            if scale is not None:
                scale.cells.product_reads(memory, role, engine, number, scale.place or 0)
        acc.cells.written(memory, role, engine, number, acc.place, "mma")
        if not use_acc:
            acc.v.view(np.float32)[...] = np.nan

    def act():
        for a, _, acc, a_scale, b_scale in each:
            sums = acc.v.view(np.float32)
            left = _values(a, elements[0], a_scale, vec)
            right = _values(_tokens(each), elements[1], b_scale, vec)
            for first in range(0, left.shape[1], depth):
                at = slice(first, first + depth)
                found = left[:, at] @ right[:, at].T
                sums[...] = found + sums if use_acc or first else found

    place = id(acc.cells), acc.place
    engine.issue(f"product into {acc.cells.name}[{acc.place}]", "mma", place, act)


def _tokens(each):
    """The rows [tokens, k] of a product's second operand: of a pair, half from each CTA."""
    parts = [b.permute((1, 0)) for _, b, *_ in each]
    whole = np.concatenate([part.v for part in parts])
    return SimpleNamespace(v=whole, kind=parts[0].kind)


def mma_scaled(a, b, acc, a_scale, b_scale, a_type, b_type, *, use_acc=True, pred=True):
    assert pred is True
    _multiply(a, b, acc, (a_scale, b_scale), (a_type, b_type), use_acc)


def mma(a, b, acc, *, use_acc=True, pred=True):
    assert pred is True
    name = {FP8: "e4m3", arrays.BF16: "bf16"}[b.kind]
    _multiply(a, b, acc, (None, None), (name, name), use_acc)


def commit(barrier):
    scheduler, role, engine = _engine()
    scheduler.step("commit")
    if role.rank:
        return
    if barrier.count == 0:
        raise Violation(f"a commit to {barrier.name}, which was not initialised")
    for one in cta_pair.barriers_of_commit(role, barrier):
        engine.commit(role, one)


def install():
    """Scheduled kernels may use sm_100a."""
    device.Scheduled.make_cluster = staticmethod(cta_pair.Cluster)
    device.REPLACED.update({
        pair.barriers_of: cta_pair.barriers_of,
        pair.part_of: cta_pair.part_of,
        **dict.fromkeys((pair.sums_layout, pair.scales_layout, pair.rows_layout), lambda *_: None),
        blackwell.tma: SimpleNamespace(
            **vars(device.REPLACED[device.hopper.tma]), async_gather=device.tma_gather
        ),
        blackwell.allocate_tensor_memory: allocate,
        blackwell.TensorMemoryLayout: arrays._Layout,
        blackwell.TensorMemoryScalesLayout: arrays._Layout,
        get_tmem_reg_layout: lambda *_: None,
        blackwell.tcgen05_copy: copy,
        blackwell.tcgen05_mma: mma,
        blackwell.tcgen05_mma_scaled: mma_scaled,
        blackwell.tcgen05_commit: commit,
        blackwell.tensor_memory_descriptor: None,
    })  # fmt: skip
