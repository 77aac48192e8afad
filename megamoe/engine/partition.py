"""Two parts of a GPU's SMs, each with a stream of its own: green contexts of the driver.

torch's own green contexts (2.9 to 2.13) take their SMs from the whole GPU each time, so two of them
would share SMs; here the second part is what the first one leaves. Made once for each device and
split, never inside a capture, and kept: graphs that were captured hold the streams' contexts.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import torch

from megamoe.engine import device_guard
from megamoe.engine.status import is_capturing
from megamoe.errors import NotAvailable, require
from megamoe.planner.plan import Plan

FIX = "use mode='auto' or 'staged': the same bits"
_SM = 1  # CU_DEV_RESOURCE_TYPE_SM
_DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM, which every green context must have
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
# Of a CUdevResource: room for it in any driver, and where its number of SMs stands.
_RESOURCE_BYTES, _SM_COUNT_AT = 512, 96


class Sides(Protocol):
    """Work on two parts of the SMs: of each in order, of both side by side."""

    def run(self, side: int, launches: Callable[[], None]) -> None:
        """Launch on side 0 or 1, after all that this side was given before."""

    def mark(self, side: int) -> Any:
        """A point on a side: all that it was given so far."""

    def wait(self, side: int, mark: Any) -> None:
        """What the side is given from now on begins after a mark of the other."""

    def join(self) -> None:
        """What follows on the call's stream begins after both sides."""


class Streams:
    """The sides of one call on a GPU: after all that is on the current stream."""

    def __init__(self, device: torch.device, streams: tuple[torch.cuda.Stream, ...]) -> None:
        self._now, self._streams = torch.cuda.current_stream(device), streams
        for one in streams:
            one.wait_stream(self._now)

    def run(self, side: int, launches: Callable[[], None]) -> None:
        with torch.cuda.stream(self._streams[side]):
            launches()

    def mark(self, side: int) -> torch.cuda.Event:
        event: torch.cuda.Event = self._streams[side].record_event()
        return event

    def wait(self, side: int, mark: torch.cuda.Event) -> None:
        self._streams[side].wait_event(mark)

    def join(self) -> None:
        for one in self._streams:
            self._now.wait_stream(one)


class Threads:
    """The sides of one call where there is no GPU: a thread each."""

    def __init__(self) -> None:
        self._threads = [ThreadPoolExecutor(1) for _ in range(2)]
        self._submitted: list[list[Future[None]]] = [[], []]

    def run(self, side: int, launches: Callable[[], None]) -> None:
        def act() -> None:
            with torch.no_grad():  # which is a thread's own
                launches()

        self._submitted[side].append(self._threads[side].submit(act))

    def mark(self, side: int) -> Future[None]:
        return self._submitted[side][-1]

    def wait(self, side: int, mark: Future[None]) -> None:
        self.run(side, mark.result)

    def join(self) -> None:
        for thread in self._threads:
            thread.shutdown()
        for futures in self._submitted:
            for one in futures:
                one.result()


class Pair(NamedTuple):
    """A stream of each part; captured calls have their own, which no eager call may meet."""

    eager: tuple[torch.cuda.Stream, ...]
    captured: tuple[torch.cuda.Stream, ...]


class InOrder:
    """The sides of a call of which nothing runs: tensors without memory."""

    def run(self, side: int, launches: Callable[[], None]) -> None:
        launches()

    def mark(self, side: int) -> None:
        pass

    def wait(self, side: int, mark: None) -> None:
        pass

    def join(self) -> None:
        pass


def fork(device: torch.device, l1_sms: int, num_sms: int) -> Sides:
    """Both sides of a call: `l1_sms` of the GPU's `num_sms` SMs, and the rest."""
    if device.type == "meta":
        return InOrder()
    if device.type != "cuda":
        return Threads()
    streams = streams_of(device, l1_sms, num_sms)
    with _LOCK:  # a call of another thread between the waits of both would have L2 wait alone
        return Streams(device, streams)


