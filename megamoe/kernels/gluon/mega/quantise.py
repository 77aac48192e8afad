"""A part of a token in the format of the pool, inside a fused launch."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.kernels.common.numbers import INF_BITS, abs_bits, e4m3_code, e4m3_round
from megamoe.kernels.common.quantise import round_to_format
from megamoe.kernels.gluon.arithmetic import divide
from megamoe.kernels.gluon.mega.state import PART_COLS


@gluon.jit
def _exact_ratio(x, divisor):
    """x / divisor, correctly rounded for BF16 x and the divisor of their amax: a division a group.

    A test goes through all pairs of mantissas. Tiny divisors are lifted, or 1 / divisor overflows.
    """
    lift = gl.where(divisor < 2.0**-60, 2.0**64, 1.0)
    by = divisor * lift
    inverse = gl.expand_dims(gl.div_rn(1.0 + 0.0 * by, by), 1)
    return divide(x * gl.expand_dims(lift, 1), gl.expand_dims(by, 1), inverse)


@gluon.jit
def _divided(x, bits, args, token):
    """(x [groups, group] by the divisor of its group, FP32 scales [groups]) of formats with a scale
    that is no power of two: FP32 per 128, NVFP4 per 16; `bits` [groups] are those of the amax.
    """
    size = bits.to(gl.float32, bitcast=True)
    IS_WIDE: gl.constexpr = args.ACTS.GROUP == 128
    if IS_WIDE:
        by: gl.constexpr = 1.0 / 448.0
        scale = gl.where(bits == 0, 1.0, divide(size, 448.0 + 0.0 * size, by))
        scale = gl.where(bits >= INF_BITS, float("nan"), scale)
        divisor = scale
    else:
        by = gl.load(args.g + token * args.g_stride)
        scale = e4m3_round(gl.where(bits == 0, 1.0, gl.div_rn(size, 6.0 * by + 0.0 * size)))
        scale = gl.where(bits >= INF_BITS, float("nan"), scale)
        divisor = scale * by
    dead = (divisor == 0.0) | (abs_bits(divisor) >= INF_BITS)
    divisor = gl.where(dead, 1.0, divisor)
    if IS_WIDE:
        ratio = _exact_ratio(x, divisor)
    else:
        ratio = gl.div_rn(x, gl.expand_dims(divisor, 1) + 0.0 * x)
    return gl.where(gl.expand_dims(dead, 1), 0.0, ratio), scale


@gluon.jit
def _placed_part(x, args, token):
    """(codes, bytes of the scales) of FP32 [groups, group], as a block-scaled MMA takes them.

    Codes of FP4 are two a byte.
    """
    A: gl.constexpr = args.ACTS
    bits = gl.max(abs_bits(x), 1)
    if A.GROUP == 16:
        ratio, scale = _divided(x, bits, args, token)
        stored = gl.where(bits >= INF_BITS, 0x7F, e4m3_code(scale).to(gl.int32))
    else:
        stored, _, divisor = A.scale(bits, 1.0, A.EXPONENT, A.MANTISSA)
        dead = abs_bits(divisor) >= INF_BITS
        ratio = A.divide(x, gl.expand_dims(gl.where(dead, 1.0, divisor), 1))
        ratio = gl.where(gl.expand_dims(dead, 1), 0.0, ratio)
    codes = A.code(ratio)
    if A.BITS == 4:
        low, high = codes.reshape([PART_COLS // 2, 2]).split()
        codes = low | (high << 4)
    else:
        codes = codes.reshape([PART_COLS])
    return codes, stored.to(gl.uint8)


@gluon.jit
def quantise_part(args, source, token):
    """Columns [PART_COLS] as the pool holds them, and scales per group where it has any."""
    A: gl.constexpr = args.ACTS
    scale = 1.0
    values = source
    if A.STORED_AS == "placed":
        x = source.to(gl.float32).reshape([PART_COLS // A.GROUP, A.GROUP])
        values, scale = _placed_part(x, args, token)
    elif A.STORED_AS != "plain":
        GROUP: gl.constexpr = A.GROUP
        x = source.to(gl.float32).reshape([PART_COLS // GROUP, GROUP])
        if GROUP == 32:
            values = round_to_format(x, A).to(gl.bfloat16)
        else:
            ratio, scale = _divided(x, gl.max(abs_bits(x), 1), args, token)
            if A.STORED_AS == "codes":
                values = ratio.to(gl.float8e4nv)
            elif A.STORED_AS == "scaled":
                values = A.round(ratio).to(gl.bfloat16)
            else:
                values = (A.round(ratio) * gl.expand_dims(scale, 1)).to(gl.bfloat16)
        values = values.reshape([PART_COLS])
    return values, scale
