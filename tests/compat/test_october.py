"""The interface of October 2026: other orders, mma_types, shared experts, Hopper's calls, NVFP4."""

import io
import os
import sys
from contextlib import redirect_stdout
from dataclasses import replace

import pytest
import torch

import megamoe as mm
from megamoe.compat import deep_gemm
from megamoe.compat.deep_gemm import mega
from megamoe.compat.deep_gemm.shared import shared_rows
from megamoe.errors import DTypeError, NotAvailable, RangeError, ShapeError
from megamoe.formats.quantize import dequantize
from megamoe.formats.spec import recipe_named
from tests.compat.support import Case, E, H, I, K, values
from tests.reference import rules64

SIZES = (None, E, 8, K, H, I)


def error(y, wanted):
    y, wanted = y.double(), wanted.double()
    return float((y - wanted).norm() / wanted.norm())


def layer64(case, w13, w2, x, recipe, **options):
    """The layer in float64 on plain values."""
    return torch.from_numpy(
        rules64.layer(
            x.float().numpy(), case.idx.numpy(), case.weight.numpy(),
            w13.view(E, 2, I, H).float().numpy(),
            w2.float().numpy(), recipe=recipe, **options,
        )
    )  # fmt: skip


# -- orders of arguments -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "mma_type", "shared"),
    [
        ((), "fp8xfp4", 0),
        ((2, None, "fp8xfp4", "swiglu"), "fp8xfp4", 2),  # SGLang's fork
        ((0, None, "nvfp4xnvfp4"), "nvfp4xnvfp4", 0),
        ((None, "bf16xbf16", "swiglu"), "bf16xbf16", 0),  # DeepGEMM of June
        ((True, "fp8xfp4", "swiglu"), "fp8xfp4", 0),
        ((True, "swiglu"), "fp8xfp4", 0),  # before it, and TensorRT-LLM
        ((True, "swigluoai"), "fp8xfp4", 0),
    ],
)
@pytest.mark.filterwarnings("ignore:use_fp8_dispatch")
def test_a_buffers_arguments_come_in_any_releases_order(more, mma_type, shared):
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(*SIZES, *more, device="cpu")
    assert (buffer.mma_type, buffer.num_shared_experts) == (mma_type, shared)
    assert buffer.activation == ("swigluoai" if "swigluoai" in more else "swiglu")


def test_a_ring_of_tokens_is_no_number_of_shared_experts():
    for more in ((4096,), (4096, "fp8xfp4", "swiglu")):
        buffer = deep_gemm.SymmBuffer(*SIZES, *more, device="cpu")
        assert (buffer.num_ring_tokens, buffer.num_shared_experts) == (4096, 0)
    assert deep_gemm.SymmBuffer(*SIZES, 1, device="cpu").num_shared_experts == 1


def test_a_calls_arguments_come_in_any_releases_order():
    case = Case("fp8xfp4", 9)
    buffer = case.buffer()
    case.fill(buffer)
    wanted = case.run(buffer, clamp=0.5)
    stats = [torch.zeros(E, dtype=torch.int32) for _ in range(2)]
    y = torch.empty_like(wanted)
    june = (stats[0], (1, 1, 32), "swiglu", 0.5, False)
    october = (None, None, stats[1], (1, 1, 32), "swiglu", 0.5, False)
    for more in (june, october):
        deep_gemm.fp8_fp4_mega_moe(y.zero_(), case.l1, case.l2, buffer, *more)
        assert torch.equal(y, wanted)
    assert torch.equal(*stats) and torch.equal(stats[0], case.counts())


def test_pre_dispatch_knows_the_old_flag_at_its_place():
    case = Case("mxf4xmxf4", 5)
    buffers = [case.buffer() for _ in range(3)]
    for buffer, last in zip(buffers, ((True,), ("mxf4xmxf4",), ()), strict=True):
        deep_gemm.mega_moe_pre_dispatch(
            case.x, case.idx, case.weight, buffer.x, buffer.x_sf, buffer.topk_idx,
            buffer.topk_weights, 5, 32, *last, **({} if last else {"use_fp4_acts": True}),
        )  # fmt: skip
    assert torch.equal(buffers[0].buffer, buffers[1].buffer)
    assert torch.equal(buffers[0].buffer, buffers[2].buffer)


# -- mma_types ---------------------------------------------------------------------------------


