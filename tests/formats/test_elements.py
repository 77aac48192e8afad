"""Codes of E8M0, E4M3 and E2M1, all of them, and what fits into E4M3 without loss."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from megamoe.errors import DTypeError, ShapeError
from megamoe.formats import elements
from megamoe.formats.spec import E2M1, E4M3

from . import oracle
from .e2m1 import e2m1_to_float, unpack_e2m1
from .support import around_the_grid, assert_same_bits, bits, edge_amaxes, from_bits

BYTES = torch.arange(256, dtype=torch.uint8)
KINDS = [(E4M3, "mxfp8"), (E2M1, "mxfp4")]


def signed(code: int, kind: oracle.Float) -> Fraction:
    size = oracle.decode(code & ~kind.sign, kind)
    return -size if code & kind.sign else size


def test_every_e8m0_code_decodes_to_its_power_of_two():
    want = from_bits([oracle.decode_e8m0(code) for code in range(256)])
    assert_same_bits(elements.e8m0_to_float(BYTES), want, want, "E8M0 code")
    exact = elements.e8m0_to_float(BYTES, torch.float64)
    assert [Fraction(v) for v in exact[:255].tolist()] == [
        oracle.power(c - 127) for c in range(255)
    ]
    assert exact[255].isnan()


@pytest.mark.parametrize(("element", "name"), KINDS, ids=("e4m3", "e2m1"))
def test_e8m0_scale_of_every_power_boundary_is_exact(element, name):
    amax = edge_amaxes()
    got = elements.e8m0_from_amax(amax, element)
    for pattern, code in zip(bits(amax).tolist(), got.tolist(), strict=True):
        assert code == oracle.scale_code(pattern, name), f"amax {pattern:#010x}"


@pytest.mark.parametrize(("element", "name"), KINDS, ids=("e4m3", "e2m1"))
def test_e8m0_scale_of_zero_is_one_and_of_the_rest_nan(element, name):
    amax = torch.tensor([0.0, torch.inf, torch.nan])
    assert elements.e8m0_from_amax(amax, element).tolist() == [127, 255, 255]


@pytest.mark.parametrize(("element", "highest"), [(E4M3, 247), (E2M1, 253)], ids=("e4m3", "e2m1"))
def test_e8m0_scales_reach_from_zero_to_the_highest_code(element, highest):
    lowest = 2.0**-127 * element.max
    amax = torch.tensor([2.0**-149, lowest, 2 * lowest, torch.finfo(torch.float32).max])
    assert elements.e8m0_from_amax(amax, element).tolist() == [0, 0, 1, highest]
    above = torch.nextafter(amax[1:3], torch.tensor(torch.inf))
    assert elements.e8m0_from_amax(above, element).tolist() == [1, 2]


def test_every_e4m3_code_decodes_and_encodes_to_itself():
    floats = BYTES.view(torch.float8_e4m3fn).float()
    is_nan = (BYTES & 0x7F) == 0x7F
    assert torch.equal(floats.isnan(), is_nan)
    want = from_bits([oracle.encode(abs(signed(c, oracle.E4M3)), oracle.FP32) for c in range(256)])
    want = torch.where(BYTES >= 128, -want, want)
    assert_same_bits(floats[~is_nan], want[~is_nan], want[~is_nan], "E4M3 code")
    again = bits(elements.e4m3_from_float(floats))
    assert torch.equal(again[~is_nan], BYTES[~is_nan].long())
    assert ((again[is_nan] & 0x7F) == 0x7F).all()


def test_e4m3_saturates_at_448_and_keeps_nan():
    x = torch.tensor([464.0, 480.0, 1e30, torch.inf, -449.0, -torch.inf])
    assert elements.e4m3_from_float(x).float().tolist() == [448.0] * 4 + [-448.0] * 2
    assert elements.e4m3_from_float(torch.tensor(torch.nan)).float().isnan()


def test_e2m1_saturates_at_six():
    x = torch.tensor([6.5, 7.0, 1e30, torch.inf, -7.0, -torch.inf])
    assert elements.e2m1_from_float(x).tolist() == [7] * 4 + [15] * 2


@pytest.mark.parametrize("kind", [oracle.E4M3, oracle.E2M1], ids=("e4m3", "e2m1"))
def test_midpoints_round_to_even_and_their_neighbours_to_the_nearest(kind):
    x = around_the_grid(kind)
    encode = elements.e4m3_from_float if kind is oracle.E4M3 else elements.e2m1_from_float
    for pattern, code in zip(bits(x).tolist(), bits(encode(x)).tolist(), strict=True):
        assert code == oracle.encode_signed(pattern, kind), f"from {pattern:#010x}"


def test_every_packed_byte_unpacks_decodes_and_packs_to_itself():
    codes = unpack_e2m1(BYTES)
    assert codes.tolist() == [half for byte in range(256) for half in (byte % 16, byte // 16)]
    assert torch.equal(elements.pack_e2m1(codes), BYTES)
    values = elements.packed_e2m1_to_float(BYTES)
    assert_same_bits(values, e2m1_to_float(codes), values, "packed E2M1 value")
    exact = [Fraction(v) for v in values.tolist()]
    assert exact == [signed(code, oracle.E2M1) for code in codes.tolist()]
    assert torch.equal(torch.signbit(values), codes >= 8)
    assert torch.equal(elements.e2m1_from_float(values), codes)


def test_packing_keeps_leading_dimensions_and_float64():
    packed = BYTES.reshape(2, 8, 16)
    assert unpack_e2m1(packed).shape == (2, 8, 32)
    assert torch.equal(elements.pack_e2m1(unpack_e2m1(packed)), packed)
    wide = elements.packed_e2m1_to_float(packed, torch.float64)
    assert wide.dtype == torch.float64
    assert torch.equal(wide.float(), elements.packed_e2m1_to_float(packed))


def test_packing_refuses_odd_widths_and_other_types():
    with pytest.raises(ShapeError, match="got"):
        elements.pack_e2m1(torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(DTypeError, match="got"):
        elements.pack_e2m1(torch.zeros(2, 4, dtype=torch.int32))


@pytest.mark.parametrize("r", range(-8, 7))
def test_e2m1_times_a_power_of_two_is_exactly_an_e4m3_value(r):
    codes = torch.arange(16, dtype=torch.uint8)
    scaled = e2m1_to_float(codes) * 2.0**r
    assert_same_bits(elements.e4m3_from_float(scaled).float(), scaled, scaled, f"E2M1 * 2**{r}")
    for code in range(8):
        value = oracle.decode(code, oracle.E2M1) * oracle.power(r)
        assert oracle.round_to(value, oracle.E4M3) == value


@pytest.mark.parametrize("r", [-9, 7])
def test_e2m1_one_power_further_does_not_fit_into_e4m3(r):
    values = [oracle.decode(code, oracle.E2M1) * oracle.power(r) for code in range(8)]
    assert any(oracle.round_to(value, oracle.E4M3) != value for value in values)
    scaled = e2m1_to_float(torch.arange(16, dtype=torch.uint8)) * 2.0**r
    assert (elements.e4m3_from_float(scaled).float() != scaled).any()


def test_nvfp4_products_do_not_all_fit_into_e4m3():
    """Element times scale, both nonzero: 607 of 882 products are E4M3 values."""
    products = [
        oracle.decode(element, oracle.E2M1) * oracle.decode(scale, oracle.E4M3)
        for element in range(1, 8)
        for scale in range(1, 0x7F)
    ]
    fitting = sum(oracle.round_to(p, oracle.E4M3) == p for p in products)
    assert len(products) == 882
    assert fitting == 607
