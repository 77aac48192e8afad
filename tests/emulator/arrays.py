"""Values of scheduled kernels, over numpy: an operation takes a microsecond, not ten.

A scalar is a Python number, a tensor an array. BF16 and E4M3 are held as FP32 that lies on their
grid; their bits exist in memory alone. Integers of scalars do not wrap: the emulator that runs
freely holds that.
"""

import operator
from types import SimpleNamespace

import numpy as np
import torch
import triton.language as tl


class Element:
    """A type of elements: Triton's own are slow to compare."""

    def __init__(self, name, stored, held=None):
        self.name, self.stored, self.held = name, stored, held or stored
        self.size = np.dtype(stored).itemsize
        self.primitive_bitwidth = 1 if name == "int1" else 8 * self.size
        self.is_float = held is not None
        self.is_narrow = self.is_float and self.size < 4  # values lie on a grid coarser than FP32

    def __repr__(self):
        return self.name


ELEMENTS = {
    e.name: e for e in (
        Element("int1", np.bool_), Element("int8", np.int8), Element("uint8", np.uint8),
        Element("int16", np.int16), Element("uint16", np.uint16), Element("int32", np.int32),
        Element("uint32", np.uint32), Element("int64", np.int64),
        Element("float32", np.uint32, np.float32), Element("bfloat16", np.uint16, np.float32),
        Element("float8e4nv", np.uint8, np.float32),
    )
}  # fmt: skip
BOOL, I32, I64 = (ELEMENTS[name] for name in ("int1", "int32", "int64"))
F32, BF16, FP8 = (ELEMENTS[name] for name in ("float32", "bfloat16", "float8e4nv"))
REPLACED = {getattr(tl, name): e for name, e in ELEMENTS.items()}  # Triton's -> these
NAMES = {
    torch.bool: BOOL, torch.int8: ELEMENTS["int8"], torch.uint8: ELEMENTS["uint8"],
    torch.int16: ELEMENTS["int16"], torch.int32: I32, torch.int64: I64, torch.float32: F32,
    torch.bfloat16: BF16, torch.float8_e4m3fn: FP8,
}  # fmt: skip
OF_ARRAY = {np.dtype(e.stored): e for e in ELEMENTS.values() if not e.is_float}
OF_ARRAY |= {np.dtype(np.float32): F32, np.dtype(np.float64): F32}
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
TORCH = {BF16: torch.bfloat16, FP8: torch.float8_e4m3fn}


def decoded(stored, kind):
    """Memory's bits as values."""
    if not kind.is_float:
        return stored
    if kind is FP8:
        return E4M3[stored]
    if kind is BF16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.view(np.float32)


def encoded(held, kind):
    """Values as memory has them; they lie on the grid of their kind."""
    if not kind.is_float:
        return np.asarray(held).astype(kind.stored)
    held = np.ascontiguousarray(held, dtype=np.float32)
    if kind is F32:
        return held.view(np.uint32)
    if kind is BF16:
        return (held.view(np.uint32) >> 16).astype(np.uint16)
    shape = held.shape
    return torch.from_numpy(held).to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(shape)


def rounded(held, kind):
    """FP32 on the grid of a kind: nearest, ties to even; E4M3 saturates, NaN stays."""
    if not kind.is_narrow:
        return np.asarray(held, dtype=np.float32)
    t = torch.from_numpy(np.array(held, dtype=np.float32))
    if kind is FP8:
        t = t.clamp(-448.0, 448.0)
    return t.to(TORCH[kind]).float().numpy()


def raw(x):
    return x.a if type(x) is Value else x


def _quotient(a, b):
    """Towards zero, as C divides; by zero it is anything, as PTX says: here -1, or 0 in tensors."""
    if not isinstance(b, np.ndarray) and b == 0:
        return a * 0 - 1
    q = a // b
    if isinstance(q, np.ndarray):
        if np.count_nonzero(q < 0):
            q = q + ((q < 0) & (q * b != a))
        return q
    return q + 1 if q < 0 and q * b != a else q


