"""What reaches every kernel is what the plan says: kernel, grid and each constant it decides.

On a pretended GPU: tensors without memory, and Triton's own entry (`JITFunction.run`) in place of a
launch, so nothing between the plan and the compiler can decide again without being seen here.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import megamoe as mm
from megamoe.engine import (
    backends,
    blackwell,
    graphs,
    grouped,
    local,
    partition,
    planning,
    staged,
)
from megamoe.engine.call import Call
from megamoe.engine.functional import launch
from megamoe.engine.launch_options import LaunchOptions
from megamoe.engine.planning import Ranks, Traits, plan_for
from megamoe.formats.spec import recipe_named
from megamoe.kernels.portable import combine as portable_combine
from megamoe.kernels.portable import launch as portable_launch
from megamoe.kernels.portable.graph_io import ReplayArgs
from megamoe.planner.grouped import GroupedSpec, plan_grouped
from megamoe.planner.launches import Launch
from megamoe.planner.numerics import BLACKWELL_RECIPES, HOPPER_RECIPES, TABLE
from megamoe.planner.overrides import checked
from megamoe.problem import RECIPES, Options
from tests.kernels.support import INTERPRETED
from tests.plan.support import (
    MACHINE,
    META,
    E,
    H,
    I,
    K,
    OneByOne,
    alone,
    chain_over_ranks,
    experts,
    fused_over_ranks,
    inputs,
    quantized,
    staged_over_ranks,
    status,
)
from tests.pretending import pretend_b200

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter has no launches")

TOKENS = (1, 8, 32, 64, 128, 512, 2048, 8192)
BACKENDS = ("hopper", "portable")
BLACKWELL = [("blackwell", r, num) for r in RECIPES for num in (8, 512, 8192)]
BLACKWELL = [one for one in BLACKWELL if one[:2] in TABLE]


def assert_planned(launched, steps):
    """Every launch is the planned one, in order."""
    assert [kernel for kernel, _, _ in launched] == [step.kernel for step in steps]
    for (kernel, grid, constants), step in zip(launched, steps, strict=True):
        assert isinstance(step, Launch)
        wanted = step.config.constants()
        assert grid == step.grid, (kernel, step.name)
        assert constants.get("launch_pdl", False) == step.overlaps, (kernel, step.name)
        assert {name: constants.get(name) for name in wanted} == wanted, (kernel, step.name)


CASES = [(b, r, t) for b in BACKENDS for r in RECIPES for t in TOKENS if (b, r) in TABLE]
CASES += BLACKWELL


@pytest.mark.parametrize(("backend", "recipe", "num"), CASES)
def test_one_rank(launched, machine, backend, recipe, num):
    w, options = experts(recipe), Options()
    plan = plan_for(
        w, options, Traits(), num_tokens=num, top_k=K, overrides=(("backend", backend),)
    )
    public = mm.plan(mm.Problem(num, H, I, E, K, 1, recipe), machine, backend=backend)
    assert plan.launches == public.launches and plan.mode == public.mode
    launch(Call(*inputs(num), w, options, None, status()), plan)
    assert_planned(launched, plan.launches)


@pytest.mark.parametrize(("backend", "recipe", "num"), CASES)
def test_eight_ranks(launched, machine, backend, recipe, num):
    w, options = experts(recipe), Options()
    ranks = Ranks(8, 8 * E, max_tokens=num)
    plan = plan_for(
        w, options, Traits(), num_tokens=num, top_k=K, overrides=(("backend", backend),),
        ranks=ranks,
    )  # fmt: skip
    public = mm.plan(mm.Problem(num, H, I, 8 * E, K, 8, recipe), machine, backend=backend)
    assert plan.launches == public.launches and plan.mode == public.mode
    if plan.mode == "fused":
        fused_over_ranks(plan, w, options, num)
    elif plan.mode == "chain":
        chain_over_ranks(plan, w, options, num)
    else:
        staged_over_ranks(plan, w, options, num)
    assert_planned(launched, plan.launches)


QUANTIZED = [(b, r) for b, r in TABLE if b in MACHINE]


@pytest.mark.parametrize(("backend", "recipe"), QUANTIZED)
def test_tokens_that_come_quantised(launched, machine, backend, recipe):
    """On one rank; portable decodes where its GEMM takes BF16. Shared experts too."""
    w, options, num = experts(recipe), Options(), 512
    for shared in (None, experts("w4a16", 1) if backend == "portable" else None):
        launched.clear()
        spec = None if shared is None else planning._shared_spec(shared, apart="w4a16")
        plan = plan_for(
            w, options, Traits(shared=spec), num_tokens=num, top_k=K,
            overrides=(("backend", backend),), is_quantized=True,
        )  # fmt: skip
        ready = inputs(num, is_quantized=True, recipe=recipe)
        launch(Call(*ready, w, options, shared, status()), plan)
        assert_planned(launched, plan.launches)


CAPTURED = [("hopper", "w4a8_block", 8), ("hopper", "nvfp4", 512), ("portable", "w4a4", 128)]
CAPTURED += [("blackwell", "w4a8", 64)]


@pytest.mark.parametrize(("backend", "recipe", "num"), CAPTURED)
def test_a_captured_call(launched, machine, backend, recipe, num):
    """All that a graph holds: its arguments and inputs, the call, its output."""
    w, options, overrides = experts(recipe), Options(), (("backend", backend),)
    stats = torch.empty(E, dtype=torch.int64, device=META)
    parts = graphs.Parts(
        backend, w, options, None, status(), stats, K, LaunchOptions(), overrides
    )  # fmt: skip
    graphs._launch_all(parts, num, parts.inputs(num), ReplayArgs.empty(1, META))
    plan = plan_for(w, options, Traits(), num_tokens=num, top_k=K, overrides=overrides)
    assert_planned(launched, plan.captured)
    names = [one.name for one in plan.captured]
    assert names[:2] == ["read_args", "copy_inputs"] and names[-1] == "copy_output"


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
@pytest.mark.parametrize("recipe", [r for b, r in TABLE if b == "portable"])
def test_a_grouped_gemm_of_portable(launched, monkeypatch, recipe, schedule):
    monkeypatch.setattr(backends, "resolve", lambda *asked: None)
    row, num, groups = recipe_named(recipe), 300, 8
    x, w = inputs(num, is_quantized=True, recipe=recipe)[0], quantized(row.weights.name, 8, I, H)
    if x.global_scale is not None:
        x = quantized(row.acts.name, num, H)
    counts = torch.empty(groups, dtype=torch.int32, device=META)
    spec = GroupedSpec(recipe, num, groups, I, H)
    plan = plan_grouped(spec, "h200", backend="portable", schedule=schedule, sort_by_m=True)
    grouped.grouped_gemm(x, w, counts, backend="portable", schedule=schedule, sort_by_m=True)
    assert_planned(launched, plan.launches)


FINALIZE = [(rows, in_order) for rows in (300, 0) for in_order in (True, False)]


@pytest.mark.parametrize("variant", ["gemm", "swiglu", "gather"])
@pytest.mark.parametrize("recipe", BLACKWELL_RECIPES)
def test_a_grouped_gemm_of_blackwell(launched, alone_on_b200, recipe, variant):
    if (recipe, variant) == ("w4a16", "gather"):
        pytest.skip("refused: tests/kernels/test_blackwell_grouped.py")
    x, w, counts, spec = alone(recipe, 300, variant)
    plan = plan_grouped(spec, "b200", backend="blackwell")
    if variant == "gemm":
        grouped.grouped_gemm(x, w, counts, backend="blackwell")
    else:
        rows = torch.empty(300, dtype=torch.int32, device=META) if variant == "gather" else None
        g = torch.ones((), device=META) if x.spec.has_global else None
        grouped.grouped_swiglu(x, w, counts, rows=rows, acts_global=g, backend="blackwell")
    assert len(plan.launches) == 2
    assert_planned(launched, plan.launches)


@pytest.mark.parametrize(("num", "in_order"), FINALIZE)
def test_a_grouped_product_that_goes_back_to_tokens(launched, alone_on_b200, num, in_order):
    """In order, a launch adds the rows of each token: the plan has it. No rows, no product."""
    x, w, counts, spec = alone("w4a8", num, "finalize", 50 if in_order else 0)
    slots = torch.empty(num, dtype=torch.int32, device=META)
    plan = plan_grouped(spec, "b200", backend="blackwell")
    gates = torch.empty(50, K, device=META)
    grouped.grouped_finalize(
        x, w, counts, slots, gates, deterministic=in_order, backend="blackwell"
    )
    assert ("combine" in [one.name for one in plan.launches]) == in_order
    assert_planned(launched, plan.launches)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_tokens_whose_rows_begin_anywhere(launched, monkeypatch, backend, recipe):
    """An odd stride or offset changes no launch, also where tokens are packed word by word."""
    if (backend, recipe) not in TABLE:
        pytest.skip("no kernel")
    if backend == "portable":
        pretend_b200(monkeypatch)  # FP4 tokens are packed there alone
    w, num = experts(recipe), 512
    plan = plan_for(
        w, Options(), Traits(), num_tokens=num, top_k=K, overrides=(("backend", backend),)
    )
    wide = torch.empty(num, H + 1, dtype=torch.bfloat16, device=META)
    flat = torch.empty(num * H + 1, dtype=torch.bfloat16, device=META)
    for x in (wide[:, :H], wide[:, 1:], flat[1:].view(num, H)):
        launched.clear()
        launch(Call(x, *inputs(num)[1:], w, Options(), None, status()), plan)
        assert_planned(launched, plan.launches)
    is_packed = backend == "portable" and recipe in ("w4a4", "nvfp4")
    assert is_packed == ("_pack_kernel" in [one.kernel for one in plan.launches])


@pytest.mark.parametrize("recipe", BLACKWELL_RECIPES)
def test_fused_on_blackwell(launched, monkeypatch, recipe):
    """One rank, and eight as processes: mode fused must be asked for there."""
    pretend_b200(monkeypatch)
    monkeypatch.setattr(
        blackwell, "known", lambda w, what, find, *_: what == "fits_bf16" or find(w)
    )
    given, w, options = {"backend": "blackwell", "mode": "fused"}, experts(recipe), Options()
    for num, ranks in ((8, 1), (64, 1), (8, 8), (300, 8)):
        launched.clear()
        of = Ranks(ranks, ranks * E, max_tokens=num) if ranks > 1 else Ranks()
        plan = plan_for(
            w, options, Traits(), num_tokens=num, top_k=K, overrides=checked(given), ranks=of
        )
        public = mm.plan(mm.Problem(num, H, I, ranks * E, K, ranks, recipe), "b200", **given)
        assert plan.launches == public.launches and plan.mode == public.mode == "fused"
        if ranks == 1:
            launch(Call(*inputs(num), w, options, None, status()), plan)
        else:
            fused_over_ranks(plan, w, options, num)
        assert_planned(launched, plan.launches)


@pytest.mark.parametrize("recipe", BLACKWELL_RECIPES)
def test_a_chain_on_blackwell(launched, monkeypatch, recipe):
    """A rank of eight: mode chain must be asked for there; passes, drawn tiles, no tokens."""
    pretend_b200(monkeypatch)
    monkeypatch.setattr(
        blackwell, "known", lambda w, what, find, *_: what == "fits_bf16" or find(w)
    )
    w, options = experts(recipe), Options(combine="fp8")
    for num, more in ((8, {}), (300, {"pool_rows": 4096}), (0, {}), (64, {"schedule": "dynamic"})):
        launched.clear()
        given = {"backend": "blackwell", "mode": "chain", **more}
        plan = plan_for(
            w, options, Traits(), num_tokens=num, top_k=K, overrides=checked(given),
            ranks=Ranks(8, 8 * E, max_tokens=512),
        )  # fmt: skip
        assert plan.backend == "blackwell" and plan.mode == "chain"
        assert len(plan.passes) > 2 or "pool_rows" not in more
        chain_over_ranks(plan, w, options, num)
        assert_planned(launched, plan.launches)


SPLIT = [(r, 512, {}) for r in HOPPER_RECIPES]
SPLIT += [(r, t, {}) for r in ("w8a8", "w4a8_block") for t in (1, 2048)]
SPLIT += [("w8a8", 2048, {"l1_sms": 80, "pool_rows": 6000}), ("w4a8_block", 2048, {"l1_sms": 16})]


@pytest.mark.parametrize(("recipe", "num", "given"), SPLIT)
def test_split(launched, monkeypatch, recipe, num, given):
    """Launches reach the part that the plan names."""
    sides = []
    monkeypatch.setattr(partition, "fork", lambda *args: OneByOne(launched, sides))
    given = {"backend": "hopper", "mode": "split", **given}
    w, options = experts(recipe), Options()
    plan = plan_for(w, options, Traits(), num_tokens=num, top_k=K, overrides=checked(given))
    public = mm.plan(mm.Problem(num, H, I, E, K, 1, recipe), "h200", **given)
    assert plan.launches == public.launches and plan.mode == "split"
    assert plan["l1_sms"] + plan["l2_sms"] == 132 and plan["l1_sms"] == given.get("l1_sms", 88)
    launch(Call(*inputs(num), w, options, None, status()), plan)
    assert_planned(launched, plan.launches)
    assert [one.partition for one in plan.launches if one.partition] == sides


@pytest.mark.parametrize("combine", ["bf16", "fp8"])
@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("recipe", ["w8a8", "w4a8_block"])
@pytest.mark.parametrize("backend", (*BACKENDS, "blackwell"))
def test_eight_staged_ranks(launched, machine, backend, recipe, has_shared, combine):
    """Rows that cross as FP8 are rounded by a launch of their own, and so are the shared ones'."""
    w, options, num = experts(recipe), Options(combine=combine), 512
    shared = experts("w4a16", 1) if has_shared else None
    spec = None if shared is None else planning._shared_spec(shared, apart="w4a16")
    for is_quantized in (False, True)[: 1 if has_shared else 2]:  # w4a16 takes BF16 tokens
        launched.clear()
        plan = plan_for(
            w, options, Traits(shared=spec), num_tokens=num, top_k=K,
            ranks=Ranks(8, 8 * E, max_tokens=num), is_quantized=is_quantized,
            overrides=(("backend", backend), ("mode", "staged")),
        )  # fmt: skip
        ready = inputs(num, is_quantized=is_quantized, recipe=recipe)
        staged_over_ranks(plan, w, options, num, shared, ready[0])
        assert_planned(launched, plan.launches)


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("is_quantized", [True, False])
@pytest.mark.parametrize("backend", (*BACKENDS, "blackwell"))
def test_whether_launches_overlap_is_planned(launched, machine, backend, is_quantized, wanted):
    w, options, num = experts("w4a8"), Options(combine="fp8"), 512
    given = {"backend": backend, "mode": "staged", "overlap_launches": wanted}
    plan = plan_for(
        w, options, Traits(), num_tokens=num, top_k=K, overrides=checked(given),
        is_quantized=is_quantized,
    )  # fmt: skip
    ready = inputs(num, is_quantized=is_quantized, recipe="w4a8")
    launch(Call(*ready, w, options, None, status()), plan)
    assert_planned(launched, plan.launches)
    alone = ["decode"] if backend == "portable" and is_quantized else []
    assert [one.name for one in plan.launches if one.overlaps != wanted] == alone * wanted