def test_packed_fp4_has_its_own_order_of_rows():
    rows = torch.arange(64.0).repeat(2, 1)[..., None].expand(2, 64, 4)
    order = mega._interleave_weights_packed_fp4(rows.contiguous())[1, :, 0].int().tolist()
    assert order[:16] == [*range(0, 16, 2), *range(32, 48, 2)]
    assert order[16:32] == [*range(1, 16, 2), *range(33, 48, 2)]
    assert order[32:40] == list(range(16, 32, 2))


def test_weights_of_another_order_are_refused():
    case = Case("mxf4xmxf4", 5)
    buffer = case.buffer()
    case.fill(buffer)
    case.run(buffer)
    case.l1, case.l2 = deep_gemm.transform_weights_for_mega_moe(*case.plain)
    with pytest.raises(RangeError, match="transformed for the mma_type of the buffer"):
        case.run(buffer)
    other = Case("fp8xfp4", 5)
    buffer = other.buffer()
    other.fill(buffer)
    other.l1, other.l2 = deep_gemm.transform_weights_for_mega_moe(*case.plain, mma_type="mxf4xmxf4")
    with pytest.raises(RangeError, match="runs of 16"):
        other.run(buffer)


def test_weights_that_a_caller_lays_out_itself_are_read_by_the_buffers_mma_type():
    case = Case("mxf4xmxf4", 7)
    buffer = case.buffer()
    case.fill(buffer)
    wanted = case.run(buffer)
    data, scale = case.plain[0]
    case.l1 = tuple(map(mega._interleave_weights_packed_fp4, (data, scale)))
    case.l1 = case.l1[0], mega._transpose_sf_for_utccp(case.l1[1])
    assert buffer.x.dtype == torch.uint8
    assert torch.equal(case.run(buffer), wanted)


