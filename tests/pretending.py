"""A CPU that the engine takes for an H200, and calls of the Hopper backend by hand."""

from dataclasses import replace

import torch

from megamoe.engine import fused, local, planning
from megamoe.engine.call import Call
from megamoe.engine.hopper import HOPPER
from megamoe.engine.planning import Ranks, plan_for, traits_of
from megamoe.engine.status import DeviceStatus
from megamoe.hardware import B200, H200
from megamoe.planner.overrides import checked
from megamoe.planner.plan import with_tile
from megamoe.problem import Options

CPU = torch.device("cpu")


def pretend_h200(monkeypatch, num_sms=132):
    """Plans for the CPU are those of an H200 with so many SMs."""
    machine = replace(H200, num_sms=num_sms)
    for module in (planning, local):
        monkeypatch.setattr(module, "hardware_of", lambda device: machine)
    uncached = getattr(planning._planned, "__wrapped__", planning._planned)
    monkeypatch.setattr(planning, "_planned", uncached)


def pretend_b200(monkeypatch, num_sms=148):
    """Plans for the CPU are those of a B200 with so many SMs."""
    machine = replace(B200, num_sms=num_sms)
    for module in (planning, local):
        monkeypatch.setattr(module, "hardware_of", lambda device: machine)
    uncached = getattr(planning._planned, "__wrapped__", planning._planned)
    monkeypatch.setattr(planning, "_planned", uncached)


def with_tmem_tile(plan, tile):
    """A plan of the Blackwell backend with another tile in both linears."""
    (one,) = plan.passes
    launches = tuple(
        replace(step, config=tile) if step.name in ("l1", "l2") else step for step in one.launches
    )
    return replace(plan, passes=(replace(one, launches=launches),))


def plan_of(inputs, w, options=None, shared=None, tile=None, **given):
    """The plan of a call on Hopper; `tile` in place of the table's."""
    x, idx, _ = inputs
    options = options or Options()
    mode = given.pop("mode", "auto")
    if tile is not None and mode == "fused":
        given |= {
            "block_m": tile.block_m,
            "block_n": tile.block_n,
            "block_k": tile.block_k,
            "group_m": tile.group_m,
        }
    ranks = given.pop("ranks", Ranks())
    plan = plan_for(
        w, options, traits_of("hopper", w, shared), num_tokens=len(x), top_k=idx.shape[1],
        overrides=checked({"backend": "hopper", "mode": mode, **given}), ranks=ranks,
        is_quantized=not isinstance(x, torch.Tensor),
    )  # fmt: skip
    return with_tile(plan, tile) if tile is not None and mode == "staged" else plan


def staged(inputs, w, options=None, shared=None, tile=None, status=None, stats=None, count=None):
    """One staged call."""
    plan = plan_of(inputs, w, options, shared, tile, mode="staged")
    status = status or DeviceStatus(CPU)
    return HOPPER.run(Call(*inputs, w, options or Options(), shared, status, stats, count), plan)


def fuse(
    inputs, w, options=None, status=None, tile=None, *, shared=None, stats=None, timeout_s=30.0,
    absent=-1, trace=None, num_valid=None, is_poisoned=False, **given,
):  # fmt: skip
    """One fused call."""
    plan = plan_of(inputs, w, options, shared, tile, mode="fused", **given)
    call = Call(
        *inputs, w, options or Options(), shared, status or DeviceStatus(CPU), stats, num_valid,
        timeout_s, is_poisoned,
    )  # fmt: skip
    return fused.run(call, plan.mega, trace=trace, absent=absent)
