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
from megamoe.planner import hopper
from megamoe.planner.numerics import HOPPER_RECIPES
from megamoe.planner.plan import plan_call
from megamoe.planner.tables import hopper as tables
from tests.kernels.support import INTERPRETED
from tests.pretending import pretend_h200

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter has no launches")

HOPS = {"staged": 8, "fused": 7}
# Functions that mm.moe has more than a layer: it is one call, which may stand in a compiled model.
BEFORE = {
    "engine/functional.py:moe": "its arguments become Options",
    "engine/eager.py:call": "torch.compile leaves the call as it stands",
}
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


def inputs(recipe):
    rng = torch.Generator().manual_seed(0)
    w13, w2 = (torch.randn(E, *shape, generator=rng).bfloat16() for shape in ((2 * I, H), (H, I)))
    experts = mm.ExpertWeights.quantize(w13, w2, recipe)
    x = torch.randn(T, H, generator=rng).bfloat16()
    idx = torch.randint(0, E, (T, K), generator=rng)
    return x, idx, torch.rand(T, K, generator=rng), experts


@pytest.mark.parametrize("mode", ["staged", "fused"])
@pytest.mark.parametrize("recipe", HOPPER_RECIPES)
@pytest.mark.parametrize("way", ["layer", "moe"])
def test_a_call_reaches_its_first_kernel_in_few_hops(hops, recipe, way, mode):
    x, idx, gates, experts = inputs(recipe)
    if way == "layer":
        call = mm.MoE(experts, E, K, mode=mode)
        hops.clear()
        call(x, idx, gates)
    else:
        mm.moe(x, idx, gates, experts, mode=mode)
    kernel = {"staged": "_pool_kernel", "fused": "mega_kernel"}[mode]
    first = next(names for one, names in hops if one == kernel)
    assert first[0] == {"layer": "engine/layer.py:forward", "moe": "engine/functional.py:moe"}[way]
    own = [name for name in first if name not in BEFORE]
    assert len(own) <= HOPS[mode], first
    assert len(first) - len(own) == (len(BEFORE) if way == "moe" else 0)


class Counted(tuple):
    """A table that notes how often it is gone through."""

    reads = 0

    def __iter__(self):
        Counted.reads += 1
        return super().__iter__()


@pytest.mark.parametrize("num", [24, 2500])
@pytest.mark.parametrize("mode", ["auto", "staged", "fused"])
def test_the_first_call_of_a_size_reads_the_tile_table_once(monkeypatch, mode, num):
    """Also `auto`, which asks whether a fused launch has a tile before it launches one."""
    if (mode, num) == ("fused", 2500):
        pytest.skip("refused: too many slots")
    monkeypatch.setattr(tables, "TILES", Counted(tables.TILES))
    monkeypatch.setattr(Counted, "reads", 0)
    problem = mm.Problem(num, 4096, 2048, 32, 6, 1, "w8a8")
    for _ in range(2):
        hopper.pick.cache_clear()
        plan_call.cache_clear()
        Counted.reads = 0
        mm.plan(problem, "h200", mode=mode)
        assert Counted.reads == 1
