"""Arithmetic of the epilogues in FP32: division, the activations, scales of formats."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.kernels.common.numbers import INF_BITS, e4m3_round

# PTX negates an operand for free; `-x` would be an instruction of its own.
RECIPROCAL = gl.constexpr(
    "{ .reg .f32 n, e; rcp.approx.ftz.f32 $0, $1; neg.f32 n, $1; "
    "fma.rn.f32 e, n, $0, 0f3F800000; fma.rn.f32 $0, e, $0, $0; }"
)
DIVIDE = gl.constexpr(
    "{ .reg .f32 q, n, r; mul.rn.f32 q, $1, $3; neg.f32 n, q; "
    "fma.rn.f32 r, n, $2, $1; fma.rn.f32 $0, r, $3, q; }"
)
LOG2_E = gl.constexpr(1.4426950408889634)
TINY_SCALE = gl.constexpr(2.0**-100)  # keeps reciprocals finite; such activations are below 1e-27


@gluon.jit
def reciprocal(x):
    """1 / x with one Newton step."""
    return gl.inline_asm_elementwise(
        RECIPROCAL, "=&f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def exp2(x):
    """2 ** x; zero instead of denormals, which take instructions that `1.0 + power` forgets."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def times(a, b):
    """a * b, rounded before anything is added to it: the compiler may not fuse it with a sum."""
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def divide(a, b, inverse):
    """a / b, given 1 / b: a product and one exact correction round it correctly."""
    return gl.inline_asm_elementwise(
        DIVIDE, "=f,f,f,f", [a, b, inverse], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def round_bf16(x):
    """FP32 rounded to BF16, two at a time: single conversions run at an eighth of the rate."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; "
        "and.b32 $1, t, 0xFFFF0000; }",
        "=r,=r,r,r", [x], dtype=gl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def min_nan(x, limit):
    """The smaller of the two; NaN stays NaN."""
    return gl.inline_asm_elementwise(
        "min.NaN.f32 $0, $1, $2;", "=f,f,f", [x, limit], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def max_nan(x, limit):
    """The larger of the two; NaN stays NaN."""
    return gl.inline_asm_elementwise(
        "max.NaN.f32 $0, $1, $2;", "=f,f,f", [x, limit], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def glu(gemm, gate, up):
    """FP32 of the gated activation; gate and up are rounded to BF16 and clamped first."""
    gate = min_nan(round_bf16(gate), gemm.clamp)
    up = max_nan(min_nan(round_bf16(up), gemm.clamp), -gemm.clamp)
    is_oss: gl.constexpr = gemm.ACTIVATION == "gpt_oss"
    power = exp2(-1.702 * gate * LOG2_E if is_oss else gate * -LOG2_E)
    act = gate * reciprocal(1.0 + power) * (up + 1.0 if is_oss else up)
    return gl.where(power == float("inf"), 0.0 * up, act)


@gluon.jit
def e4m3_scale(bits):
    """FP32 scale of E4M3 from the bits of an amax, and its reciprocal; NaN for NaN and Inf."""
    size = bits.to(gl.float32, bitcast=True)
    by: gl.constexpr = 1.0 / 448.0
    scale = divide(size, 448.0 + 0.0 * size, by)
    scale = gl.where(bits == 0, 1.0, gl.maximum(scale, TINY_SCALE))
    inverse = reciprocal(scale)
    return gl.where(bits >= INF_BITS, float("nan"), scale), inverse


@gluon.jit
def nvfp4_scale(bits, acts_factor):
    """The E4M3 block scale of an amax, as FP32; 1 for zero, NaN for what is not finite."""
    limit = 6.0 * acts_factor
    size = bits.to(gl.float32, bitcast=True)
    scale = e4m3_round(divide(size, limit, reciprocal(limit)))
    scale = gl.where(bits == 0, 1.0, scale)
    return gl.where(bits >= INF_BITS, float("nan"), scale)
