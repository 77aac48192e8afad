"""Experts out of checkpoint folders: all naming schemes, what libraries wrote, what is refused."""

import json
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import megamoe as mm
from megamoe.engine import loader
from megamoe.errors import DTypeError, FileError, NotAvailable, RangeError, ShapeError
from megamoe.formats.quantize import dequantize

DATA = Path(__file__).parents[1] / "data" / "checkpoints"
E, I, H = 4, 128, 256
LINEARS = ("gate_proj", "up_proj", "down_proj")
MIXTRAL = ("w1", "w3", "w2")
CONFIG = {
    "model_type": "qwen3_moe", "hidden_act": "silu", "num_experts": E, "num_experts_per_tok": 2,
}  # fmt: skip
V4 = {"model_type": "deepseek_v4", "swiglu_limit": 10.0, "n_routed_experts": E, "num_experts": None}


def source(seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(E, 2 * I, H, generator=rng) * 0.05, torch.randn(E, H, I, generator=rng) * 0.1


def write(folder, tensors, config=None, shards=1):
    """A folder as Hugging Face writes it."""
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    tensors = {name: t.contiguous() for name, t in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    files, names = (
        {},
        sorted(tensors, key=lambda n: zlib.crc32(n.encode())),
    )  # layers are cut anywhere
    for k in range(shards):
        file = f"model-{k + 1:05}-of-{shards:05}.safetensors"
        part = names[k::shards]
        save_file({n: tensors[n] for n in part}, folder / file)
        files |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def per_expert(parts, *, linears=LINEARS, prefix="model.layers.3.mlp.experts."):
    """{suffix: ([E, 2, ...] of gate and up, [E, ...] of down)} under each expert's names."""
    found = {}
    for suffix, (w13, w2) in parts.items():
        for e in range(E):
            for name, t in zip(linears, (w13[e, 0], w13[e, 1], w2[e]), strict=True):
                found[f"{prefix}{e}.{name}.{suffix}"] = t.clone()
    return found


def made(recipe):
    return mm.ExpertWeights.quantize(*source(), recipe)


def bf16(**names):
    w13, w2 = (w.bfloat16() for w in source())
    return per_expert({"weight": (w13.unflatten(1, (2, I)), w2)}, **names)


def fp8(scale, dtype=torch.float32):
    w = made("w8a8")
    scales = w.w13.scale.to(dtype), w.w2.scale.to(dtype)
    return per_expert({"weight": (w.w13.data, w.w2.data), scale: scales})


def mxfp4(values="weight", scale="weight_scale", view=torch.uint8, scale_view=torch.uint8, **names):
    w = made("w4a16")
    return per_expert(
        {
            values: (w.w13.data.view(view), w.w2.data.view(view)),
            scale: (w.w13.scale.view(scale_view), w.w2.scale.view(scale_view)),
        },
        **names,
    )


def gpt_oss(blocks):
    w13, w2 = source()
    if not blocks:
        mixed = w13.unflatten(1, (2, I)).transpose(1, 2).flatten(1, 2)
        parts = {"gate_up_proj": mixed.mT.bfloat16(), "down_proj": w2.mT.bfloat16()}
    else:
        w = made("w4a16")
        mixed, scale = (t.transpose(1, 2).flatten(1, 2) for t in (w.w13.data, w.w13.scale))
        parts = {
            "gate_up_proj_blocks": mixed.unflatten(2, (-1, 16)), "gate_up_proj_scales": scale,
            "down_proj_blocks": w.w2.data.unflatten(2, (-1, 16)), "down_proj_scales": w.w2.scale,
        }  # fmt: skip
    b13, b2 = biases()
    parts["gate_up_proj_bias"] = b13.unflatten(1, (2, I)).transpose(1, 2).flatten(1).bfloat16()
    parts["down_proj_bias"] = b2.bfloat16()
    return {f"model.layers.3.mlp.experts.{name}": t for name, t in parts.items()}


def biases():
    rng = torch.Generator().manual_seed(5)
    return (torch.randn(E, 2 * I, generator=rng).bfloat16().float(),
            torch.randn(E, H, generator=rng).bfloat16().float())  # fmt: skip


OSS = {"model_type": "gpt_oss", "swiglu_limit": 7.0, "num_local_experts": E, "num_experts": None}
V4_NAMES = {"linears": MIXTRAL, "prefix": "layers.3.ffn.experts."}
MIXTRAL_NAMES = {"linears": MIXTRAL, "prefix": "model.layers.3.block_sparse_moe.experts."}
KIMI = {"text_config": {"num_experts": None, "n_routed_experts": E}, "model_type": "kimi_k25"}
# what: tensors, config, recipe that is picked, the same experts
FOLDERS = {
    "Qwen3": (lambda: bf16(), {}, "bf16"),
    "Mixtral": (lambda: bf16(**MIXTRAL_NAMES), {"model_type": "mixtral"}, "bf16"),
    "GLM-4.5": (lambda: bf16(), {"model_type": "glm4_moe"}, "bf16"),
    "Kimi, nested": (
        lambda: bf16(prefix="language_model.model.layers.3.mlp.experts."), KIMI, "bf16"),
    "DeepSeek-V3, Kimi-K2": (
        lambda: fp8("weight_scale_inv"), {"model_type": "deepseek_v3"}, "w8a8"),
    "DeepSeek-V4": (
        lambda: mxfp4("weight", "scale", torch.int8, torch.float8_e8m0fnu, **V4_NAMES), V4, "w4a8"),
    "Qwen3-Next": (
        lambda: bf16() | bf16(prefix="mtp.layers.0.mlp.experts.")
        | {"model.layers.3.mlp.shared_expert.up_proj.weight": torch.ones(I, H)},
        {"model_type": "qwen3_next"}, "bf16"),
    "modelopt FP8_PB_WO": (
        lambda: {n: t[:, None, :, None] if "scale" in n else t
                 for n, t in fp8("weight_scale").items()}, {}, "w8a8"),
    "Quark MXFP4": (lambda: mxfp4(), {}, "w4a16"),
    "compressed-tensors MXFP4": (lambda: mxfp4("weight_packed"), {}, "w4a16"),
}  # fmt: skip


def same(a, b):
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(
        torch.equal(t.view(torch.uint8) if t.ndim else t, theirs[n].view(torch.uint8) if t.ndim else theirs[n])
        for n, t in mine.items()
    )  # fmt: skip


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", FOLDERS)
def test_folders_are_read_as_they_are(name, shards, tmp_path, capsys):
    tensors, config, recipe = FOLDERS[name]
    folder = write(tmp_path, tensors(), config, shards)
    found = mm.Checkpoint(folder)
    picked = found.picked(3)
    assert found.layers == [3] and picked.recipe == recipe and picked.num_experts == E
    assert (picked.hidden, picked.intermediate, picked.top_k) == (H, I, 2)
    assert picked.activation == "swiglu" and picked.clamp == config.get("swiglu_limit")
    done = []
    whole = mm.ExpertWeights.from_checkpoint(folder, 3, progress=done.append)
    assert done == [1, 2, 3, 4]
    mm.ExpertWeights.from_checkpoint(folder, 3, progress=True)
    assert picked.recipe in (said := capsys.readouterr().err) and f"{E}/{E}" in said
    wanted = made("w4a8" if recipe.startswith("w4") else recipe)
    wanted = mm.ExpertWeights(recipe, wanted.w13, wanted.w2)
    assert same(whole, wanted)
    half = mm.ExpertWeights.from_checkpoint(folder, 3, rank=1, num_ranks=2)
    assert same(half, wanted[2:])


@pytest.mark.parametrize("name", FOLDERS)
def test_hopper_takes_the_recipe_that_it_multiplies_fast(name, tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "arch_of", lambda device: {"cuda": "sm_90"}.get(device.type, "cpu"))
    tensors, config, recipe = FOLDERS[name]
    found = mm.Checkpoint(write(tmp_path, tensors(), config))
    fast = "w4a8_block" if recipe == "w4a8" else recipe
    assert found.picked(3, device="cuda").recipe == fast
    assert found.picked(3, "w4a16", device="cuda").recipe == "w4a16"
    assert found.experts(3).recipe == recipe
    monkeypatch.setattr(loader, "arch_of", lambda device: "sm_90")
    assert found.experts(3).recipe == fast


@pytest.mark.parametrize("places", [(), ("weight_output", "weight_input"), ("q_attn", "k_cache")])
def test_rotations_that_weights_hold_or_attention_has_are_no_hindrance(places, tmp_path):
    """SpinQuant's R1 and R2 are in the weights as they are stored, its R3 is in attention."""
    folder = write(tmp_path, bf16(), rotated(*places))
    assert same(mm.ExpertWeights.from_checkpoint(folder, 3), made("bf16"))


def test_an_activation_may_be_said_twice_by_two_of_its_names(tmp_path):
    folder = write(tmp_path, bf16(), {"hidden_act": "swish", "moe_hidden_act": "silu"})
    assert mm.Checkpoint(folder).picked(3).activation == "swiglu"


@pytest.mark.parametrize("key", ["num_local_experts", "moe_num_experts", "num_routed_experts"])
def test_the_count_of_experts_has_several_names(key, tmp_path):
    folder = write(tmp_path, bf16(), {"num_experts": None, key: E})
    assert mm.Checkpoint(folder).picked(3).num_experts == E


@pytest.mark.parametrize("blocks", [True, False])
def test_gpt_oss_is_read_with_its_gate_and_biases(blocks, tmp_path):
    folder = write(tmp_path, gpt_oss(blocks), OSS)
    picked = mm.Checkpoint(folder).picked(3)
    assert (picked.activation, picked.clamp, picked.gate_up) == ("gpt_oss", 7.0, "interleaved")
    assert picked.has_bias and "gpt_oss clamped at 7" in str(picked)
    recipe = "w4a16" if blocks else "bf16"
    b13, b2 = biases()
    wanted = mm.ExpertWeights.quantize(*source(), recipe, b13=b13, b2=b2)
    assert same(mm.ExpertWeights.from_checkpoint(folder, 3), wanted)


def test_scales_in_bf16_and_e8m0_are_taken_by_value(tmp_path):
    folder = write(tmp_path, fp8("weight_scale_inv", torch.bfloat16))
    w = mm.ExpertWeights.from_checkpoint(folder, 3)
    assert torch.equal(w.w13.scale, made("w8a8").w13.scale.bfloat16().float())


def test_a_scale_per_matrix_is_a_scale_of_every_block(tmp_path):
    tensors = fp8("weight_scale_inv")
    for name in [n for n in tensors if n.endswith("scale_inv")]:
        tensors[name.removesuffix("_inv")] = tensors.pop(name).amax()
        tensors[name.removesuffix("weight_scale_inv") + "input_scale"] = torch.tensor(0.1)
    w = mm.ExpertWeights.from_checkpoint(write(tmp_path, tensors), 3)
    assert w.recipe == "w8a8" and torch.equal(w.w2.data.float(), made("w8a8").w2.data.float())
    assert (w.w2.scale == made("w8a8").w2.scale.flatten(1).amax(1).view(E, 1, 1)).all()


@pytest.mark.parametrize("value", [0.0, torch.inf])
def test_input_scales_that_no_recipe_reads_may_be_anything(value, tmp_path):
    """Experts that saw no token when inputs were calibrated have none that mean something."""
    tensors = fp8("weight_scale_inv")
    for name in [n for n in tensors if n.endswith("scale_inv")]:
        tensors[name.removesuffix("_inv")] = tensors.pop(name).amax()
        tensors[name.removesuffix("weight_scale_inv") + "input_scale"] = torch.tensor(value)
    static, four = tmp_path / "static", tmp_path / "four"
    for folder in (static, four):
        folder.mkdir()
    assert mm.ExpertWeights.from_checkpoint(write(static, tensors), 3).recipe == "w8a8"
    bad = first(first(nvfp4(), "1.up_proj.input_scale", value), "2.down_proj.input_scale", value)
    w = mm.ExpertWeights.from_checkpoint(write(four, bad), 3, recipe="nvfp4a16")
    assert torch.equal(w.w13.data, made("nvfp4").w13.data)
    with pytest.raises(RangeError, match=r'must be positive.*up_proj.*recipe="nvfp4a16"'):
        mm.ExpertWeights.from_checkpoint(four, 3)


LIBRARIES = {
    "compressed_tensors_nvfp4": ("nvfp4", 4e-3),  # it reads back in BF16
    "compressed_tensors_mxfp4": ("w4a16", 0.0),
    "compressed_tensors_mxfp8": ("bf16", 0.0),
    "compressed_tensors_fp8_channel": ("bf16", 4e-3),  # rounded to BF16
    "compressed_tensors_fp8_block": ("w8a8", 1e-6),
    "modelopt_nvfp4": ("nvfp4", 1e-6),
    "modelopt_mxfp4": ("w4a16", 0.0),
    "quark_mxfp4": ("w4a16", 0.0),
    "quark_fp8_channel": ("bf16", 4e-3),  # scales [rows], not [rows, 1]
    "quark_fp8_tensor": ("w8a8", 1e-6),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_what_libraries_wrote_has_the_values_that_they_read_back(name, tmp_path):
    recipe, tolerance = LIBRARIES[name]
    tensors = load_file(DATA / f"{name}.safetensors")
    values = {n: tensors.pop(n) for n in list(tensors) if n.startswith("values.")}
    folder = write(tmp_path, tensors, {"num_experts": 2})
    assert mm.Checkpoint(folder).picked(1).recipe == recipe
    w = mm.ExpertWeights.from_checkpoint(folder, 1, rank=1, num_ranks=2)
    w13, w2 = w.dequantize()
    found = {"gate_proj": w13[0, :32], "up_proj": w13[0, 32:], "down_proj": w2[0]}
    for linear, mine in found.items():
        wanted = values[f"values.{linear}"]
        assert float((mine - wanted).norm() / wanted.norm()) <= tolerance, linear
    if recipe == "nvfp4":  # both files give inputs of amax 12
        assert w.x_global.item() == pytest.approx(12 / 2688)
        assert w.acts_global.tolist() == pytest.approx([12 / 2688])


A16 = {
    "modelopt": {"quantization_config": {"quant_algo": "W4A16_NVFP4"}},
    "modelopt's own file": {},
    "compressed-tensors": {
        "quantization_config": {
            "config_groups": {"g": {"weights": {"num_bits": 4}, "input_activations": None}}
        }
    },
}


@pytest.mark.parametrize("name", A16)
def test_nvfp4_weights_whose_tokens_stay_bf16_have_their_recipe(name, tmp_path):
    file = "compressed_tensors_nvfp4" if name == "compressed-tensors" else "modelopt_nvfp4"
    tensors = load_file(DATA / f"{file}.safetensors")
    tensors = {n: t for n, t in tensors.items() if not n.startswith("values.") and "input" not in n}
    folder = write(tmp_path, tensors, {"num_experts": 2} | A16[name])
    if name == "modelopt's own file":
        text = json.dumps({"quantization": {"quant_algo": "W4A16_NVFP4"}})
        (folder / "hf_quant_config.json").write_text(text)
    w = mm.ExpertWeights.from_checkpoint(folder, 1)
    assert w.recipe == "nvfp4a16" and w.x_global is None and w.acts_global is None
    both = mm.ExpertWeights.from_checkpoint(folder, 1, recipe="nvfp4")
    assert all(torch.equal(a, b) for a, b in zip(w.dequantize(), both.dequantize(), strict=True))


def test_another_recipe_may_be_asked_for(tmp_path):
    folder = write(tmp_path, bf16())
    w = mm.ExpertWeights.from_checkpoint(folder, 3, recipe="w4a8_block")
    w13, w2 = (t.bfloat16() for t in source())
    assert same(w, mm.ExpertWeights.quantize(w13, w2, "w4a8_block"))
    w = mm.ExpertWeights.from_checkpoint(folder, 3, recipe="nvfp4", rank=1, num_ranks=4)
    assert float((dequantize(w.w2)[0] - w2[1].float()).norm() / w2[1].float().norm()) < 0.12


def test_biases_of_single_experts_are_read(tmp_path):
    b13, b2 = biases()
    tensors = bf16() | per_expert({"bias": (b13.unflatten(1, (2, I)), b2)})
    w = mm.ExpertWeights.from_checkpoint(write(tmp_path, tensors), 3)
    assert torch.equal(w.b13, b13.unflatten(1, (2, I))) and torch.equal(w.b2, b2)


def test_a_loaded_layer_runs(tmp_path):
    folder = write(tmp_path, mxfp4("weight", "scale", **V4_NAMES), V4)
    found = mm.Checkpoint(folder)
    picked = found.picked(3)
    x = torch.randn(5, H).bfloat16()
    idx, weight = torch.arange(10).view(5, 2) % E, torch.rand(5, 2)
    options = {"activation": picked.activation, "clamp": picked.clamp}
    y = mm.MoE(found.experts(3), picked.num_experts, picked.top_k, **options)(x, idx, weight)
    assert torch.equal(y, mm.moe(x, idx, weight, made("w4a8"), **options))


SITU = {"hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}


@pytest.mark.parametrize(
    ("config", "activation"),
    [(SITU, "situ"), ({"swiglu_alpha": 1.702, "swiglu_limit": 7.0}, "gpt_oss"), ({"hidden_act": "gelu"}, "geglu"), ({"hidden_act": "gelu_pytorch_tanh"}, "geglu_tanh")],
)  # fmt: skip
def test_activations_are_those_of_the_config(config, activation, tmp_path):
    assert mm.Checkpoint(write(tmp_path, bf16(), config)).picked(3).activation == activation


@pytest.mark.parametrize("limit", [0, 0.0, -1.0, None])
def test_a_limit_of_0_is_no_clamp(limit, tmp_path):
    folder = write(tmp_path, bf16(), {"swiglu_limit": limit})
    assert mm.Checkpoint(folder).picked(3).clamp is None


def test_reading_streams():
    """Beside the result at most two experts lie in memory."""
    script = Path(__file__).parents[2] / "scripts" / "load_speed.py"
    sizes = ["--experts", "16", "--hidden", "2048", "--intermediate", "1024", "--shards", "2"]
    done = subprocess.run([sys.executable, script, *sizes], capture_output=True, text=True,
                          timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    beside = float(done.stdout.split("beside the result ")[1].split()[0])
    assert 0 < beside <= 2 and "GB/s" in done.stdout


def change(tensors, pick, new):
    """`tensors` with the one that ends in `pick` changed, or taken out."""
    name = next(n for n in tensors if n.endswith(pick))
    old = tensors.pop(name)
    return tensors | ({} if new is None else {name: new(old)})


def int4():
    tensors = bf16()
    return {
        n.replace("weight", key): t
        for n in tensors
        for key, t in (("weight_packed", torch.zeros(I, H // 8, dtype=torch.int32)),
                       ("weight_scale", torch.ones(I, H // 32).bfloat16()))
    }  # fmt: skip


def half_scales(t):
    return t.repeat_interleave(2, dim=0)


def channel(value, kind=(-1, 1)):
    """FP8 with one scale, `value`, per row (or per matrix)."""
    tensors = fp8("weight_scale")
    rows = {n: tensors[n.removesuffix("_scale")].shape[0] if kind[0] else 1
            for n in tensors if n.endswith("_scale")}  # fmt: skip
    return tensors | {n: torch.full((num, 1), value) for n, num in rows.items()}


def nvfp4():
    w = made("nvfp4")
    tensors = per_expert(
        {"weight": (w.w13.data, w.w2.data), "weight_scale": (w.w13.scale, w.w2.scale)}
    )
    for e in range(E):
        for g, name in zip(
            (*w.w13.global_scale[e].expand(2), w.w2.global_scale[e]), LINEARS, strict=True
        ):
            head = f"model.layers.3.mlp.experts.{e}.{name}."
            tensors |= {
                head + "weight_scale_2": g.clone(),
                head + "input_scale": torch.tensor(1e-3),
            }
    return tensors


def first(tensors, end, value):
    """`tensors` with the first value of the one that ends so replaced."""

    def new(old):
        old = old.clone()
        old.view(-1)[0] = value
        return old

    return change(tensors, end, new)


def fused(scale=None):
    w13, w2 = (w.bfloat16() for w in source())
    head = "model.layers.3.mlp.experts."
    parts = {head + "gate_up_proj": w13, head + "down_proj": w2}
    return parts if scale is None else parts | {head + scale: torch.ones(1)}


def narrow(name, rows):
    return lambda tensors: change(change(tensors, f"2.{name}.weight", lambda t: t[:rows]),
                                  "2.up_proj.weight", lambda t: t[:rows])  # fmt: skip


TWO = {
    f"model.layers.3.mlp.experts.0.gate_proj.{n}": torch.ones(1)
    for n in ("weight_scale", "weight_scale_2")
}
ROTATED = {
    "quantization_config": {"transform_config": {"config_groups": {"R4": {"type": "hadamard"}}}}
}


def rotated(*places):
    """compressed-tensors' rotations of so many places of linears."""
    groups = {f"R{n}": {"type": "hadamard", "apply": [{"targets": ["re:.*down_proj$"], "location": p}]}
              for n, p in enumerate(places)}  # fmt: skip
    return {"quantization_config": {"transform_config": {"config_groups": groups}}}


QUARK_R4 = {"quantization_config": {"algo_config": [{"name": "rotation", "r1": True, "r4": True}]}}
NO_COUNT = {"num_experts": None}
SIZES = {"hidden_size": H, "moe_intermediate_size": 2 * I}
BAD_SCALES = [
    *((f"input_scale {v}", lambda v=v, n=n: first(nvfp4(), f"1.{n}.input_scale", v), {}, RangeError, "input_scale must be positive", 3)
      for v in (0.0, -1.0, torch.nan, torch.inf) for n in ("up_proj", "down_proj")),
    *((f"weight_scale_2 {v}", lambda v=v: first(nvfp4(), "1.up_proj.weight_scale_2", v), {}, RangeError, "global ones positive", 3)
      for v in (0.0, -1.0, torch.nan, torch.inf)),
    *((f"FP8 scale {v}", lambda v=v: first(fp8("weight_scale"), "1.up_proj.weight_scale", v), {}, RangeError, "not negative", 3)
      for v in (-1.0, torch.nan, torch.inf)),
    ("a negative scale per row", lambda: first(channel(1e-3), "1.up_proj.weight_scale", -1.0), {}, RangeError, "not negative", 3),
    ("a negative scale per matrix", lambda: first(channel(1e-3, (0, 1)), "1.up_proj.weight_scale", -1.0), {}, RangeError, "not negative", 3),
    ("a negative NVFP4 scale", lambda: first(nvfp4(), "1.up_proj.weight_scale", -1.0), {}, RangeError, "not negative", 3),
    ("reciprocals per row", lambda: channel(1000.0), {}, RangeError, "scales must multiply", 3),
    ("reciprocals per matrix", lambda: channel(1000.0, (0, 1)), {}, RangeError, "scales must multiply", 3),
    ("NVFP4's factor upside down", lambda: {n: t.reciprocal() if "scale_2" in n else t for n, t in nvfp4().items()}, {}, RangeError, "scales must multiply", 3),
]  # fmt: skip
REFUSED = [
    *BAD_SCALES,
    ("an expert without input_scale", lambda: change(nvfp4(), "2.down_proj.input_scale", None), {}, FileError, "of all experts must have an input_scale.*got 11", 3),
    ("another activation of experts", lambda: bf16(), {"expert_hidden_act": "relu2"}, NotAvailable, "'silu' and .*relu2", 3),
    ("gpt-oss's blocks in another model", lambda: gpt_oss(True), OSS | {"model_type": "gpt_oss_puzzle"}, NotAvailable, "order of rows.*gpt_oss_puzzle", 3),
    ("gpt-oss's floats in another model", lambda: gpt_oss(False), OSS | {"model_type": "openai_privacy_filter", "swiglu_alpha": 1.702}, NotAvailable, "order of rows", 3),
    ("one tensor of an unknown model", fused, {"model_type": "unknown"}, NotAvailable, "order of rows", 3),
    ("a scale that nothing reads", lambda: fused("gate_up_proj_scales"), {}, NotAvailable, "must be known; got .*gate_up_proj_scales", 3),
    ("blocks beside floats", lambda: gpt_oss(True) | fused(), OSS, NotAvailable, "one of these; got .*gate_up_proj_blocks and .*gate_up_proj", 3),
    ("FP8 with a second factor", lambda: fp8("weight_scale_inv") | {n: t for n, t in TWO.items() if n.endswith("_2")}, {}, NotAvailable, "no global scale", 3),
    ("two scales", lambda: fp8("weight_scale_inv") | {n: t for n, t in TWO.items() if n.endswith("scale")}, {}, NotAvailable, "one of these; got .*weight_scale_inv and .*weight_scale", 3),
    ("two names of gate", lambda: bf16() | {"model.layers.3.mlp.experts.0.w1.weight": torch.ones(I, H)}, {}, NotAvailable, "gate_proj and .*w1", 3),
    ("an online rotation", lambda: bf16(), ROTATED, NotAvailable, "no rotation.*transform_config", 3),
    ("a rotation of activations beside others", lambda: bf16(), rotated("weight_output", "input"), NotAvailable, "no rotation.*transform_config", 3),
    ("a rotation of an unknown place", lambda: bf16(), rotated("elsewhere"), NotAvailable, "no rotation.*transform_config", 3),
    ("Quark's rotation of activations", lambda: bf16(), QUARK_R4, NotAvailable, "no rotation.*algo_config", 3),
    ("a clamp per layer", lambda: bf16(), {"swiglu_limits": [0, None, 0.0, 7.0]}, NotAvailable, "swiglu_limits 7.0 in layer 3", 3),
    ("clamps of fewer layers", lambda: bf16(), {"swiglu_limits": [0, 0]}, FileError, "swiglu_limits must have every layer", 3),
    ("no count of experts", lambda: bf16(), NO_COUNT, FileError, "must say how many experts", 3),
    ("experts by other numbers", lambda: {n.replace("experts.0.", "experts.9."): t for n, t in bf16().items()}, {}, FileError, "numbered from 0 on; got .1, 2, 3, 9.", 3),
    ("half of each expert", lambda: bf16(), SIZES, ShapeError, "width of config.json.*tensor-parallel", 3),
    ("tokens of another width", lambda: bf16(), {"hidden_size": 2 * H}, ShapeError, "width of config.json", 3),
    ("half of each Mixtral expert", lambda: bf16(**MIXTRAL_NAMES), {"model_type": "mixtral", "intermediate_size": 2 * I}, ShapeError, "width of config.json", 3),
    ("experts of two sizes", lambda: narrow("gate_proj", I // 2)(bf16()), {}, ShapeError, "gate of expert 2 must have the shape of the first", 3),
    ("an expert of one row", lambda: narrow("gate_proj", 1)(bf16()), {}, ShapeError, "gate of expert 2 must have the shape of the first", 3),
    ("experts that predict further tokens alone", lambda: bf16(prefix="mtp.layers.3.mlp.experts."), {}, RangeError, "the layer must have experts", 3),
    ("no experts there", lambda: bf16(), {}, RangeError, "those with experts: 3..3", 4),
    ("a missing tensor", lambda: change(bf16(), "2.up_proj.weight", None), {}, FileError, "2.up_proj.weight", 3),
    ("a missing expert", lambda: {n: t for n, t in bf16().items() if ".3.mlp.experts.3." not in n}, {}, FileError, "4 experts of config", 3),
    ("an unknown tensor", lambda: bf16() | {"model.layers.3.mlp.experts.0.gate_proj.weight_zero_point": torch.zeros(1)}, {}, NotAvailable, "weight_zero_point", 3),
    ("INT4", int4, {}, NotAvailable, "torch.int32", 3),
    ("other blocks", lambda: change(fp8("weight_scale_inv"), "0.gate_proj.weight_scale_inv", half_scales), {}, DTypeError, "scales torch.float32", 3),
    ("FP4 with float scales", lambda: change(mxfp4(), "0.gate_proj.weight_scale", lambda t: t.float()), {}, DTypeError, "MXFP4", 3),
    ("an activation", lambda: bf16(), {"hidden_act": "relu2"}, NotAvailable, "hidden_act 'relu2'", 3),
    ("another alpha", lambda: bf16(), {"swiglu_alpha": 1.5}, NotAvailable, "swiglu_alpha be 1.702", 3),
    ("alpha without a limit", lambda: bf16(), {"swiglu_alpha": 1.702}, NotAvailable, "positive swiglu_limit", 3),
    ("alpha with a limit of 0", lambda: bf16(), {"swiglu_alpha": 1.702, "swiglu_limit": 0.0}, NotAvailable, "positive swiglu_limit", 3),
    ("another beta", lambda: bf16(), {"swiglu_alpha": 1.702, "swiglu_beta": 0.5, "swiglu_limit": 7.0}, NotAvailable, "swiglu_beta 1", 3),
    ("a softcap", lambda: bf16(), {"mlp_gate_softcap": 10.0}, NotAvailable, "softcap", 3),
    ("rows in an unknown order", lambda: gpt_oss(True), OSS | {"model_type": "other", "swiglu_alpha": 1.702}, NotAvailable, "order of rows", 3),
    ("another SiTU", lambda: bf16(), {"hidden_act": "situ", "activation_situ_beta": 1.0}, NotAvailable, "SiTU must have", 3),
    ("two prefixes", lambda: bf16() | bf16(prefix="draft.layers.3.mlp.experts."), {}, FileError, "one prefix", 3),
    ("mixed formats", lambda: mxfp4() | {n: t for n, t in bf16().items() if "0.up_proj" in n}, {}, DTypeError, "must be one of", 3),
    ("NaN", lambda: change(bf16(), "1.down_proj.weight", lambda t: t * torch.nan), {}, RangeError, "NaN or Inf in expert 1", 3),
    ("scales upside down", lambda: {n: t.reciprocal() if "scale" in n else t for n, t in fp8("weight_scale_inv").items()}, {}, RangeError, "scales must multiply", 3),
    ("a transposed down", lambda: change(bf16(), "0.down_proj.weight", lambda t: t.T), {}, ShapeError, "down", 3),
]  # fmt: skip


@pytest.mark.parametrize(("what", "tensors", "config", "kind", "says", "layer"), REFUSED)
def test_what_cannot_be_read_is_refused(what, tensors, config, kind, says, layer, tmp_path):
    folder = write(tmp_path, tensors(), config)
    with pytest.raises(kind, match=says):
        mm.ExpertWeights.from_checkpoint(folder, layer)


@pytest.mark.parametrize("recipe", ["w8a8", "bf16", "w4a8_block"])
@pytest.mark.parametrize("tensors", [lambda: channel(1000.0), lambda: {n: t.reciprocal() if "scale" in n else t for n, t in fp8("weight_scale_inv").items()}], ids=["row", "block"])  # fmt: skip
def test_reciprocals_are_refused_whatever_recipe_is_asked_for(tensors, recipe, tmp_path):
    folder = write(tmp_path, tensors())
    with pytest.raises(RangeError, match="scales must multiply"):
        mm.ExpertWeights.from_checkpoint(folder, 3, recipe=recipe)


def test_a_tensor_in_two_files_without_an_index_is_refused(tmp_path):
    whole = bf16()
    for half in range(2):  # as tensor-parallel ranks save theirs
        part = {n: t.chunk(2, 1 if "down" in n else 0)[half].contiguous() for n, t in whole.items()}
        save_file(part, write(tmp_path, {"x": torch.ones(1)}) / f"model-tp{half}.safetensors")
    with pytest.raises(
        FileError, match=r"model-tp0\.safetensors and model-tp1\.safetensors.*merge"
    ):
        mm.ExpertWeights.from_checkpoint(tmp_path, 3)


@pytest.mark.parametrize("config", [{"hidden_size": H, "moe_intermediate_size": I}, {"hidden_size": H - 7, "moe_intermediate_size": I - 28}])  # fmt: skip
def test_widths_may_be_padded(config, tmp_path):
    picked = mm.Checkpoint(write(tmp_path, bf16(), config)).picked(3)
    assert (picked.hidden, picked.intermediate) == (H, I)


def test_layers_that_predict_further_tokens_are_read_when_asked_for(tmp_path):
    """Qwen3-Next: mtp.layers.0 stands beside model.layers.0."""
    ahead = {n: t * 2 for n, t in bf16(prefix="mtp.layers.3.mlp.experts.").items()}
    ahead |= {n.replace("layers.3", "layers.9"): t.clone() for n, t in ahead.items()}
    folder = write(tmp_path, bf16() | ahead, {"model_type": "qwen3_next"})
    checkpoint = mm.Checkpoint(folder)
    assert checkpoint.layers == [3]
    assert checkpoint.picked(3).prefix == "model.layers.3.mlp.experts."
    body = mm.ExpertWeights.from_checkpoint(folder, 3)
    mtp = mm.ExpertWeights.from_checkpoint(folder, 3, prefix="mtp.layers.3.mlp.experts.")
    assert torch.equal(mtp.w2.data, 2 * body.w2.data)
    with pytest.raises(RangeError, match=r"under mtp\.layers\.4"):
        checkpoint.picked(3, prefix="mtp.layers.4.mlp.experts.")


def test_llama4_says_that_its_weights_multiply_tokens(tmp_path):
    config = {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}}
    folder = write(
        tmp_path, bf16(prefix="language_model.model.layers.3.feed_forward.experts."), config
    )
    picked = mm.Checkpoint(folder).picked(3)
    assert picked.weights_multiply == "tokens" and "routing weights multiply tokens" in str(picked)
    (tmp_path / "qwen").mkdir()
    assert mm.Checkpoint(write(tmp_path / "qwen", bf16())).picked(3).weights_multiply == "outputs"


@pytest.mark.parametrize("model", ["qwen3_moe", "qwen3_5_moe_text", "mistral4"])
def test_one_tensor_of_split_gate_and_up_is_read(model, tmp_path):
    w13, w2 = (w.bfloat16() for w in source())
    folder = write(tmp_path, fused(), {"model_type": model})
    w = mm.ExpertWeights.from_checkpoint(folder, 3)
    assert torch.equal(w.w13.data.flatten(1, 2), w13) and torch.equal(w.w2.data, w2)


def test_nvfp4_in_modelopts_names_is_taken_as_it_is(tmp_path):
    w = mm.ExpertWeights.from_checkpoint(write(tmp_path, nvfp4()), 3)
    assert w.recipe == "nvfp4" and torch.equal(w.w13.scale.view(torch.uint8), made("nvfp4").w13.scale.view(torch.uint8))  # fmt: skip


def test_files_that_are_not_whole_are_refused(tmp_path):
    folder = write(tmp_path, bf16(), shards=2)
    shard = sorted(folder.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1000])
    with pytest.raises(FileError, match="whole safetensors file"):
        mm.ExpertWeights.from_checkpoint(folder, 3)
    shard.write_bytes(whole[:4])
    with pytest.raises(FileError, match="whole safetensors file"):
        mm.ExpertWeights.from_checkpoint(folder, 3)
    shard.unlink()
    with pytest.raises(FileError, match="a shard must exist"):
        mm.ExpertWeights.from_checkpoint(folder, 3)
    (folder / "config.json").unlink()
    with pytest.raises(FileError, match=r"config\.json"):
        mm.Checkpoint(folder)
    with pytest.raises(FileError, match="must exist"):
        mm.Checkpoint(folder / "none")


def test_experts_that_do_not_fit_the_ranks_are_refused(tmp_path):
    with pytest.raises(RangeError, match="divide evenly over ranks"):
        mm.ExpertWeights.from_checkpoint(write(tmp_path, bf16()), 3, num_ranks=3)


@pytest.mark.parametrize(("recipe", "kind"), [("w4a8_block", "e4m3_image"), ("w4a16", "mx_image")])
def test_a_hopper_gpu_gets_images_an_expert_at_a_time(tmp_path, gpu, recipe, kind):
    tensors = mxfp4()
    if kind == "mx_image":  # the third expert has a scale for which placed images have no room
        next(t for n, t in tensors.items() if "experts.2.down" in n and "scale" in n)[0, 0] = 129
    folder = write(tmp_path, tensors)
    packed = mm.ExpertWeights.from_checkpoint(folder, 3, recipe=recipe)
    assert packed.is_packed and packed.w13.kind == packed.w2.kind == kind
    again = packed.canonical()
    for expert in range(E):
        for name, suffix in (("w13", "gate_proj"), ("w2", "down_proj")):
            key = f"model.layers.3.mlp.experts.{expert}.{suffix}.weight"
            found = getattr(again, name)[expert]
            found = found[0] if name == "w13" else found
            assert torch.equal(found.data, tensors[key])
            assert torch.equal(found.scale, tensors[f"{key}_scale"])


def test_experts_that_no_image_holds_stay_canonical(tmp_path, gpu):
    tensors = mxfp4()
    next(t for n, t in tensors.items() if "experts.3.up" in n and "scale" in n)[0, 0] = 0
    w = mm.ExpertWeights.from_checkpoint(write(tmp_path, tensors), 3, recipe="w4a8")
    assert not w.is_packed and int(w.w13.scale[3, 1, 0, 0]) == 0
