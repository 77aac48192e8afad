"""Where rounding, scales and special values can go wrong: each edge against the oracle."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

import megamoe as mm
from megamoe.formats.quantize import dequantize, weight_global_scale

from . import oracle
from .support import (
    GLOBAL_SCALES,
    MX,
    NAMES,
    alone,
    around_the_grid,
    assert_follows_the_rule,
    assert_same_bits,
    bits,
    edge_amaxes,
    float_bits,
    from_bits,
    stored_codes,
)

LARGEST = torch.finfo(torch.float32).max
NAN, INF = torch.nan, torch.inf


def one_block(*values: float) -> torch.Tensor:
    """A [1, 32] row that begins with these values."""
    x = torch.zeros(1, 32)
    x[0, : len(values)] = torch.tensor(values)
    return x


@pytest.mark.parametrize("name", NAMES)
def test_amax_around_every_power_of_two_times_the_maximum_matches_the_rule(name):
    amax = edge_amaxes()
    assert_follows_the_rule(alone(amax if name != "fp8_128x128" else amax[::3], name), name)


@pytest.mark.parametrize("name", NAMES)
def test_values_far_below_such_an_amax_match_the_rule(name):
    """Beside each amax: fractions of it that fall on ties, near zero, and below FP32's range."""
    amax = edge_amaxes()[:: 1 if name != "fp8_128x128" else 5]
    parts = torch.tensor([1.0, -0.75, 0.0625, -(2.0**-10), 2.0**-18, -(2.0**-30), 0.1, -0.4])
    x = torch.zeros(len(amax), 32)
    x[:, :8] = amax[:, None] * parts
    assert_follows_the_rule(x[:, None, :] if name == "fp8_128x128" else x, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_zero_block_has_scale_one_and_keeps_the_signs_of_zero(name):
    q = assert_follows_the_rule(one_block(0.0, -0.0, 0.0, -0.0), name)
    assert set(bits(q.scale).flatten().tolist()) == {oracle.ONE_SCALE[oracle.RULES[name].scale]}
    minus = oracle.RULES[name].element.sign
    assert stored_codes(q)[0, :5].tolist() == [0, minus, 0, minus, 0]
    assert torch.signbit(mm.dequantize(q))[0, :5].tolist() == [False, True, False, True, False]


@pytest.mark.parametrize("special", [NAN, INF, -INF])
@pytest.mark.parametrize("name", NAMES)
def test_a_block_with_nan_or_inf_stores_zeros_under_a_nan_scale(name, special):
    q = assert_follows_the_rule(one_block(1.0, -2.0, special, -0.0), name)
    rule = oracle.RULES[name]
    assert bits(q.scale)[0, 0].item() == oracle.NAN_SCALE[rule.scale]
    width = min(rule.block[1], 32)
    assert not stored_codes(q)[0, :width].any()
    assert mm.dequantize(q)[0, :width].isnan().all()


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_block_leaves_its_neighbours_alone(name):
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(0))
    x[1, 130] = NAN
    spoilt = assert_follows_the_rule(x, name)
    width = oracle.RULES[name].block[1]
    nan = mm.dequantize(spoilt).isnan()
    first = 130 // width * width
    assert nan[:, first : first + width].any(0).all()
    assert nan.sum() == width * (2 if name == "fp8_128x128" else 1)


@pytest.mark.parametrize("name", NAMES)
def test_negative_values_that_round_to_zero_are_stored_as_minus_zero(name):
    q = assert_follows_the_rule(one_block(448.0, -1e-9, 1e-9, -1e-45), name)
    minus = oracle.RULES[name].element.sign
    assert stored_codes(q)[0, 1:4].tolist() == [minus, 0, minus]


@pytest.mark.parametrize("name", NAMES)
def test_subnormal_values_match_the_rule(name):
    fp32 = from_bits([p | s for p in (1, 2, 3, 5, 447, 448, 449, 0x7FFFFF) for s in (0, 1 << 31)])
    bf16 = from_bits([(p << 16) | s for p in (1, 3, 6, 7, 0x40, 0x7F) for s in (0, 1 << 31)])
    for values in (fp32, bf16):
        assert_follows_the_rule(alone(values, name), name)
        assert_follows_the_rule(one_block(*values.tolist()), name)