@pytest.mark.parametrize("backend", ["hopper", "blackwell"])
@pytest.mark.parametrize("ranks", [1, 8])
def test_a_fused_launch_whose_pool_is_a_ring(launched, machine, backend, ranks):
    w, options, num = experts("w4a8"), Options(), 64
    given = {"backend": backend, "mode": "fused", "pool_rows": 3000 if ranks == 8 else 600}
    of = Ranks(8, 8 * E, max_tokens=num) if ranks == 8 else Ranks()
    plan = plan_for(
        w, options, Traits(), num_tokens=num, top_k=K, overrides=checked(given), ranks=of
    )
    assert plan.mega.config.is_ring
    if ranks == 8:
        fused_over_ranks(plan, w, options, num)
    else:
        launch(Call(*inputs(num), w, options, None, status()), plan)
    assert_planned(launched, plan.launches)


@pytest.mark.parametrize("backend", ["hopper", "blackwell"])
def test_ranks_on_one_gpu(launched, machine, backend, monkeypatch):
    """Fused: a put for each, and one launch. Chain: each rank's launches on its SMs."""
    monkeypatch.setattr(local, "traits_of", lambda *_: Traits())
    w, options, num = experts("w4a8", 8 * E), Options(), 64
    given = {"backend": backend, "mode": "fused"}
    ranks = object.__new__(local.LocalRanks)
    ranks.weights, ranks.num_ranks, ranks.options, ranks._chain = w, 8, options, None
    ranks._launch = SimpleNamespace(timeout_s=1.0, is_poisoned=False)
    ranks._backend, ranks._chosen, ranks._buffers = backend, checked(given), []
    ranks._peers, ranks._status = torch.empty(0), status()
    ranks._captured = SimpleNamespace(note=lambda: None, replace=lambda _: None)
    ranks.stats = torch.empty(8 * E, dtype=torch.int64, device=META)
    ranks([*[inputs(num)[0]] * 8], [inputs(num)[1]] * 8, [inputs(num)[2]] * 8)
    plan = ranks.plan(num, K)
    assert [one.name for one in plan.launches] == ["put"] * 8 + ["mega"]
    assert_planned(launched, plan.launches)
    launched.clear()
    plan = plan_for(
        w, options, Traits(), num_tokens=num, top_k=K, ranks=Ranks(8, 8 * E, 8),
        overrides=checked({**given, "mode": "chain"}),
    )  # fmt: skip
    chain_over_ranks(plan, experts("w4a8"), options, num)
    assert_planned(launched, plan.launches)


