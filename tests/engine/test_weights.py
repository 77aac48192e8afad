"""ExpertWeights: checkpoints' layouts, files, slices; and quantising that needs little memory."""

import os
import subprocess
import sys

import pytest
import torch

import megamoe as mm
from megamoe.engine.planning import log_once
from megamoe.errors import RangeError
from megamoe.formats.quantize import dequantize, weight_global_scale
from megamoe.formats.spec import recipe_named
from megamoe.problem import RECIPES

E, I, H = 6, 160, 256


def source(seed=0, experts=E, intermediate=I, hidden=H):
    rng = torch.Generator().manual_seed(seed)
    w13 = torch.randn(experts, 2 * intermediate, hidden, generator=rng).bfloat16()
    w2 = torch.randn(experts, hidden, intermediate, generator=rng).bfloat16()
    return w13, w2


def same(a, b):
    left, right = a.state_dict(), b.state_dict()
    return (
        a.recipe == b.recipe
        and left.keys() == right.keys()
        and all(
            left[n].dtype == right[n].dtype
            and torch.equal(
                left[n].reshape(-1).view(torch.uint8), right[n].reshape(-1).view(torch.uint8)
            )
            for n in left
        )
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantize_is_the_formats_own_rounding(recipe):
    w13, w2 = source()
    made = mm.ExpertWeights.quantize(w13, w2, recipe)
    fmt = recipe_named(recipe).weights.name
    pairs = ((w13.view(E, 2, I, H), made.w13), (w2, made.w2))
    for w, part in pairs:
        g = weight_global_scale(w) if fmt == "nvfp4" else None
        plain = mm.quantize(w, fmt, global_scale=g)
        assert torch.equal(dequantize(plain), dequantize(part))
    full13, full2 = made.dequantize()
    assert full13.shape == (E, 2 * I, H) and full2.shape == (E, H, I)
    assert (full13 - w13.float()).norm() / w13.float().norm() < 0.15
    assert (made.num_experts, made.intermediate, made.hidden) == (E, I, H)


@pytest.mark.parametrize("recipe", RECIPES)
def test_interleaved_weights_are_the_same_experts(recipe):
    w13, w2 = source()
    mixed = w13.view(E, 2, I, H).transpose(1, 2).reshape(E, 2 * I, H)
    a = mm.ExpertWeights.quantize(w13, w2, recipe)
    assert same(a, mm.ExpertWeights.quantize(mixed, w2, recipe, gate_up="interleaved"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_files_and_state_dicts_give_the_same_bytes_back(recipe, tmp_path):
    w13, w2 = source()
    b13, b2 = torch.randn(E, 2 * I), torch.randn(E, H)
    made = mm.ExpertWeights.quantize(w13, w2, recipe, b13=b13, b2=b2)
    made.save(tmp_path / "experts.safetensors")
    assert same(made, mm.ExpertWeights.load(tmp_path / "experts.safetensors"))
    assert same(made, mm.ExpertWeights.from_state_dict(made.state_dict(), recipe))
    part = made[2:5]
    part.save(tmp_path / "experts.safetensors")  # replaces the file
    assert same(part, mm.ExpertWeights.load(tmp_path / "experts.safetensors"))
    assert os.listdir(tmp_path) == ["experts.safetensors"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_slices_are_views_and_cat_joins_them_again(recipe):
    made = mm.ExpertWeights.quantize(*source(), recipe, b2=torch.ones(E, H))
    parts = [made.for_rank(r, 3) for r in range(3)]
    assert [p.num_experts for p in parts] == [2, 2, 2]
    assert parts[1].w13.data.data_ptr() == made.w13.data[2].data_ptr()
    assert same(mm.ExpertWeights.cat(parts), made)
    assert sum(p.nbytes for p in parts) - made.nbytes == (8 if recipe == "nvfp4" else 0)  # x_global
    assert same(made.to("cpu"), made)


def test_nbytes_counts_values_and_scales():
    w13, w2 = source()
    values = w13.numel() + w2.numel()
    assert mm.ExpertWeights.quantize(w13, w2, "bf16").nbytes == 2 * values
    assert mm.ExpertWeights.quantize(w13, w2, "w4a8").nbytes == values // 2 + values // 32
    blocks = E * (2 * 2 * 2 + 2 * 2)  # 160 rows are two blocks of 128, of gate and up each
    assert mm.ExpertWeights.quantize(w13, w2, "w8a8").nbytes == values + 4 * blocks


def test_deepseek_v3_tensors_are_taken_as_they_are():
    """One checkpoint tensor each for gate, up and down, with weight_scale_inv per 128x128."""
    w13, w2 = source()
    gate, up = w13.view(E, 2, I, H).unbind(1)
    q = [mm.quantize(w, "fp8_128x128") for w in (gate, up, w2)]
    taken = mm.ExpertWeights.from_quantized(
        torch.cat([q[0].data, q[1].data], 1), torch.cat([q[0].scale, q[1].scale], 1),
        q[2].data, q[2].scale, recipe="w8a8",
    )  # fmt: skip
    assert same(taken, mm.ExpertWeights.quantize(w13, w2, "w8a8"))


def test_fp8_blocks_with_e8m0_scales_count_by_value():
    codes = torch.full((1, 2, 1), 120, dtype=torch.uint8)
    ones = torch.ones(1, 64, 32).to(torch.float8_e4m3fn)
    down = torch.ones(1, 32, 32).to(torch.float8_e4m3fn)
    taken = mm.ExpertWeights.from_quantized(
        ones, codes.view(torch.float8_e8m0fnu), down, codes[:, :1].view(torch.float8_e8m0fnu),
        recipe="w8a8",
    )  # fmt: skip
    assert torch.equal(taken.w13.scale, torch.full((1, 2, 1, 1), 2.0**-7))


@pytest.mark.parametrize("made", ["quantize", "from_quantized", "sliced", "joined", "biased"])
def test_gpt_oss_experts_under_another_activation_are_warned_of(made, caplog):
    """Their gate and up are interleaved, with biases or without."""
    w13, w2 = torch.randn(2, 64, 32), torch.randn(2, 32, 32)
    q13, q2 = mm.quantize(w13.bfloat16(), "bf16"), mm.quantize(w2.bfloat16(), "bf16")
    w = {
        "quantize": lambda: mm.ExpertWeights.quantize(w13, w2, "bf16", gate_up="interleaved"),
        "from_quantized": lambda: mm.ExpertWeights.from_quantized(
            q13.data, None, q2.data, None, recipe="bf16", gate_up="interleaved"
        ),
        "biased": lambda: mm.ExpertWeights.quantize(
            w13, w2, "bf16", b13=torch.zeros(2, 64), b2=torch.zeros(2, 32)
        ),
    }.get(made, lambda: mm.ExpertWeights.quantize(w13, w2, "bf16", gate_up="interleaved"))()
    w = {"sliced": lambda: w[1:].to("cpu"), "joined": lambda: w.take([1, 0])}.get(made, lambda: w)()
    log_once.cache_clear()
    mm.MoE(w, w.num_experts, 1, activation="gpt_oss")
    mm.MoE(mm.ExpertWeights.quantize(w13, w2, "bf16"), 2, 1)
    assert not caplog.messages
    mm.MoE(w, w.num_experts, 1)
    (message,) = caplog.messages
    assert "its activation is 'gpt_oss'; with 'swiglu' its results are wrong" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_deepseek_v4_tensors_are_taken_as_they_are(dtype):
    """w1, w3 and w2 of every expert: packed bytes, float8_e8m0fnu scales per 32."""
    w13, w2 = source()
    q13, q2 = mm.quantize(w13, "mxfp4"), mm.quantize(w2, "mxfp4")
    taken = mm.ExpertWeights.from_quantized(
        q13.data.view(dtype), q13.scale.view(torch.float8_e8m0fnu),
        q2.data.view(dtype), q2.scale.view(torch.float8_e8m0fnu), recipe="w4a8",
    )  # fmt: skip
    assert same(taken, mm.ExpertWeights.quantize(w13, w2, "w4a8"))


def test_gpt_oss_tensors_are_taken_as_they_are():
    """Blocks of 16 bytes, gate and up rows interleaved, biases."""
    w13, w2 = source()
    b13, b2 = torch.randn(E, 2 * I).bfloat16(), torch.randn(E, H).bfloat16()
    wanted = mm.ExpertWeights.quantize(w13, w2, "w4a16", b13=b13, b2=b2)

    def mix(t):
        return t.unflatten(1, (2, I)).transpose(1, 2).flatten(1, 2)

    q13, q2 = mm.quantize(mix(w13), "mxfp4"), mm.quantize(w2, "mxfp4")
    taken = mm.ExpertWeights.from_quantized(
        q13.data.unflatten(2, (-1, 16)), q13.scale, q2.data.unflatten(2, (-1, 16)), q2.scale,
        recipe="w4a16", gate_up="interleaved", b13=mix(b13), b2=b2,
    )  # fmt: skip
    assert same(taken, wanted)


@pytest.mark.parametrize("per_half", [False, True])
def test_nvfp4_tensors_are_taken_as_they_are(per_half):
    w13, w2 = source()
    g = torch.rand(E, 2) + 0.5 if per_half else torch.rand(E) + 0.5
    q13 = mm.quantize(w13.view(E, 2, I, H), "nvfp4", global_scale=g)
    q2 = mm.quantize(w2, "nvfp4", global_scale=torch.ones(E))
    taken = mm.ExpertWeights.from_quantized(
        q13.data.flatten(1, 2), q13.scale.flatten(1, 2), q2.data, q2.scale,
        recipe="nvfp4", w13_global=g, w2_global=torch.ones(E), x_global=0.5, acts_global=0.25,
    )  # fmt: skip
    assert torch.equal(dequantize(taken.w13), dequantize(q13))
    assert taken.x_global.item() == 0.5 and taken.acts_global.tolist() == [0.25] * E


def nvfp4(**changes):
    """Small weights as modelopt stores them, global scales amax / 2688."""
    w13, w2 = (w * 0.02 for w in source())
    made = mm.ExpertWeights.quantize(w13, w2, "nvfp4")
    given = {
        "w13_data": made.w13.data.flatten(1, 2), "w13_scale": made.w13.scale.flatten(1, 2),
        "w2_data": made.w2.data, "w2_scale": made.w2.scale, "w13_global": made.w13.global_scale,
        "w2_global": made.w2.global_scale, "recipe": "nvfp4",
    }  # fmt: skip
    return made, mm.ExpertWeights.from_quantized(**given | changes)


def test_reciprocal_global_scales_are_taken_when_said_and_refused_when_not():
    made, taken = nvfp4()
    assert same(taken, made)
    stored = {
        f"{name}_global": getattr(made, name).global_scale.reciprocal() for name in ("w13", "w2")
    }
    with pytest.raises(RangeError, match=r'w13: scales must multiply.*scales="divide"'):
        nvfp4(**stored)
    _, taken = nvfp4(**stored, scales="divide", x_global=30.0, acts_global=torch.full((E,), 60.0))
    for mine, wanted in zip(taken.dequantize(), made.dequantize(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=3e-7, atol=0)  # 1 / (1 / g)
    assert taken.x_global.item() == pytest.approx(1 / 30)
    with pytest.raises(RangeError, match="x_global must multiply"):
        nvfp4(x_global=30.0)
    _, taken = nvfp4(**stored, scales="multiply")
    assert taken.dequantize()[0].abs().max() > 1e5


def test_fp8_scales_may_be_stored_in_bf16_and_are_refused_upside_down():
    made = mm.ExpertWeights.quantize(*(w * 0.02 for w in source()), "w8a8")
    rounded = [q.scale.bfloat16() for q in (made.w13, made.w2)]

    def take(w13_scale, w2_scale, **options):
        return mm.ExpertWeights.from_quantized(
            made.w13.data.flatten(1, 2), w13_scale.flatten(1, 2), made.w2.data, w2_scale,
            recipe="w8a8", **options,
        )  # fmt: skip

    assert same(take(*rounded), take(*(s.float() for s in rounded)))
    assert torch.equal(take(*rounded).w2.scale, rounded[1].float())
    upside_down = [s.float().reciprocal() for s in rounded]
    with pytest.raises(RangeError, match="scales must multiply"):
        take(*upside_down)
    taken = take(*upside_down, scales="divide")
    torch.testing.assert_close(taken.w2.scale, rounded[1].float(), rtol=3e-7, atol=0)


def test_experts_may_come_one_by_one():
    w13, w2 = source()
    done = []
    made = mm.ExpertWeights.quantize_each(
        zip(w13, w2, strict=True), E, "w4a8_block", progress=done.append
    )
    assert same(made, mm.ExpertWeights.quantize(w13, w2, "w4a8_block"))
    assert done == list(range(1, E + 1))


MEMORY = """
import resource, sys, torch
import megamoe as mm
torch.set_num_threads(1)
recipe = sys.argv[1]
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
mm.ExpertWeights.quantize(torch.randn(1, 512, 256), torch.randn(1, 256, 256), recipe)
E, I, H = 4, 2048, 4096
def fill(*shape):
    t = torch.empty(*shape, dtype=torch.bfloat16)
    for row in t.flatten(0, 1): row[:] = torch.arange(row.numel()) % 7 - 3
    return t
w13, w2 = fill(E, 2 * I, H), fill(E, H, I)
before = peak()
made = mm.ExpertWeights.quantize(w13, w2, recipe)
print((peak() - before - made.nbytes) / (6 * I * H))
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="reads ru_maxrss in kilobytes, as Linux gives it"
)
@pytest.mark.parametrize("recipe", ["w4a8", "w8a8", "nvfp4"])
def test_quantising_needs_less_than_one_and_a_half_experts_beside_input_and_output(recipe):
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, recipe], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 1.5


@pytest.mark.parametrize("recipe", ["w8a8", "nvfp4"])
def test_scales_and_biases_that_are_stored_transposed_are_held_densely(recipe):
    rng = torch.Generator().manual_seed(0)
    w13, w2 = torch.randn(2, 512, 256, generator=rng), torch.randn(2, 256, 256, generator=rng)
    b2 = torch.randn(2, 256, generator=rng)
    w = mm.ExpertWeights.quantize(w13.bfloat16(), w2.bfloat16(), recipe, b2=b2)

    def turned(t):
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)

    found = mm.ExpertWeights.from_quantized(
        w.w13.data.flatten(1, 2), turned(w.w13.scale.flatten(1, 2)), w.w2.data, turned(w.w2.scale),
        w13_global=w.w13.global_scale, w2_global=w.w2.global_scale, b2=turned(b2), recipe=recipe,
    )  # fmt: skip
    assert all(t.is_contiguous() for t in found.held().values())
    for name, t in found.held().items():
        assert torch.equal(t.float(), w.held()[name].float())
