"""The language of kernels: loads, arithmetic, barriers, copies and products."""

import math
from types import SimpleNamespace

import torch
import triton.language as tl
from triton.experimental.gluon import language as gluon_language
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from megamoe.kernels.common import compat
from megamoe.kernels.gluon.compat import reinterpret
from tests.emulator.assembly import inline_asm_elementwise
from tests.emulator.running import HERE, REPLACED, WORDS, run_time_range, warp_specialize
from tests.emulator.values import RAW, TYPES, Barriers, Shared, Value, pair, raw, same


def _addresses(pointer, mask, value=None):
    """Flat addresses and mask (None: all), and the shape they share."""
    address = torch.as_tensor(pointer.address)
    if mask is None and value is None:
        return address.reshape(-1), None, address.shape, ()
    keep = torch.as_tensor(True if mask is None else raw(mask))
    parts = [address, keep] + ([] if value is None else [value])
    parts = torch.broadcast_tensors(*parts)
    return parts[0].reshape(-1), parts[1].reshape(-1), parts[0].shape, parts[2:]


def load(pointer, mask=None, other=None, **_):
    address, keep, shape, _ = _addresses(pointer, mask)
    dtype = TYPES[pointer.element]
    if keep is None:
        return Value(HERE.launch.memory.load(address, dtype).view(shape))
    found = torch.full((len(address),), 0 if other is None else raw(other), dtype=torch.float64)
    found = found.to(dtype)
    if bool(keep.any()):
        got = HERE.launch.memory.load(address[keep], dtype)
        found.view(RAW[dtype.itemsize])[keep] = got.view(RAW[dtype.itemsize])
    return Value(found.view(shape))


def store(pointer, value, mask=None, **_):
    dtype = TYPES[pointer.element]
    value = value if isinstance(value, Value) else Value(torch.tensor(value))
    given = value.to(pointer.element).t
    if dtype == torch.float8_e4m3fn:
        given = given.view(torch.uint8)
    address, keep, _, (given,) = _addresses(pointer, mask, given)
    if bool(keep.any()):
        HERE.launch.memory.store(address[keep], given.reshape(-1)[keep].contiguous())


def _atomic(change):
    def act(pointer, value, mask=None, sem=None, scope=None):
        with WORDS:
            old = load(pointer, mask=mask)
            store(pointer, change(old, value), mask=mask)
            WORDS.notify_all()
        return old

    return act


def arange(start, end, layout=None):
    return Value(torch.arange(int(start), int(end), dtype=torch.int32))


def full(shape, value, dtype, layout=None):
    return Value(torch.full([int(n) for n in shape], float(raw(value))).to(TYPES[dtype]))


def where(condition, a, b):
    condition = raw(condition)
    if not isinstance(condition, torch.Tensor):
        return a if condition else b
    a, b = raw(a), raw(b)
    if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
        a = torch.tensor(a, dtype=torch.float32 if float in (type(a), type(b)) else torch.int32)
    if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor):
        like, other = (a, b) if isinstance(a, torch.Tensor) else (b, a)
        is_wider = isinstance(other, float) and not like.is_floating_point()
        other = torch.tensor(other, dtype=torch.float32 if is_wider else like.dtype)
        a, b = (a, other) if isinstance(a, torch.Tensor) else (other, b)
    return Value(torch.where(condition, *same(a, b)))


def _reduce(do):
    def act(v, axis=None):
        t = v.t if axis is not None else v.t.reshape(-1)
        found = do(t, 0 if axis is None else axis)
        return Value(found.to(torch.int32) if t.dtype == torch.bool else found)

    return act


def _sum(t, axis):
    return t.sum(axis, dtype=t.dtype if t.dtype != torch.bool else torch.int32)


def expand_dims(v, axis):
    return Value(v.t.unsqueeze(axis))


def broadcast(a, b):
    return tuple(map(Value, torch.broadcast_tensors(a.t, b.t)))


def broadcast_to(v, shape):
    return Value(v.t.expand([int(n) for n in shape]))


def join(a, b):
    return Value(torch.stack((a.t, b.t), -1))


def histogram(v, bins, mask=None, layout=None):
    t = v.t if mask is None else v.t[raw(mask)]
    return Value(torch.bincount(t.long(), minlength=bins).to(torch.int32))


def associative_scan(v, axis, combine):
    one, two = Value(torch.tensor(3)), Value(torch.tensor(5))
    assert int(combine(one, two)) == 8, "only sums are scanned"
    return Value(v.t.cumsum(axis, dtype=v.t.dtype))


def fma(a, b, c):
    a, b, c = (torch.as_tensor(raw(v)).double() for v in (a, b, c))
    return Value((a * b + c).float())


def div_rn(a, b):
    return Value(torch.as_tensor(raw(a)).float() / torch.as_tensor(raw(b)).float())


def allocate_shared_memory(dtype, shape, layout):
    if layout is MBARRIERS:
        return Barriers(shape[0], HERE.launch.lock)
    wanted = TYPES[dtype]
    size = math.prod(int(n) for n in shape) * wanted.itemsize
    poison = torch.full((size,), 0xFF, dtype=torch.uint8)
    return Shared(poison.view(wanted).view([int(n) for n in shape]))


# -- barriers, copies, products ------------------------------------------------------------------

MBARRIERS = object()


