"""Quantised experts modules, widths that are padded, and names and models that are refused."""

import pytest
import torch

import megamoe as mm
from megamoe.errors import NotAvailable, RangeError
from megamoe.formats.spec import recipe_named
from megamoe.integrations import transformers as ours
from tests.integrations.models import CONFIGS, GQA, ROPE, VERSION, logits, model, prompt

tf = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(VERSION < (5, 7), reason="transformers 5.7 is not installed")
E, I, H = 4, 128, 256


def error(y, wanted):
    return float((y.double() - wanted).norm() / wanted.norm())


# -- names and models --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eager", "grouped_mm", "batched_mm"])
def test_transformers_own_names_are_not_taken(name):
    with pytest.raises(RangeError, match="transformers' own implementations"):
        ours.register(name)


def test_our_own_names_may_be_registered_again():
    ours.register("megamoe-again", recipe="w4a16")
    before = [known["megamoe-again"] for known in ours._interfaces()]
    ours.register("megamoe-again")
    after = [known["megamoe-again"] for known in ours._interfaces()]
    assert before and all(old is not new for old, new in zip(before, after, strict=True))


def test_use_sets_it_and_counts():
    made, ids = model("qwen3"), prompt()
    eager = logits(made, "eager", ids)
    assert ours.use(made) == 2
    assert made.config._experts_implementation == "megamoe"
    with torch.no_grad():
        y = made(ids, attention_mask=torch.ones_like(ids)).logits.double()
    assert 0 < error(y, eager) < recipe_named("bf16").tolerance


