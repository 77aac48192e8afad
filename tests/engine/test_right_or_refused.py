"""Calls that were silently wrong: each is right now, or refused by a named error."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch

import megamoe as mm
from megamoe.engine.packed import from_picture, pictured
from megamoe.errors import (
    CapacityError,
    DTypeError,
    NotAvailable,
    RangeError,
    ShapeError,
)
from tests.engine.pretended import E, H, I, K, tokens, weights


def dense(recipe="bf16", seed=0, **options):
    g = torch.Generator().manual_seed(seed)
    w13, w2 = (torch.randn(shape, generator=g) * 0.1 for shape in ((E, 2 * I, H), (E, H, I)))
    return mm.ExpertWeights.quantize(w13, w2, recipe, **options)


def compiled(layer):
    torch._dynamo.reset()
    return torch.compile(layer, backend="eager")


# -- operands on several devices -------------------------------------------------------------------


def loaded_onto_meta(assign=True):
    layer = mm.MoE.empty("w8a8", E, K, H, I, device="meta")
    layer.load_state_dict(mm.MoE(weights("w8a8"), E, K).state_dict(), assign=assign)
    return layer


def test_a_meta_layer_is_compiled_right_after_its_weights_were_assigned():
    wanted, layer = mm.MoE(weights("w8a8"), E, K)(*tokens()), loaded_onto_meta()
    assert torch.equal(compiled(layer)(*tokens()), wanted)
    exported = torch.export.export(loaded_onto_meta(), tokens()).module()
    assert torch.equal(exported(*tokens()), wanted)
    assert layer.stats.device.type == layer._status.storage.device.type == "cpu"


def test_parts_of_a_state_dict_may_be_assigned_one_after_the_other():
    layer = mm.MoE.empty("w8a8", E, K, H, I, device="meta")
    whole = mm.MoE(weights("w8a8"), E, K).state_dict()
    for name, t in whole.items():
        layer.load_state_dict({name: t}, strict=False, assign=True)
    assert torch.equal(layer(*tokens()), mm.MoE(weights("w8a8"), E, K)(*tokens()))


@pytest.mark.parametrize("what", ["layer", "function", "ids"])
def test_compiled_calls_with_an_operand_on_meta_are_refused(what):
    x, idx, weight = tokens()
    bare = mm.ExpertWeights.empty("bf16", E, H, I, "meta")
    calls = {
        "layer": (mm.MoE.empty("bf16", E, K, H, I, device="meta"), idx),
        "function": (lambda *args: mm.moe(*args, bare), idx),
        "ids": (mm.MoE(weights(), E, K), idx.to("meta")),
    }
    call, ids = calls[what]
    with pytest.raises(Exception, match="must lie on one device; got"):
        compiled(call)(x, ids, weight)


# -- what a compiled layer was built for -----------------------------------------------------------


def test_compiled_layers_check_top_k_and_the_number_of_tokens():
    layer = mm.MoE(weights(), E, K, max_tokens_per_rank=10)
    call = compiled(layer)
    x, idx, weight = tokens(8)
    with pytest.raises(CapacityError, match="max_tokens_per_rank = 10 tokens; got 11"):
        call(*tokens(11))
    with pytest.raises(CapacityError, match="max_tokens = 4 tokens; got 8"):
        call(x, idx, weight, max_tokens=4)
    with pytest.raises(ShapeError, match="must be"):
        call(x, idx[:, :1].contiguous(), weight[:, :1].contiguous())


def test_a_replay_checks_the_bound_of_every_call(cuda):
    from tests.engine.test_graphs import make

    layer, inputs = make(), tokens(4)
    for _ in range(2):
        layer(*inputs, max_tokens=4)
        with pytest.raises(CapacityError, match="max_tokens = 3"):
            layer(*inputs, max_tokens=3)


def test_the_options_of_a_layer_stay():
    layer = mm.MoE(weights(), E, K, clamp=2.0)
    with pytest.raises(NotAvailable, match="options must stay as it was built"):
        layer.options = mm.Options(clamp=1.0)
    assert layer.options.clamp == 2.0


# -- experts in place of others --------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_functional_call_computes_with_the_buffers_that_it_is_given(recipe):
    one, two = mm.MoE(dense(recipe, 0), E, K), mm.MoE(dense(recipe, 1), E, K)
    ours, theirs = one(*tokens()), two(*tokens())
    buffers = {n: t.clone() for n, t in two.named_buffers()}
    assert torch.equal(torch.func.functional_call(one, buffers, tokens()), theirs)
    assert torch.equal(one(*tokens()), ours) and not torch.equal(ours, theirs)
    call = compiled(lambda b: torch.func.functional_call(one, b, tokens()))
    assert torch.equal(call(buffers), theirs)


def test_buffers_that_are_set_are_used():
    one, two = mm.MoE(dense(seed=0), E, K), mm.MoE(dense(seed=1), E, K)
    one(*tokens())
    for name, t in two.experts.named_buffers():
        setattr(one.experts, name, t.clone())
    assert torch.equal(one(*tokens()), two(*tokens()))
    assert torch.equal(one.weights.w13.data, two.weights.w13.data)


def test_graphs_go_when_a_buffer_is_set(cuda):
    from tests.engine.test_graphs import make

    one, two, inputs = make(), mm.MoE(weights(seed=1), E, K, backend="reference"), tokens(4)
    one(*inputs)
    for name, t in two.experts.named_buffers():
        setattr(one.experts, name, t.clone())
    assert torch.equal(one(*inputs), two(*inputs))


# -- memory that two share -------------------------------------------------------------------------


def nvfp4(g13, g2):
    w = dense("nvfp4")
    parts = w.w13.data.flatten(1, 2), w.w13.scale.flatten(1, 2), w.w2.data, w.w2.scale
    return mm.ExpertWeights.from_quantized(
        *parts, recipe="nvfp4", w13_global=g13, w2_global=g2, acts_global=g2
    )


def test_one_global_scale_for_both_matrices_is_two():
    g = torch.full((E,), 0.001)
    one, two = mm.MoE(nvfp4(g, g), E, K), mm.MoE(nvfp4(g.clone(), g.clone()), E, K)
    new = torch.randn(E, 2 * I, H, generator=torch.Generator().manual_seed(5)) * 5
    for layer in (one, two):
        layer.refresh(w13=new)
    assert torch.equal(one(*tokens()), two(*tokens()))
    assert bool((g == 0.001).all())


def test_tensors_that_are_one_may_be_compiled_but_not_refreshed():
    w = dense("nvfp4")
    shared = replace(w, w2=replace(w.w2, global_scale=w.w13.global_scale))
    layer = mm.MoE(shared, E, K)
    assert torch.equal(compiled(layer)(*tokens()), layer(*tokens()))
    with pytest.raises(RangeError, match="memory of their own; got w13 in the memory of w2"):
        layer.refresh(w13=torch.zeros(E, 2 * I, H))
    layer.load_state_dict(layer.state_dict())  # into memory of its own
    layer.refresh(w13=torch.zeros(E, 2 * I, H))


def test_experts_that_expand_shares_are_not_refreshed():
    w13, w2 = torch.randn(1, 2 * I, H).bfloat16(), torch.randn(1, H, I).bfloat16()
    both = w13.expand(E, -1, -1), None, w2.expand(E, -1, -1), None
    layer = mm.MoE(mm.ExpertWeights.from_quantized(*both, recipe="bf16"), E, K)
    with pytest.raises(RangeError, match="memory of their own; got w13 in the memory of w13"):
        layer.refresh(w13=torch.zeros(1, 2 * I, H), experts=[0])


def test_experts_of_one_allocation_side_by_side_are_refreshed():
    memory = torch.zeros(E, 3 * I * H, dtype=torch.bfloat16)
    w13 = memory[:, : 2 * I * H].view(E, 2, I, H)
    w2 = memory[:, 2 * I * H :].view(E, H, I)
    experts = mm.ExpertWeights.from_state_dict({"w13.data": w13, "w2.data": w2}, "bf16")
    layer = mm.MoE(experts, E, K)
    layer.refresh(w13=torch.ones(E, 2 * I, H))
    assert bool((w13 == 1).all()) and not w2.any()


# -- as kernels read experts -----------------------------------------------------------------------


def restrided(t):
    """The same values in other strides."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.parametrize("how", ["made", "assigned", "channels_last"])
