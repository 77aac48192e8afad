"""The staged layer takes the plan's tile, or the one that it is given, in both linears."""

import pytest
import torch

import megamoe as mm
from megamoe.engine import gluon, staged
from megamoe.engine.call import Call
from megamoe.engine.hopper import HOPPER
from megamoe.engine.status import DeviceStatus
from megamoe.planner.hopper import pick, tile_of
from megamoe.planner.tables.hopper import Shape
from megamoe.problem import Options
from megamoe.routing.samplers import sample_routing
from tests import pretending

E, I, H, K = 4, 64, 96, 2


@pytest.fixture
def taken(monkeypatch):
    """The tiles that launches were given; nothing is launched."""
    seen = []
    pretending.pretend_h200(monkeypatch)
    for linear in ("gated", "linear"):
        monkeypatch.setattr(
            HOPPER.launch, linear, lambda x, w, out, step, *rest, **more: seen.append(step.config)
        )
    monkeypatch.setattr(
        gluon, "route",
        lambda x, routing, acts, pool, steps, **more: seen.append(steps["permute"].config.block_m),
    )  # fmt: skip
    monkeypatch.setattr(staged, "combine", lambda *args, **more: None)
    return seen


@pytest.mark.parametrize("recipe", ["w4a8_block", "w4a16"])
def test_a_given_tile_is_used_and_shared_experts_of_their_own_launches_keep_theirs(taken, recipe):
    rng = torch.Generator().manual_seed(0)
    w13, w2 = (torch.randn(E, *s, generator=rng).bfloat16() for s in ((2 * I, H), (H, I)))
    w = mm.ExpertWeights.quantize(w13, w2, "w4a8_block")
    x = torch.randn(6, H, generator=rng).bfloat16()
    others = mm.ExpertWeights.quantize(w13[:1], w2[:1], recipe)
    inputs = (x, *sample_routing(6, E, K))
    pretending.staged(inputs, w, shared=others)
    own, _ = pick("w4a8_block", 6 * K / E)
    shared, _ = pick(recipe, 6.0)
    more = [] if recipe == w.recipe else [shared.block_m, shared, shared]
    assert taken == [own.block_m, own, own, *more]
    taken.clear()
    wide = tile_of("w4a8_block", Shape(64, 2, 2))
    given = {"block_m": 64, "block_k": 256}
    plan = pretending.plan_of(inputs, w, shared=others, mode="staged", **given)
    call = Call(*inputs, w, Options(), others, DeviceStatus(x.device))
    HOPPER.run(call, plan)
    assert taken == [64, wide, wide, *more]
