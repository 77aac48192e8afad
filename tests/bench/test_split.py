"""bench split: the whole measurement on the emulator, where times say nothing."""

import json
from dataclasses import replace

import pytest

from megamoe.bench import split
from megamoe.bench.cells import SPLIT, cells_named
from megamoe.cli import split as cli
from megamoe.engine import backends
from megamoe.engine.call import Call
from megamoe.engine.hopper import HOPPER
from megamoe.engine.status import DeviceStatus
from tests import emulator, pretending
from tests.kernels.support import INTERPRETED


class Layer:
    """Stands for a layer on a GPU: its launches here, and what was wrong with some of them."""

    wrong = ""

    def __init__(self, weights, num_experts, top_k, *, mode, backend, overrides, **options):
        self.w, self.mode, self.given, self.top_k = weights, mode, overrides, top_k
        self.options, self.status = split_options(options), DeviceStatus(pretending.CPU)

    def plan(self, num_tokens):
        inputs = pretending.torch.empty(num_tokens, 1), pretending.torch.empty(1, self.top_k), None
        return pretending.plan_of(inputs, self.w, self.options, mode=self.mode, **self.given)

    def __call__(self, *inputs):
        plan = self.plan(len(inputs[0]))
        y = HOPPER.run(Call(*inputs, self.w, self.options, None, self.status), plan)
        return y + (self.wrong == self.mode)

    def check(self):
        self.status.check(self.top_k)


def split_options(options):
    return pretending.Options(**options)


@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")
def test_a_cell_is_checked_and_timed_in_every_mode_and_partition(monkeypatch, capsys):
    monkeypatch.setattr(backends, "resolve", lambda *wanted: None)
    emulator.install(monkeypatch, num_sms=16)
    monkeypatch.setattr(split, "MoE", Layer)
    (cell,) = cells_named(["tiny/2"])
    small = replace(cell.shape, hidden=256, intermediate=128, num_experts=2)
    cells, seen = [replace(cell, shape=small)], []
    monkeypatch.setattr(Layer, "wrong", "fused")
    found = split.measure(cells, ["w8a8"], device="cpu", repeats=1, rounds=1, on_row=seen.append)
    assert seen == found and [row.contestant for row in found] == ["staged", "fused", "split 8 + 8"]
    assert [bool(row.why) for row in found] == [False, True, False]
    assert all(row.ratio > 0 and row.tflops > 0 for row in found if not row.why)
    cli.show(found)
    text = capsys.readouterr().out
    assert text.count("other bits than staged") == 1 and "8 + 8" in text
    json.dumps([row.as_dict() for row in found])


def test_the_sweep_is_that_of_the_published_split_kernels():
    cells = cells_named(list(SPLIT))
    assert len(cells) == 32 and {c.shape.num_experts for c in cells} == {48, 96}
