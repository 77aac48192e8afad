"""The quantisation rule in exact rational arithmetic, one value at a time.

Nothing here is shared with the library: numbers are `Fraction`s, floats are integer codes.
A float's magnitude code is its bits without the sign; `2**128` stands for FP32 infinity.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

INF32, NAN32 = 0x7F800000, 0x7FC00000
ONE32 = 0x3F800000
NAN_SCALE = {"e8m0": 255, "e4m3": 0x7F, "fp32": NAN32}
ONE_SCALE = {"e8m0": 127, "e4m3": 0x38, "fp32": ONE32}


class Float(NamedTuple):
    """A binary float; magnitudes beyond code `top` become it (the largest number, or infinity)."""

    exponent_bits: int
    mantissa_bits: int
    top: int

    @property
    def low(self) -> int:
        """Exponent of the smallest normal number."""
        return 2 - (1 << (self.exponent_bits - 1))

    @property
    def sign(self) -> int:
        """The sign bit."""
        return 1 << (self.exponent_bits + self.mantissa_bits)


FP32 = Float(8, 23, INF32)
BF16 = Float(8, 7, 0x7F80)
E4M3 = Float(4, 3, 0x7E)
E2M1 = Float(2, 1, 0x7)


class Rule(NamedTuple):
    """A format: element, scale kind, and the (rows, columns) that share a scale."""

    element: Float
    scale: str
    block: tuple[int, int]


RULES = {
    "mxfp8": Rule(E4M3, "e8m0", (1, 32)),
    "mxfp4": Rule(E2M1, "e8m0", (1, 32)),
    "nvfp4": Rule(E2M1, "e4m3", (1, 16)),
    "fp8_1x128": Rule(E4M3, "fp32", (1, 128)),
    "fp8_128x128": Rule(E4M3, "fp32", (128, 128)),
}


@lru_cache(1 << 10)
def power(exponent: int) -> Fraction:
    """2**exponent."""
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


@lru_cache(1 << 12)
def decode(code: int, kind: Float) -> Fraction:
    """The value of a magnitude code."""
    exponent, mantissa = divmod(code, 1 << kind.mantissa_bits)
    if exponent:
        mantissa += 1 << kind.mantissa_bits
    return mantissa * power(max(exponent, 1) - 1 + kind.low - kind.mantissa_bits)


def encode(value: Fraction, kind: Float) -> int:
    """The magnitude code nearest to `value` >= 0: ties to even, `top` beyond the largest."""
    if value == 0:
        return 0
    n, d = value.numerator, value.denominator
    exponent = n.bit_length() - d.bit_length()  # of value's leading bit, or one too large
    exponent = max(exponent - (value < power(exponent)), kind.low)
    shift = kind.mantissa_bits - exponent
    n, d = (n << shift, d) if shift >= 0 else (n, d << -shift)
    units, rest = divmod(n, d)
    units += 2 * rest > d or (2 * rest == d and units % 2 == 1)
    return min(((exponent - kind.low) << kind.mantissa_bits) + units, kind.top)


def round_to(value: Fraction, kind: Float) -> Fraction:
    """`value` >= 0 rounded to nearest even in `kind`."""
    return decode(encode(value, kind), kind)


def encode_signed(bits: int, kind: Float) -> int:
    """An FP32 bit pattern that is not NaN, rounded to `kind`, as a bit pattern with its sign."""
    return encode(decode(bits & ~FP32.sign, FP32), kind) | (kind.sign if bits & FP32.sign else 0)


def decode_e8m0(code: int) -> int:
    """FP32 bits of an E8M0 scale: 2**(code - 127), NaN for 255."""
    return NAN32 if code == 255 else encode(power(code - 127), FP32)


def ceil_log2(value: Fraction) -> int:
    """The least e with 2**e >= value > 0."""
    e = value.numerator.bit_length() - value.denominator.bit_length()
    return e + 1 if power(e) < value else (e if power(e - 1) < value else e - 1)


def divide(a: Fraction, b: Fraction) -> Fraction:
    """a / b rounded to FP32; a finite number over infinity is 0."""
    return Fraction(0) if b >= power(128) else round_to(a / b, FP32)


@lru_cache(40_000)
def scale_code(amax: int, name: str, g: int = ONE32) -> int:
    """The stored scale of a block whose largest magnitude has FP32 code `amax`."""
    rule = RULES[name]
    if amax >= INF32:
        return NAN_SCALE[rule.scale]
    if amax == 0:
        return ONE_SCALE[rule.scale]
    largest = decode(rule.element.top, rule.element)
    size = decode(amax, FP32)
    if rule.scale == "e8m0":
        return min(max(ceil_log2(size / largest) + 127, 0), 254)
    if rule.scale == "fp32":
        return encode(size / largest, FP32)
    return encode(divide(size, round_to(largest * decode(g, FP32), FP32)), E4M3)


@lru_cache(40_000)
def step_code(scale: int, name: str, g: int = ONE32) -> int | None:
    """FP32 code of what values are divided by: the scale, times g for NVFP4. None where NaN."""
    kind = RULES[name].scale
    if scale == NAN_SCALE[kind]:
        return None
    if kind == "e8m0":
        return decode_e8m0(scale)
    return scale if kind == "fp32" else encode(decode(scale, E4M3) * decode(g, FP32), FP32)


@lru_cache(40_000)
def element_code(size: int, step: int, kind: Float) -> int:
    """Magnitude code of element(FP32(x / step)) for FP32 codes of |x| and step > 0."""
    return encode(divide(decode(size, FP32), decode(step, FP32)), kind)


def quantise_block(values: list[int], name: str, g: int = ONE32) -> tuple[list[int], int]:
    """Stored element codes and scale code of one block of FP32 bit patterns."""
    kind = RULES[name].element
    sizes = {v: v & 0x7FFFFFFF for v in set(values)}
    scale = scale_code(max(sizes.values()), name, g)
    step = step_code(scale, name, g)
    if not step:  # NaN, or rounded to 0
        return [0] * len(values), scale
    code = {v: element_code(s, step, kind) | (kind.sign * (v != s)) for v, s in sizes.items()}
    return [code[v] for v in values], scale


def exact_scale(scale: int, name: str) -> Fraction:
    """The value of a stored scale that is not NaN."""
    kind = RULES[name].scale
    return power(scale - 127) if kind == "e8m0" else decode(scale, E4M3 if kind == "e4m3" else FP32)


def exact_value(code: int, scale: int, name: str, g: int = ONE32) -> Fraction | None:
    """The signed value element * scale * g of one stored element; None where it is NaN."""
    if scale == NAN_SCALE[RULES[name].scale]:
        return None
    kind = RULES[name].element
    size = decode(code & ~kind.sign, kind) * exact_scale(scale, name) * decode(g, FP32)
    return -size if code & kind.sign else size


@lru_cache(40_000)
def dequantise(code: int, scale: int, name: str, g: int = ONE32) -> int:
    """FP32 bits of one stored element: the exact product, rounded once."""
    value = exact_value(code, scale, name, g)
    if value is None:
        return NAN32
    return encode(abs(value), FP32) | (FP32.sign if code & RULES[name].element.sign else 0)
