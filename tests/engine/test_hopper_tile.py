"""The staged layer takes the table's tile, or the one that it is given, in both linears."""

import pytest
import torch

import megamoe as mm
from megamoe.engine import hopper
from megamoe.engine.faults import Faults
from megamoe.problem import Options
from megamoe.routing.samplers import sample_routing
from megamoe.planner.tables.hopper import tile_of, tiles

E, I, H, K = 4, 64, 96, 2


@pytest.fixture
def taken(monkeypatch):
    """The tiles that launches were given; nothing is launched."""
    seen = []
    for linear in ("gated", "linear"):
        monkeypatch.setattr(
            hopper.launch, linear, lambda x, w, out, tile, *rest, **more: seen.append(tile)
        )
    monkeypatch.setattr(
        hopper, "route", lambda x, routing, acts, pool, block, *rest, **more: seen.append(block)
    )
    monkeypatch.setattr(hopper, "combine", lambda *args, **more: None)
    return seen


@pytest.mark.parametrize("recipe", ["w4a8_block", "w4a16"])
def test_a_given_tile_is_used_and_shared_experts_of_their_own_launches_keep_theirs(taken, recipe):
    rng = torch.Generator().manual_seed(0)
    w13, w2 = (torch.randn(E, *s, generator=rng).bfloat16() for s in ((2 * I, H), (H, I)))
    w = mm.ExpertWeights.quantize(w13, w2, "w4a8_block")
    x = torch.randn(6, H, generator=rng).bfloat16()
    others = mm.ExpertWeights.quantize(w13[:1], w2[:1], recipe)
    call = (x, *sample_routing(6, E, K), w, Options(), others, Faults(x.device).word)
    hopper.moe(*call)
    own, _ = tiles("w4a8_block", 6 * K / E)
    shared, _ = tiles(recipe, 6.0)
    more = [] if recipe == w.recipe else [shared.tokens, shared, shared]
    assert taken == [own.tokens, own, own, *more]
    taken.clear()
    wide = tile_of("w4a8_block", (64, 2, 2, 1))
    hopper.moe(*call, tile=wide)
    assert taken == [64, wide, wide, *more]
