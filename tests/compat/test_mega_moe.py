"""The drop-in's calls against a float64 evaluation, with statistics, masks and uneven tokens."""

import gc
import warnings

import pytest
import torch

from megamoe.compat import deep_gemm
from megamoe.compat.deep_gemm import prepared
from megamoe.engine.status import DeviceStatus
from megamoe.errors import (
    CapacityError,
    DTypeError,
    NotAvailable,
    RangeError,
    ShapeError,
)
from megamoe.formats.spec import recipe_named
from megamoe.layout import tiles
from tests.compat.support import Case, E, H, I, K, cast_weights
from tests.formats.swizzle import swizzle

RECIPES = {"fp8xfp4": "w4a8", "bf16xbf16": "bf16", "mxf4xmxf4": "w4a4"}
CASES = {
    "even": {"num_tokens": 12},
    "masked": {"num_tokens": 17, "masked_ratio": 0.4},
    "all masked": {"num_tokens": 3, "masked_ratio": 1.0},
    "uneven": {"num_tokens": 23, "skew": "zipf"},
    "no token": {"num_tokens": 0},
    "one token": {"num_tokens": 1},
}


def error(y, wanted):
    y, wanted = y.double().cpu(), wanted.double()
    return float((y - wanted).norm() / wanted.norm().clamp(min=1e-30))


