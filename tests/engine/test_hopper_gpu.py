"""Staged mode on a Hopper GPU: against the reference, and its bits against each other."""

import functools
from dataclasses import replace

import pytest
import torch

import megamoe as mm
from megamoe.engine import images, planning
from megamoe.engine.status import NONE, DeviceStatus
from megamoe.formats.spec import FP8_COMBINE_FACTOR, recipe_named
from megamoe.kernels.gluon.dispatch import Tokens, route
from megamoe.kernels.hopper import launch
from megamoe.kernels.portable.routing import Routing
from megamoe.planner import hopper as planner
from megamoe.planner.launches import Gemm
from megamoe.planner.numerics import HOPPER_RECIPES as RECIPES
from megamoe.planner.plan import plan_call
from megamoe.problem import Options
from megamoe.routing.samplers import sample_routing
from tests import pretending
from tests.kernels.hopper import shipped, tile_name
from tests.kernels.support import error

IS_OTHER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(IS_OTHER, reason="needs an sm_90 GPU; this is another"),
]

# One shape for nearly all, so that kernels are compiled once; intermediate needs padding.
E, I, H, K = 8, 320, 512, 2
WIDE = "w4a8_block wide"  # weights whose exponents do not fit E4M3
SHIFT = 13


def named(recipe):
    return recipe_named(recipe.split()[0])


@functools.cache
def experts(recipe, intermediate=I, hidden=H):
    """Random experts, biases included."""
    if recipe == WIDE:
        return wide_range(experts("w4a8_block", intermediate, hidden))
    rng = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=rng, device="cuda")

    w13 = normal(E, 2 * intermediate, hidden) / hidden**0.5
    w2 = normal(E, hidden, intermediate) / intermediate**0.5
    bias = {"b13": normal(E, 2 * intermediate) / 4, "b2": normal(E, hidden) / 4}
    return mm.ExpertWeights.quantize(w13.bfloat16(), w2.bfloat16(), recipe, **bias)


def wide_range(w):
    """`w` with L1's first 128 columns 2**13 times smaller: no power of two fits a row to E4M3."""
    w = w.canonical()
    scale = w.w13.scale.clone()
    scale[..., :4] -= SHIFT
    return replace(w, w13=replace(w.w13, data=w.w13.data.clone(), scale=scale))


def plain(recipe, *shape):
    return replace(experts(recipe, *shape), b13=None, b2=None)


def tokens(num, recipe="", seed=0, hidden=H, **routing):
    """Tokens, ids and weights; where weights are 2**13 times smaller, tokens are larger."""
    rng = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(num, hidden, generator=rng, device="cuda").bfloat16()
    if recipe == WIDE:
        x[:, :128] *= 2.0**SHIFT
    idx, weight = sample_routing(num, E, K, seed=seed, **routing)
    return x, idx.cuda(), weight.cuda()


def moe(*inputs, **options):
    return mm.moe(*inputs, backend="hopper", mode="staged", **options)


def assert_agrees(got, inputs, w, **options):
    wanted = mm.moe(*inputs, w, backend="reference", **options)
    factor = FP8_COMBINE_FACTOR if options.get("combine") == "fp8" else 1.0
    assert got.shape == wanted.shape and got.dtype == torch.bfloat16
    assert error(got, wanted) <= recipe_named(w.recipe).tolerance * factor


uncached = planning._planned.__wrapped__


def force(monkeypatch, tile):
    monkeypatch.setattr(planner, "tile_for", lambda *load: (tile, "forced"))
    monkeypatch.setattr(planning, "_planned", uncached)
    plan_call.cache_clear()


def tiles_of(recipe):
    return shipped(recipe.split()[0], fits=recipe != WIDE)


TILED = [
    pytest.param(recipe, tile, id=f"{recipe}-{tile_name(tile)}".replace(" ", "-"))
    for recipe in (*RECIPES, WIDE)
    for tile in tiles_of(recipe)
]