@pytest.mark.parametrize("num", [0, 300])
def test_a_chain_in_passes_with_shared_experts_and_fp8_rows(launched, num):
    w, shared, options = experts("w8a8"), experts("w4a16", 1), Options(combine="fp8")
    spec = planning._shared_spec(shared, apart="w4a16")
    given = (("backend", "hopper"), ("mode", "chain"), ("pool_rows", 5000), ("reserve_sms", 4))
    plan = plan_for(
        w, options, Traits(shared=spec), num_tokens=num, top_k=K, overrides=given,
        ranks=Ranks(8, 8 * E, max_tokens=512),
    )  # fmt: skip
    assert len(plan.passes) == 1 + 5 and plan.launch("l2").grid == (128,)
    chain_over_ranks(plan, w, options, num, shared)
    assert_planned(launched, plan.launches)


@pytest.mark.parametrize("mode", ["chain", "split"])
@pytest.mark.parametrize("recipe", ["w8a8", "w4a8", "nvfp4"])
def test_quantised_tokens_over_ranks(launched, monkeypatch, recipe, mode):
    monkeypatch.setattr(partition, "fork", lambda *args: OneByOne(launched, []))
    w, options, num = experts(recipe), Options(combine="fp8"), 300
    plan = plan_for(
        w, options, Traits(), num_tokens=num, top_k=K, ranks=Ranks(8, 8 * E, max_tokens=512),
        overrides=checked({"backend": "hopper", "mode": mode}), is_quantized=True,
    )  # fmt: skip
    ready = inputs(num, is_quantized=True, recipe=recipe)
    chain_over_ranks(plan, w, options, num, ready=ready)
    assert_planned(launched, plan.launches)