@pytest.mark.parametrize("mma_type", RECIPES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_calls_hold_to_float64_and_add_to_the_statistics(mma_type, name, device):
    case = Case(mma_type, **CASES[name], device=device)
    buffer = case.buffer()
    case.fill(buffer)
    stats = torch.arange(E, dtype=torch.int32, device=device) * 7
    for clamp in (10.0, None):
        y = case.run(buffer, stats, clamp)
        assert error(y, case.expected(clamp)) < recipe_named(RECIPES[mma_type]).tolerance
    wanted = torch.arange(E, dtype=torch.int32) * 7 + 2 * case.counts()
    assert torch.equal(stats.cpu(), wanted)


def test_the_reference_is_the_float64_evaluation_but_for_sums():
    case = Case("fp8xfp4", 20, masked_ratio=0.2)
    buffer = case.buffer(backend="reference")
    case.fill(buffer)
    assert error(case.run(buffer, clamp=1.0), case.expected(1.0)) < 1e-4


@pytest.mark.parametrize("fp4", [False, True])
def test_pre_dispatch_fills_the_buffer_and_masks_the_rest(fp4):
    case = Case("mxf4xmxf4" if fp4 else "fp8xfp4", 9)
    buffer, by_hand = case.buffer(), case.buffer()
    case.fill(by_hand)
    deep_gemm.mega_moe_pre_dispatch(
        case.x, case.idx.int(), case.weight, buffer.x, buffer.x_sf, buffer.topk_idx,
        buffer.topk_weights, num_tokens=9, group_size=32, use_fp4_acts=fp4,
    )  # fmt: skip
    for name in ("x", "x_sf", "topk_idx", "topk_weights"):
        one, two = (getattr(b, name)[:9].view(torch.uint8) for b in (buffer, by_hand))
        assert torch.equal(one, two), name
    assert (buffer.topk_idx[9:] == -1).all() and (buffer.topk_weights[9:] == 0).all()
    assert torch.equal(case.run(buffer), case.run(by_hand))
    # A call that counts the masked rows in is the same call.
    case.num_tokens = 30
    assert torch.equal(case.run(buffer)[9:], torch.zeros(21, H, dtype=torch.bfloat16))


def test_transformed_weights_have_the_published_layout():
    case = Case("fp8xfp4", 1)
    (data, scale), (data_2, scale_2) = case.plain
    rows = tiles.gate_up(I, 8).order()
    assert torch.equal(case.l1[0], swizzle(data, rows, 1))
    wanted = swizzle(swizzle(scale, rows, 1), tiles.utccp(2 * I).order(), 1)
    assert torch.equal(case.l1[1], wanted) and case.l1[1].stride() == scale.stride()
    assert case.l2[0] is data_2
    assert torch.equal(case.l2[1], swizzle(scale_2, tiles.utccp(H).order(), 1))
    bf16 = Case("bf16xbf16", 1)
    assert torch.equal(bf16.l1, swizzle(bf16.plain[0], rows, 1)) and bf16.l2 is bf16.plain[1]


def test_scales_become_rows_of_words_in_aligned_columns():
    sf = torch.pow(2.0, torch.arange(2 * 6 * 5).view(2, 6, 5) % 40 - 20)
    packed = deep_gemm.transform_sf_into_required_layout(sf, 6, 160, (1, 32), 2)
    assert packed.shape == (2, 6, 2) and packed.stride() == (16, 1, 8)
    code = packed.contiguous().view(torch.uint8)
    assert torch.equal(code[..., :5].int() - 127, sf.log2().int()) and (code[..., 5:] == 0).all()
    assert deep_gemm.transform_sf_into_required_layout(packed, 6, 160, (1, 32), 2) is packed
    plain = deep_gemm.transform_sf_into_required_layout(
        sf[0], 6, 640, (1, 1, 128), is_sfa=True, disable_ue8m0_cast=True
    )
    assert torch.equal(plain, sf[0]) and plain.stride() == (1, 8)
    blocks = deep_gemm.transform_sf_into_required_layout(sf[:, :2], 200, 160, (128, 32), 2)
    assert torch.equal(blocks[:, 130].view(-1), packed[:, 1].view(-1))


def test_weights_are_prepared_once_and_found_by_their_memory():
    case = Case("fp8xfp4", 5)
    buffer = case.buffer()
    case.fill(buffer)
    y = case.run(buffer)
    first = prepared.prepare(prepared.read_source(case.l1, case.l2), False)
    case.l1, case.l2 = (
        tuple(torch.nn.Parameter(t, requires_grad=False) for t in pair)
        for pair in (case.l1, case.l2)
    )
    assert prepared.prepare(prepared.read_source(case.l1, case.l2), False) is first
    assert torch.equal(case.run(buffer), y) and len(first.layers) == 1
    assert first.experts.w2.data.data_ptr() == case.l2[0].data_ptr()  # not held twice


@pytest.mark.parametrize("which", ["l1", "l2"])
def test_weights_that_change_in_place_are_prepared_anew(which):
    case, other = Case("fp8xfp4", 5), Case("fp8xfp4", 5, seed=1)
    buffer = case.buffer()
    case.fill(buffer)
    before = case.run(buffer)
    for mine, theirs in zip(getattr(case, which), getattr(other, which), strict=True):
        mine.copy_(theirs)
    after = case.run(buffer)
    assert not torch.equal(after, before)
    fresh = Case("fp8xfp4", 5)
    setattr(fresh, which, getattr(other, which))
    assert torch.equal(fresh.run(buffer), after)


def counted(mine, theirs):
    mine.copy_(theirs)


def through_data(mine, theirs):
    mine.data.copy_(theirs)


def by_expert_views(mine, theirs):
    with torch.inference_mode():  # as a server's load balancer moves experts
        for e in range(E):
            mine[e].copy_(theirs[e])


@pytest.mark.parametrize("write", [counted, through_data, by_expert_views])
@pytest.mark.parametrize("transformed", ["plainly", "in inference mode", "and cloned there"])
def test_weights_that_change_in_any_mode_are_prepared_anew(transformed, write):
    other = Case("fp8xfp4", 5, seed=1)
    with torch.inference_mode(transformed != "plainly"):
        case = Case("fp8xfp4", 5)
        if transformed == "and cloned there":
            case.l1, case.l2 = (tuple(t.clone() for t in pair) for pair in (case.l1, case.l2))
        else:
            assert not any(t.is_inference() for t in (*case.l1, *case.l2))
        buffer = case.buffer()
        case.fill(buffer)
        case.run(buffer)
    with torch.inference_mode(transformed == "and cloned there"):
        for mine, theirs in zip((*case.l1, *case.l2), (*other.l1, *other.l2), strict=True):
            write(mine, theirs)
        after = case.run(buffer)
    case.l1, case.l2 = other.l1, other.l2
    assert torch.equal(case.run(buffer), after)


def test_calls_inside_and_outside_of_inference_mode_may_alternate():
    case = Case("fp8xfp4", 5)
    buffer = case.buffer()
    case.fill(buffer)
    with torch.inference_mode():
        inside = case.run(buffer)
    assert torch.equal(case.run(buffer), inside)


def test_dropped_weights_are_forgotten():
    gc.collect()
    prepared.forget_dropped()
    before = len(prepared._PREPARED)
    case = Case("bf16xbf16", 2)
    assert len(prepared._PREPARED) == before + 1
    buffer = case.buffer()
    del case
    gc.collect()
    buffer.destroy()
    assert len(prepared._PREPARED) == before


def test_the_buffer_has_upstreams_views_and_size():
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(None, E, 385, K, H, I, device="cpu")
    assert buffer.num_max_tokens_per_rank == 768
    assert buffer.x.shape == (768, H) and buffer.x.dtype == torch.float8_e4m3fn
    assert buffer.x_sf.shape == (768, H // 128) and buffer.x_sf.dtype == torch.int32
    assert buffer.topk_idx.shape == (768, K) and buffer.topk_idx.dtype == torch.int64
    assert buffer.topk_weights.shape == (768, K)
    assert buffer.buffer.dtype == torch.int8 and (buffer.buffer == 0).all()
    assert buffer.buffer.nbytes == 768 * (H + H // 32 + 12 * K)
    buffer.x_sf.fill_(-1)
    assert (buffer.x.view(torch.uint8) == 0).all() and (buffer.topk_idx == 0).all()
    buffer.destroy()
    assert buffer.x is None and buffer.buffer is None


def test_the_old_flag_is_taken_with_a_warning():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        deep_gemm.get_symm_buffer_for_mega_moe(None, E, 8, K, H, I, True, device="cpu")
    assert [w.category for w in seen] == [DeprecationWarning]


def test_a_callers_default_device_changes_nothing():
    case = Case("fp8xfp4", 6)
    buffer = case.buffer()
    case.fill(buffer)
    wanted = case.run(buffer)
    y = torch.empty_like(wanted)
    with torch.device("meta"):  # what is made without saying where would have no values
        l1, l2 = deep_gemm.transform_weights_for_mega_moe(*case.plain)
        case.fill(buffer)
        deep_gemm.fp8_fp4_mega_moe(y, l1, l2, buffer)
        DeviceStatus(torch.device("cpu")).raise_if_seen()
    assert torch.equal(y, wanted)


def test_a_group_of_one_is_one_rank():
    class One:
        def size(self):
            return 1

    case = Case("fp8xfp4", 6)
    buffer = case.buffer()
    case.fill(buffer)
    wanted = case.run(buffer)
    buffer.group = One()
    assert torch.equal(case.run(buffer), wanted)


def bad_call(*, mma_type="fp8xfp4", **change):
    case = Case(mma_type, 4)
    buffer = case.buffer()
    case.fill(buffer)
    fields = {"y": torch.empty(4, H, dtype=torch.bfloat16), "l1_weights": case.l1,
              "l2_weights": case.l2, "sym_buffer": buffer} | change  # fmt: skip
    deep_gemm.fp8_fp4_mega_moe(**fields)


def wrong_stats():
    bad_call(cumulative_local_expert_recv_stats=torch.zeros(E, dtype=torch.int64))


def destroyed():
    buffer = Case("fp8xfp4", 1).buffer()
    buffer.destroy()
    bad_call(sym_buffer=buffer)


def other_shape():
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(None, 2 * E, 8, K, H, I, device="cpu")
    bad_call(sym_buffer=buffer)


def make(**change):
    sizes = {"group": None, "num_experts": E, "num_max_tokens_per_rank": 8, "num_topk": K,
             "hidden": H, "intermediate_hidden": I, "device": "cpu"}  # fmt: skip
    deep_gemm.get_symm_buffer_for_mega_moe(**sizes | change)


def nan_scale():
    w = torch.ones(E, 2 * I, H), torch.ones(E, H, I)
    l1, l2 = (cast_weights(t.bfloat16()) for t in w)
    l1[1][2, 5, 0] = -1  # four times code 255
    deep_gemm.transform_weights_for_mega_moe(l1, l2)


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (lambda: bad_call(y=torch.empty(500, H, dtype=torch.bfloat16)), CapacityError, "at most 384 tokens; got 500"),
        (lambda: bad_call(y=torch.empty(4, H)), DTypeError, "y must be a bfloat16"),
        (lambda: bad_call(y=torch.empty(4, I, dtype=torch.bfloat16)), ShapeError, "num_tokens, 256"),
        (lambda: bad_call(recipe=(1, 1, 128)), RangeError, "recipe must be"),
        (lambda: bad_call(activation="gelu"), NotAvailable, "activation must be swiglu"),
        (lambda: bad_call(activation_clamp=-1.0), RangeError, "clamp must not be negative"),
        (lambda: bad_call(mma_type="bf16xbf16"), DTypeError, "go to bf16_mega_moe"),
        (lambda: bad_call(sym_buffer=None), DTypeError, "get_symm_buffer_for_mega_moe"),
        (lambda: bad_call(sym_buffer=Case("bf16xbf16", 1).buffer()), RangeError, "fp8xfp4 or mxf4xmxf4"),
        (destroyed, RangeError, "alive"),
        (other_shape, ShapeError, "the buffer is for"),
        (wrong_stats, DTypeError, "must be int32"),
        (nan_scale, RangeError, "w13 must be finite; got NaN or Inf in expert 2"),
        (lambda: make(hidden=96), ShapeError, "multiples of 128"),
        (lambda: make(mma_type="fp4"), RangeError, "mma_type must be one of"),
        (lambda: make(num_topk=E + 1), ShapeError, "top_k must lie"),
        (lambda: make(activation="gelu"), NotAvailable, "swiglu"),
        (lambda: make(use_fp8_dispatch=False), RangeError, "must agree"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(call, kind, says):
    with pytest.raises(kind, match=says):
        call()
