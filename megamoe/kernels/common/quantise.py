"""Values rounded to a block format with E8M0 scales, inside Gluon kernels."""

import triton
import triton.language as tl

from megamoe.kernels.common.numbers import INF_BITS, abs_bits


@triton.jit
def round_to_format(x, FORMAT: tl.constexpr):
    """FP32 [groups, group, ..] -> code times scale, which BF16 holds exactly.

    FORMAT is a `Kind` of `portable.acts` whose scales are powers of two. A group that holds a value
    that is not finite becomes NaN: its codes are zero and its scale is NaN.
    """
    bits = tl.max(abs_bits(x), 1)
    _, scale, step = FORMAT.scale(bits, 1.0, FORMAT.EXPONENT, FORMAT.MANTISSA)
    dead = abs_bits(step) >= INF_BITS
    step = tl.expand_dims(tl.where(dead, 1.0, step), 1)
    ratio = tl.where(tl.expand_dims(dead, 1), 0.0, FORMAT.divide(x, step))
    return FORMAT.round(ratio) * tl.expand_dims(scale, 1)