@pytest.mark.parametrize("given", [{}, {"pool_rows": 5000}, {"l1_sms": 72, "reserve_sms": 4}])
def test_split_over_eight_ranks(launched, monkeypatch, given):
    sides, w, options, num = [], experts("w4a8_block"), Options(), 300
    monkeypatch.setattr(partition, "fork", lambda *args: OneByOne(launched, sides))
    plan = plan_for(
        w, options, Traits(), num_tokens=num, top_k=K, ranks=Ranks(8, 8 * E, max_tokens=512),
        overrides=checked({"backend": "hopper", "mode": "split", **given}),
    )  # fmt: skip
    assert plan["l1_sms"] == given.get("l1_sms", 88) and plan["pull_sms"] == 16
    chain_over_ranks(plan, w, options, num)
    assert_planned(launched, plan.launches)
    assert [one.partition for one in plan.launches if one.partition] == sides


def _one_stage_less(*args):
    step = args[0]
    return replace(step.config, num_stages=step.config.num_stages - 1)


def _other_grid(*args, step, **more):
    portable_combine.combine(*args, step=replace(step, grid=(1, 1, 1)), **more)


def _other_overlap(*args, pdl, **more):
    portable_combine.combine(*args, pdl=not pdl, **more)


@pytest.mark.parametrize(
    ("place", "name", "planted", "says"),
    [
        (portable_launch, "_tile", _one_stage_less, "num_stages"),
        (staged, "combine", _other_grid, "combine"),
        (staged, "combine", _other_overlap, "launch_pdl"),
    ],
)
def test_a_second_decision_is_seen(launched, monkeypatch, place, name, planted, says):
    """A launcher of the library that changes a stage count, a grid or an overlap fails."""
    w, options = experts("w8a8"), Options()
    plan = plan_for(
        w, options, Traits(), num_tokens=512, top_k=K, overrides=(("backend", "portable"),)
    )
    monkeypatch.setattr(place, name, planted)
    launch(Call(*inputs(512), w, options, None, status()), plan)
    with pytest.raises(AssertionError, match=says):
        assert_planned(launched, plan.launches)


@pytest.mark.parametrize("backend", (*BACKENDS, "blackwell"))
def test_overrides_shared_experts_fp8_rows_and_quantised_tokens(launched, machine, backend):
    w, shared = experts("w4a8_block"), experts("w4a16", 1)
    options = Options(combine="fp8")
    spec = planning._shared_spec(shared, apart="w4a16")
    given = (("backend", backend), ("mode", "staged"), ("block_m", 64), ("num_stages", 3))
    plan = plan_for(
        w, options, Traits(shared=spec), num_tokens=100, top_k=K, overrides=given,
        is_quantized=False,
    )  # fmt: skip
    assert plan.tile.block_m == 64 and plan.tile.num_stages == 3
    launch(Call(*inputs(100), w, options, shared, status()), plan)
    assert_planned(launched, plan.launches)
    launched.clear()
    plan = plan_for(
        w, options, Traits(), num_tokens=100, top_k=K, overrides=given, is_quantized=True
    )
    ready = inputs(100, is_quantized=True, recipe="w4a8_block")
    launch(Call(*ready, w, options, None, status()), plan)
    assert_planned(launched, plan.launches)
