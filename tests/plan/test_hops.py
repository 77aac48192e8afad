"""From a layer's call to its first kernel there are at most eight functions of the library."""

import sys
from pathlib import Path

import pytest
import torch
from triton.runtime.jit import JITFunction

import megamoe as mm
from megamoe.engine import functional, images, layer, packed
from megamoe.engine.planning import Traits
from megamoe.kernels.hopper.weights import pack
from megamoe.planner.numerics import HOPPER_RECIPES
from tests.kernels.support import INTERPRETED
from tests.pretending import pretend_h200

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter has no launches")

HOPS = {"layer": 8, "moe": 10}  # mm.moe: its arguments as options, and what torch.compile asks for
LIBRARY = Path(mm.__file__).parent
T, E, K, H, I = 24, 4, 2, 256, 128


@pytest.fixture
def hops(monkeypatch):
    """The library's functions, outermost first, that had been entered at each launch."""
    found = []

    def keep(kernel, *args, grid, warmup, **constants):
        frame, names = sys._getframe(1), []
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(LIBRARY):
                names.append(f"{path.relative_to(LIBRARY)}:{frame.f_code.co_name}")
            frame = frame.f_back
        found.append((kernel.__name__, names[::-1]))

    pretend_h200(monkeypatch)
    monkeypatch.setattr(JITFunction, "run", keep)
    facts = pack.Facts(True, True, True)
    monkeypatch.setattr(pack, "facts_of", lambda w: facts)
    monkeypatch.setattr(packed, "facts_of", lambda w: facts)
    monkeypatch.setattr(images, "_facts", lambda w: facts)
    for module in (layer, functional):
        monkeypatch.setattr(module, "choose", lambda *wanted: ("hopper", Traits(), ""))
    return found


@pytest.mark.parametrize("recipe", HOPPER_RECIPES)
@pytest.mark.parametrize("way", ["layer", "moe"])
def test_a_staged_call_reaches_its_first_kernel_in_few_hops(hops, recipe, way):
    rng = torch.Generator().manual_seed(0)
    w13, w2 = (torch.randn(E, *shape, generator=rng).bfloat16() for shape in ((2 * I, H), (H, I)))
    experts = mm.ExpertWeights.quantize(w13, w2, recipe)
    x = torch.randn(T, H, generator=rng).bfloat16()
    idx = torch.randint(0, E, (T, K), generator=rng)
    gates = torch.rand(T, K, generator=rng)
    if way == "layer":
        call = mm.MoE(experts, E, K, mode="staged")
        hops.clear()
        call(x, idx, gates)
    else:
        mm.moe(x, idx, gates, experts, mode="staged")
    first = next(names for kernel, names in hops if kernel == "_pool_kernel")
    assert first[0] == {"layer": "engine/layer.py:forward", "moe": "engine/functional.py:moe"}[way]
    assert len(first) <= HOPS[way], first
