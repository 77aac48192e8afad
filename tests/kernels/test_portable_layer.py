"""The portable backend against the reference: every recipe, variant and edge."""

import pytest
import torch

import megamoe as mm
from megamoe.engine import status
from megamoe.engine.call import Call
from megamoe.engine.planning import Traits, plan_for
from megamoe.engine.portable import PORTABLE
from megamoe.formats.quantize import dequantize
from megamoe.formats.spec import recipe_named
from megamoe.kernels.portable import launch
from megamoe.kernels.portable.combine import combine
from megamoe.kernels.portable.decode_tokens import decode_tokens
from megamoe.kernels.portable.dispatch import dispatch
from megamoe.kernels.portable.sort import Order, sort_slots
from megamoe.planner.launches import PortableGemm
from megamoe.planner.portable import pick
from megamoe.problem import RECIPES, Options
from tests.kernels.steps import (
    arithmetic,
    combine_step,
    decode_step,
    gemm_step,
    rows_step,
    sort_steps,
)
from tests.kernels.support import DEVICE, INTERPRETED, MARKS, error, experts, tokens, tolerance

pytestmark = MARKS

E, I, H, K, T = (5, 160, 192, 3, 21) if INTERPRETED else (24, 1056, 1440, 6, 333)


def both(x, idx, weight, w, **options):
    got = mm.moe(x, idx, weight, w, backend="portable", **options)
    assert got.shape == x.shape and got.dtype == torch.bfloat16
    return got, mm.moe(x, idx, weight, w, backend="reference", **options)


OPTIONS = [
    {"clamp": 1.0},
    {"activation": "gpt_oss", "weight_at": "combine"},
    {"activation": "situ"},
    {"activation": "geglu"},
    {"activation": "geglu_tanh", "clamp": 2.0},
    {"combine": "fp8", "weight_at": "combine"},
    {"combine": "fp8"},
]


# What an activation computes, and how rows become FP8, depends on no recipe: two run always.
AGREE = [
    pytest.param(
        recipe,
        options,
        id="-".join((recipe, *map(str, options.values()))),
        marks=(pytest.mark.every,)
        if recipe not in ("bf16", "w4a8_block")
        and (options.get("activation") in ("situ", "geglu", "geglu_tanh") or len(options) == 1)
        and "clamp" not in options
        else (),
    )
    for recipe in RECIPES
    for options in OPTIONS
]


@pytest.mark.parametrize(("recipe", "options"), AGREE)
def test_the_layer_agrees_with_the_reference(recipe, options):
    w = experts(recipe, E, I, H, bias=True)
    shared = experts("w8a8" if recipe == "w4a4" else recipe, 1, I, H, seed=3)
    inputs = tokens(T, E, K, H, skew="zipf", masked_ratio=0.1)
    got, wanted = both(*inputs, w, shared=shared, **options)
    assert error(got, wanted) <= tolerance(recipe, options.get("combine", "bf16"))


def by(values, always):
    """(recipe, value): `always` in every recipe, the others in two, and in all with --every."""
    return [
        pytest.param(
            recipe, value,
            marks=() if value == always or recipe in ("bf16", "w4a8_block") else pytest.mark.every,
        ) for recipe in RECIPES for value in values
    ]  # fmt: skip


@pytest.mark.parametrize(("recipe", "skew"), by(["hot_expert", "masked", "dirichlet"], "masked"))
def test_skew_masks_and_the_same_expert_twice(recipe, skew):
    w = experts(recipe, E, I, H)
    x, idx, weight = tokens(T, E, K, H, skew=skew)
    if skew == "hot_expert":
        idx[:] = 2  # one expert takes all, in every slot
    got, wanted = both(x, idx, weight, w)
    assert error(got, wanted) <= tolerance(recipe)


