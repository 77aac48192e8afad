"""Parts of a GPU's SMs: what a pretended driver is asked for, and what is refused."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

import megamoe as mm
from megamoe.engine import partition
from megamoe.errors import NotAvailable


class Driver:
    """Stands for libcuda: parts 132 SMs in units of 8, as the real one does."""

    def __init__(self, missing="", failing=""):
        self.asked, self.failing = [], failing
        for name in (
            "cuDeviceGet", "cuDeviceGetDevResource", "cuDevSmResourceSplitByCount",
            "cuDevResourceGenerateDesc", "cuGreenCtxCreate", "cuGreenCtxStreamCreate",
        ):  # fmt: skip
            if name != missing:
                setattr(self, name, lambda *args, name=name: self.call(name, args))

    def call(self, name, args):
        self.asked.append(name)
        if name == self.failing:
            return 801
        if name == "cuDevSmResourceSplitByCount":
            first, _, _, rest, _, wanted = args
            granted = -(-wanted // 8) * 8
            for one, num in ((first, granted), (rest, 132 - granted)):
                ctypes.c_uint.from_buffer(one, partition._SM_COUNT_AT).value = num
        if name == "cuGreenCtxStreamCreate":
            args[0]._obj.value = len(self.asked)
        return 0

    def cuGetErrorString(self, code, text):
        text._obj.value = b"operation not supported"


@pytest.fixture
def driver(monkeypatch):
    """Makes the driver; no capture runs, and streams are their handles."""

    def make(**how):
        found = Driver(**how)
        monkeypatch.setattr(partition.ctypes, "CDLL", lambda name: found)
        return found

    monkeypatch.setattr(partition, "_PAIRS", {})
    monkeypatch.setattr(partition, "is_capturing", lambda device: False)
    monkeypatch.setattr(partition.device_guard, "on", lambda device: torch.no_grad())
    stream = lambda handle, device: (handle, device)  # noqa: E731
    pretended = SimpleNamespace(init=lambda: None, ExternalStream=stream, Stream=torch.Stream)
    monkeypatch.setattr(partition.torch, "cuda", pretended)
    monkeypatch.setattr(partition.torch, "empty", lambda *args, **how: None)
    return make


GPU = torch.device("cuda", 1)


def test_both_parts_are_made_once_with_streams_for_captures_of_their_own(driver, monkeypatch):
    found = driver()
    eager = partition.streams_of(GPU, 88, 132)
    assert found.asked.count("cuGreenCtxCreate") == 2 and [at for _, at in eager] == [1, 1]
    num = len(found.asked)
    monkeypatch.setattr(partition, "is_capturing", lambda device: True)
    captured = partition.streams_of(GPU, 88, 132)
    assert len({*eager, *captured}) == 4 and len(found.asked) == num
    with pytest.raises(NotAvailable, match=r"before a capture; got a first call.*l1_sms 80"):
        partition.streams_of(GPU, 80, 132)


def test_a_layer_in_mode_split_parts_its_gpu_as_it_is_built(driver):
    found = driver()
    problem = mm.Problem(1, 512, 256, 8, 2, 1, "w8a8")
    cpu = torch.device("cpu")
    for mode, device, num in (("staged", GPU, 0), ("split", cpu, 0), ("split", GPU, 1)):
        partition.prepare(mm.plan(problem, "h200", mode=mode), device)
        assert found.asked.count("cuDevSmResourceSplitByCount") == num
    assert (1, 88) in partition._PAIRS


@pytest.mark.parametrize(
    ("how", "l1_sms", "says"),
    [
        ({}, 84, "132 SMs must part into 84 and 48; got 88 and 44"),
        ({"missing": "cuGreenCtxCreate"}, 88, "a driver without cuGreenCtxCreate; CUDA 12.5"),
        ({"failing": "cuDevSmResourceSplitByCount"}, 88, "error 801, operation not supported"),
    ],
)
def test_what_the_driver_cannot_do_is_refused(driver, how, l1_sms, says):
    driver(**how)
    with pytest.raises(NotAvailable, match=says):
        partition.streams_of(GPU, l1_sms, 132)


def test_without_a_driver_there_is_no_part(driver, monkeypatch):
    driver()

    def none(name):
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(partition.ctypes, "CDLL", none)
    with pytest.raises(NotAvailable, match=r"no driver library .libcuda"):
        partition.streams_of(GPU, 88, 132)


def test_sides_keep_their_order_and_an_error_is_raised_when_they_join():
    sides, seen = partition.fork(torch.device("cpu"), 88, 132), []
    sides.run(0, lambda: seen.append("a"))
    sides.wait(1, sides.mark(0))
    sides.run(1, lambda: seen.append("b"))
    sides.wait(0, sides.mark(1))
    sides.run(0, lambda: seen.append("c"))
    sides.join()
    assert seen == ["a", "b", "c"]
    sides = partition.fork(torch.device("cpu"), 88, 132)
    sides.run(1, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        sides.join()