@pytest.mark.parametrize("name", ["DG_USE_FP4_ACTS", "DG_USE_MXF4_KIND"])
def test_old_switches_are_refused(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    with pytest.raises(RangeError, match="mxf4xmxf4"):
        deep_gemm.get_symm_buffer_for_mega_moe(*SIZES, device="cpu")


def test_a_clamp_of_0_lets_nothing_through():
    case = Case("fp8xfp4", 5)
    buffer = case.buffer()
    case.fill(buffer)
    assert not case.run(buffer, clamp=0.0).any()


def plain_bytes(words):
    return words.clone(memory_format=torch.contiguous_format).view(torch.uint8)


@pytest.mark.parametrize(
    ("options", "activation"),
    [
        ({"activation": "swigluoai"}, "gpt_oss"),
        ({"activation_alpha": 1.702, "activation_beta": 1.0}, "gpt_oss"),
        ({"activation": "situ"}, "situ"),  # SGLang's kernel has Kimi K3's factors
        ({"activation": "situ", "activation_alpha": 4.0, "activation_beta": 25.0}, "situ"),
    ],
)
def test_other_activations_are_known_under_all_their_names(options, activation):
    case = Case("fp8xfp4", 9)
    buffer = case.buffer()
    case.fill(buffer)
    weights = mm.ExpertWeights.from_quantized(
        case.plain[0][0].view(torch.uint8), plain_bytes(case.plain[0][1]),
        case.plain[1][0].view(torch.uint8), plain_bytes(case.plain[1][1]),
        recipe="w4a8",
    )  # fmt: skip
    for clamp, ours in ((7.0, 7.0), (None, float("inf"))):
        wanted = mm.moe(
            buffer.tokens(9), case.idx, case.weight, weights, activation=activation, clamp=ours
        )
        assert torch.equal(case.run(buffer, clamp=clamp, **options), wanted)


# -- shared experts ----------------------------------------------------------------------------


def mlp64(x, w13, w2, clamp, acts):
    """A gated MLP in float64, the activations rounded as between the layer's linears."""
    gate, up = (x.double() @ w13.double().T).bfloat16().double().chunk(2, dim=1)
    gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    h = (gate / (1 + torch.exp(-gate))) * up
    if acts is not None:
        h = dequantize(mm.quantize(h.float(), acts)).double()
    return h @ w2.double().T


@pytest.mark.parametrize("weights", ["fp8", "fp4", "bf16"])
@pytest.mark.parametrize("num_shared", [1, 2])
def test_shared_experts_are_added_to_every_token(weights, num_shared):
    case = Case("bf16xbf16" if weights == "bf16" else "fp8xfp4", 11, masked_ratio=0.3)
    rng = torch.Generator().manual_seed(7)
    wide = num_shared * I
    w13 = torch.randn(2 * wide, H, generator=rng).bfloat16()
    w2 = torch.randn(H, wide, generator=rng).bfloat16()
    if weights == "bf16":
        plain = w13, w2
    else:
        plain = tuple(cast_shared(w, weights) for w in (w13, w2))
        w13, w2 = (shared_values(*pair) for pair in plain)
    l1, l2 = deep_gemm.transform_weights_for_mega_moe(*plain)
    buffer = case.buffer(num_shared_experts=num_shared)
    if weights != "bf16":
        assert buffer.shared_l1_acts_sf.shape == buffer.x_sf.shape
    case.fill(buffer)
    y = case.run(buffer, clamp=10.0, shared_l1_weights=l1, shared_l2_weights=l2)
    acts = None if weights == "bf16" else "mxfp8"
    x = case.x if acts is None else case._tokens()
    wanted = case.expected(10.0) + mlp64(x, w13, w2, 10.0, acts)
    assert error(y, wanted) < recipe_named("w4a8" if acts else "bf16").tolerance
    l1[0].data.zero_() if weights != "bf16" else l1.data.zero_()  # not kept out of date
    y = case.run(buffer, clamp=10.0, shared_l1_weights=l1, shared_l2_weights=l2)
    assert error(y, case.expected(10.0)) < recipe_named("w4a8").tolerance


def test_shared_weights_are_of_the_width_of_each_call():
    case, rng = Case("bf16xbf16", 3), torch.Generator().manual_seed(7)
    plain = (torch.randn(shape, generator=rng).bfloat16() for shape in ((2 * I, H), (H, I)))
    l1, l2 = deep_gemm.transform_weights_for_mega_moe(*plain)
    shared_rows(l1, l2, case.x, I, mm.Options())
    with pytest.raises(ShapeError, match="shared_l1_weights must be"):
        shared_rows(l1, l2, case.x, 2 * I, mm.Options())


def cast_shared(w, kind):
    cast = deep_gemm.per_token_cast_to_fp8 if kind == "fp8" else deep_gemm.per_token_cast_to_fp4
    data, scale = cast(w, use_ue8m0=True, gran_k=32)
    return data, deep_gemm.transform_sf_into_required_layout(scale, *w.shape, (1, 32))


def shared_values(data, scale):
    if data.dtype == torch.float8_e4m3fn:
        steps = deep_gemm.unpack_ue8m0_from_int(scale).repeat_interleave(32, dim=1)
        return data.double() * steps
    return values(data[None], scale[None])[0]


# -- Hopper's calls ----------------------------------------------------------------------------


def fp8_case(num_tokens):
    case = Case("bf16xbf16", num_tokens)
    pairs = []
    for w in case.plain:
        made = [deep_gemm.per_block_cast_to_fp8(one, use_ue8m0=False) for one in w]
        pairs.append(tuple(torch.stack(parts) for parts in zip(*made, strict=True)))
    return case, pairs


@pytest.mark.parametrize("own_buffer", [True, False])
def test_the_hopper_call_holds_to_float64(own_buffer):
    case, pairs = fp8_case(9)
    l1, l2 = deep_gemm.transform_weights_for_mega_moe_sm90(*pairs)
    assert torch.equal(l1[0], mega._interleave_weights(pairs[0][0])) and l2[0] is pairs[1][0]
    assert torch.equal(l1[1], pairs[0][1])
    make = deep_gemm.get_symm_buffer_for_sm90_mega_moe if own_buffer else (
        deep_gemm.get_symm_buffer_for_mega_moe
    )  # fmt: skip
    buffer = make(None, E, 40, K, H, I, device="cpu")
    assert buffer.x_sf.dtype == (torch.float32 if own_buffer else torch.int32)
    deep_gemm.mega_moe_pre_dispatch_sm90(
        case.x, case.idx.int(), case.weight, buffer.x, buffer.x_sf, buffer.topk_idx,
        buffer.topk_weights, num_tokens=9, group_size=128, routed_scaling_factor=2.5,
    )  # fmt: skip
    y = torch.empty(9, H, dtype=torch.bfloat16)
    stats = torch.zeros(E, dtype=torch.int32)
    deep_gemm.fp8_mega_moe(
        y, l1, l2, buffer, stats, recipe=(128, 128, 128), activation="swiglu",
        activation_clamp=10.0, fast_math=True,
    )  # fmt: skip
    w13, w2 = (
        data.double() * sf.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
        for data, sf in pairs
    )
    data, scale = deep_gemm.per_token_cast_to_fp8(case.x, use_ue8m0=False)
    x = data.double() * scale.double().repeat_interleave(128, dim=1)
    case.weight = case.weight * 2.5
    assert error(y, layer64(case, w13, w2, x, "w8a8", clamp=10.0)) < recipe_named("w8a8").tolerance
    assert torch.equal(stats, case.counts())


def test_tokens_with_scales_of_the_other_kind_are_refused():
    case, pairs = fp8_case(9)
    l1, l2 = deep_gemm.transform_weights_for_mega_moe_sm90(*pairs)
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(None, E, 40, K, H, I, device="cpu")
    views = buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights
    y = torch.empty(9, H, dtype=torch.bfloat16)
    deep_gemm.mega_moe_pre_dispatch(case.x, case.idx, case.weight, *views, 9)
    with pytest.raises(RangeError, match="x_sf must hold float32"):
        deep_gemm.fp8_mega_moe(y, l1, l2, buffer)
    deep_gemm.mega_moe_pre_dispatch_sm90(case.x, case.idx, case.weight, *views, 9)
    deep_gemm.fp8_mega_moe(y, l1, l2, buffer)
    other = Case("fp8xfp4", 9)
    with pytest.raises(RangeError, match="UE8M0 codes"):
        deep_gemm.fp8_fp4_mega_moe(y, other.l1, other.l2, buffer)


# -- NVFP4 -------------------------------------------------------------------------------------


def nvfp4_case(num_tokens, mma_type):
    """Weights as a checkpoint has them, per-expert global scales, and the transformed ones."""
    case = Case("bf16xbf16", num_tokens)
    made = mm.ExpertWeights.quantize(*case.plain, "nvfp4")
    pairs = []
    for q in (made.w13, made.w2):
        data, scale = (t.flatten(1, -2) if t.ndim > 3 else t for t in (q.data, q.scale))
        sf = deep_gemm.utils.math.transform_ue4m3_sf_into_required_layout(scale, data.shape[1])
        pairs.append((data.view(torch.int8), sf))
    l1, l2 = deep_gemm.transform_weights_for_mega_moe(*pairs, mma_type=mma_type)
    return case, made, l1, l2


@pytest.mark.parametrize("mma_type", ["nvfp4xnvfp4", "nvfp4"])
@pytest.mark.parametrize("names", ["sglang", "vllm"])
def test_nvfp4_calls_give_the_layer_of_the_same_scales(mma_type, names):
    case, made, l1, l2 = nvfp4_case(13, mma_type)
    acts = torch.linspace(0.01, 0.02, E) if names == "sglang" else torch.full((E,), 0.015)
    if mma_type == "nvfp4":
        buffer = deep_gemm.NVFP4SymmBuffer(
            None, E, 40, K, H, I, num_shared_experts=0, shared_dtype=None, device="cpu"
        )
    else:
        buffer = deep_gemm.get_symm_buffer_for_mega_moe(
            None, E, 40, K, H, I, mma_type=mma_type, device="cpu"
        )
    assert buffer.x.dtype == torch.uint8 and buffer.x.shape[1] == H // 2
    assert buffer.x_sf.dtype == torch.int32 and buffer.x_sf.shape[1] == H // 64
    deep_gemm.mega_moe_pre_dispatch(
        case.x, case.idx.int(), case.weight, buffer.x, buffer.x_sf, buffer.topk_idx,
        buffer.topk_weights, num_tokens=13, group_size=16, mma_type=mma_type,
        buf_x_scales=buffer.x_scales,
    )  # fmt: skip
    l2_alphas = made.w2.global_scale * acts
    y = torch.empty(13, H, dtype=torch.bfloat16)
    if names == "sglang":
        deep_gemm.fp8_fp4_mega_moe(
            y, l1, l2, buffer, recipe=(1, 1, 16), use_x_scales=True,
            l1_alphas=torch.stack([made.w13.global_scale] * 2, dim=1),
            l2_alphas=l2_alphas, l2_act_scales=1 / acts,
        )  # fmt: skip
    else:
        deep_gemm.nvfp4_mega_moe(
            y, l1, l2, buffer, fast_math=True, activation_clamp=None, use_x_scales=True,
            l1_alpha=made.w13.global_scale, l2_alpha=l2_alphas, l2_activation_scale=0.015,
        )  # fmt: skip
    x = buffer.tokens(13, use_x_scales=True)
    assert error(dequantize(x), case.x) < 0.12
    wanted = mm.moe(x, case.idx, case.weight, replace(made, acts_global=acts))
    assert error(y, wanted) < 1e-3  # l2_alphas / acts is rounded


def test_nvfp4_scales_may_change_between_calls():
    case, made, l1, l2 = nvfp4_case(5, "nvfp4xnvfp4")
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(
        None, E, 40, K, H, I, mma_type="nvfp4xnvfp4", device="cpu"
    )
    buffer.topk_idx.fill_(-1)
    deep_gemm.mega_moe_pre_dispatch(
        case.x, case.idx, case.weight, buffer.x, buffer.x_sf, buffer.topk_idx,
        buffer.topk_weights, 5, 16, "nvfp4xnvfp4",
    )  # fmt: skip
    y, z = (torch.empty(5, H, dtype=torch.bfloat16) for _ in range(2))
    alphas = made.w2.global_scale.clone()
    deep_gemm.nvfp4_mega_moe(y, l1, l2, buffer, l1_alphas=made.w13.global_scale, l2_alphas=alphas)
    alphas.mul_(2)
    deep_gemm.nvfp4_mega_moe(z, l1, l2, buffer, l1_alphas=made.w13.global_scale, l2_alphas=alphas)
    assert torch.equal(z, y * 2) and bool(y.any())


# -- what stands beside the calls --------------------------------------------------------------


def test_buffers_may_share_memory():
    bf16 = deep_gemm.SymmBuffer(*SIZES, mma_type="bf16xbf16", device="cpu")
    small = deep_gemm.SymmBuffer(*SIZES, mma_type="nvfp4", base=bf16)
    assert small.buffer is bf16.buffer and small.x.data_ptr() == bf16.x.data_ptr()
    with pytest.raises(ShapeError, match="must hold"):
        deep_gemm.SymmBuffer(None, E, 800, K, H, I, mma_type="bf16xbf16", base=small)


def test_settings_are_remembered():
    try:
        deep_gemm.set_num_sms(100)
        assert deep_gemm.get_num_sms() == 100
    finally:
        deep_gemm.set_num_sms(0)
    deep_gemm.set_pdl(True)
    deep_gemm.set_tc_util(90)
    assert deep_gemm.get_pdl() and deep_gemm.get_tc_util() == 90
    deep_gemm.set_pdl(False)
    args = (1, E, 384, 5, K)
    assert deep_gemm.get_block_m_for_mega_moe(*args, "fp8xfp4") > 0
    assert deep_gemm.get_block_m_for_nvfp4_mega_moe(*args) > 0


def test_casts_of_the_october_release():
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    math = deep_gemm.utils.math
    data, sf = math.per_channel_cast_to_fp8(x, use_ue8m0=False)
    other, sf_t = math.per_token_cast_to_fp8(x.T.contiguous(), use_ue8m0=False)
    assert torch.equal(data.view(torch.uint8), other.T.contiguous().view(torch.uint8))
    assert torch.equal(sf, sf_t.T)
    data, sf = math.per_custom_dims_cast_to_fp8(x, (0,), use_ue8m0=True)
    other, sf_t = math.per_token_cast_to_fp8(x, use_ue8m0=True, gran_k=64)
    assert torch.equal(sf, sf_t[:, 0]) and torch.equal(data.float(), other.float())
    packed, sf = math.per_token_cast_to_fp4(x, use_ue8m0=True, gran_k=32)
    back = math.cast_back_from_fp4(math.transpose_packed_fp4(packed), torch.ones(64, 1), 256)
    assert torch.equal(back.T, math.cast_back_from_fp4(packed, torch.ones(256, 1), 64))
    packed, sf = math.per_token_cast_to_nvfp4(x, use_packed_ue4m3=True)
    sf = math.unpack_ue4m3_from_int(sf)
    back = math.cast_back_from_fp4(packed, sf, 16)
    mine = dequantize(mm.quantize(x, "nvfp4", global_scale=torch.ones(())))
    assert error(back, x) < 0.12 and error(back, mine) < 0.02
    data, sf = math.per_token_cast_to_fp8(x, True, 32, True)
    assert sf.shape == (256, 1) and (sf >> 16 == 127 * 257).all()  # filled up with 1
    assert error(math.cast_back_from_fp8(data, sf, 32, True), x) < 0.05


def test_what_test_files_take():
    testing = deep_gemm.testing
    assert 0 < testing.bench(lambda: sum(range(100)), 1, 2) < 1
    testing.assert_bitwise_equal(torch.ones(3), torch.ones(3))
    with pytest.raises(AssertionError, match="element 1"):
        testing.assert_bitwise_equal(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), "x")
    ran = []
    testing.test_filter(lambda: True)(lambda: ran.append(1))()
    with redirect_stdout(io.StringIO()) as said:
        testing.test_filter(lambda: False)(lambda: ran.append(2))()
    assert ran == [1] and "left out" in said.getvalue()
    os.environ["DG_SOME"] = "1"
    testing.ignore_env("DG_SOME", lambda: True)(lambda: ran.append(os.environ.get("DG_SOME")))()
    assert ran[1] is None and os.environ.pop("DG_SOME") == "1"