UNCHANGED = {
    "JetMoe": lambda: tf.JetMoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_key_value_heads=2, kv_channels=16,
        num_local_experts=2, num_experts_per_tok=1, intermediate_size=32,
    ),
    "Llama4": lambda: tf.Llama4TextConfig(
        **GQA, intermediate_size=32, intermediate_size_mlp=64, num_local_experts=4,
        num_experts_per_tok=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", UNCHANGED)
def test_a_model_that_would_not_change_is_refused(family):
    made = tf.AutoModelForCausalLM.from_config(UNCHANGED[family]())
    before = {name: t.clone() for name, t in made.state_dict().items()}
    for take in (False, True):
        with pytest.raises(NotAvailable, match=rf"none in {family}\w+; nothing would change"):
            ours.use(made, take=take)
    assert all(torch.equal(t, before[name]) for name, t in made.state_dict().items())


# -- widths ------------------------------------------------------------------------------------

ODD = {
    "qwen3": lambda: tf.Qwen3MoeConfig(
        **GQA | {"hidden_size": 40}, intermediate_size=96, moe_intermediate_size=24, num_experts=8,
        num_experts_per_tok=2,
    ),
    "gpt_oss": lambda: tf.GptOssConfig(
        **GQA | {"hidden_size": 48}, intermediate_size=40, num_local_experts=4,
        num_experts_per_tok=2, layer_types=["sliding_attention", "full_attention"],
        rope_parameters=ROPE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", ODD)
def test_widths_that_are_no_multiple_of_32_are_padded(family, monkeypatch):
    monkeypatch.setitem(CONFIGS, family, ODD[family])
    made, ids = model(family), prompt()
    eager = logits(made, "eager", ids)
    ours.register()
    ours.register("megamoe-w8a8", recipe="w8a8")
    assert 0 < error(logits(made, "megamoe", ids), eager) < recipe_named("bf16").tolerance
    assert error(logits(made, "megamoe-w8a8", ids), eager) < 0.1


# -- FP8Experts --------------------------------------------------------------------------------


def fp8_module(kind):
    """An experts module as transformers makes it of a quantised model, and its float values."""
    from transformers.integrations import finegrained_fp8 as fp8
    from transformers.integrations.moe import use_experts_implementation

    config = tf.Qwen3MoeConfig(
        hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=2
    )
    config._experts_implementation = "megamoe"
    # A class of its own: the decorator changes what it is given.
    cls = type("Experts", (fp8.FP8Experts,), {})
    cls = use_experts_implementation(cls, experts_interface=fp8.ALL_FP8_EXPERTS_FUNCTIONS)
    options = {"block_size": None if kind == "tensor" else (128, 128)}
    if kind in ("fp4", "fp4 float"):
        options |= {"expert_dtype": "fp4", "scale_fmt": "ue8m0" if kind == "fp4" else "float"}
    elif kind == "ue8m0":
        options |= {"scale_fmt": "ue8m0"}
    module = cls(config, **options)
    rng = torch.Generator().manual_seed(0)
    w13, w2 = (torch.randn(shape, generator=rng) * 0.05 for shape in ((E, 2 * I, H), (E, H, I)))
    recipe = "w4a8" if kind.startswith("fp4") else "w8a8"
    weights = mm.ExpertWeights.quantize(w13, w2, recipe)
    scales = weights.w13.scale.flatten(1, 2), weights.w2.scale
    if kind == "tensor":
        scales = torch.full((E, 2, 1), 2.0**-10), torch.full((E, 1, 1), 2.0**-9)
    elif kind == "ue8m0":
        scales = tuple(torch.full_like(s, 2.0**-10) for s in scales)
    elif kind == "fp4":
        scales = tuple(s.view(torch.float8_e8m0fnu) for s in scales)
    elif kind == "fp4 float":
        scales = tuple((s.int() << 23).view(torch.float32) for s in scales)
    with torch.no_grad():
        for name, w, scale in (
            ("gate_up_proj", weights.w13, scales[0]),
            ("down_proj", weights.w2, scales[1]),
        ):
            data = w.data.flatten(1, 2) if name == "gate_up_proj" else w.data
            parameter = getattr(module, name)
            assert parameter.shape == data.shape
            parameter.copy_(data.view(parameter.dtype))
            getattr(module, f"{name}_scale_inv").copy_(scale)
    if kind in ("tensor", "ue8m0"):
        weights = mm.ExpertWeights.from_quantized(
            weights.w13.data.flatten(1, 2),
            torch.full_like(weights.w13.scale.flatten(1, 2), 2.0**-10),
            weights.w2.data,
            torch.full_like(weights.w2.scale, 2.0**-9 if kind == "tensor" else 2.0**-10),
            recipe=recipe,
        )
    return module, weights


@pytest.mark.parametrize("kind", ["block", "ue8m0", "tensor", "fp4", "fp4 float"])
def test_quantised_experts_are_served_with_their_scales(kind):
    ours.register()
    module, weights = fp8_module(kind)
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(9, H, generator=rng).bfloat16()
    idx = torch.rand(9, E, generator=rng).topk(2).indices
    weight = torch.rand(9, 2, generator=rng)
    with torch.no_grad():
        y = module(x, idx, weight)  # through transformers' own dispatch
    assert torch.equal(y, mm.moe(x, idx, weight, weights, weight_at="combine"))
    w13, w2 = (w.double() for w in weights.dequantize())
    wanted = torch.zeros(9, H, dtype=torch.float64)
    for t in range(9):
        for e, scale in zip(idx[t].tolist(), weight[t].tolist(), strict=True):
            gate, up = (w13[e] @ x[t].double()).chunk(2)
            wanted[t] += scale * (w2[e] @ (torch.nn.functional.silu(gate) * up))
    assert error(y, wanted) < 0.06  # tokens and activations are FP8, these are not
    layer = ours.make_layer(module, 2)
    assert layer.weights.w13.data.data_ptr() == module.gate_up_proj.data_ptr()  # not held twice
    plain = ours.make_layer(module, 2, "bf16")
    assert error(plain.weights.dequantize()[0], w13.float()) < 4e-3


@pytest.mark.parametrize(("arch", "recipe"), [("sm_90", "w4a8_block"), ("sm_100", "w4a8")])
def test_fp4_experts_have_the_recipe_that_the_gpu_multiplies_fast(arch, recipe, monkeypatch):
    monkeypatch.setattr(ours.backends, "arch_of", lambda device: arch)
    module, weights = fp8_module("fp4")
    layer = ours.make_layer(module, 2, backend="reference")
    assert layer.weights.recipe == recipe
    assert all(map(torch.equal, layer.weights.state_dict().values(), weights.state_dict().values()))
    assert ours.make_layer(module, 2, "w4a8", "reference").weights.recipe == "w4a8"


@pytest.mark.parametrize("name", ["gate_up_proj_scale_inv", "down_proj_scale_inv", "down_proj"])
def test_quantised_experts_follow_changes(name):
    module, _ = fp8_module("ue8m0")
    forward = ours.experts_forward()
    x, idx, weight = torch.ones(2, H).bfloat16(), torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2)
    with torch.no_grad():
        before = forward(module, x, idx, weight)
        getattr(module, name).data.view(torch.uint8)[:, 0].add_(1)
        after = forward(module, x, idx, weight)
        fresh = ours.experts_forward()(module, x, idx, weight)
    assert not torch.equal(after, before) and torch.equal(after, fresh)


def test_fp4_scales_that_are_no_powers_of_two_are_refused():
    module, _ = fp8_module("fp4 float")
    with torch.no_grad():
        module.down_proj_scale_inv.mul_(1.5)
    with pytest.raises(RangeError, match="powers of two"):
        ours.make_layer(module, 2)


def test_other_blocks_are_refused():
    module, _ = fp8_module("block")
    module.gate_up_proj_scale_inv = torch.nn.Parameter(torch.ones(E, 4, 4))
    with pytest.raises(NotAvailable, match="a scale per 128 x 128"):
        ours.make_layer(module, 2)