def prepare(plan: Plan, device: torch.device) -> None:
    """Part the GPU of a layer in mode split as it is built: refused there, not in a call."""
    if plan.mode == "split" and plan.backend == "hopper" and device.type == "cuda":
        l1_sms = plan["l1_sms"]
        assert isinstance(l1_sms, int)
        streams_of(device, l1_sms, plan.hardware.num_sms)


_PAIRS: dict[tuple[int, int], Pair] = {}
_LOCK = threading.Lock()


def streams_of(device: torch.device, l1_sms: int, num_sms: int) -> tuple[torch.cuda.Stream, ...]:
    """The streams of a device's two parts; made the first time."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with _LOCK:
        if (index, l1_sms) not in _PAIRS:
            require(
                not is_capturing(device),
                "the SMs must be parted before a capture",
                got=f"a first call of mode split with l1_sms {l1_sms} inside one",
                fix="make the call once before, as torch.cuda.graph asks of every call",
                kind=NotAvailable,
            )
            with device_guard.on(torch.device("cuda", index)):
                torch.cuda.init()
                _PAIRS[index, l1_sms] = _part(index, l1_sms, num_sms)
        pair = _PAIRS[index, l1_sms]
    return pair.captured if is_capturing(device) else pair.eager


def _part(index: int, l1_sms: int, num_sms: int) -> Pair:
    """Green contexts and streams of the first SMs, and of those that remain."""
    driver = _Driver()
    torch.empty(1, dtype=torch.float32, device=f"cuda:{index}")  # the device's own context is there
    device, whole, first, rest = ctypes.c_int(), *(_resource() for _ in range(3))
    groups = ctypes.c_uint(1)
    driver("cuDeviceGet", ctypes.byref(device), index)
    driver("cuDeviceGetDevResource", device, whole, _SM)
    driver("cuDevSmResourceSplitByCount", first, ctypes.byref(groups), whole, rest, 0, l1_sms)
    granted = [ctypes.c_uint.from_buffer(one, _SM_COUNT_AT).value for one in (first, rest)]
    require(
        granted == [l1_sms, num_sms - l1_sms],
        f"the GPU's {num_sms} SMs must part into {l1_sms} and {num_sms - l1_sms}",
        got=" and ".join(map(str, granted)),
        fix=f"take another l1_sms, or {FIX}",
        kind=NotAvailable,
    )
    parts = []
    for one in (first, rest):
        described, context = ctypes.c_void_p(), ctypes.c_void_p()
        driver("cuDevResourceGenerateDesc", ctypes.byref(described), one, 1)
        driver("cuGreenCtxCreate", ctypes.byref(context), described, device, _DEFAULT_STREAM)
        both = []
        for _ in Pair._fields:
            stream = ctypes.c_void_p()
            driver("cuGreenCtxStreamCreate", ctypes.byref(stream), context, _NON_BLOCKING, 0)
            both.append(torch.cuda.ExternalStream(stream.value, device=index))
        parts.append(both)
    return Pair(*zip(*parts, strict=True))


def _resource() -> ctypes.Array[ctypes.c_byte]:
    return (ctypes.c_byte * _RESOURCE_BYTES)()


class _Driver:
    """Calls of CUDA's driver by name; one that fails, or is not there, is refused by name."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            _refuse(f"no driver library ({error})")

    def __call__(self, name: str, *args: Any) -> None:
        call = getattr(self._library, name, None)
        if call is None:
            _refuse(f"a driver without {name}; CUDA 12.5 has it")
        assert call is not None
        code = call(*args)
        if code != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            said = (text.value or b"unknown error").decode()
            _refuse(f"{name}: error {code}, {said}")


def _refuse(why: str) -> None:
    require(
        False, "mode split must have green contexts for its SMs", got=why, fix=FIX,
        kind=NotAvailable,
    )  # fmt: skip