def _remainder(a, b):
    return a - _quotient(a, b) * b


def _divide(a, b):
    return np.divide(a, b, dtype=np.float32)


def _binary(do):
    def act(self, other):
        if type(other) is Value:
            return Value(do(self.a, other.a))
        if isinstance(other, Pointer):
            return NotImplemented
        return Value(do(self.a, other))

    def flipped(self, other):
        if isinstance(other, Pointer):
            return NotImplemented
        return Value(do(other, self.a))

    return act, flipped


class Value:
    """A tensor or scalar of a kernel."""

    __slots__ = ("a", "kind")

    def __init__(self, a, kind=None):
        self.a, self.kind = a, kind

    @property
    def dtype(self):
        if self.kind is not None:
            return self.kind
        if isinstance(self.a, np.ndarray | np.generic):
            return OF_ARRAY[self.a.dtype]
        if isinstance(self.a, bool):
            return BOOL
        if isinstance(self.a, float):
            return F32
        return I32 if -(2**31) <= self.a < 2**31 else I64

    shape = property(lambda self: list(np.shape(self.a)))
    numel = property(lambda self: np.size(self.a))
    type = property(lambda self: SimpleNamespace(layout=None))

    __add__, __radd__ = _binary(operator.add)
    __sub__, __rsub__ = _binary(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul)
    __truediv__, __rtruediv__ = _binary(_divide)
    __floordiv__, __rfloordiv__ = _binary(_quotient)
    __mod__, __rmod__ = _binary(_remainder)
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
        return Value(-self.a)

    def __bool__(self):
        return bool(self.a)

    def __index__(self):
        return int(self.a)

    __int__ = __index__

    def __float__(self):
        return float(self.a)

    def __getitem__(self, at):
        return Value(self.a[at])

    def to(self, dtype, bitcast=False):
        a = self.a
        if bitcast:
            source = encoded(a, self.dtype)
            if np.ndim(a) == 0:
                source = source.reshape(1)
                return Value(decoded(source.view(dtype.stored), dtype)[0], dtype)
            source = np.ascontiguousarray(source)
            return Value(decoded(source.view(dtype.stored), dtype), dtype)
        if dtype.is_narrow:
            return Value(rounded(a, dtype), dtype)
        if isinstance(a, np.ndarray):
            return Value(a.astype(dtype.held))
        if dtype.is_float:
            return Value(float(a))
        return Value(bool(a) if dtype is BOOL else int(a))

    def reshape(self, shape):
        return Value(self.a.reshape([int(n) for n in shape]), self.kind)

    def permute(self, order):
        return Value(self.a.transpose(tuple(order)), self.kind)

    def split(self):
        assert self.a.shape[-1] == 2
        return Value(self.a[..., 0], self.kind), Value(self.a[..., 1], self.kind)


class Pointer:
    """Addresses of elements of one kind."""

    __slots__ = ("address", "element")

    def __init__(self, address, element):
        self.address, self.element = address, element

    @property
    def dtype(self):
        return SimpleNamespace(element_ty=self.element)

    def __add__(self, by):
        by = raw(by)
        if isinstance(by, np.ndarray):
            by = by.astype(np.int64)
        return Pointer(self.address + by * self.element.size, self.element)

    __radd__ = __add__

    def to(self, dtype):
        assert dtype is I64
        return Value(self.address)


def pair(do, scalar):
    """np.minimum or np.maximum of values and numbers."""

    def act(a, b):
        a, b = raw(a), raw(b)
        if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
            return Value(do(a, b))
        return Value(scalar(a, b))

    return act


def _reduce(do):
    def act(v, axis=None):
        a = v.a if isinstance(v.a, np.ndarray) else np.asarray(v.a).reshape(1)
        found = do(a) if axis is None else do(a, axis=axis)
        return Value(found.item() if np.ndim(found) == 0 else found)

    return act


def _sum(a, axis=None):
    return a.sum(axis=axis, dtype=np.int32 if a.dtype.kind in "bi" and a.itemsize < 8 else a.dtype)


