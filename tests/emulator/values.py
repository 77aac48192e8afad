"""Values, pointers and memories of emulated kernels, over torch tensors."""

import functools
import math
import operator
import threading
from bisect import bisect_right
from types import SimpleNamespace

import torch
import triton.language as tl

TYPES = {
    tl.int1: torch.bool, tl.int8: torch.int8, tl.uint8: torch.uint8, tl.int16: torch.int16,
    tl.uint16: torch.uint16, tl.int32: torch.int32, tl.uint32: torch.uint32, tl.int64: torch.int64,
    tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float32: torch.float32,
    tl.float8e4nv: torch.float8_e4m3fn,
}  # fmt: skip
NAMES = {value: key for key, value in TYPES.items()}
UNSIGNED = (torch.uint16, torch.uint32)
RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ORDER = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64]


def raw(x):
    """torch tensor or Python number of a value."""
    return x.t if isinstance(x, Value) else x


def same(a, b):
    """Operands in one dtype, as Triton widens them; Python numbers take the tensor's."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)) or a.dtype == b.dtype:
        return a, b
    if a.is_floating_point() or b.is_floating_point():
        return a.to(torch.float32), b.to(torch.float32)
    wide = max(a.dtype, b.dtype, key=ORDER.index)
    return a.to(wide), b.to(wide)


def _plain(a):
    """Wider where torch cannot compute with an unsigned type."""
    if isinstance(a, torch.Tensor) and a.dtype in UNSIGNED:
        return a.to(torch.int64)
    return a


def _operands(a, b):
    """`same` of what torch computes with; most operands are of one type already."""
    is_tensor = isinstance(b, torch.Tensor)
    if a.dtype not in UNSIGNED and (not is_tensor or a.dtype is b.dtype):
        return a, b
    return same(_plain(a), _plain(b))


def _binary(do):
    def act(self, other):
        if isinstance(other, Pointer):
            return NotImplemented
        return Value(do(*_operands(self.t, raw(other))))

    def flipped(self, other):
        if isinstance(other, Pointer):
            return NotImplemented
        a, b = _operands(self.t, raw(other))
        return Value(do(b, a))

    return act, flipped


def _whole(do, a, b):
    """A quotient or remainder of integers; by zero it is anything, as PTX says: here -1."""
    a, is_zero = torch.as_tensor(a), torch.as_tensor(b) == 0
    if a.is_floating_point() or not bool(is_zero.any()):
        return do(a, b)
    found = do(a, torch.as_tensor(b).masked_fill(is_zero, 1))
    return found.masked_fill(is_zero, -1)


def _divide(a, b):
    return _whole(functools.partial(torch.div, rounding_mode="trunc"), a, b)


class Value:
    """A tensor or scalar of a kernel."""

    def __init__(self, t):
        if isinstance(t, torch.Tensor):
            self.t = t
        elif type(t) is int and -(2**31) <= t < 2**31:
            self.t = torch.tensor(t, dtype=torch.int32)
        else:
            self.t = torch.tensor(t)

    dtype = property(lambda self: NAMES[self.t.dtype])
    shape = property(lambda self: list(self.t.shape))
    numel = property(lambda self: self.t.numel())
    type = property(lambda self: SimpleNamespace(layout=None))

    __add__, __radd__ = _binary(operator.add)
    __sub__, __rsub__ = _binary(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul)
    __truediv__, __rtruediv__ = _binary(operator.truediv)
    __floordiv__, __rfloordiv__ = _binary(_divide)
    __mod__, __rmod__ = _binary(lambda a, b: _whole(torch.fmod, a, b))
    __and__, __rand__ = _binary(operator.and_)
    __or__, __ror__ = _binary(operator.or_)
    __xor__, __rxor__ = _binary(operator.xor)
    __lshift__, __rlshift__ = _binary(operator.lshift)
    __rshift__, __rrshift__ = _binary(operator.rshift)
    __lt__, _ = _binary(operator.lt)
    __le__, _ = _binary(operator.le)
    __gt__, _ = _binary(operator.gt)
    __ge__, _ = _binary(operator.ge)
    __eq__, _ = _binary(operator.eq)
    __ne__, _ = _binary(operator.ne)
    __hash__ = None

    def __neg__(self):
        return Value(-self.t)

    def __bool__(self):
        return bool(self.t)

    def __index__(self):
        return int(self.t)

    __int__ = __index__

    def __getitem__(self, at):
        return Value(self.t[at])

    def to(self, dtype, bitcast=False):
        wanted = TYPES[dtype]
        if bitcast:
            return Value(self.t.contiguous().view(wanted))
        t = self.t
        if wanted == torch.float8_e4m3fn and t.dtype != wanted:
            t = t.float().clamp(-448.0, 448.0)  # satfinite; NaN stays
        elif t.dtype == torch.float8_e4m3fn:
            t = t.float()
        return Value(t.to(wanted))

    def reshape(self, shape):
        return Value(self.t.reshape([int(n) for n in shape]))

    def permute(self, order):
        return Value(self.t.permute(tuple(order)))

    def split(self):
        assert self.t.shape[-1] == 2
        return Value(self.t[..., 0]), Value(self.t[..., 1])


def pair(do):
    """torch.minimum or torch.maximum of values and numbers."""

    def act(a, b):
        if not isinstance(a, Value) and not isinstance(b, Value):
            return (min if do is torch.minimum else max)(a, b)
        a, b = same(raw(a), raw(b))
        a, b = (
            v if isinstance(v, torch.Tensor) else torch.tensor(v, dtype=(b if v is a else a).dtype)
            for v in (a, b)
        )
        return Value(do(a, b))

    return act


class Memory:
    """All allocations that a launch may touch, by address."""

    def __init__(self):
        self.starts, self.parts = [], []
        self.words = []  # of each allocation: bytes of a word -> the allocation as such words

    def hold(self, t):
        storage = t.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
        at = bisect_right(self.starts, start)
        if size == 0 or (at and self.starts[at - 1] == start):
            return
        view = torch.empty(0, dtype=torch.uint8).set_(storage)
        self.starts.insert(at, start)
        self.parts.insert(at, view)
        self.words.insert(at, {})

    def pick(self, address, size):
        """The allocation of the lowest address, as words of `size`: ((it, the number of each
        address's word in it), which of them lie in it)."""
        first = int(address.min())
        at = bisect_right(self.starts, first) - 1
        start = self.starts[at] if at >= 0 else 0
        whole = self.parts[at] if at >= 0 else torch.empty(0)
        end = start + len(whole)
        inside = address + size <= end
        if at < 0 or not bool(inside[address == first].all()):
            raise IndexError(f"no allocation holds {size} bytes at {first:#x}")
        return self._words(address, at, size), inside

    def _words(self, address, at, size):
        """Allocation `at` as words of `size`, and the number of each address's word in it."""
        offset = address - self.starts[at]
        if bool((offset % size).any()):
            raise IndexError(f"an address is not a multiple of {size} bytes")
        words = self.words[at].get(size)
        if words is None:
            whole = self.parts[at]
            words = self.words[at][size] = whole[: len(whole) // size * size].view(RAW[size])
        return words, offset // size if size > 1 else offset

    def one(self, address, size):
        """As `pick` where one allocation has all addresses, or None."""
        low, high = (int(v) for v in torch.aminmax(address))
        at = bisect_right(self.starts, low) - 1
        if at < 0 or high + size > self.starts[at] + len(self.parts[at]):
            return None
        return self._words(address, at, size)

    def load(self, address, dtype):
        """Values at int64 addresses [n]."""
        size = dtype.itemsize
        one = self.one(address, size) if len(address) else None
        if one is not None:
            words, offset = one
            return words[offset].view(dtype)
        found = torch.empty(len(address), dtype=RAW[size])
        left = torch.ones(len(address), dtype=torch.bool)
        while bool(left.any()):
            at = left.nonzero()[:, 0]
            (words, offset), inside = self.pick(address[at], size)
            found[at[inside]] = words[offset[inside]]
            left[at[inside]] = False
        return found.view(dtype)

    def store(self, address, values):
        size = values.dtype.itemsize
        values, left = values.view(RAW[size]), torch.ones(len(address), dtype=torch.bool)
        one = self.one(address, size) if len(address) else None
        if one is not None:
            words, offset = one
            words[offset] = values
            return
        while bool(left.any()):
            at = left.nonzero()[:, 0]
            (words, offset), inside = self.pick(address[at], size)
            words[offset[inside]] = values[at[inside]]
            left[at[inside]] = False


class Pointer:
    """Addresses of elements of one dtype."""

    def __init__(self, address, element):
        self.address, self.element = address, element

    @property
    def dtype(self):
        return SimpleNamespace(element_ty=self.element)

    def __add__(self, by):
        by = raw(by)
        by = by.to(torch.int64) if isinstance(by, torch.Tensor) else by
        return Pointer(self.address + by * TYPES[self.element].itemsize, self.element)

    __radd__ = __add__

    def to(self, dtype):
        assert dtype == tl.int64
        address = self.address
        return Value(address if isinstance(address, torch.Tensor) else torch.tensor(address))


class Shared:
    """A descriptor of shared memory."""

    def __init__(self, t):
        self.t = t

    dtype = property(lambda self: NAMES[self.t.dtype])
    shape = property(lambda self: list(self.t.shape))

    def index(self, i):
        i = int(i)
        assert 0 <= i < len(self.t), f"index {i} of {len(self.t)}"
        return Shared(self.t[i])

    def slice(self, start, length, dim=0):
        return Shared(self.t.narrow(dim, int(start), int(length)))

    def permute(self, order):
        return Shared(self.t.permute(tuple(order)))

    def reshape(self, shape):
        return Shared(self.t.view([int(n) for n in shape]))

    def _reinterpret(self, dtype, shape, layout):
        wanted, size = TYPES[dtype], math.prod(shape)
        flat = self.t.view(-1).view(torch.uint8)[: size * wanted.itemsize]
        return Shared(flat.view(wanted).view(*shape))

    def load(self, layout=None):
        return Value(self.t.clone())

    def store(self, value):
        assert value.t.dtype == self.t.dtype, f"{value.t.dtype} into {self.t.dtype}"
        self.t.copy_(value.t)


class Barriers:
    """mbarriers, made together."""

    def __init__(self, num, lock):
        self.made = [Barrier(lock) for _ in range(num)]

    def index(self, i):
        return self.made[int(i)]


class Barrier:
    """One mbarrier: `pending` arrivals and `bytes` end its phase."""

    def __init__(self, lock):
        self.count = self.pending = self.bytes = self.phase = 0
        self.changed = threading.Condition(lock)  # of its own: nobody else wakes when it completes


class Descriptor:
    """A TMA descriptor: a strided tensor and the block of one copy."""

    def __init__(self, made):
        base = made.base
        self.t = torch.as_strided(base, made.shape, made.strides, base.storage_offset())
        self.block, self.layout = list(made.block_shape), made.layout

    dtype = property(lambda self: NAMES[self.t.dtype])
    block_type = property(lambda self: SimpleNamespace(shape=self.block))

    def read(self, at):
        """The block at `at`; zero beyond the tensor."""
        found = torch.zeros(self.block, dtype=self.t.dtype)
        source, into = self.t, found
        for dim, (first, size) in enumerate(zip(map(int, at), self.block, strict=True)):
            assert first >= 0, "a block begins before its tensor"
            num = max(min(size, self.t.shape[dim] - first), 0)
            if num == 0:
                return found
            source, into = source.narrow(dim, first, num), into.narrow(dim, 0, num)
        into.view(RAW[into.dtype.itemsize]).copy_(source.view(RAW[source.dtype.itemsize]))
        return found
