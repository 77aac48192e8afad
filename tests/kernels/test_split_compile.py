"""Split's launches compile for sm_90a: GEMMs that signal tiles or follow them, in no spill."""

import pytest

from megamoe.engine import images, packed, partition
from megamoe.engine.call import Call
from megamoe.engine.functional import launch as launch_call
from megamoe.engine.planning import Traits, plan_for
from megamoe.kernels.gluon import dispatch, permute, window
from megamoe.kernels.hopper import launch
from megamoe.kernels.hopper.weights import pack
from megamoe.kernels.portable import combine, sort
from megamoe.planner.overrides import checked
from megamoe.problem import Options
from tests.kernels.compiling import resources
from tests.kernels.support import INTERPRETED
from tests.kernels.test_chain_compile import Ignored, sums_of
from tests.kernels.test_hopper_compile import SHARED_LIMIT, Compiler
from tests.plan.support import K, OneByOne, experts, inputs, status
from tests.pretending import pretend_h200

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

WANTED = ((launch, "gemm_kernel"), (launch, "gemm_swap_ab_kernel"), (window, "_window_kernel"))
OTHERS = ((permute, "_count_kernel"), (permute, "_place_kernel"), (sort, "_scan_kernel"),
          (dispatch, "_pool_kernel"), (combine, "_combine_kernel"))  # fmt: skip

# recipe, tokens, overrides: every kind of GEMM that follows by words of its own
CASES = {
    "swap_ab": ("w4a8_block", 8, {}),
    "decoded-per-tile": ("w4a8_block", 512, {}),
    "decoded-per-wave": ("w4a8_block", 2048, {"pool_rows": 6000}),
    "static": ("w8a8", 512, {"schedule": "static"}),
}
EVERY = {
    f"{recipe}-{num}": (recipe, num, {})
    for recipe in ("w4a8_block", "w8a8", "w4a16", "nvfp4", "bf16")
    for num in (8, 64, 128, 300, 512, 8192)
}


def compiled(monkeypatch, recipe, num, **given):
    """Its kernels by name, as a call launches them."""
    pretend_h200(monkeypatch)
    found = {}
    for module, name in WANTED:
        made = found[name] = []
        monkeypatch.setattr(module, name, Compiler(getattr(module, name), made))
    for module, name in OTHERS:
        monkeypatch.setattr(module, name, Ignored())
    facts = pack.Facts(True, True, True)
    monkeypatch.setattr(pack, "facts_of", lambda w: facts)
    monkeypatch.setattr(packed, "facts_of", lambda w: facts)
    monkeypatch.setattr(images, "_facts", lambda w: facts)
    monkeypatch.setattr(partition, "fork", lambda *args: OneByOne([], []))
    w, options = experts(recipe), Options()
    overrides = checked({"backend": "hopper", "mode": "split", **given})
    plan = plan_for(w, options, Traits(), num_tokens=num, top_k=K, overrides=overrides)
    launch_call(Call(*inputs(num), w, options, None, status()), plan)
    found["sum"] = max(sums.num_bytes for sums in sums_of(plan))
    return found


def assert_fits(found):
    gemms = found["gemm_kernel"] + found["gemm_swap_ab_kernel"]
    assert len(gemms) >= 2 and found["_window_kernel"]
    for made in gemms:
        used = resources(made)
        assert used["stack"] == 0 and used["shared"] <= found["sum"] <= SHARED_LIMIT
    assert resources(found["_window_kernel"][0])["stack"] == 0


@pytest.mark.parametrize("case", CASES)
def test_both_linears_compile_without_spills(case, monkeypatch):
    recipe, num, given = CASES[case]
    assert_fits(compiled(monkeypatch, recipe, num, **given))


@pytest.mark.every
@pytest.mark.parametrize("case", EVERY)
def test_every_tile_compiles_without_spills(case, monkeypatch):
    recipe, num, given = EVERY[case]
    assert_fits(compiled(monkeypatch, recipe, num, **given))