def arange(start, end, layout=None):
    return Value(np.arange(int(start), int(end), dtype=np.int32))


def full(shape, value, dtype, layout=None):
    return Value(np.full([int(n) for n in shape], raw(value), dtype=dtype.held))


def where(condition, a, b):
    condition = raw(condition)
    if not isinstance(condition, np.ndarray):
        return a if condition else b
    a, b = raw(a), raw(b)
    found = np.where(condition, a, b)
    if found.dtype == np.float64:
        found = found.astype(np.float32)
    elif found.dtype == np.int64 and not any(
        isinstance(v, np.ndarray) and v.dtype == np.int64 for v in (a, b)
    ):
        found = found.astype(np.int32)
    return Value(found)


def histogram(v, bins, mask=None, layout=None):
    a = v.a if mask is None else v.a[raw(mask)]
    return Value(np.bincount(a, minlength=int(bins)).astype(np.int32))


def associative_scan(v, axis, combine):
    assert int(combine(Value(3), Value(5))) == 8, "only sums are scanned"
    return Value(v.a.cumsum(axis, dtype=v.a.dtype))


def broadcast(a, b):
    return tuple(
        Value(found, v.kind) for found, v in zip(np.broadcast_arrays(a.a, b.a), (a, b), strict=True)
    )


def expand_dims(v, axis):
    shape = v.a.shape
    return Value(v.a.reshape((*shape[:axis], 1, *shape[axis:])), v.kind)


def fma(a, b, c):
    a, b, c = (np.asarray(raw(v), dtype=np.float64) for v in (a, b, c))
    return Value((a * b + c).astype(np.float32))


class _Layout:
    """Layouts mean nothing here."""

    def __init__(self, *args, **kwargs):
        pass


def run_time_range(*bounds):
    """A loop's number is a value of the kernel, unless the loop is unrolled (`static_range`)."""
    return (Value(i) for i in range(*map(int, bounds)))


def _refuse(text):
    raise AssertionError(text)


# What needs no memory; the scheduler adds the rest.
LANGUAGE = {
    **ELEMENTS,
    **dict.fromkeys((
        "BlockedLayout", "SliceLayout", "SwizzledSharedLayout", "NVMMASharedLayout",
        "NVMMADistributedLayout", "DotOperandLayout", "DistributedLinearLayout"), _Layout),
    "tensor": None, "shared_memory_descriptor": None, "constexpr": lambda x: x,
    "arange": arange, "full": full, "where": where,
    "zeros": lambda shape, dtype, layout=None: full(shape, 0, dtype),
    "minimum": pair(np.minimum, min), "maximum": pair(np.maximum, max),
    "max": _reduce(np.max), "min": _reduce(np.min), "sum": _reduce(_sum),
    "expand_dims": expand_dims,
    "broadcast": broadcast,
    "broadcast_to": lambda v, shape: Value(np.broadcast_to(v.a, shape), v.kind),
    "join": lambda a, b: Value(np.stack((a.a, b.a), -1), a.kind), "split": lambda v: v.split(),
    "histogram": histogram, "fma": fma,
    "div_rn": lambda a, b: Value(_divide(raw(a), raw(b))),
    "reshape": lambda v, shape: v.reshape(shape), "permute": lambda v, order: v.permute(order),
    "cumsum": lambda v, axis=0: Value(v.a.cumsum(axis, dtype=v.a.dtype)),
    "gather": lambda v, index, axis: Value(np.take_along_axis(v.a, index.a, axis)),
    "associative_scan": associative_scan, "convert_layout": lambda v, layout, **_: v,
    "multiple_of": lambda v, by: v,
    "abs": lambda v: Value(abs(v.a)), "exp": lambda v: Value(np.exp(v.a)),
    "cdiv": lambda a, b: (a + b - 1) // b,
    "to_tensor": lambda v: v if type(v) is Value else Value(v),
    "static_range": range, "range": run_time_range,
    "static_assert": lambda holds, text="": None if holds else _refuse(text),
}  # fmt: skip
