"""Weights packed for Hopper: made once, held in place of the canonical bytes, never another's."""

import gc
import weakref
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import megamoe as mm
from megamoe.engine import backends
from megamoe.engine.call import Call
from megamoe.engine.functional import choose
from megamoe.engine.hopper import HOPPER
from megamoe.engine.images import LIE_APART, hold, lie_apart, prepared, why_apart, with_shared
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
    return a.arithmetic == b.arithmetic and all(
        (s is None) == (t is None) and (s is None or torch.equal(s, t))
        for s, t in zip(*tensors, strict=True)
    )


def bits(w):
    return {name: t.clone() for name, t in w.state_dict().items()}


def are_bits(w, wanted):
    found = w.state_dict()
    return list(found) == list(wanted) and all(
        torch.equal(t.reshape(-1).view(torch.uint8), wanted[name].reshape(-1).view(torch.uint8))
        for name, t in found.items()
    )


def storages(w):
    return [StorageWeakRef(t.untyped_storage()) for t in (w.w13.data, w.w2.data)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_are_packed_once_and_freed_with_the_experts(recipe):
    w = experts(recipe)
    made = prepared(w)
    assert prepared(w).w13.data is made.w13.data and prepared(w).w2.data is made.w2.data
    alive = weakref.ref(made.w2.data)
    del w, made
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("recipe", [r for r in RECIPES if "4" in r])
def test_packed_experts_hold_no_canonical_byte_and_give_back_every_bit(recipe):
    w = experts(recipe)
    wanted, before, values = bits(w), storages(w), w.dequantize()
    prepared(w)
    assert w.is_packed and all(ref.expired() for ref in before) and are_bits(w, wanted)
    assert w.nbytes == sum(t.nbytes for t in w.held().values()) and "packed" in repr(w)
    assert all(map(torch.equal, w.dequantize(), values))
    plain = mm.ExpertWeights.from_state_dict(wanted, recipe)
    for one, other in ((w[1:], plain[1:]), (w.for_rank(1, 2), plain.for_rank(1, 2)),
                       (w.take([1, 0]), plain.take([1, 0])), (w.to("cpu"), plain),
                       (deepcopy(w), plain), (w.canonical(), plain)):  # fmt: skip
        assert are_bits(one, bits(other))


def test_a_file_of_packed_experts_is_that_of_canonical_ones(tmp_path):
    w = experts("w4a8_block")
    wanted = bits(w)
    prepared(w)
    w.save(tmp_path / "file")
    assert are_bits(mm.ExpertWeights.load(tmp_path / "file"), wanted)


@pytest.mark.parametrize("name", ["data", "scale", "global_scale"])
@pytest.mark.parametrize("matrix", ["w13", "w2"])
def test_a_change_of_memory_that_others_hold_is_seen(matrix, name):
    w = experts("nvfp4")
    mine = w.state_dict()  # the caller's own
    before = prepared(w)
    held = before.w13.data.data_ptr(), before.w2.data.data_ptr()
    mine[f"{matrix}.{name}"].view(torch.uint8)[0].fill_(61)
    after = prepared(w)
    assert (after.w13.data.data_ptr(), after.w2.data.data_ptr()) == held  # in place
    assert are_bits(w, mine)
    assert same(after, prepared(mm.ExpertWeights.from_state_dict(bits(w), "nvfp4")))


def test_a_parameter_that_others_hold_is_watched_and_not_held():
    """ExpertWeights has views of it; when they are packed the counter of the memory remains."""
    w = experts("w4a16")
    own = [torch.nn.Parameter(t, requires_grad=False) for t in w.state_dict().values()]
    w = mm.ExpertWeights.from_quantized(
        own[0].flatten(1, 2), own[1].flatten(1, 2), *own[2:], recipe="w4a16"
    )
    versions = [t._version for t in own]
    prepared(w)
    assert [t._version for t in own] == versions
    with torch.no_grad():
        own[1][0, 0, 0, 0] = 129  # a scale for which there is no room in a placed image
    made = prepared(w)
    assert made.w13.kind == made.w2.kind == "mx_image" and int(w.w13.scale[0, 0, 0, 0]) == 129
    with torch.no_grad():
        own[1][0, 0, 0, 0] = 128
    assert prepared(w).w13.data is made.w13.data  # in place: this image holds it too
    refs = [StorageWeakRef(t.untyped_storage()) for t in own]
    del own
    assert all(ref.expired() for ref in refs)
    assert int(w.w13.scale[0, 0, 0, 0]) == 128 and prepared(w).w13.data is prepared(w).w13.data


def test_experts_that_share_tensors_are_kept_apart():
    w, other = experts("w4a8_block"), experts("w4a8_block", seed=1)
    twin = mm.ExpertWeights("w4a16", w.w13, w.w2)
    assert prepared(w).arithmetic.is_fp8
    assert not prepared(twin).arithmetic.is_fp8 and prepared(w).w13.kind == "e4m3_image"
    late = replace(w, recipe="w4a16")  # of images that are there: unpacked, then packed
    assert prepared(late).w13.kind == "placed_image" and same(prepared(late), prepared(twin))
    mixed = replace(w, w2=other.w2)
    assert torch.equal(prepared(mixed).w2.data, prepared(other).w2.data)


@pytest.mark.parametrize("recipe", ["w4a8_block", "w4a16", "w4a4"])
def test_shared_experts_stand_after_the_others_in_one_memory(recipe):
    w, shared = experts(recipe), experts(recipe, seed=1)[:1]
    wanted, before = [bits(w), bits(shared)], [*storages(w), *storages(shared)]
    both = with_shared(w, shared)
    assert all(ref.expired() for ref in before)
    assert with_shared(w, shared).w2.data.data_ptr() == both.w2.data.data_ptr()
    assert len(both.w2.data) == E + 1
    parts = prepared(w), prepared(shared)
    assert len({p.w13.data.untyped_storage().data_ptr() for p in (both, *parts)}) == 1
    for one, part, of in zip((w, shared), parts, wanted, strict=True):
        assert are_bits(one, of) and not lie_apart(w, shared)
        assert same(part, prepared(mm.ExpertWeights.from_state_dict(of, recipe)))
    alive = StorageWeakRef(both.w13.data.untyped_storage())
    del w, shared, both, parts, one, part
    gc.collect()
    assert alive.expired()


def test_experts_that_were_packed_apart_are_joined_by_a_layer_and_stay_where_they_are():
    w, shared = experts("w4a8_block"), experts("w4a8_block", seed=1)
    first = prepared(w)  # a graph may hold its address
    assert lie_apart(w, shared) == LIE_APART
    mine, others = hold(w, shared)
    assert mine is not w and others is shared and not lie_apart(mine, others)
    assert prepared(w).w13.data is first.w13.data
    assert are_bits(mine, bits(w)) and hold(mine, others) == (mine, others)


def test_a_change_of_either_is_seen_in_both():
    w, shared = experts("w4a8_block"), experts("w4a8_block", seed=1)
    mine = shared.w2.data
    first = with_shared(w, shared)
    had = first.w2.data.clone()
    mine[0].fill_(61)
    assert not lie_apart(w, shared) and not why_apart(w, shared)  # as a plan asks first
    second = with_shared(w, shared)
    assert torch.equal(had[:E], second.w2.data[:E])
    assert not torch.equal(had[E:], second.w2.data[E:])
    assert torch.equal(shared.w2.data, mine)


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
    w = w.canonical()
    scale = w.w13.scale.clone()
    scale[..., 0] = scale[..., 0] - codes if codes else 0
    return replace(w, w13=replace(w.w13, data=w.w13.data.clone(), scale=scale))


def test_exponents_that_e4m3_lacks_choose_bf16_for_the_layer():
    w = experts("w4a8_block")
    assert prepared(w).arithmetic.is_fp8 and prepared(w).w2.kind == "e4m3_image"
    made = prepared(spread(w, 20))
    assert not made.arithmetic.is_fp8 and made.arithmetic.is_promoted
    assert made.w13.kind == made.w2.kind == "placed_image"


def test_shared_experts_and_the_others_have_one_decoder():
    w, shared = experts("w4a16"), experts("w4a16", seed=1)[:1]
    shared.w2.scale[0, 0, 0] = 129
    both = with_shared(w, shared)
    assert both.w13.kind == both.w2.kind == "mx_image" == prepared(shared).w2.kind
    assert prepared(w).w2.kind == "mx_image"  # one copy: alone it is the same


@pytest.mark.parametrize("recipe", ["w4a16", "w4a8", "w4a4"])
def test_one_scale_above_2_chooses_another_decoder_for_the_layer(recipe):
    w = experts(recipe)
    scale = w.w2.scale
    assert prepared(w).w13.kind == prepared(w).w2.kind == "placed_image"
    scale[0, 0, 0] = 129
    made = prepared(w)
    assert made.w13.kind == made.w2.kind == "mx_image"


@pytest.mark.parametrize("recipe", ["w4a16", "w4a8", "w4a4", "w4a8_block"])
def test_scales_of_2_to_the_minus_127_are_refused(recipe):
    with pytest.raises(NotAvailable, match=r"2\*\*-126"):
        prepared(spread(experts(recipe), 0))


@pytest.mark.parametrize("activation", ["situ", "geglu", "geglu_tanh"])
def test_activations_that_the_kernels_lack_are_not_taken_for_another(activation, monkeypatch):
    there = tuple(
        replace(b, why_not=lambda device: "") if b.name in ("hopper", "portable") else b
        for b in backends.BACKENDS
    )
    monkeypatch.setattr(backends, "BACKENDS", there)
    w = experts("w4a16")
    assert choose("auto", "auto", w, None, activation)[0] == "portable"
    for backend, mode in (("auto", "fused"), ("hopper", "auto")):
        with pytest.raises(NotAvailable, match=f"activation {activation}"):
            choose(backend, mode, w, None, activation)
    with pytest.raises(NotAvailable, match="computes swiglu and gpt_oss"):
        HOPPER.check_activation(Options(activation))
    with pytest.raises(NotAvailable, match="computes swiglu and gpt_oss"):
        HOPPER.rows(Call(*[None] * 3, w, Options(activation), None, None), None, None, None)


def test_auto_passes_over_hopper_where_it_cannot_hold_the_weights(monkeypatch, caplog):
    there = tuple(
        replace(b, why_not=lambda device: "") if b.name in ("hopper", "portable") else b
        for b in backends.BACKENDS
    )
    monkeypatch.setattr(backends, "BACKENDS", there)
    log_once.cache_clear()
    w = experts("w4a16")
    assert choose("auto", "auto", w, None)[0] == "hopper" and not caplog.messages
    w.w2.scale[0, 0, 0] = 0
    assert choose("auto", "auto", w, None)[0] == "portable"
    assert choose("auto", "auto", experts("w8a8"), w)[0] == "portable"
    (message,) = caplog.messages
    assert message.startswith("backend portable instead of hopper") and "2**-127" in message
    with pytest.raises(NotAvailable, match='backend="portable"'):
        choose("hopper", "auto", w, None)
    with pytest.raises(NotAvailable, match="portable"):
        prepared(w)
