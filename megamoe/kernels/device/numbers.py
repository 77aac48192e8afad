"""Number formats inside kernels, bit by bit as `formats` defines them.

Roundings are exact FP32 and integer operations that the GPU and Triton's interpreter agree on:
adding and taking away 2**23 times the grid's step rounds to the grid, ties to even. Where the GPU
has an E4M3 conversion it gives the same bytes.
"""

import triton
import triton.language as tl

from megamoe.kernels.device.compat import HAS_FP8

INF_BITS = tl.constexpr(0x7F800000)


class Kind:
    """A compile-time type for kernels: a name, some constants and jit functions as methods.

    Kernels take one as a constexpr and call its methods; `cache_key` makes a compiled kernel depend
    on their source.
    """

    def __init__(self, name: str, **members) -> None:
        self.name = name
        for key, value in members.items():
            plain = isinstance(value, (int, float, bool, str)) or value is None
            setattr(self, key, tl.constexpr(value) if plain else value)
        self._members = members

    @property
    def cache_key(self) -> str:
        parts = (getattr(v, "cache_key", str(v)) for v in self._members.values())
        return "-".join((self.name, *parts))

    def __repr__(self) -> str:
        return self.name


@triton.jit
def abs_bits(x):
    """|x| as integers, which order like the values; NaN lies above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def pow2(exponent_field):
    """2**(field - 127) for fields 0..254; field 0 is the subnormal 2**-127."""
    bits = tl.where(exponent_field == 0, 0x00400000, exponent_field << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e8m0_scale(amax_bits, MAX_EXPONENT: tl.constexpr, MAX_MANTISSA: tl.constexpr):
    """E8M0 code of a group from the bits of its amax: 127 for zero, 255 for NaN and Inf."""
    code = (amax_bits >> 23) - MAX_EXPONENT + ((amax_bits & 0x7FFFFF) > MAX_MANTISSA).to(tl.int32)
    code = tl.minimum(tl.maximum(code, 0), 254)
    code = tl.where(amax_bits == 0, 127, code)
    return tl.where(amax_bits >= INF_BITS, 255, code)


@triton.jit
def e8m0_value(code):
    """2**(code - 127); code 255 is NaN."""
    return tl.where(code == 255, float("nan"), pow2(tl.minimum(code, 254)))


@triton.jit
def e4m3_round(x):
    """`x` on the grid of E4M3: nearest, ties to even, saturating at 448, sign kept."""
    if HAS_FP8():
        return x.to(tl.float8e4nv).to(tl.float32)
    else:
        size = tl.minimum(tl.abs(x), 448.0)
        bits = size.to(tl.int32, bitcast=True)
        normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF
        small = (size + 16384.0) - 16384.0  # below 2**-6 the grid's step is 2**-9
        value = tl.where(size < 0.015625, small, normal.to(tl.float32, bitcast=True))
        return _with_sign_of(value, x)


@triton.jit
def e4m3_code(x):
    """The byte of the E4M3 value nearest to `x`."""
    if HAS_FP8():
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = abs_bits(e4m3_round(x))
        size = bits.to(tl.float32, bitcast=True)
        code = tl.where(size < 0.015625, (size * 512.0).to(tl.int32), (bits >> 20) - 960)
        return (code | _sign_bit(x, 24)).to(tl.uint8)


@triton.jit
def e4m3_value(code):
    """The value of an E4M3 byte; 0x7F and 0xFF are NaN."""
    code = code.to(tl.int32)
    size = code & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    value = tl.where(size == 0x7F, float("nan"), value)
    return tl.where(code >= 128, -value, value)


@triton.jit
def e2m1_round(x):
    """`x` on the grid of E2M1 0 .5 1 1.5 2 3 4 6: nearest, ties to even, saturating, sign kept."""
    size = tl.minimum(tl.abs(x), 6.0)
    normal = (_e2m1_bits(size) & ~0x3FFFFF).to(tl.float32, bitcast=True)
    small = (size + 4194304.0) - 4194304.0  # below 1 the grid's step is 0.5
    return _with_sign_of(tl.where(size < 1.0, small, normal), x)


@triton.jit
def e2m1_code(x):
    """The 4-bit code of the E2M1 value nearest to `x`."""
    size = tl.minimum(tl.abs(x), 6.0)
    small = (size + 4194304.0).to(tl.int32, bitcast=True) - 0x4A800000
    code = tl.where(size < 1.0, small, (_e2m1_bits(size) >> 22) - 252)
    return (code | _sign_bit(x, 28)).to(tl.uint8)


@triton.jit
def _e2m1_bits(size):
    """FP32 bits rounded to one mantissa bit; the bits below it are not cleared."""
    bits = size.to(tl.int32, bitcast=True)
    return bits + 0x1FFFFF + ((bits >> 22) & 1)


@triton.jit
def e2m1_to_bf16(nibble):
    """BF16 of E2M1 codes 0..15 (int16): exact, by placing exponent and mantissa."""
    size = nibble & 7
    bits = tl.where(size >= 2, (size << 6) + 0x3F00, size * 0x3F00)
    return (bits | ((nibble & 8) << 12)).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def e8m0_to_bf16(code):
    """BF16 of E8M0 codes 0..254: exact; code 0 is a subnormal."""
    wide = code.to(tl.int16)
    return tl.where(wide == 0, 0x40, wide << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _sign_bit(x, SHIFT: tl.constexpr):
    """The sign of `x` moved down by SHIFT from bit 31."""
    return ((x.to(tl.int32, bitcast=True) >> SHIFT) & (1 << (31 - SHIFT))).to(tl.int32)


@triton.jit
def _with_sign_of(size, x):
    bits = size.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -0x80000000)
    return bits.to(tl.float32, bitcast=True)
