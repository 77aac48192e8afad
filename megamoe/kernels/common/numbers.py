"""Number formats inside kernels, bit by bit as `formats` defines them.

Roundings are exact FP32 and integer operations that the GPU and Triton's interpreter agree on:
adding and taking away 2**23 times the grid's step rounds to the grid, ties to even. Where the GPU
has an E4M3 conversion it gives the same bytes.
"""

import triton
import triton.language as tl

from megamoe.kernels.common.compat import HAS_FP8, HAS_PTX, bf16_mul

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
    shifted, power = _e2m1_shifted(tl.minimum(tl.abs(x), 6.0))
    return _with_sign_of(tl.fma(power, -4194307.0, shifted), x)


@triton.jit
def e2m1_code(x):
    """The 4-bit code of the E2M1 value nearest to `x`."""
    return ((e2m1_low_bits(tl.minimum(tl.abs(x), 6.0)) & 7) | _sign_bit(x, 28)).to(tl.uint8)


@triton.jit
def e2m1_low_bits(size):
    """The code nearest to `size`, 0..6, in the three lowest bits; those above are not cleared.

    With `power` 2**e the code is 2 e more than the steps up to `size`. The sum's mantissa holds
    those steps plus 6, and its exponent, twice, is 298 + 2 e: modulo 8 they add up to the code.
    """
    bits = _e2m1_shifted(size)[0].to(tl.int32, bitcast=True)
    return bits + (bits >> 22)


@triton.jit
def _e2m1_shifted(size):
    """`size`, 0..6, plus 2**23 + 6 of the grid's steps there, which rounds it; and two steps.

    The step is 0.5 below 2, where the power is 1, and doubles with it.
    """
    power = tl.maximum(size, 1.0).to(tl.int32, bitcast=True) & INF_BITS
    power = power.to(tl.float32, bitcast=True)
    return tl.fma(power, 4194307.0, size), power


@triton.jit
def e2m1_to_bf16(nibble):
    """BF16 of E2M1 codes 0..15 (int16): exact, by placing exponent and mantissa."""
    size = nibble & 7
    bits = tl.where(size >= 2, (size << 6) + 0x3F00, size * 0x3F00)
    return (bits | ((nibble & 8) << 12)).to(tl.int16).to(tl.bfloat16, bitcast=True)


def _decode_asm() -> str:
    """PTX: word $8 of E2M1 codes 7..0, and a BF16 factor twice in $9 -> BF16 $0..$7.

    A code's sign and magnitude are moved to a BF16's sign and its lowest exponent and highest
    mantissa bits by one multiplication; that is the value times 2**-126, subnormal or not.
    """
    lines = [".reg .b32 x, v, up, none;", "mov.b32 up, 0x7E807E80;", "mov.b32 none, 0x80008000;"]
    for code in range(4):  # with code + 4, in the other half of the word
        shift = 4 * (code % 2)
        lines += [
            f"shr.u32 x, $8, {8 * (code // 2)};",
            f"and.b32 v, x, {0x000F000F << shift:#x};",
            f"mul.lo.u32 v, v, {(1 << 12 | 1 << 6) >> shift};",
            "and.b32 v, v, 0x81C081C0;",
            "fma.rn.bf16x2 v, v, up, none;",  # times 2**126; adding -0 keeps the sign of zero
            "fma.rn.bf16x2 v, v, $9, none;",
            f"mov.b32 {{${code}, ${code + 4}}}, v;",
        ]
    return "{" + " ".join(lines) + "}"


DECODE_ASM = tl.constexpr(_decode_asm())


@triton.jit
def e2m1_words(words, factor):
    """BF16 [n, 8 w] of words [n, w] of eight E2M1 codes, times BF16 factors: exact.

    factor   int32 [n, w], the same BF16 in both halves; its product with 6 must be finite
    """
    N: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    if HAS_PTX():
        v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
            DECODE_ASM, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, factor],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                   tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=1,
        )  # fmt: skip
        low = tl.join(tl.join(v0, v1), tl.join(v2, v3))
        high = tl.join(tl.join(v4, v5), tl.join(v6, v7))
        return tl.reshape(tl.permute(tl.join(low, high), (0, 1, 4, 3, 2)), (N, 8 * W))
    else:
        code = (words[:, :, None] >> (tl.arange(0, 8) * 4)[None, None, :]) & 15
        scale = factor.to(tl.int16).to(tl.bfloat16, bitcast=True)
        value = bf16_mul(e2m1_to_bf16(code.to(tl.int16)), scale[:, :, None])
        return tl.reshape(value, (N, 8 * W))


@triton.jit
def e8m0_twice(code):
    """BF16 of E8M0 codes 0..254 (int32), in both halves of a word: exact; code 0 is a subnormal."""
    return tl.where(code == 0, 0x00400040, code * 0x00800080)


@triton.jit
def e4m3_twice(code):
    """BF16 of E4M3 codes that are no NaN (int32), in both halves of a word: exact."""
    small = ((code & 0x7F) << 20) | ((code & 0x80) << 24)  # FP32 of the value times 2**-120
    bits = (small.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(tl.int32, bitcast=True)
    return bits | ((bits >> 16) & 0xFFFF)


@triton.jit
def _sign_bit(x, SHIFT: tl.constexpr):
    """The sign of `x` moved down by SHIFT from bit 31."""
    return ((x.to(tl.int32, bitcast=True) >> SHIFT) & (1 << (31 - SHIFT))).to(tl.int32)


@triton.jit
def _with_sign_of(size, x):
    bits = size.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -0x80000000)
    return bits.to(tl.float32, bitcast=True)
