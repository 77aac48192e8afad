"""Launches: kernels as Python functions, a thread for every role of every CTA."""

import builtins
import contextlib
import functools
import inspect
import itertools
import threading
import time
import types
from types import SimpleNamespace

import torch
import triton.language as tl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import ConstexprFunction, JITFunction

from megamoe.kernels.common.numbers import Kind
from tests.emulator.values import NAMES, Descriptor, Memory, Pointer, Value

WAIT_S = 60.0  # a wait in a kernel that takes longer is an error here
REPLACED = {}  # what kernels import -> what they get here; `language` fills it


class Stuck(RuntimeError):
    """A wait that nobody ends."""


class Launch:
    """One launch: its memory, its lock, and the first error of any thread."""

    def __init__(self):
        self.memory = Memory()
        self.lock = threading.RLock()  # of its mbarriers and its error
        self.error = None

    def wait(self, barrier, phase):
        deadline = time.monotonic() + WAIT_S
        with self.lock:
            while barrier.phase == phase:
                if self.error is not None:
                    raise Stuck("another thread failed")
                if time.monotonic() > deadline:
                    left = f"{barrier.pending} arrivals, {barrier.bytes} bytes left"
                    what = f"phase {phase} of an mbarrier ({left})"
                    raise Stuck(f"{HERE.role} of CTA {HERE.ids[0]} waits for {what}")
                barrier.changed.wait(0.05)

    def fail(self, error):
        with self.lock:
            if self.error is None or isinstance(self.error, Stuck) > isinstance(error, Stuck):
                self.error = error


HERE = threading.local()
# Of words in global memory, of all launches: who changes one wakes those who wait for one.
WORDS = threading.Condition()


def _become(launch, grid, ids, role="kernel", num_warps=4):
    """What this thread is."""
    HERE.launch, HERE.grid, HERE.ids, HERE.role, HERE.num_warps = launch, grid, ids, role, num_warps


def _thread(act, *what):
    def run():
        _become(*what)
        try:
            act()
        except BaseException as error:
            HERE.launch.fail(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


class Emulated:
    """A kernel with the launch syntax of Triton, on the CPU. Gluon's CTAs run all at once.

    hold  tensors that it reaches by address alone
    """

    def __init__(self, kernel):
        self.signature = inspect.signature(kernel.fn)
        self.kernel, self.hold = translated(kernel), []
        self.is_gluon, self.launches = kernel.is_gluon(), 0

    def __getitem__(self, grid):
        return lambda *args, **constants: self._run(tuple(grid), args, constants)

    def _run(self, grid, args, constants):
        known = {k: v for k, v in constants.items() if k in self.signature.parameters}
        bound = self.signature.bind(*args, **known).arguments
        launch = Launch()
        for t in self.hold:
            launch.memory.hold(t)
        given = {name: self._argument(launch, value) for name, value in bound.items()}
        self.launches += 1
        programs = list(itertools.product(*map(range, grid)))
        if self.is_gluon:
            act = functools.partial(self.kernel, **given)
            for thread in [_thread(act, launch, grid, ids) for ids in programs]:
                thread.join()
        else:
            for ids in programs:
                _become(launch, grid, ids)
                self.kernel(**given)
        if launch.error is not None:
            raise launch.error

    @staticmethod
    def _argument(launch, value):
        if isinstance(value, torch.Tensor):
            launch.memory.hold(value)
            return Pointer(value.data_ptr(), NAMES[value.dtype])
        if isinstance(value, TensorDescriptor):
            return Descriptor(value)
        if isinstance(value, Kind):
            return kind(value)
        return value


def warp_specialize(roles, num_warps, registers):
    """Every role as a thread; returns when all have ended."""
    place = HERE.launch, HERE.grid, HERE.ids
    threads = [
        _thread(functools.partial(act, *args), *place, f"{act.__name__} {i}", warps)
        for i, ((act, args), warps) in enumerate(zip(roles, [4, *num_warps], strict=True))
    ]
    for thread in threads:
        thread.join()
    if HERE.launch.error is not None:
        raise Stuck("a role failed")


# -- kernels as Python functions ------------------------------------------------------------------

_MODULES, _FUNCTIONS, _KINDS = {}, {}, {}


def run_time_range(*bounds):
    """A loop's number is a value of the kernel, unless the loop is unrolled (`static_range`)."""
    return (Value(i) for i in range(*map(int, bounds)))


BUILTINS = {**vars(builtins), "range": run_time_range}


def translated(function):
    """A jit function as a Python function over what is here."""
    fn = function.fn
    if fn not in _FUNCTIONS:
        _FUNCTIONS[fn] = types.FunctionType(
            fn.__code__, _globals(fn.__globals__), fn.__name__,
            tuple(map(_convert, fn.__defaults__ or ())), fn.__closure__,
        )  # fmt: skip
    return _FUNCTIONS[fn]


def _globals(module):
    name = module["__name__"]
    if name not in _MODULES:
        made = _MODULES[name] = {"__builtins__": BUILTINS, "__name__": name}
        made.update({key: _convert(value) for key, value in module.items() if key[:2] != "__"})
    return _MODULES[name]


def _convert(value):
    if isinstance(value, tl.constexpr):
        return _convert(value.value)
    with contextlib.suppress(TypeError):
        if value in REPLACED:
            return REPLACED[value]
    if isinstance(value, JITFunction):
        return translated(value)
    if isinstance(value, ConstexprFunction):
        return value.fn  # Python already
    if isinstance(value, Kind):
        return kind(value)
    if isinstance(value, type) and hasattr(value, "FIELDS"):
        return _record(value)
    return value


def _record(cls):
    def fill(self, **values):
        assert values.keys() == cls.FIELDS.keys(), values.keys() ^ cls.FIELDS.keys()
        for name, value in values.items():
            setattr(self, name, value)

    return type(cls.__name__, (), {"__init__": fill})


def kind(value):
    """A compile-time type with its constants and functions."""
    if value not in _KINDS:  # by itself: architectures have kinds of one name
        members = {key: _convert(member) for key, member in vars(value).items()}
        _KINDS[value] = SimpleNamespace(**members)
    return _KINDS[value]