def edges(tile, recipe):
    """Experts with 0, 1, tile - 1, tile, tile + 1 and many rows, and those at half a tile."""
    many, half = tile.block_m, tile.block_m // 2
    counts = (0, 1, many - 1, many, many + 1, 3 * many + 5, half, half + 1)
    slots = torch.repeat_interleave(torch.arange(E), torch.tensor(counts))
    slots = torch.cat((slots, slots.new_full((1 + (len(slots) + 1) % 2,), -1)))  # masked, and even
    slots = slots[torch.randperm(len(slots), generator=torch.Generator().manual_seed(0))]
    x, _, weight = tokens(len(slots) // K, recipe)
    return x, slots.view(-1, K).cuda(), weight


@pytest.mark.parametrize(("recipe", "tile"), TILED)
def test_every_tile_agrees_with_the_reference_and_has_the_narrowest_ones_bits(
    recipe, tile, monkeypatch
):
    w, inputs = plain(recipe), edges(tile, recipe)
    force(monkeypatch, tile)
    got = moe(*inputs, w)
    assert_agrees(got, inputs, w)
    assert torch.equal(moe(*inputs, w), got)
    force(monkeypatch, tiles_of(recipe)[0])
    assert torch.equal(moe(*inputs, w), got)


@pytest.mark.parametrize("recipe", ["w4a8_block", "w8a8", "nvfp4", "w4a16"])
def test_biases_leave_all_tiles_the_same_bits(recipe, monkeypatch):
    w, inputs = experts(recipe), tokens(150, skew="zipf")
    if recipe == "nvfp4":
        some = torch.linspace(0.01, 0.02, E, device="cuda")
        w = replace(w, acts_global=some, x_global=torch.tensor(0.37, device="cuda"))
    options = {"activation": "gpt_oss"} if recipe == "w4a16" else {}
    outs = []
    for tile in (tiles_of(recipe)[i] for i in (0, -2, -1)):
        force(monkeypatch, tile)
        outs.append(moe(*inputs, w, **options))
    assert_agrees(outs[0], inputs, w, **options)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_weights_beyond_e4m3_take_the_exact_path():
    assert images.prepared(plain("w4a8_block")).arithmetic.is_fp8
    assert not images.prepared(plain(WIDE)).arithmetic.is_fp8


@pytest.mark.parametrize("recipe", ["w4a16", "w4a8"])
def test_scales_above_2_take_another_decoder_and_have_the_same_bits(recipe):
    usual, (x, idx, weight) = plain(recipe), tokens(40)
    usual = usual.canonical()
    scale = usual.w13.scale.clone()
    scale[..., :4] += SHIFT
    large = replace(usual, w13=replace(usual.w13, data=usual.w13.data.clone(), scale=scale))
    small = x.clone()
    small[:, :128] *= 2.0**-SHIFT
    kinds = [images.prepared(w).w2.kind for w in (usual, large)]
    assert kinds == ["placed_image", "mx_image"]
    got = moe(small, idx, weight, large)
    assert_agrees(got, (small, idx, weight), large)
    assert torch.equal(got, moe(x, idx, weight, usual))  # the same products, exactly
    assert torch.equal(got, mm.moe(small, idx, weight, large, backend="hopper", mode="fused"))


@pytest.mark.parametrize("shape", [(256, 256), (2880, 2880), (512, 7168), (7168, 512)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_widths_agree_with_the_reference(recipe, shape):
    hidden, intermediate = shape
    w = replace(experts.__wrapped__(recipe, intermediate, hidden), b13=None, b2=None)  # not kept
    inputs = tokens(100, hidden=hidden)
    assert_agrees(moe(*inputs, w), inputs, w)


@pytest.mark.parametrize("skew", ["zipf", "hot_expert", "same", "masked"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_skew_masks_and_the_same_expert_twice(recipe, skew):
    w = plain(recipe)
    x, idx, weight = tokens(100, skew="uniform" if skew == "same" else skew, masked_ratio=0.1)
    if skew == "same":
        idx[:] = 2  # one expert takes all, in every slot
    got = moe(x, idx, weight, w)
    assert_agrees(got, (x, idx, weight), w)
    assert skew != "masked" or not got.any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_token_and_one(recipe):
    w = plain(recipe)
    assert moe(*tokens(0), w).shape == (0, H)
    assert_agrees(moe(*tokens(1), w), tokens(1), w)


OPTIONS = [
    {"clamp": 0.5},
    {"activation": "gpt_oss", "weight_at": "combine"},
    {"combine": "fp8"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("recipe", RECIPES)
def test_options_agree_with_the_reference(recipe, options):
    w = plain(recipe) if "clamp" in options else experts(recipe)
    inputs = tokens(13, masked_ratio=0.1)
    assert_agrees(moe(*inputs, w, **options), inputs, w, **options)


@pytest.mark.parametrize("weight_at", ["l1", "combine"])
@pytest.mark.parametrize(
    ("recipe", "shared"), [("w4a8_block", "w4a8_block"), ("w8a8", "w4a16"), ("nvfp4", "bf16")]
)
def test_shared_experts_may_be_in_another_recipe(recipe, shared, weight_at):
    w, inputs = plain(recipe), tokens(13)
    options = {"shared": plain(shared)[:2], "weight_at": weight_at}
    assert_agrees(moe(*inputs, w, **options), inputs, w, **options)


@pytest.mark.parametrize("recipe", [*RECIPES, WIDE])
def test_quantised_tokens_give_the_bits_of_bf16_tokens(recipe):
    w = plain(recipe)
    x, idx, weight = tokens(13, recipe)
    q = mm.quantize(x, named(recipe).acts.name)
    got = moe(q, idx, weight, w)
    assert torch.equal(got, moe(x, idx, weight, w))
    every_second = moe(q[::2], idx[::2].contiguous(), weight[::2].contiguous(), w)
    assert torch.equal(every_second, got[::2])


def test_nvfp4_tokens_may_have_a_global_scale_each():
    w = plain("nvfp4")
    x, idx, weight = tokens(13)
    g = torch.linspace(0.2, 3, 26, device="cuda")[::2]
    q = mm.quantize(x, "nvfp4", global_scale=g)
    assert_agrees(moe(q, idx, weight, w), (q, idx, weight), w)


@pytest.mark.parametrize("recipe", [*RECIPES, WIDE])
def test_nan_rows_touch_nothing_else(recipe):
    w = plain(recipe)
    x, idx, weight = tokens(13, recipe)
    clean = moe(x, idx, weight, w)
    x[4, 7] = float("nan")
    x[9], idx[9] = float("inf"), -1
    y = moe(x, idx, weight, w)
    others = [t for t in range(13) if t not in (4, 9)]
    assert torch.equal(y[others], clean[others])
    assert y[4].isnan().any() and (y[9] == 0).all()


@pytest.mark.parametrize("num", [13, 600])
@pytest.mark.parametrize("recipe", ["w8a8", "w4a16", "nvfp4"])
def test_rows_behind_the_valid_ones_are_padding(recipe, num):
    w = plain(recipe)
    x, idx, weight = tokens(num)
    wanted = moe(x[:5], idx[:5], weight[:5], w)
    x[5:], idx[5:], weight[5:] = float("nan"), E + 7, float("inf")
    status = DeviceStatus(torch.device("cuda"))
    count = torch.tensor([5], dtype=torch.int32, device="cuda")
    y = pretending.staged((x, idx, weight), w, status=status, count=count)
    assert torch.equal(y[:5], wanted) and (y[5:] == 0).all()
    status.check(K)


@pytest.mark.parametrize("num", [13, 600])
def test_bad_slots_are_masked_reported_and_not_counted(num):
    layer = mm.MoE(plain("w4a8_block"), E, K, backend="hopper", mode="staged")
    x, idx, weight = tokens(num)
    bad, masked, nan = idx.clone(), idx.clone(), weight.clone()
    bad[5, 1] = E + 3
    masked[5, 1] = masked[7, 0] = -1
    nan[7, 0] = float("nan")
    wanted = layer(x, masked, weight)
    assert torch.equal(layer(x, bad, nan), wanted)
    with pytest.raises(mm.MegaMoEError, match="token 5, slot 1"):
        layer.check()
    layer.check()  # reported once
    assert torch.equal(layer.stats, 2 * torch.bincount(masked[masked >= 0], minlength=E))


@pytest.mark.parametrize("recipe", [*RECIPES, WIDE])
def test_batches_of_1_8_100_and_4096_give_a_token_the_same_bits(recipe):
    w = plain(recipe)
    x, idx, weight = tokens(4096, recipe, skew="dirichlet")
    whole = moe(x, idx, weight, w)
    for size in (1, 8, 100):
        for first in (0, 1234, 4096 - size):
            part = slice(first, first + size)
            assert torch.equal(moe(x[part], idx[part], weight[part], w), whole[part]), part


@pytest.mark.parametrize("recipe", ["w4a8_block", "w8a8", "w4a16", "nvfp4"])
def test_replays_of_a_graph_have_the_bits_of_eager_calls(recipe):
    """Tokens, routing and their number change under the graph; what lies behind them is garbage."""
    most, batches, replays = 100, 10, 200
    w = plain(recipe)
    x = torch.full((batches, most, H), float("nan"), dtype=torch.bfloat16, device="cuda")
    idx = torch.full((batches, most, K), 12345, device="cuda")
    weight = torch.full((batches, most, K), float("inf"), device="cuda")
    counts = torch.tensor([most, 1, 99, 50, 8, 77, 16, 100, 33, 64], dtype=torch.int32)
    wanted = torch.zeros_like(x)
    for batch, count in enumerate(counts.tolist()):
        skew = ("uniform", "zipf", "hot_expert")[batch % 3]
        new = tokens(count, seed=batch, skew=skew, masked_ratio=0.1)
        x[batch, :count], idx[batch, :count], weight[batch, :count] = new
        wanted[batch, :count] = moe(*new, w)
    status = DeviceStatus(torch.device("cuda"))
    held = x[0].clone(), idx[0].clone(), weight[0].clone(), counts[:1].cuda()

    def call():
        return pretending.staged(held[:3], w, status=status, count=held[3])

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    everything = x, idx, weight, counts[:, None].cuda()
    wrong = torch.zeros(replays, dtype=torch.bool, device="cuda")
    for replay in range(replays):
        batch = replay * 7 % batches
        for there, new in zip(held, everything, strict=True):
            there.copy_(new[batch])
        y.fill_(float("nan"))
        graph.replay()
        wrong[replay] = (y.view(torch.int16) != wanted[batch].view(torch.int16)).any()
    assert not wrong.any(), f"replays {wrong.nonzero().flatten().tolist()[:20]} differ"
    status.check(K)


def test_a_compiled_layer_has_the_bits_of_eager_calls():
    torch.compiler.reset()
    layer = mm.MoE(plain("w4a8_block"), E, K, backend="hopper", shared=plain("bf16")[:1])
    compiled = torch.compile(layer, fullgraph=True)
    with torch.no_grad():
        for seed in range(2):
            inputs = tokens(13, seed=seed)
            assert torch.equal(compiled(*inputs), layer(*inputs))
    assert int(layer.stats.sum()) == 4 * 13 * K


SOAKED = [
    pytest.param(recipe, tile, id=f"{recipe}-{tile_name(tile)}")
    for recipe, wanted in (("w4a8_block", None), ("w8a8", (0, -1)), ("w4a16", (0, -1)))
    for tile in (tiles_of(recipe) if wanted is None else [tiles_of(recipe)[i] for i in wanted])
]


@pytest.mark.parametrize(("recipe", "tile"), SOAKED)
def test_20000_launches_of_each_kernel_show_no_mismatch(recipe, tile, monkeypatch):
    """Several tiles a CTA and token passes an expert: races at the reuse of a stage are rare."""
    force(monkeypatch, tile)
    intermediate, hidden, num = 512, 2048, 32 * tile.block_m
    w = plain(recipe, intermediate, hidden)
    status = DeviceStatus(torch.device("cuda"))
    batches = [
        tokens(num, seed=i, hidden=hidden, skew=skew, masked_ratio=0.05)
        for i, skew in enumerate(("uniform", "zipf", "hot_expert", "dirichlet"))
    ]

    def call(batch):
        return pretending.staged(batch, w, status=status, tile=tile)

    wanted = [call(batch) for batch in batches]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for batch, first in zip(batches, wanted, strict=True):
            wrong += (call(batch).view(torch.int16) != first.view(torch.int16)).any()
    for replay in range(20000 // len(batches)):
        graph.replay()
        if replay % 64 == 0:
            torch.cuda.synchronize()  # launches of graphs queue up without a bound otherwise
    assert int(wrong) == 0
    status.check(K)


def test_an_l2_whose_l1_never_came_gives_up_and_the_next_call_is_right():
    w, tile = plain("w8a8"), Gemm(4, schedule="dynamic")
    made, device = images.prepared(w), torch.device("cuda")
    inputs = x, idx, weight = tokens(200, "w8a8")
    error_word = torch.full((1,), NONE, dtype=torch.int32, device=device)
    routing = Routing(idx, weight, idx.int(), weight.clone(), error_word, None)
    sizes = idx.numel(), E, tile.block_m, device
    pool = launch.pool(made.arithmetic, sizes[0], H, *sizes[1:])
    (steps,) = pretending.plan_of(inputs, w, tile=tile, mode="staged").passes
    work = launch.work_items(pool, (made.w13, made.w2), steps["l1"])
    route(Tokens(x), routing, made.arithmetic.acts, pool, steps, work=work)
    acts = launch.pool(made.arithmetic, sizes[0], I, *sizes[1:], pool)
    rows = torch.empty(len(x), K, H, dtype=torch.bfloat16, device=device)
    launch.linear(
        acts, made.w2, rows, steps["l2"], made.arithmetic, Options(), items=work.each()[1],
        error=error_word, chain=launch.Chain(after=made.w13),
    )  # fmt: skip
    assert int(error_word) == -1
    assert_agrees(moe(*inputs, w), inputs, w)
