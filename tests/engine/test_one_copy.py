"""A layer on Hopper holds images and nothing else; the rest is unpacked on demand, exactly."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import megamoe as mm
from megamoe.engine import images, in_place, op
from megamoe.engine.expert_module import megabytes
from megamoe.errors import RangeError
from tests.engine.pretended import E, H, I, K, tokens, wanted, weights

KEYS = ["experts.w13_data", "experts.w13_scale", "experts.w2_data", "experts.w2_scale"]


def same(a, b):
    return list(a) == list(b) and all(torch.equal(t, b[name]) for name, t in a.items())


def addresses(layer):
    return [t.data_ptr() for t in layer.experts.buffers()]


def moe(w, **options):
    return mm.MoE(w, E, K, backend="hopper", **{"mode": "fused", **options})


def test_a_layer_lets_the_canonical_bytes_go_when_it_is_built(gpu):
    w = weights()
    plain = {name: t.clone() for name, t in w.state_dict().items()}
    refs = [StorageWeakRef(t.untyped_storage()) for t in w.state_dict().values()]
    layer = moe(w)
    assert all(ref.expired() for ref in refs) and w.is_packed and layer.weights is w
    assert sum(t.nbytes for t in layer.experts.buffers()) == w.nbytes
    assert same(w.state_dict(), plain)
    assert list(layer.state_dict()) == KEYS
    assert all(map(torch.equal, layer.state_dict().values(), plain.values()))
    assert moe(w).weights is w  # layers of the same experts have the same images
    assert torch.equal(layer(*tokens()), wanted(tokens(), gpu))


def test_a_tensor_that_the_caller_holds_stays_his_and_is_watched(gpu):
    w = weights()
    mine = w.w2.data
    layer = moe(w)
    before = addresses(layer)
    mine[0].fill_(0x11)
    layer(*tokens())
    assert torch.equal(layer.weights.w2.data, mine) and addresses(layer) == before


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_is_loaded_into_images(gpu, assign):
    one, other = moe(weights()), mm.MoE(weights(seed=1), E, K, backend="reference")
    loaded = one.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    assert not loaded.missing_keys and not loaded.unexpected_keys
    assert same(one.state_dict(), other.state_dict())
    gpu.weights = weights(seed=1)
    assert torch.equal(one(*tokens()), wanted(tokens(), gpu)) and one.weights.is_packed
    assert same(one.state_dict(), other.state_dict())
    before = addresses(one)  # it has images of its own by now
    one.load_state_dict(mm.MoE(weights(seed=2), E, K, backend="reference").state_dict())
    one(*tokens())
    assert addresses(one) == before and same(one.weights.state_dict(), weights(seed=2).state_dict())


def test_a_state_dict_that_was_written_to_can_be_loaded_again_and_again(gpu):
    layer = moe(weights("w4a16"))
    for value in (1, 2, 3):
        state = layer.state_dict()
        state[KEYS[2]].fill_(value)
        layer.load_state_dict(state)
        layer(*tokens())
        assert bool((layer.weights.w2.plain().data == value).all())
    layer.weights.w2.data.zero_()
    with pytest.raises(RangeError, match="copies"):
        layer(*tokens())


def test_biases_made_under_inference_mode_are_loaded_into(gpu):
    with torch.inference_mode():
        bias = torch.zeros(E, H)
    layer = moe(replace(weights("w4a16"), b2=bias))
    layer.experts.owns = True  # as after a load: what is held is written to
    layer.load_state_dict({**layer.state_dict(), "experts.b2": torch.ones(E, H)})
    assert torch.equal(layer.weights.b2, torch.ones(E, H))


@pytest.mark.parametrize("recipe", ["w4a8_block", "nvfp4", "w8a8"])
def test_experts_picked_with_a_step_lie_densely_as_kernels_read_them(gpu, recipe):
    w = weights(recipe)
    wanted = mm.ExpertWeights.cat([w[e : e + 1] for e in range(1, E, 3)]).state_dict()
    for one in (w[1::3], moe(w).weights[1::3]):  # packed only then
        assert all(t.is_contiguous() for t in one.held().values())
        assert same(one.state_dict(), wanted)


def test_a_load_leaves_other_layers_of_the_same_experts_alone(gpu):
    w = weights()
    one, other = moe(w), moe(w)
    one.load_state_dict(moe(weights(seed=1)).state_dict())
    assert same(other.weights.state_dict(), weights().state_dict())
    assert same(one.weights.state_dict(), weights(seed=1).state_dict())


def test_what_does_not_fit_changes_nothing(gpu):
    layer = moe(weights())
    before = layer.state_dict()
    wrong = {**moe(weights(seed=1)).state_dict(), KEYS[0]: torch.zeros(1, dtype=torch.uint8)}
    with pytest.raises(RuntimeError, match=r"size mismatch for experts\.w13_data"):
        layer.load_state_dict(wrong)
    with pytest.raises(Exception, match="data must be"):
        layer.load_state_dict({**before, KEYS[0]: before[KEYS[0]].float()})
    loaded = layer.load_state_dict({KEYS[0]: before[KEYS[0]]}, strict=False)
    assert loaded.missing_keys == KEYS[1:]
    layer(*tokens())
    assert layer.weights.is_packed and same(layer.weights.state_dict(), weights().state_dict())


def test_an_empty_layer_is_loaded_in_place_and_gives_back_its_zeros(gpu):
    layer = mm.MoE.empty("w4a8_block", E, K, H, I, backend="hopper")
    assert layer.weights.is_packed and not any(t.any() for t in layer.state_dict().values())
    before = addresses(layer)
    layer.load_state_dict(mm.MoE(weights("w4a8_block"), E, K, backend="reference").state_dict())
    layer.plan(8)
    assert addresses(layer) == before
    assert same(layer.weights.state_dict(), weights("w4a8_block").state_dict())


def test_loaded_exponents_that_e4m3_lacks_choose_another_image(gpu):
    layer, wide = moe(weights("w4a8_block")), weights("w4a8_block")
    assert layer.weights.w13.kind == "e4m3_image"
    wide.w13.scale[0, 0, 0, 0] -= 20
    state = {f"experts.{n.replace('.', '_')}": t for n, t in wide.state_dict().items()}
    layer.load_state_dict(state)
    assert not layer.plan(8).call.fits_e4m3
    assert layer.weights.w13.kind == "placed_image"
    assert same(layer.weights.state_dict(), wide.state_dict())


def test_copies_moves_and_casts_keep_one_copy(gpu):
    layer = moe(weights())
    twin = copy.deepcopy(layer)
    assert twin.weights.is_packed and set(addresses(twin)).isdisjoint(addresses(layer))
    for one in (twin, layer.half().to("cpu")):
        assert one.weights.is_packed and same(one.weights.state_dict(), weights().state_dict())
        assert torch.equal(one(*tokens()), wanted(tokens(), gpu))


def test_experts_are_packed_on_the_way_to_the_gpu(gpu):
    w, shared = weights("w4a8_block"), weights("w4a8_block", seed=1)[:1]
    there = images.hold_on(torch.device("cpu"), w, shared)
    assert not w.is_packed and not shared.is_packed
    assert not images.lie_apart(*there) and all(one.is_packed for one in there)
    assert all(
        same(a.state_dict(), b.state_dict()) for a, b in zip(there, (w, shared), strict=True)
    )


def test_shared_experts_lie_after_the_others_in_the_layers_memory(gpu):
    w, shared = weights(), weights(seed=1)[:1]
    first = moe(w)  # which has its images
    held = addresses(first)
    layer = moe(w, shared=shared)
    assert layer.weights is not w and addresses(first) == held
    assert layer.shared.weights is shared and not layer.plan(8).call.shared.apart
    gpu.shared = weights(seed=1)[:1]
    want = mm.moe(*tokens(), weights(), shared=gpu.shared, backend="reference")
    assert torch.equal(layer(*tokens()), want)
    assert same(layer.shared.weights.state_dict(), gpu.shared.state_dict())


def test_a_compiled_call_reads_the_images(gpu):
    from megamoe.engine.op import moe_op

    layer = moe(weights("w4a8_block"), mode="staged")
    x, idx, gates = tokens()
    status = layer._status.storage
    y = moe_op(x, idx, gates, list(layer.experts.buffers()), layer.stats, status, layer._what)
    assert torch.equal(y, mm.moe(x, idx, gates, weights("w4a8_block"), backend="reference"))


def test_other_backends_unpack_what_they_are_given(gpu):
    w = weights()
    images.prepared(w)
    layer = mm.MoE(w, E, K, backend="reference")
    assert not layer.weights.is_packed and w.is_packed
    assert torch.equal(layer(*tokens()), wanted(tokens(), gpu))
    assert torch.equal(mm.moe(*tokens(), w, backend="reference"), wanted(tokens(), gpu))


def test_a_write_to_a_copy_is_refused_by_the_layer(gpu):
    layer = moe(weights())
    layer.weights.w2.data.zero_()
    with pytest.raises(RangeError, match=r"layer\.refresh"):
        layer(*tokens())


def test_facts_are_known_once_packed(gpu, monkeypatch):
    layer = moe(weights("w4a8_block"))
    monkeypatch.setattr(images.pack, "facts_of", lambda w: 1 / 0)
    layer(*tokens())
    assert layer.plan(8).call.fits_e4m3


@pytest.mark.parametrize("recipe", ["w4a8_block", "w4a16", "nvfp4"])
def test_a_plan_and_a_repr_tell_the_bytes_that_are_held(gpu, recipe):
    layer = moe(weights(recipe))
    sizes = {b.name: b.num_bytes for b in layer.plan(8).buffers}
    extras = 0 if recipe != "nvfp4" else 4 + 4 * E  # x_global, acts_global
    assert sizes["experts"] == layer.weights.nbytes - extras and "images" not in sizes
    assert megabytes(layer.weights.nbytes) in repr(layer) and ", packed" in repr(layer)


# -- compiled models, which pass the images ------------------------------------------------------


@pytest.fixture
def compiled(gpu, monkeypatch):
    """A w4a8_block layer as a compiled function, a scale that its caller holds, and the kinds and
    scales of w2 that its calls compute with."""
    torch._dynamo.reset()
    seen = []

    def run(call, plan):
        seen.append((call.weights.w2.kind, call.weights.w2.plain().scale))
        return call.x.clone()

    monkeypatch.setattr(op, "run", run)
    w = weights("w4a8_block")
    mine = w.w2.scale
    layer = moe(w)
    call = torch.compile(layer, backend="eager", fullgraph=True)
    call(*tokens())
    assert seen[-1][0] == "e4m3_image" and torch.equal(seen[-1][1], mine)
    return layer, call, mine, seen


@pytest.mark.parametrize("code, kind", [(125, "e4m3_image"), (90, "placed_image")])
def test_a_compiled_model_sees_writes_to_what_was_packed(compiled, code, kind):
    layer, call, mine, seen = compiled
    mine[-1, -1, -1] = code  # 90: other exponents than E4M3 holds, so another image
    for eager in (False, True, False):
        (layer if eager else call)(*tokens())
        assert seen[-1][0] == kind and torch.equal(seen[-1][1], mine)
    assert torch.equal(layer.weights.w2.plain().scale, mine)


def test_a_compiled_model_takes_images_of_another_kind_after_a_load(compiled):
    layer, call, _, seen = compiled
    state = layer.state_dict()
    state[KEYS[3]] = state[KEYS[3]].index_fill(0, torch.tensor([E - 1]), 90)
    state[KEYS[3]][-1, -1, -1] = 125
    layer.load_state_dict(state)
    call(*tokens())
    assert seen[-1][0] == "placed_image" and torch.equal(seen[-1][1], state[KEYS[3]])


@pytest.mark.parametrize("recipe", ["w4a8_block", "w4a16", "w4a4", "nvfp4"])
def test_a_layer_packs_experts_where_they_lie(gpu, monkeypatch, recipe):
    monkeypatch.setattr(in_place, "_is_gpu", lambda device: True)
    rng = torch.Generator().manual_seed(0)
    w13, w2 = torch.randn(K, 512, 512, generator=rng), torch.randn(K, 512, 256, generator=rng)
    w = mm.ExpertWeights.quantize(w13, w2, recipe)
    wanted = {name: t.clone() for name, t in w.state_dict().items()}
    at = [part.data.data_ptr() for part in (w.w13, w.w2)]
    layer = mm.MoE(w, K, K, backend="hopper")
    held = layer.weights
    assert held is w and [part.packed.data.data_ptr() for part in (w.w13, w.w2)] == at
    for name, t in w.state_dict().items():
        assert torch.equal(
            t.reshape(-1).view(torch.uint8), wanted[name].reshape(-1).view(torch.uint8)
        ), name
    assert {t.data_ptr() for t in layer.experts.buffers()} >= set(at)


def test_a_layer_whose_packing_ends_in_an_error_holds_what_it_held(gpu, monkeypatch):
    w = weights()
    layer = mm.MoE(w, E, K, backend="reference")
    monkeypatch.setattr(images, "hold", lambda *experts: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        layer._pack_experts("hopper")
    assert layer.weights is w and dict(layer.experts.named_buffers()).keys() == {
        name.replace(".", "_") for name in w.held()
    }