@pytest.mark.parametrize("name", ["fp8_1x128", "fp8_128x128"])
def test_an_fp32_scale_may_be_a_coarse_subnormal_or_zero(name):
    """Up to 224 least subnormals, amax / 448 rounds to 0: then zeros are stored."""
    counts = [1, 223, 224, 225, 447, 448, 449, 671, 672, 673, 1120, 4000]
    x = alone(from_bits([n | s for n in counts for s in (0, 1 << 31)]), name)
    q = assert_follows_the_rule(x, name)
    scales = bits(q.scale).flatten().tolist()
    assert scales[::2] == scales[1::2] == [0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 9]
    assert not stored_codes(q).reshape(-1, 32)[:6].any()


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_fp32_values_match_the_rule(name):
    assert_follows_the_rule(one_block(LARGEST, -LARGEST, LARGEST / 3, 1.0), name)


@pytest.mark.parametrize(("name", "highest"), [("mxfp8", 247), ("mxfp4", 253)])
def test_mx_scale_codes_reach_from_zero_to_the_highest(name, highest):
    largest = float(oracle.decode(oracle.RULES[name].element.top, oracle.RULES[name].element))
    amax = [2.0**-149, largest * 2.0**-127, largest * 2.0**-126, LARGEST]
    q = assert_follows_the_rule(torch.cat([one_block(a, -a / 7) for a in amax]), name)
    assert q.scale.flatten().tolist() == [0, 0, 1, highest]


@pytest.mark.parametrize("exponent", [-120, -20, -1, 0, 3, 100])
@pytest.mark.parametrize("name", NAMES)
def test_every_midpoint_of_the_grid_goes_to_even_under_any_scale(name, exponent):
    """The block maximum is the element's largest value, so the step is exactly 2**exponent."""
    kind = oracle.RULES[name].element
    cols = oracle.RULES[name].block[1]
    points = around_the_grid(kind)
    points = torch.nn.functional.pad(points, (0, -len(points) % (cols - 1))).reshape(-1, cols - 1)
    largest = float(oracle.decode(kind.top, kind))
    x = torch.cat((torch.full((len(points), 1), largest), points), dim=1) * 2.0**exponent
    g = 2.0**exponent if name == "nvfp4" else None
    q = assert_follows_the_rule(x, name, g)
    assert len(set(bits(q.scale).flatten().tolist())) == 1
    if exponent == 0:
        for point, code in zip(
            x.flatten().tolist(), stored_codes(q).flatten().tolist(), strict=True
        ):
            size, magnitude = abs(Fraction(point)), code & ~kind.sign
            error = abs(oracle.decode(magnitude, kind) - size)
            neighbours = [n for n in (magnitude - 1, magnitude + 1) if 0 <= n <= kind.top]
            errors = [abs(oracle.decode(n, kind) - size) for n in neighbours]
            assert error <= min(errors)
            assert error < min(errors) or magnitude % 2 == 0, point


@pytest.mark.parametrize("g", GLOBAL_SCALES)
def test_nvfp4_edges_match_the_rule_under_a_global_scale(g):
    assert_follows_the_rule(alone(edge_amaxes()[::2], "nvfp4"), "nvfp4", g)
    for specials in ((0.0, -0.0), (NAN, 1.0), (INF,), (-INF, -1.0), (LARGEST, -LARGEST)):
        assert_follows_the_rule(one_block(*specials), "nvfp4", g)


@pytest.mark.parametrize("g", GLOBAL_SCALES)
def test_nvfp4_rows_spread_over_twenty_binades_match_the_rule(g):
    noise = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    factor = from_bits([float_bits(g)]) * torch.exp2(torch.arange(64.0) / 3 - 10)[:, None]
    assert_follows_the_rule((noise * factor).clamp(-LARGEST, LARGEST), "nvfp4", g)


def test_nvfp4_blocks_whose_scale_rounds_to_zero_store_zeros():
    """E4M3's least value is 2**-9, so scales up to 2**-10 round to 0: amax up to 6 * 2**-10."""
    edge = 6 * 2.0**-10
    q = assert_follows_the_rule(one_block(edge, -edge), "nvfp4")
    assert bits(q.scale)[0].tolist() == [0, oracle.ONE_SCALE["e4m3"]]
    assert not q.data.any()
    assert_same_bits(mm.dequantize(q), torch.zeros(1, 32), torch.zeros(1, 32), "value")
    above = torch.nextafter(torch.tensor(edge), torch.tensor(1.0)).item()
    q = assert_follows_the_rule(one_block(above, -edge), "nvfp4")
    assert bits(q.scale)[0, 0].item() == 1


def test_nvfp4_blocks_whose_step_rounds_to_zero_store_zeros_under_a_live_scale():
    """g is the least subnormal: a scale of 1/2 or less makes g * scale vanish."""
    least = 2.0**-149
    q = assert_follows_the_rule(one_block(least, -least), "nvfp4", least)
    assert bits(q.scale)[0, 0].item() == oracle.encode(Fraction(1, 6), oracle.E4M3)
    assert not q.data.any()
    assert not mm.dequantize(q).any()