def test_scales_and_biases_are_dense(how):
    w = dense("w8a8", b13=torch.randn(E, 2 * I), b2=torch.randn(E, H))
    tensors = {n: restrided(t) if n != "w13.data" else t for n, t in w.state_dict().items()}
    layer = mm.MoE(w, E, K, activation="gpt_oss")
    wanted = layer(*tokens())
    if how == "made":
        strided = mm.ExpertWeights.from_state_dict(tensors, "w8a8")
        layer = mm.MoE(strided, E, K, activation="gpt_oss")
    elif how == "assigned":
        named = {f"experts.{n.replace('.', '_')}": t for n, t in tensors.items()}
        layer.load_state_dict(named, assign=True)
    else:
        layer.to(memory_format=torch.channels_last)
    dense_ones = [t for n, t in layer.weights.held().items() if not n.endswith("data")]
    assert all(t.is_contiguous() for t in dense_ones)
    assert all(t.is_contiguous() for n, t in layer.experts.named_buffers() if "data" not in n)
    assert torch.equal(layer(*tokens()), wanted)


def test_no_gradient_is_kept_and_no_bias_is_the_callers_memory():
    w13, w2 = (torch.nn.Parameter(torch.randn(s) * 0.1) for s in ((E, 2 * I, H), (E, H, I)))
    b13, b2 = torch.nn.Parameter(torch.randn(E, 2 * I)), torch.randn(E, H)
    for recipe in ("bf16", "w8a8", "nvfp4"):
        w = mm.ExpertWeights.quantize(w13, w2, recipe, b13=b13, b2=b2)
        assert not any(t.requires_grad for t in w.held().values())
        assert w.b2.data_ptr() != b2.data_ptr() and w.b13.data_ptr() != b13.data_ptr()
    w = mm.ExpertWeights.from_quantized(w13.bfloat16(), None, w2.bfloat16(), None, recipe="bf16")
    assert not w.w13.data.requires_grad


