"""Weights packed for Hopper: made once, kept as long as the experts, never another's."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

import megamoe as mm
from megamoe.engine import backends
from megamoe.engine.functional import choose
from megamoe.engine.hopper import check_activation, prepared, run_pass, why_apart, with_shared
from megamoe.engine.planning import log_once
from megamoe.errors import NotAvailable
from megamoe.planner.numerics import HOPPER_RECIPES as RECIPES
from megamoe.problem import Options

E, I, H = 2, 96, 64


def experts(recipe, seed=0):
    rng = torch.Generator().manual_seed(seed)
    w13 = torch.randn(E, 2 * I, H, generator=rng)
    return mm.ExpertWeights.quantize(w13, torch.randn(E, H, I, generator=rng), recipe)


def same(a, b):
    tensors = [[t for p in (x.w13, x.w2) for t in (p.data, p.scale, p.factor)] for x in (a, b)]
    return a.how == b.how and all(
        (s is None) == (t is None) and (s is None or torch.equal(s, t))
        for s, t in zip(*tensors, strict=True)
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_are_packed_once_and_freed_with_the_experts(recipe):
    w = experts(recipe)
    made = prepared(w)
    assert prepared(w).w13.data is made.w13.data and prepared(w).w2.data is made.w2.data
    alive = [weakref.ref(w.w13.data), weakref.ref(made.w2.data)]
    del w, made
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


@pytest.mark.parametrize("name", ["data", "scale", "global_scale"])
@pytest.mark.parametrize("matrix", ["w13", "w2"])
def test_a_change_in_place_is_seen(matrix, name):
    w = experts("nvfp4")
    before = prepared(w._map(torch.clone))
    prepared(w)
    w.state_dict()[f"{matrix}.{name}"].view(torch.uint8)[0].fill_(61)
    assert not same(prepared(w), before) and same(prepared(w), prepared(w._map(torch.clone)))


def test_experts_that_share_tensors_are_kept_apart():
    w, other = experts("w4a8_block"), experts("w4a8_block", seed=1)
    assert prepared(w).how.is_fp8
    assert not prepared(mm.ExpertWeights("w4a16", w.w13, w.w2)).how.is_fp8
    mixed = replace(w, w2=other.w2)
    assert torch.equal(prepared(mixed).w2.data, prepared(other).w2.data)


@pytest.mark.parametrize("recipe", ["w4a8_block", "w4a16", "w4a4"])
def test_shared_experts_stand_behind_the_others_in_one_memory(recipe):
    w, shared = experts(recipe), experts(recipe, seed=1)[:1]
    both = with_shared(w, shared)
    assert with_shared(w, shared).w2.data is both.w2.data and len(both.w2.data) == E + 1
    parts = prepared(w), prepared(shared)
    assert all(
        same(p, prepared(q._map(torch.clone))) for p, q in zip(parts, (w, shared), strict=True)
    )
    held = [p.w13.data.untyped_storage().data_ptr() for p in (both, *parts)]
    assert len(set(held)) == 1
    alive = weakref.ref(both.w13.data)
    del w, shared, both, parts
    gc.collect()
    assert alive() is None


def test_a_change_of_either_is_seen_in_both_and_what_is_there_stays():
    w, shared = experts("w4a8_block"), experts("w4a8_block", seed=1)
    before = prepared(w)  # a graph may hold its address
    first = with_shared(w, shared)
    assert prepared(w).w13.data is before.w13.data
    shared.w2.data[0].fill_(61)
    second = with_shared(w, shared)
    assert torch.equal(first.w2.data[:E], second.w2.data[:E])
    assert not torch.equal(first.w2.data[E:], second.w2.data[E:])
    assert second.w13.data is first.w13.data
    assert torch.equal(second.w2.data[E:], prepared(shared._map(torch.clone)).w2.data)


def test_layers_that_share_experts_do_not_take_turns_in_making_images():
    w, some, others = (experts("w4a8_block", seed=seed) for seed in range(3))
    pairs = (w, some), (w, others), (others, some)
    made = [with_shared(*pair) for pair in pairs]
    assert all(with_shared(*p).w13.data is m.w13.data for p, m in zip(pairs, made, strict=True))
    assert torch.equal(made[1].w13.data[E:], made[2].w13.data[:E])


def test_experts_of_different_arithmetic_do_not_share_a_launch():
    w, shared = experts("w4a8_block"), experts("w4a8_block", seed=1)
    assert not why_apart(w, shared)
    assert "E4M3 holds in one" in why_apart(w, spread(shared, 14))


def test_weights_made_under_inference_mode_work():
    with torch.inference_mode():
        w = experts("w4a16")
        made = prepared(w)
    assert same(made, prepared(experts("w4a16")))


def spread(w, codes):
    """`w` with the scale of L1's first group of 32 lowered by `codes`, or set to 0."""
    scale = w.w13.scale.clone()
    scale[..., 0] = scale[..., 0] - codes if codes else 0
    return replace(w, w13=replace(w.w13, data=w.w13.data.clone(), scale=scale))


