"""The one file that knows what Triton's interpreter and versions lack."""

import triton
import triton.language as tl

# The interpreter keeps BF16 as raw 16-bit words and would multiply those: go through FP32 there.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def bf16_mul(a, b):
    """BF16 product; the callers' products are exact, so no rounding is left open."""
    if INTERPRETED:
        return (a.to(tl.float32) * b.to(tl.float32)).to(tl.bfloat16)
    else:
        return a * b


@triton.jit
def dot(a, b, acc):
    """acc + a @ b with FP32 sums."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def to_bf16(x):
    """FP32 to the nearest BF16, ties to even; the interpreter's own cast truncates."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
        rounded = tl.where(x != x, 0x7FC0, rounded).to(tl.int16)
        return rounded.to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)