def test_a_refresh_of_experts_made_under_inference_mode_is_whole():
    with torch.inference_mode():
        w = dense("w4a16", b13=torch.randn(E, 2 * I))
    layer = mm.MoE(w, E, K, activation="gpt_oss")
    b13 = torch.randn(E, 2 * I)
    layer.refresh(w13=torch.zeros(E, 2 * I, H), b13=b13)
    assert torch.equal(layer.weights.b13.flatten(1), b13)
    assert not layer.weights.dequantize()[0].any()


def test_counts_stay_counts():
    layer = mm.MoE(weights(), E, K).type(torch.bfloat16)
    layer(*tokens())
    assert layer.stats.dtype == torch.int64 and int(layer.stats.sum()) == tokens()[1].numel()


def test_experts_are_taken_by_their_own_numbers():
    for bad in ([-1], [-2], [E], [0.0]):
        with pytest.raises(RangeError, match=f"numbers from 0 to {E - 1}"):
            weights().take(bad)


# -- loading ---------------------------------------------------------------------------------------


def named(layer, change):
    return {n: change(n, t.clone()) for n, t in layer.state_dict().items()}


@pytest.mark.parametrize("assign", [False, True])
def test_bytes_under_another_name_are_bytes(assign):
    layer = mm.MoE(dense("w4a16"), E, K)
    other = {"scale": torch.float8_e8m0fnu, "data": torch.int8}
    sd = named(layer, lambda n, t: t.view(other[n.rpartition("_")[2]]))
    empty = mm.MoE.empty("w4a16", E, K, H, I)
    empty.load_state_dict(sd, assign=assign)
    assert torch.equal(empty(*tokens()), layer(*tokens()))
    floats = mm.MoE.empty("bf16", E, K, H, I)
    floats.load_state_dict(named(mm.MoE(dense(), E, K), lambda n, t: t.float()), assign=assign)
    assert torch.equal(floats(*tokens()), mm.MoE(dense(), E, K)(*tokens()))


@pytest.mark.parametrize("recipe, dtype", [("w4a16", torch.float32), ("bf16", torch.float64),
                                           ("w8a8", torch.float8_e5m2)])  # fmt: skip
@pytest.mark.parametrize("assign", [False, True])
def test_other_dtypes_are_not_loaded_by_value(recipe, dtype, assign):
    layer = mm.MoE(dense(recipe), E, K)
    before = {n: t.clone() for n, t in layer.state_dict().items()}
    with pytest.raises(DTypeError, match="w13_data must be"):
        layer.load_state_dict(named(layer, lambda n, t: t.to(dtype)), assign=assign)
    for name, t in layer.state_dict().items():
        assert torch.equal(t.view(torch.uint8), before[name].view(torch.uint8))