def test_output_can_be_suppressed(capfd):
    with deep_gemm.testing.suppress_stdout_stderr():
        print("lost", flush=True)
        os.write(2, b"lost too")
    with deep_gemm.testing.empty_suppress():
        print("seen", file=sys.stdout, flush=True)
    out, err = capfd.readouterr()
    assert "lost" not in out + err and "seen" in out


def call(mma_type="fp8xfp4", num_shared=0, **options):
    case = Case(mma_type, 3)
    buffer = case.buffer(num_shared_experts=num_shared)
    case.fill(buffer)
    case.run(buffer, **options)


def make(**options):
    deep_gemm.get_symm_buffer_for_mega_moe(*SIZES, device="cpu", **options)


def fp8_weights_to_fp4_call():
    _, pairs = fp8_case(3)
    l1, l2 = deep_gemm.transform_weights_for_mega_moe_sm90(*pairs)
    buffer = Case("fp8xfp4", 3).buffer()
    deep_gemm.fp8_fp4_mega_moe(torch.empty(3, H, dtype=torch.bfloat16), l1, l2, buffer)


def fp4_weights_to_nvfp4_buffer():
    case = Case("fp8xfp4", 3)
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(*SIZES, mma_type="nvfp4", device="cpu")
    deep_gemm.nvfp4_mega_moe(torch.empty(3, H, dtype=torch.bfloat16), case.l1, case.l2, buffer)


