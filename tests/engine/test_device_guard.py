"""A layer's launches go to the device that it lies on, whichever is the current one."""

from types import SimpleNamespace

import pytest
import torch

from megamoe.engine import device_guard, functional, warm
from megamoe.engine.hopper import HOPPER


class Current:
    """Stands for torch's current device."""

    def __init__(self):
        self.index, self.entered = 0, 0

    def device(self, device):
        outer = self

        class Entered:
            def __enter__(self):
                self.before, outer.index = outer.index, device.index
                outer.entered += 1

            def __exit__(self, *error):
                outer.index = self.before

        return Entered()


@pytest.fixture
def current(monkeypatch):
    found = Current()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found.index)
    monkeypatch.setattr(torch.cuda, "device", found.device)
    return found


@pytest.mark.parametrize(("index", "entered"), [(3, 1), (0, 0)])
def test_a_launch_enters_the_device_of_its_weights_where_it_is_not_the_current_one(
    current, monkeypatch, index, entered
):
    seen = []
    monkeypatch.setattr(HOPPER, "run", lambda call, plan: seen.append(current.index))
    weights = SimpleNamespace(device=torch.device("cuda", index))
    status = SimpleNamespace(copy_to_host_async=lambda top_k: seen.append(current.index))
    call = SimpleNamespace(weights=weights, num_tokens=4, top_k=2, status=status)
    functional.launch(call, SimpleNamespace(backend="hopper"))
    assert seen == [index, index]
    assert (current.index, current.entered) == (0, entered)


def test_a_cpu_and_a_device_without_a_number_are_left_alone(current):
    for device in (torch.device("cpu"), torch.device("cuda")):
        assert device_guard.is_current(device)
        with device_guard.on(device):
            assert current.entered == 0


def test_warming_up_over_a_group_launches_there_too(current, monkeypatch):
    seen = []
    monkeypatch.setattr(warm, "_warm_group", lambda *_: seen.append(current.index))
    weights = SimpleNamespace(device=torch.device("cuda", 3))
    warm.warmup(SimpleNamespace(weights=weights, _world=object(), _fused_group=object()), [1])
    assert seen == [3] and current.index == 0
