"""Which backends run on an architecture is one rule, which engine and planner share."""

from dataclasses import replace

import pytest
import torch

from megamoe.engine import backends
from megamoe.errors import NotAvailable
from megamoe.hardware import H200
from megamoe.planner.backends import reasons_on
from megamoe.planner.plan import plan
from megamoe.problem import Problem

ARCHES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120")
GPU = torch.device("cuda:0")


@pytest.mark.parametrize("arch", ARCHES)
def test_the_engine_refuses_what_the_planner_refuses(monkeypatch, arch):
    version = int(arch.removeprefix("sm_"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: divmod(version, 10))
    assert backends.reasons_on(GPU) == reasons_on(arch)
    for name, why in reasons_on(arch + "a").items():
        assert bool(why) == bool(reasons_on(arch)[name])


def test_portable_before_ampere_is_refused_by_name():
    old = replace(H200, arch="sm_75")
    problem = Problem(8, 4096, 2048, 32, 6, 1, "w4a16")
    with pytest.raises(NotAvailable, match="needs sm_80 or newer, this is sm_75"):
        plan(problem, old, backend="portable")
    assert plan(problem, old).backend == "reference"