@pytest.mark.parametrize(("recipe", "num"), by([0, 1, 80], 80))
def test_few_and_many_tokens(recipe, num):
    """80 tokens on two experts take the wide tile."""
    w = experts(recipe, 2, I, H)
    got, wanted = both(*tokens(num, 2, 1, H), w)
    assert error(got, wanted) <= tolerance(recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_tokens_bits_do_not_depend_on_its_batch(recipe):
    w = experts(recipe, 2, I, H)
    x, idx, weight = tokens(80, 2, 2, H)  # wide tiles
    whole = mm.moe(x, idx, weight, w, backend="portable")
    for first, last in ((0, 1), (3, 10), (79, 80)):  # narrow ones
        part = slice(first, last)
        alone = mm.moe(x[part], idx[part], weight[part], w, backend="portable")
        assert torch.equal(alone, whole[part])


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantised_tokens_give_the_bits_of_bf16_tokens(recipe):
    w = experts(recipe, E, I, H)
    x, idx, weight = tokens(9, E, K, H)
    q = mm.quantize(x, recipe_named(recipe).acts.name)
    plain = mm.moe(x, idx, weight, w, backend="portable")
    assert torch.equal(mm.moe(q, idx, weight, w, backend="portable"), plain)


@pytest.mark.parametrize("recipe", RECIPES)
def test_nan_rows_touch_nothing_else(recipe):
    w = experts(recipe, E, I, H)
    x, idx, weight = tokens(12, E, K, H)
    clean = mm.moe(x, idx, weight, w, backend="portable")
    x[4] = float("nan")
    idx[9] = -1
    x[9] = float("inf")  # a padding row
    y = mm.moe(x, idx, weight, w, backend="portable")
    others = [t for t in range(12) if t not in (4, 9)]
    assert torch.equal(y[others], clean[others])
    assert y[4].isnan().any() and (y[9] == 0).all()


@pytest.mark.parametrize("recipe", ["w8a8", "w4a16"])
def test_rows_behind_the_valid_ones_are_padding(recipe):
    w = experts(recipe, E, I, H)
    x, idx, weight = tokens(T, E, K, H)
    wanted = mm.moe(x[:5], idx[:5], weight[:5], w, backend="portable")
    x[5:], idx[5:], weight[5:] = float("nan"), E + 7, float("inf")
    device_status = status.DeviceStatus(torch.device(DEVICE))
    count = torch.tensor([5], dtype=torch.int32, device=DEVICE)
    plan = plan_for(
        w, Options(), Traits(), num_tokens=len(x), top_k=K, overrides=(("backend", "portable"),)
    )
    y = PORTABLE.run(Call(x, idx, weight, w, Options(), None, device_status, None, count), plan)
    assert torch.equal(y[:5], wanted) and (y[5:] == 0).all()
    device_status.check(K)


def test_nvfp4_global_scales_enter():
    w = experts("nvfp4", E, I, H, x_global=0.37, acts_global=torch.linspace(0.01, 0.02, E))
    got, wanted = both(*tokens(T, E, K, H), w)
    assert error(got, wanted) <= tolerance("nvfp4")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_plain_grouped_gemm_and_the_atomic_finalise(recipe):
    """The variants that the layer does not use: permuted rows in, rows or sums out."""
    w = experts(recipe, E, I, H)
    _, idx, weight = tokens(T, E, K, H, masked_ratio=0.2)
    how = arithmetic(recipe)
    tile = pick(recipe, 1)[1]
    order = Order.empty(idx.numel(), E, tile.block_m, torch.device(DEVICE))
    sort_slots(idx.int(), order, sort_steps(idx.numel(), E, tile.block_m))
    step = gemm_step(tile, idx.numel(), E, H)
    live = int(order.num_non_exiting_tiles) * tile.block_m
    rows = order.permuted_idx_to_expanded_idx[:live].long().clamp(0, idx.numel() - 1)
    acts = torch.randn(T, I, generator=torch.Generator().manual_seed(1)).to(DEVICE).bfloat16()
    q = mm.quantize(acts, recipe_named(recipe).acts.name, **_globals(recipe))
    all_rows = decode_tokens(q, how, decode_step(q, how))
    held = launch.Activations(*(None if t is None else t[rows // K] for t in all_rows))
    out = torch.full((live, H), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    ones = torch.ones(E, device=DEVICE) if recipe == "nvfp4" else None
    factors = launch.Factors(x_global=ones)
    launch.linear(held, w.w2, order, out, step, how, factors=factors)
    total = torch.zeros(T, H, device=DEVICE)
    launch.linear(
        held, w.w2, order, total, step, how, factors=factors,
        to=launch.Destination("atomic", top_k=K, topk_weights=weight, weighted=True),
    )  # fmt: skip
    w2, values = dequantize(w.w2), dequantize(q)
    wanted = torch.zeros(T, H, device=DEVICE)
    for row, expanded in enumerate(order.permuted_idx_to_expanded_idx[:live].tolist()):
        if row >= int(order.tile_idx_to_mn_limit[row // tile.block_m]):
            continue
        token, slot = divmod(expanded, K)
        plain = w2[idx[token, slot]] @ values[token]
        assert error(out[row], plain) <= 2 * tolerance("bf16")
        wanted[token] += weight[token, slot] * plain.bfloat16().float()
    assert error(total, wanted) <= 2 * tolerance("bf16")


def _globals(recipe):
    return {"global_scale": 1.0} if recipe == "nvfp4" else {}


@pytest.mark.parametrize("group_m", [1, 2, 64])
def test_the_raster_changes_no_bit(group_m):
    w = experts("w4a16", 3, I, H)
    x, idx, weight = tokens(T, 3, 2, H)
    how = arithmetic("w4a16")
    held = how.allocate(T, H, torch.device(DEVICE))
    dispatch(x, held.data, None, how.acts, step=rows_step(T, H, how.acts))
    outs = []
    for tile in (PortableGemm(16, 64, 128, 4, 2, group_m), PortableGemm(16, 64, 128, 4, 2, 1)):
        order = Order.empty(idx.numel(), 3, 16, torch.device(DEVICE))
        sort_slots(idx.int(), order, sort_steps(idx.numel(), 3, 16))
        step = gemm_step(tile, idx.numel(), 3, I, is_ordered=True)
        acts = how.allocate(order.permuted_idx_to_expanded_idx.numel(), I, torch.device(DEVICE))
        acts.data.zero_()
        launch.gated(held, w.w13, order, weight, acts, step, how, Options(), top_k=2)
        outs.append(acts.data)
    assert torch.equal(*outs) and outs[0].abs().max() > 0


def test_gather_equals_a_permuted_copy():
    w = experts("w8a8", E, I, H)
    x, idx, weight = tokens(T, E, K, H)
    how, tile = arithmetic("w8a8"), pick("w8a8", 1)[0]
    q = mm.quantize(x, "fp8_1x128")
    order = Order.empty(idx.numel(), E, tile.block_m, torch.device(DEVICE))
    sort_slots(idx.int(), order, sort_steps(idx.numel(), E, tile.block_m))
    step = gemm_step(tile, idx.numel(), E, I)
    count = order.permuted_idx_to_expanded_idx.numel()
    rows = order.permuted_idx_to_expanded_idx.long().clamp(0, idx.numel() - 1) // K
    outs = []
    for gather in (True, False):
        held = launch.Activations(q.data, q.scale)
        if not gather:
            held = launch.Activations(
                q.data.view(torch.uint8)[rows].view(q.data.dtype), q.scale[rows]
            )
        acts = how.allocate(count, I, torch.device(DEVICE))
        acts.data.view(torch.uint8).zero_()
        launch.gated(held, w.w13, order, weight, acts, step, how, Options(), top_k=K, gather=gather)
        outs.append(acts.data.view(torch.uint8))
    assert torch.equal(*outs)


@pytest.mark.parametrize("recipe", ["bf16", "w8a8"])
@pytest.mark.parametrize("activation", ["swiglu", "gpt_oss"])
def test_fast_math_changes_last_bits_only(recipe, activation):
    w = experts(recipe, E, I, H)
    inputs = tokens(T, E, K, H)
    fast, wanted = both(*inputs, w, activation=activation, fast_math=True)
    plain = mm.moe(*inputs, w, backend="portable", activation=activation)
    assert error(fast, wanted) <= tolerance(recipe)
    assert error(fast, plain) <= tolerance(recipe) / 3 and (fast == plain).float().mean() > 0.5
    layer = mm.MoE(w, E, K, backend="portable", activation=activation, fast_math=True)
    assert torch.equal(layer(*inputs), fast)


def test_the_reference_is_exact_whatever_fast_math_says():
    w = experts("bf16", E, I, H)
    inputs = tokens(T, E, K, H)
    fast = mm.moe(*inputs, w, backend="reference", fast_math=True)
    assert torch.equal(fast, mm.moe(*inputs, w, backend="reference"))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_combine_is_the_references_bit_for_bit(weighted, is_fp8):
    _, idx, weight = tokens(T, E, K, H, masked_ratio=0.3)
    rows = (
        torch.randn(T, K + 1, H, generator=torch.Generator().manual_seed(2)).bfloat16().to(DEVICE)
    )
    y = torch.empty(T, H, dtype=torch.bfloat16, device=DEVICE)
    values, data, scale = rows.float(), rows, None
    if is_fp8:
        q = mm.quantize(rows, "fp8_combine")
        values, data, scale = dequantize(q), q.data.view(torch.uint8), q.scale
    combine(data, scale, idx.int(), weight, y, step=combine_step(T, H), weighted=weighted)
    total = torch.zeros(T, H, device=DEVICE)
    for slot in range(K + 1):
        row = values[:, slot]
        if slot < K:
            row = row * weight[:, slot, None] if weighted else row
            total = torch.where(idx[:, slot, None] >= 0, total + row, total)
        else:
            total = total + row
    assert torch.equal(y, total.bfloat16())


def test_a_bad_slot_is_masked_and_raised_by_the_next_call():
    layer = mm.MoE(experts("w4a16", E, I, H), E, K, backend="portable")
    x, idx, weight = tokens(8, E, K, H)
    bad, masked = idx.clone(), idx.clone()
    bad[5, 1], masked[5, 1] = E + 3, -1
    wanted = layer(x, masked, weight)
    assert torch.equal(layer(x, bad, weight), wanted)
    with pytest.raises(mm.MegaMoEError, match="token 5, slot 1"):
        layer.check()
    layer.check()  # reported once
    weight = weight.clone()
    weight[2, 0] = float("nan")
    layer(x, idx, weight)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    with pytest.raises(mm.MegaMoEError, match="token 2, slot 0"):
        layer(x, idx, weight)


def test_stats_are_added_on_the_device():
    layer = mm.MoE(experts("w8a8", E, I, H), E, K, backend="portable", mode="staged")
    x, idx, weight = tokens(T, E, K, H, masked_ratio=0.2)
    layer(x, idx, weight)
    layer(x, idx, weight)
    wanted = torch.bincount(idx[idx >= 0], minlength=E) * 2
    assert torch.equal(layer.stats, wanted)