def test_nvfp4_blocks_saturate_when_the_global_scale_is_too_small():
    q = assert_follows_the_rule(one_block(1e6, -1e6, 3.0, -0.0), "nvfp4", 0.5)
    assert bits(q.scale)[0, 0].item() == 0x7E
    assert mm.dequantize(q)[0, :4].tolist() == [1344.0, -1344.0, 0.0, 0.0]
    assert_follows_the_rule(one_block(LARGEST, -1.0), "nvfp4", 2.0**-149)


def test_nvfp4_takes_one_global_scale_per_row():
    g = torch.tensor(GLOBAL_SCALES)
    x = torch.randn(len(g), 64, generator=torch.Generator().manual_seed(4)) * g[:, None]
    q = assert_follows_the_rule(x, "nvfp4", g)
    for row, factor in enumerate(GLOBAL_SCALES):
        lone = mm.quantize(x[row : row + 1], "nvfp4", global_scale=factor)
        assert torch.equal(lone.data[0], q.data[row])
        assert torch.equal(bits(lone.scale[0]), bits(q.scale[row]))


@pytest.mark.parametrize("lead", [(), (3,), (3, 5)])
def test_a_global_scale_spreads_over_the_dimensions_it_does_not_name(lead):
    rng = torch.Generator().manual_seed(5)
    x = torch.randn(3, 5, 48, generator=rng)
    assert_follows_the_rule(x, "nvfp4", torch.rand(lead, generator=rng) + 1e-3)


def test_the_default_global_scale_is_one():
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(6))
    q, want = mm.quantize(x, "nvfp4"), mm.quantize(x, "nvfp4", global_scale=1.0)
    assert q.global_scale.shape == () and q.global_scale.item() == 1.0
    assert torch.equal(q.data, want.data)
    assert torch.equal(bits(q.scale), bits(want.scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weight_global_scale_is_amax_over_2688_of_finite_values(dtype):
    w = torch.randn(6, 4, 32, generator=torch.Generator().manual_seed(7)).to(dtype)
    w[1] = 0.0
    w[2, 1, 3], w[2, 0, 0], w[2, 2, 2] = NAN, INF, -INF
    w[3] = NAN
    w[4] = torch.finfo(dtype).max
    w[5] = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    got = weight_global_scale(w)
    assert got.shape == (6,) and got.dtype == torch.float32
    for expert, code in enumerate(bits(got).tolist()):
        sizes = [b & 0x7FFFFFFF for b in bits(w[expert].float()).flatten().tolist()]
        amax = max([s for s in sizes if s < oracle.INF32], default=0)
        want = oracle.encode(oracle.decode(amax, oracle.FP32) / 2688, oracle.FP32)
        assert code == (want or oracle.ONE32), f"expert {expert}, amax {amax:#010x}"
    assert got[1] == got[3] == 1.0


def test_weight_global_scale_that_rounds_to_zero_is_one():
    """Multiples of the least subnormal: up to 1344 of them are at most half of it over 2688."""
    got = weight_global_scale(from_bits([1, 1343, 1344, 1345, 2688, 4031, 4032, 4033])[:, None])
    assert bits(got).tolist() == [oracle.ONE32] * 3 + [1, 1, 1, 2, 2]


@pytest.mark.parametrize("name", NAMES)
def test_float64_values_are_the_exact_products(name):
    amax = edge_amaxes()[::31]
    x = torch.cat((alone(amax, name), alone(amax * 0.3, name)))
    g = 1 / 3 if name == "nvfp4" else None
    q = mm.quantize(x, name, global_scale=g)
    got = dequantize(q, torch.float64).reshape(len(x), -1)
    scales = bits(q.scale).reshape(len(x), -1).tolist()
    width = got.shape[1] // len(scales[0])
    factor = oracle.ONE32 if g is None else float_bits(g)
    for row, codes in enumerate(stored_codes(q).reshape(len(x), -1).tolist()):
        for i, code in enumerate(codes):
            want = oracle.exact_value(code, scales[row][i // width], name, factor)
            assert Fraction(got[row, i].item()) == want, (row, i)


@pytest.mark.parametrize("name", MX)
def test_a_power_of_two_times_a_block_moves_only_the_scale_code(name):
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(8))
    q = mm.quantize(x, name)
    for shift in (-60, -7, 1, 90):
        moved = mm.quantize(x * 2.0**shift, name)
        assert torch.equal(bits(moved.data), bits(q.data))
        assert torch.equal(moved.scale.int(), q.scale.int() + shift)