NAN_IN = [("bf16", "w13_data"), ("w8a8", "w2_data"), ("w8a8", "w13_scale"),
          ("w4a16", "w2_scale"), ("nvfp4", "w13_global_scale"), ("bf16", "b13")]  # fmt: skip


@pytest.mark.parametrize("recipe, name", NAN_IN)
def test_nan_is_not_loaded(recipe, name, tmp_path):
    biases = {"b13": torch.randn(E, 2 * I)} if name == "b13" else {}
    layer = mm.MoE(dense(recipe, **biases), E, K, activation="gpt_oss")

    def spoil(n, t):
        if n == f"experts.{name}":
            t[2].view(torch.uint8 if t.element_size() == 1 else t.dtype).flatten()[0:1].fill_(
                255 if t.element_size() == 1 else float("nan")
            )
        return t

    with pytest.raises(RangeError, match=f"{name} must be finite.* expert 2"):
        layer.load_state_dict(named(layer, spoil))
    spoil(f"experts.{name}", layer.weights.held()[name.replace("_", ".", 1)])
    layer.weights.save(tmp_path / "experts.safetensors")
    with pytest.raises(RangeError, match="must be finite"):
        mm.ExpertWeights.load(tmp_path / "experts.safetensors")


def test_a_layer_may_be_unpickled_on_another_device():
    layer, memory = mm.MoE(weights("w8a8"), E, K), io.BytesIO()
    torch.save(layer, memory)
    memory.seek(0)
    again = torch.load(memory, map_location="meta", weights_only=False)
    assert again._status.storage.device.type == again.weights.device.type == "meta"
    assert again._at == "meta"
    again.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(again(*tokens()), layer(*tokens()))


def test_a_load_after_an_assignment_leaves_the_callers_tensors():
    one, two = mm.MoE(dense(seed=0), E, K), mm.MoE(dense(seed=1), E, K)
    wanted = two(*tokens())
    one.load_state_dict(two.state_dict(), assign=True)
    assert torch.equal(one(*tokens()), wanted)
    one.load_state_dict(mm.MoE(dense(seed=2), E, K).state_dict())
    assert torch.equal(two(*tokens()), wanted) and not torch.equal(one(*tokens()), wanted)


# -- arguments -------------------------------------------------------------------------------------


def test_quantised_tokens_get_no_gradient_silently():
    x, idx, weight = tokens()
    ready = mm.quantize(x.float().requires_grad_(), "bf16")
    for call in (mm.MoE(dense(), E, K), lambda *args: mm.moe(*args, dense())):
        with pytest.raises(NotAvailable, match="x must not require grad"):
            call(ready, idx, weight)


def test_a_clamp_is_a_number():
    for bad in (True, "3", torch.tensor(3.0)):
        with pytest.raises(DTypeError, match="clamp must be a number"):
            mm.moe(*tokens(), dense(), clamp=bad)
    wanted = mm.moe(*tokens(), dense(), clamp=0.5)
    layer = mm.MoE(dense(), E, K, clamp=np.float32(0.5))
    assert torch.equal(layer(*tokens()), wanted)


def test_what_is_refused_after_a_load_is_refused_in_every_call(monkeypatch):
    layer = mm.MoE(dense(), E, K)

    def refuse():
        raise NotAvailable("no such experts")

    monkeypatch.setattr(layer, "_refresh", refuse)
    layer.load_state_dict(layer.state_dict())
    for _ in range(2):
        with pytest.raises(NotAvailable, match="no such experts"):
            layer(*tokens())


# -- images ----------------------------------------------------------------------------------------


def test_images_in_place_of_others_are_refused(gpu):
    layer = mm.MoE(weights(), E, K, mode="staged")
    assert layer.weights.is_packed
    image = layer.experts.w13_image
    layer.experts.w13_image = image.clone()
    with pytest.raises(NotAvailable, match="packed experts must be replaced by load_state_dict"):
        layer(*tokens())
    layer.experts.w13_image = image
    assert torch.equal(layer(*tokens()), mm.moe(*tokens(), weights(), backend="reference"))


def test_an_image_is_not_read_as_one_of_another_kind(gpu):
    matrix = mm.MoE(weights(), E, K, mode="staged").weights.w13
    kind, *rest = pictured(matrix)
    assert from_picture([kind, *rest], matrix.held()) is matrix
    other = "mx_image" if kind != "mx_image" else "placed_image"
    with pytest.raises(RangeError, match=f"must be the {other} .* got {kind}"):
        from_picture([other, *rest], matrix.held())