def test_exponents_that_e4m3_lacks_choose_bf16_for_the_layer():
    w = experts("w4a8_block")
    assert prepared(w).how.is_fp8 and prepared(w).w2.kind == "e4m3_image"
    made = prepared(spread(w, 20))
    assert not made.how.is_fp8 and made.how.is_promoted
    assert made.w13.kind == made.w2.kind == "placed_image"


def test_shared_experts_and_the_others_have_one_decoder():
    w, shared = experts("w4a16"), experts("w4a16", seed=1)[:1]
    shared.w2.scale[0, 0, 0] = 129
    both = with_shared(w, shared)
    assert both.w13.kind == both.w2.kind == "mx_image" == prepared(shared).w2.kind
    assert prepared(w).w2.kind == "placed_image"  # alone it may


@pytest.mark.parametrize("recipe", ["w4a16", "w4a8", "w4a4"])
def test_one_scale_above_2_chooses_another_decoder_for_the_layer(recipe):
    w = experts(recipe)
    assert prepared(w).w13.kind == prepared(w).w2.kind == "placed_image"
    w.w2.scale[0, 0, 0] = 129
    made = prepared(w)
    assert made.w13.kind == made.w2.kind == "mx_image"


@pytest.mark.parametrize("recipe", ["w4a16", "w4a8", "w4a4", "w4a8_block"])
def test_scales_of_2_to_the_minus_127_are_refused(recipe):
    with pytest.raises(NotAvailable, match=r"2\*\*-126"):
        prepared(spread(experts(recipe), 0))


@pytest.mark.parametrize("activation", ["situ", "geglu", "geglu_tanh"])
def test_activations_that_the_kernels_lack_are_not_taken_for_another(activation, monkeypatch):
    there = tuple(replace(b, why_not=lambda device: "") for b in backends.BACKENDS)
    monkeypatch.setattr(backends, "BACKENDS", there)
    w = experts("w4a16")
    assert choose("auto", "auto", w, None, activation)[0] == "portable"
    for backend, mode in (("auto", "fused"), ("hopper", "auto")):
        with pytest.raises(NotAvailable, match=f"activation {activation}"):
            choose(backend, mode, w, None, activation)
    with pytest.raises(NotAvailable, match="computes swiglu and gpt_oss"):
        check_activation(Options(activation))
    none = [None] * 4
    with pytest.raises(NotAvailable, match="computes swiglu and gpt_oss"):
        run_pass(*none[:1], w, Options(activation), *none[:3], 0, None, pdl=False)


def test_auto_passes_over_hopper_where_it_cannot_hold_the_weights(monkeypatch, caplog):
    there = tuple(replace(b, why_not=lambda device: "") for b in backends.BACKENDS)
    monkeypatch.setattr(backends, "BACKENDS", there)
    log_once.cache_clear()
    w = experts("w4a16")
    assert choose("auto", "auto", w, None)[0] == "hopper" and not caplog.messages
    w.w2.scale[0, 0, 0] = 0
    assert choose("auto", "auto", w, None)[0] == "portable"
    assert choose("auto", "auto", experts("w8a8"), w)[0] == "portable"
    (told,) = caplog.messages
    assert told.startswith("backend portable instead of hopper") and "2**-127" in told
    with pytest.raises(NotAvailable, match='backend="portable"'):
        choose("hopper", "auto", w, None)
    with pytest.raises(NotAvailable, match="portable"):
        prepared(w)