def _check(barrier):
    """Caller holds the lock."""
    assert barrier.pending >= 0, "more arrivals than a phase has"
    if barrier.pending == 0 and barrier.bytes == 0:
        barrier.phase ^= 1
        barrier.pending = barrier.count
        barrier.changed.notify_all()


def init(barrier, count):
    barrier.count = barrier.pending = count


def expect(barrier, size, pred=True):
    if not pred:
        return
    with HERE.launch.lock:
        barrier.bytes += size
        barrier.pending -= 1
        _check(barrier)


def arrive(barrier, count=1):
    with HERE.launch.lock:
        barrier.pending -= count
        _check(barrier)


def wait(barrier, phase):
    HERE.launch.wait(barrier, int(phase))


def async_copy_global_to_shared(descriptor, at, barrier, into, pred=True):
    if not pred:
        return
    block = descriptor.read(at)
    assert into.t.numel() == block.numel() and into.t.dtype == block.dtype
    raw_type = RAW[block.dtype.itemsize]
    into.t.view(raw_type).copy_(block.view(raw_type).view(into.t.shape))
    with HERE.launch.lock:
        barrier.bytes -= block.nbytes
        _check(barrier)


def copy_to_shared(into, pointer, mask=None):
    into.store(load(pointer, mask=mask))


def warpgroup_mma(a, b, acc, use_acc=True, is_async=False):
    """Products in FP64, rounded once: the bits depend on no order."""
    found = a.t.float().double() @ b.t.float().double()
    if use_acc:
        found = found + acc.t.double()
    return Value(found.float())


def warpgroup_mma_wait(num_outstanding, deps):
    return deps[0] if len(deps) == 1 else tuple(deps)


# -- under the names that kernels know ------------------------------------------------------------


class _Layout:
    """Layouts mean nothing here."""

    def __init__(self, *args, **kwargs):
        pass


LANGUAGE = SimpleNamespace(
    **{name: getattr(tl, name) for name in (
        "int1", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "float16",
        "bfloat16", "float32", "float8e4nv")},
    **dict.fromkeys((
        "BlockedLayout", "SliceLayout", "SwizzledSharedLayout", "NVMMASharedLayout",
        "NVMMADistributedLayout", "DotOperandLayout", "DistributedLinearLayout"), _Layout),
    tensor=None, shared_memory_descriptor=None, constexpr=lambda x: x,
    load=load, store=store, arange=arange, full=full, where=where,
    zeros=lambda shape, dtype, layout=None: full(shape, 0, dtype),
    minimum=pair(torch.minimum), maximum=pair(torch.maximum),
    max=_reduce(lambda t, axis: t.amax(axis)), min=_reduce(lambda t, axis: t.amin(axis)),
    sum=_reduce(_sum), expand_dims=expand_dims, broadcast=broadcast, broadcast_to=broadcast_to,
    join=join, split=lambda v: v.split(), histogram=histogram, fma=fma, div_rn=div_rn,
    reshape=lambda v, shape: v.reshape(shape), permute=lambda v, order: v.permute(order),
    cumsum=lambda v, axis=0: Value(v.t.cumsum(axis, dtype=v.t.dtype)),
    sort=lambda v, descending: Value(v.t.sort(descending=descending).values),
    gather=lambda v, index, axis: Value(v.t.gather(axis, index.t.long())),
    associative_scan=associative_scan, convert_layout=lambda v, layout, **_: v,
    abs=lambda v: Value(v.t.abs()), exp=lambda v: Value(v.t.exp()),
    cdiv=lambda a, b: (a + b - 1) // b,
    to_tensor=lambda v: v if isinstance(v, Value) else Value(v),
    program_id=lambda axis: Value(HERE.ids[axis]),
    multiple_of=lambda v, by: v,
    num_programs=lambda axis: Value(HERE.grid[axis]),
    num_warps=lambda: HERE.num_warps, static_range=range, range=run_time_range,
    static_assert=lambda holds, text="": None if holds else _refuse(text),
    thread_barrier=lambda: None, warp_specialize=warp_specialize,
    inline_asm_elementwise=inline_asm_elementwise,
    allocate_shared_memory=allocate_shared_memory,
    atomic_add=_atomic(lambda old, value: old + value),
    atomic_xchg=_atomic(lambda old, value: value),
    atomic_min=_atomic(lambda old, value: pair(torch.minimum)(old, value)),
)  # fmt: skip


def _refuse(text):
    raise AssertionError(text)


REPLACED |= {
    **dict.fromkeys((compat.HAS_FP8, compat.HAS_PTX, compat.HAS_PDL), lambda: False),
    tl: LANGUAGE,
    gluon_language: LANGUAGE,
    hopper.mbarrier: SimpleNamespace(
        init=init, expect=expect, arrive=arrive, wait=wait, MBarrierLayout=lambda: MBARRIERS
    ),
    hopper.tma: SimpleNamespace(
        async_copy_global_to_shared=async_copy_global_to_shared, tensor_descriptor=None
    ),
    async_copy: SimpleNamespace(
        async_copy_global_to_shared=copy_to_shared,
        commit_group=lambda: None,
        wait_group=lambda num_outstanding=0: None,
    ),
    reinterpret: lambda desc, *what: desc._reinterpret(*what),
    hopper.fence_async_shared: lambda: None,
    hopper.warpgroup_mma: warpgroup_mma,
    hopper.warpgroup_mma_wait: warpgroup_mma_wait,
}
