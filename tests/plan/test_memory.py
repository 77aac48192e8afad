"""`Plan.buffers` lists what a call allocates, byte for byte: every empty tensor is counted."""

import sys
from functools import cache, partial
from pathlib import Path

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import megamoe as mm
from megamoe.engine import blackwell, partition, planning
from megamoe.engine.call import Call
from megamoe.engine.functional import launch
from megamoe.engine.planning import Ranks, Traits, plan_for
from megamoe.planner.numerics import BLACKWELL_RECIPES, HOPPER_RECIPES, TABLE
from megamoe.planner.overrides import checked
from megamoe.problem import RECIPES, Options
from tests.kernels.support import INTERPRETED
from tests.plan.support import (
    E,
    K,
    OneByOne,
    chain_over_ranks,
    experts,
    fused_over_ranks,
    inputs,
    staged_over_ranks,
    status,
)

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter has no launches")

LIBRARY = Path(mm.__file__).parent
ALLOCATIONS = ("empty", "new_empty", "empty_like", "zeros")


class Allocated(TorchDispatchMode):
    """Bytes of each tensor that engine or launchers allocate, with where."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ALLOCATIONS and (where := _place()):
            self.found.append((out.untyped_storage().nbytes(), where))
        return out


def _place():
    """The line of the engine, or of a launcher, that is being executed; None in a test."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(LIBRARY):
            is_own = path.relative_to(LIBRARY).parts[0] in ("engine", "kernels")
            return f"{path.relative_to(LIBRARY)}:{frame.f_lineno}" if is_own else None
        if path.is_relative_to(LIBRARY.parent / "tests"):
            return None
        frame = frame.f_back
    return None


def assert_allocated(plan, call):
    """A call allocates what its plan says; weights are packed in a call before."""
    call()
    with Allocated() as allocated:
        call()
    local = [buffer for buffer in plan.buffers if buffer.kind == "local"]
    wanted = sum(buffer.num_bytes * buffer.times for buffer in local)
    listed = "\n".join(map(str, (*local, *allocated.found)))
    assert sum(num for num, _ in allocated.found) == wanted, listed


@pytest.fixture
def placed_once(launched, machine, monkeypatch):
    """Blackwell's weights are placed once, as on a GPU, whose values can be read."""
    made = {}
    monkeypatch.setattr(
        blackwell, "known",
        lambda w, what, find, *_: what == "fits_bf16" or made.setdefault(id(w), cache(find))(w),
    )  # fmt: skip
    monkeypatch.setattr(partition, "fork", lambda *args: OneByOne(launched, []))


def plan_of(backend, recipe, num, given=(), shared=None, ranks=None, options=None, **more):
    w, options = experts(recipe), options or Options()
    spec = None if shared is None else planning._shared_spec(shared, apart="w4a16")
    plan = plan_for(
        w, options, Traits(shared=spec), num_tokens=num, top_k=K,
        overrides=checked({"backend": backend, **dict(given)}), **more,
        **({} if ranks is None else {"ranks": ranks}),
    )  # fmt: skip
    return plan, w, options


ONE = [
    (backend, recipe, num, mode)
    for backend, recipe in TABLE
    if backend in ("hopper", "portable", "blackwell")
    for num in (8, 512, 2048)
    for mode in ("auto", "staged")
]


@pytest.mark.parametrize(("backend", "recipe", "num", "mode"), ONE)
def test_one_rank(placed_once, backend, recipe, num, mode):
    """With FP8 rows in every other case, and shared experts in launches of their own."""
    options = Options(combine="fp8" if mode == "staged" else "bf16")
    shared = experts("w4a16", 1, 1024) if mode == "staged" else None
    plan, w, options = plan_of(backend, recipe, num, {"mode": mode}, shared, options=options)
    call = Call(*inputs(num), w, options, shared, status())
    assert_allocated(plan, lambda: launch(call, plan))


@pytest.mark.parametrize("recipe", [r for b, r in TABLE if b == "portable"])
@pytest.mark.parametrize("backend", ["portable"])
def test_tokens_that_come_quantised(placed_once, backend, recipe):
    plan, w, options = plan_of(backend, recipe, 512, is_quantized=True)
    call = Call(*inputs(512, is_quantized=True, recipe=recipe), w, options, None, status())
    assert_allocated(plan, lambda: launch(call, plan))


FUSED = [("hopper", r) for r in HOPPER_RECIPES] + [("blackwell", r) for r in BLACKWELL_RECIPES]


@pytest.mark.parametrize("given", [{}, {"pool_rows": 3000}])
@pytest.mark.parametrize(("backend", "recipe"), FUSED)
def test_fused_over_ranks(placed_once, backend, recipe, given):
    given = {"mode": "fused", **given}
    ranks = Ranks(8, 8 * E, max_tokens=64)
    plan, w, options = plan_of(backend, recipe, 64, given, ranks=ranks)
    assert_allocated(plan, lambda: fused_over_ranks(plan, w, options, 64))


@pytest.mark.parametrize("backend", ["hopper"])
def test_a_call_of_several_fused_launches_allocates_in_each(placed_once, backend):
    ranks = Ranks(8, 8 * E, max_tokens=700)
    plan, w, options = plan_of(backend, "w4a8", 700, {"mode": "fused"}, ranks=ranks)
    assert plan.num_passes > 1
    assert_allocated(plan, lambda: fused_over_ranks(plan, w, options, 700))


@pytest.mark.parametrize("given", [{}, {"pool_rows": 6000}])
@pytest.mark.parametrize("recipe", HOPPER_RECIPES)
@pytest.mark.parametrize("backend", ["hopper"])
def test_split(placed_once, backend, recipe, given):
    options = Options(combine="fp8")
    given = {"mode": "split", **given}
    plan, w, options = plan_of(backend, recipe, 2048, given, options=options)
    call = Call(*inputs(2048), w, options, None, status())
    assert_allocated(plan, lambda: launch(call, plan))


CHAINS = [("hopper", mode, given) for mode in ("chain", "split") for given in ((), (9000,))]
CHAINS += [("blackwell", "chain", given) for given in ((), (9000,))]


@pytest.mark.parametrize("num", [0, 300])
@pytest.mark.parametrize("combine", ["bf16", "fp8"])
@pytest.mark.parametrize(("backend", "mode", "rows"), CHAINS)
def test_a_chain(placed_once, backend, mode, rows, combine, num):
    given = {"mode": mode, **({"pool_rows": rows[0]} if rows else {})}
    shared = experts("w4a16", 1, 1024)
    for recipe in ("w4a8_block", "w8a8", "nvfp4"):
        plan, w, options = plan_of(
            backend, recipe, num, given, shared, Ranks(8, 8 * E, max_tokens=512),
            Options(combine=combine),
        )  # fmt: skip
        call = partial(chain_over_ranks, plan, w, options, num, shared)
        assert_allocated(plan, call)


@pytest.mark.parametrize("combine", ["bf16", "fp8"])
@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("backend", ["hopper", "portable", "blackwell"])
def test_staged_ranks(placed_once, backend, recipe, has_shared, combine):
    if (backend, recipe) not in TABLE:
        pytest.skip("no kernel")
    shared = experts("w4a16", 1, 1024) if has_shared else None
    plan, w, options = plan_of(
        backend, recipe, 512, {"mode": "staged"}, shared, Ranks(8, 8 * E, max_tokens=512),
        Options(combine=combine),
    )  # fmt: skip
    assert_allocated(plan, lambda: staged_over_ranks(plan, w, options, 512, shared))