@pytest.mark.parametrize(
    ("use", "kind", "says"),
    [
        (lambda: make(activation="gelu"), NotAvailable, "swigluoai or situ; got 'gelu'"),
        (lambda: call(activation="gelu"), NotAvailable, "got 'gelu'"),
        (lambda: call(activation="situ", activation_alpha=2.0), NotAvailable, "4 and 25 for situ"),
        (lambda: call(activation_alpha=1.5), NotAvailable, "activation_alpha"),
        (lambda: make(mma_type="fp8xfp8"), NotAvailable, "MXFP8 weights"),
        (lambda: make(mma_type="nvfp4", num_shared_experts=1), NotAvailable, "shared experts run beside"),
        (lambda: call(weight_layout="trtllm"), NotAvailable, "weight_layout"),
        (lambda: call(post_expert_norm=True), NotAvailable, "norm after the experts"),
        (lambda: call(global_num_tokens=10**6), RangeError, "global_num_tokens"),
        (lambda: call(use_x_scales=True), RangeError, "belong to NVFP4"),
        (lambda: call(l1_alphas=torch.ones(E)), RangeError, "belong to NVFP4"),
        (lambda: call(num_shared=1), ShapeError, "shared weights must be given"),
        (fp8_weights_to_fp4_call, DTypeError, "weights must be those of w4a8; got w8a8"),
        (fp4_weights_to_nvfp4_buffer, DTypeError, "weights must be those of nvfp4; got w4a8"),
        (lambda: make(num_shared_experts=1, mma_type=2), RangeError, "must be given once"),
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused_by_name(use, kind, says):
    with pytest.raises(kind, match=says):
        use()


# -- integers where types tell arguments apart -------------------------------------------------


@pytest.mark.parametrize("mma_type", ["fp8xfp4", "bf16xbf16"])
def test_an_integer_for_fast_math_is_no_clamp(mma_type):
    case = Case(mma_type, 5)
    buffer = case.buffer()
    case.fill(buffer)
    wanted = case.run(buffer)
    for value in (0, 1, None):
        assert torch.equal(case.run(buffer, fast_math=value), wanted)
    assert torch.equal(case.run(buffer, clamp=0.5, fast_math=1), case.run(buffer, clamp=0.5))
    with pytest.raises(RangeError, match="fast_math must be True or False"):
        case.run(buffer, fast_math=0.5)
    for value in (0, 1):
        with pytest.raises(RangeError, match=f"the integer {value}, which may be either"):
            case.run(buffer, clamp=value)


def test_nvfp4s_scale_of_l2s_input_may_be_any_number():
    import numpy as np

    case, made, l1, l2 = nvfp4_case(5, "nvfp4")
    buffer = deep_gemm.NVFP4SymmBuffer(None, E, 40, K, H, I, device="cpu")
    deep_gemm.mega_moe_pre_dispatch(
        case.x, case.idx, case.weight, buffer.x, buffer.x_sf, buffer.topk_idx,
        buffer.topk_weights, 5, 16, "nvfp4", buffer.x_scales,
    )  # fmt: skip

    def run(scale, **options):
        y = torch.empty(5, H, dtype=torch.bfloat16)
        deep_gemm.nvfp4_mega_moe(
            y, l1, l2, buffer, use_x_scales=True, l1_alpha=made.w13.global_scale,
            l2_alpha=made.w2.global_scale, l2_activation_scale=scale, **options,
        )  # fmt: skip
        return y

    for kind in (int, np.float32):
        few, many = run(kind(1)), run(kind(4))
        assert torch.equal(many, run(4.0)) and not torch.equal(few, many)
    assert torch.equal(run(1.0, fast_math=1), few)


def test_an_integer_for_use_fp8_dispatch_is_no_shared_expert():
    with pytest.warns(DeprecationWarning, match="use_fp8_dispatch"):
        buffer = deep_gemm.get_symm_buffer_for_mega_moe(*SIZES, use_fp8_dispatch=1, device="cpu")
    assert buffer.num_shared_experts == 0
    for make in (deep_gemm.SymmBuffer, deep_gemm.get_symm_buffer_for_mega_moe):
        with pytest.raises(RangeError, match="must agree with mma_type fp8xfp4; got False"):
            make(*SIZES, False, device="cpu")


def test_a_call_with_another_activation_than_its_buffer_is_refused():
    case = Case("fp8xfp4", 5)
    buffer = case.buffer(activation="swigluoai")
    case.fill(buffer)
    wanted = case.run(buffer, activation="swigluoai")
    assert torch.equal(case.run(buffer, activation_alpha=1.702, activation_beta=1.0), wanted)
    with pytest.raises(RangeError, match="activation of its buffer, swigluoai"):
        case.run(buffer)


def test_fp4_tokens_that_are_not_finite_stay_so():
    case = Case("mxf4xmxf4", 5)
    case.x[1, 3], case.x[2, 40] = torch.nan, torch.inf
    buffer = case.buffer()
    deep_gemm.mega_moe_pre_dispatch(
        case.x, case.idx, case.weight, buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights,
        5, mma_type="mxf4xmxf4",
    )  # fmt: skip
    y = case.run(buffer)
    assert y.isnan().any(dim=1).tolist() == [False, True, True, False, False]


def test_ids_that_are_no_integers_are_refused():
    case = Case("fp8xfp4", 5)
    buffer = case.buffer()
    with pytest.raises(DTypeError, match="topk_idx must be int32 or int64"):
        deep_gemm.mega_moe_pre_dispatch(
            case.x, case.idx.float(), case.weight, buffer.x, buffer.x_sf, buffer.topk_idx,
            buffer.topk_weights, 5,
        )  # fmt: skip


def test_shared_experts_are_bf16_under_autocast():
    case, rng = Case("bf16xbf16", 3), torch.Generator().manual_seed(7)
    plain = (torch.randn(shape, generator=rng).bfloat16() for shape in ((2 * I, H), (H, I)))
    l1, l2 = deep_gemm.transform_weights_for_mega_moe(*plain)
    wanted = shared_rows(l1, l2, case.x, I, mm.Options())
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(shared_rows(l1, l2, case.x, I, mm.Options()), wanted)
