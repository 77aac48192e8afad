"""The drop-in's casts have DeepGEMM's bits, and its habits where they differ from ours."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megamoe.compat.deep_gemm import utils
from megamoe.errors import DTypeError, RangeError, ShapeError
from tests.formats.e2m1 import unpack_e2m1

GOLDEN = load_file(Path(__file__).parent.parent / "data" / "deep_gemm_casts.safetensors")
CASTS = {
    "fp8_ue8m0_g32": lambda x: utils.per_token_cast_to_fp8(x, True, 32),
    "fp8_ue8m0_g128": lambda x: utils.per_token_cast_to_fp8(x, use_ue8m0=True),
    "fp8_packed_g32": lambda x: utils.per_token_cast_to_fp8(
        x, use_ue8m0=True, gran_k=32, use_packed_ue8m0=True
    ),
    "fp8_fp32_g128": lambda x: utils.per_token_cast_to_fp8(x, False),
    "fp4_ue8m0_g32": lambda x: utils.per_token_cast_to_fp4(x, use_ue8m0=True, gran_k=32),
    "fp4_packed_g32": lambda x: utils.per_token_cast_to_fp4(x, True, 32, True),
    "fp8_block": lambda x: utils.per_block_cast_to_fp8(x, False),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def codes(packed):
    return unpack_e2m1(packed.view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASTS)
def test_casts_have_the_librarys_own_bits(name, device):
    data, scale = CASTS[name](GOLDEN[f"{name}.x"].to(device))
    wanted = GOLDEN[f"{name}.sf"]
    assert torch.equal(data.view(torch.uint8).cpu(), GOLDEN[f"{name}.q"])
    assert scale.dtype == wanted.dtype
    assert torch.equal(scale.view(torch.int32).cpu(), wanted.view(torch.int32))


def test_every_golden_tensor_is_used():
    assert {name.partition(".")[0] for name in GOLDEN} == set(CASTS)


def test_ties_go_toward_zero_and_zeros_lose_their_sign():
    x = torch.zeros(1, 32)
    x[0, :9] = torch.tensor([6.0, 0.75, 2.5, -3.5, 5.0, 0.25, -0.25, -0.0, -0.2])
    data, scale = utils.per_token_cast_to_fp4(x, True, 32)
    assert data.dtype == torch.int8 and scale.item() == 1.0
    assert codes(data)[0, :9].tolist() == [7, 1, 4, 8 + 5, 6, 0, 0, 0, 0]


@pytest.mark.parametrize("cast", [utils.per_token_cast_to_fp8, utils.per_token_cast_to_fp4])
def test_small_groups_share_the_scale_of_one_ten_thousandth(cast):
    x = torch.full((2, 64), 1e-9)
    x[1] = 1e-4
    _, scale = cast(x, True, 32)
    assert (scale == scale[1, 0]).all()


def test_a_last_group_may_be_short_and_packed_fp4_scales_are_filled_with_one():
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(x, (0, 24))
    for cast in (utils.per_token_cast_to_fp8, utils.per_token_cast_to_fp4):
        data, scale = cast(x, True, 32)
        whole, same = cast(padded, True, 32)
        assert torch.equal(data.view(torch.uint8), whole.view(torch.uint8)[:, : data.shape[1]])
        assert torch.equal(scale, same)
    _, packed = utils.per_token_cast_to_fp4(x, True, 32, True)
    filled = utils.unpack_ue8m0_from_int(packed)
    assert filled.shape == (3, 4) and (filled[:, 2:] == 1.0).all()
    assert torch.equal(filled[:, :2], scale)


def test_scales_pack_and_unpack_and_fp4_casts_back():
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    data, scale = utils.per_token_cast_to_fp4(x, True, 32)
    same, packed = utils.per_token_cast_to_fp4(x, True, 32, True)
    assert torch.equal(utils.pack_ue8m0_to_int(scale), packed) and torch.equal(data, same)
    assert torch.equal(utils.unpack_ue8m0_from_int(packed), scale)
    back = utils.cast_back_from_fp4(data, scale, 32)
    assert torch.equal(back, utils.cast_back_from_fp4(data, packed, 32, True))
    assert (back - x).norm() / x.norm() < 0.2
    again = utils.cast_back_from_fp4(*utils.per_token_cast_to_fp4(back, True, 32), 32)
    assert torch.equal(again, back)  # the scale may be finer, the values are the same


def test_nan_stays_and_makes_zeros_of_its_group():
    x = torch.ones(2, 64)
    x[0, 3] = torch.nan
    data = utils.per_token_cast_to_fp8(x, True, 32)[0].float()
    assert data[0, 3].isnan() and (data[0, :32].nan_to_num(0) == 0).all()
    assert (data[0, 32:] == data[1, 32:]).all()


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (lambda: utils.per_token_cast_to_fp8(torch.zeros(4, 4, dtype=torch.int32), True), DTypeError, "got torch.int32"),
        (lambda: utils.per_token_cast_to_fp8(torch.zeros(4), True), ShapeError, "must be a matrix"),
        (lambda: utils.per_token_cast_to_fp8(torch.zeros(4, 128), False, 32, True), RangeError, "powers of two"),
        (lambda: utils.pack_ue8m0_to_int(torch.ones(4, 2)), ShapeError, "multiple of 4"),
        (lambda: utils.per_token_cast_to_fp4(torch.zeros(4, 33), True, 32), ShapeError, "even"),
        (lambda: utils.pack_ue8m0_to_int(torch.full((1, 4), 3.0)), RangeError, "powers of two"),
        (lambda: utils.pack_ue8m0_to_int(torch.full((1, 4), -2.0)), RangeError, "powers of two"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(call, kind, says):
    with pytest.raises(kind, match=says):
        call()
