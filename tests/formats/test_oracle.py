"""The oracle itself, against tables written by hand and Python's own float conversion."""

from __future__ import annotations

import itertools
import random
import struct
from fractions import Fraction

import pytest

from . import oracle

E2M1_TABLE = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]


def test_e2m1_codes_are_the_eight_magnitudes():
    assert [oracle.decode(code, oracle.E2M1) for code in range(8)] == E2M1_TABLE


def test_e4m3_landmarks_are_where_the_standard_puts_them():
    landmarks = {0: 0, 1: Fraction(1, 512), 8: Fraction(1, 64), 0x38: 1, 0x39: Fraction(9, 8)}
    for code, value in {**landmarks, 0x77: 240, 0x78: 256, 0x7E: 448}.items():
        assert oracle.decode(code, oracle.E4M3) == value, hex(code)


@pytest.mark.parametrize(
    ("kind", "last"),
    [(oracle.E2M1, 7), (oracle.E4M3, 0x7E), (oracle.BF16, 0x7F80)],
    ids=("e2m1", "e4m3", "bf16"),
)
def test_codes_rise_with_their_values_and_encode_to_themselves(kind, last):
    values = [oracle.decode(code, kind) for code in range(last + 1)]
    assert all(a < b for a, b in itertools.pairwise(values))
    assert [oracle.encode(value, kind) for value in values] == list(range(last + 1))


def test_fp32_rounding_is_what_the_c_compiler_does():
    rng = random.Random(1)
    for _ in range(5000):
        value = rng.uniform(1, 2) * 2.0 ** rng.randint(-152, 126)
        (want,) = struct.unpack("<I", struct.pack("<f", value))
        assert oracle.encode(Fraction(value), oracle.FP32) == want, value
        assert oracle.decode(want, oracle.FP32) == struct.unpack("<f", struct.pack("<f", value))[0]


def test_rounding_overflows_to_infinity_or_saturates():
    half_ulp = oracle.power(103)
    largest = oracle.decode(oracle.INF32 - 1, oracle.FP32)
    assert oracle.encode(largest + half_ulp, oracle.FP32) == oracle.INF32
    assert oracle.encode(largest + half_ulp - 1, oracle.FP32) == oracle.INF32 - 1
    assert oracle.encode(Fraction(10**6), oracle.E4M3) == 0x7E
    assert oracle.encode(Fraction(10**6), oracle.E2M1) == 7


def test_ceil_log2_is_exact_at_and_around_powers_of_two():
    tiny = Fraction(1, 1 << 400)
    for e in range(-160, 160):
        assert oracle.ceil_log2(oracle.power(e)) == e
        assert oracle.ceil_log2(oracle.power(e) - tiny) == e
        assert oracle.ceil_log2(oracle.power(e) + tiny) == e + 1
        assert oracle.ceil_log2(oracle.power(e) * Fraction(2, 3)) == e


def test_a_block_worked_by_hand():
    three, minus_half = 0x40400000, 0xBF000000
    assert oracle.quantise_block([three, minus_half], "mxfp4") == ([0b0111, 0b1010], 126)
    assert oracle.dequantise(0b1010, 126, "mxfp4") == minus_half
