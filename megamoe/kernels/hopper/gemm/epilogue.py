"""Epilogues: sums to activations in the next linear's format, or to rows at their places.

Sums stand as [64 weight rows, tokens]; what else an epilogue needs is in the tile's `notes`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from megamoe.kernels.common.columns import pool_place
from megamoe.kernels.common.numbers import INF_BITS, abs_bits, e4m3_round
from megamoe.kernels.hopper.gemm.notes import rows_of
from megamoe.kernels.hopper.pipeline import GROUPS

# Signs are the multiplier's business in PTX; `-x` would be an instruction of its own.
RECIPROCAL = gl.constexpr(
    "{ .reg .f32 n, e; rcp.approx.ftz.f32 $0, $1; neg.f32 n, $1; "
    "fma.rn.f32 e, n, $0, 0f3F800000; fma.rn.f32 $0, e, $0, $0; }"
)
DIVIDE = gl.constexpr(
    "{ .reg .f32 q, n, r; mul.rn.f32 q, $1, $3; neg.f32 n, q; "
    "fma.rn.f32 r, n, $2, $1; fma.rn.f32 $0, r, $3, q; }"
)
LOG2_E = gl.constexpr(1.4426950408889634)
_PLANES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
TINY_SCALE = gl.constexpr(2.0**-100)  # keeps reciprocals finite; such activations are below 1e-27


@gluon.jit
def halves(v, TOKENS: gl.constexpr):
    """Rows of 8 gate, 8 up, ...: both of one output sit in one thread."""
    gate, up = v.reshape([4, 2, 8, TOKENS]).permute((0, 2, 3, 1)).split()
    return gate.reshape([32, TOKENS]), up.reshape([32, TOKENS])


@gluon.jit
def _reciprocal(x):
    """1 / x with one Newton step."""
    return gl.inline_asm_elementwise(
        RECIPROCAL, "=&f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def _exp2(x):
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
def divide(a, b, reciprocal):
    """a / b, given 1 / b: a product and one exact correction round it correctly."""
    return gl.inline_asm_elementwise(
        DIVIDE, "=f,f,f,f", [a, b, reciprocal], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def _round_bf16(x):
    """FP32 rounded to BF16, two at a time: single conversions run at an eighth of the rate."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; "
        "and.b32 $1, t, 0xFFFF0000; }",
        "=r,=r,r,r", [x], dtype=gl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _at_most(x, limit):
    """The smaller of the two; NaN stays NaN."""
    return gl.inline_asm_elementwise(
        "min.NaN.f32 $0, $1, $2;", "=f,f,f", [x, limit], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _at_least(x, limit):
    """The larger of the two; NaN stays NaN."""
    return gl.inline_asm_elementwise(
        "max.NaN.f32 $0, $1, $2;", "=f,f,f", [x, limit], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def glu(p, gate, up):
    """FP32 of the gated activation; gate and up are rounded to BF16 and clamped first."""
    gate = _at_most(_round_bf16(gate), p.clamp)
    up = _at_least(_at_most(_round_bf16(up), p.clamp), -p.clamp)
    is_oss: gl.constexpr = p.ACTIVATION == "gpt_oss"
    power = _exp2(-1.702 * gate * LOG2_E if is_oss else gate * -LOG2_E)
    act = gate * _reciprocal(1.0 + power) * (up + 1.0 if is_oss else up)
    return gl.where(power == float("inf"), 0.0 * up, act)


@gluon.jit
def e4m3_step(bits):
    """FP32 scale of E4M3 from the bits of an amax, and what to multiply by; NaN for NaN and Inf."""
    size = bits.to(gl.float32, bitcast=True)
    by: gl.constexpr = 1.0 / 448.0
    scale = divide(size, 448.0 + 0.0 * size, by)
    scale = gl.where(bits == 0, 1.0, gl.maximum(scale, TINY_SCALE))
    inverse = _reciprocal(scale)
    return gl.where(bits >= INF_BITS, float("nan"), scale), inverse


@gluon.jit
def _activated(p, sums, factor, bias, token_factor, weight, ok):
    """FP32 [32, tokens]: gate and up rounded to BF16, clamped, gated, weighted; padding is zero."""
    if p.FACTOR == "row" or p.FACTOR == "expert":
        sums = times(sums, gl.expand_dims(factor, 1))
    N: gl.constexpr = sums.shape[1]
    gate, up = halves(sums, N)
    if p.FACTOR == "expert":
        gate = times(gate, gl.expand_dims(token_factor, 0))
        up = times(up, gl.expand_dims(token_factor, 0))
    if p.HAS_BIAS:
        LAYOUT: gl.constexpr = sums.type.layout
        wide = gl.expand_dims(bias, 1) + gl.zeros([64, N], gl.float32, LAYOUT)
        gate_bias, up_bias = halves(wide, N)
        gate = gate + gate_bias
        up = up + up_bias
    act = glu(p, gate, up)
    if p.WEIGHTED:
        act = act * gl.expand_dims(weight, 0)
    return gl.where(gl.expand_dims(ok, 0), act, 0.0)


@gluon.jit
def _together(a, b, LAYOUT: gl.constexpr):
    """Both in another layout, by one conversion."""
    a = a.to(gl.int32, bitcast=True).to(gl.int64)
    b = b.to(gl.int32, bitcast=True).to(gl.int64)
    both = gl.convert_layout(a << 32 | b & 0xFFFFFFFF, LAYOUT)
    a = (both >> 32).to(gl.int32).to(gl.float32, bitcast=True)
    return a, both.to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def _scales(p, act, other, first, end, slab, done, WG: gl.constexpr, COL: gl.constexpr):
    """Each token's E4M3 scale and its reciprocal, from the largest value of all warpgroups.

    Warps write theirs to shared memory, in two sets that take turns. Every lane gets tokens of its
    own, so that a warp computes a scale once.
    """
    N: gl.constexpr = act.shape[1]
    NUM: gl.constexpr = 4 * GROUPS
    LANES: gl.constexpr = gl.BlockedLayout([N // 32 if N > 32 else 1], [32], [4], [0])
    turn = done & 1
    bits = gl.max(abs_bits(act).reshape([4, 8, N]), 1)
    if p.SLABS == 2:
        bits = gl.maximum(bits, gl.max(abs_bits(other).reshape([4, 8, N]), 1))
    sets = p.amax._reinterpret(gl.int32, [2 * GROUPS, 4, p.TOKENS], _PLANES)
    sets.index(turn * GROUPS + WG).slice(0, N, 1).store(bits)
    mbarrier.arrive(p.met.index(turn), count=1)
    mbarrier.wait(p.met.index(turn), (done >> 1) & 1)
    most = p.amax.index(turn * NUM).slice(0, N, 0).load(LANES)
    for i in gl.static_range(1, NUM):
        most = gl.maximum(most, p.amax.index(turn * NUM + i).slice(0, N, 0).load(LANES))
    scale, inverse = e4m3_step(most)
    if WG == 0:
        row = first + gl.arange(0, N, LANES)
        gl.store(p.out_scale + slab // 4 * p.pool_rows + row, scale, mask=row < end)
    return _together(scale, inverse, COL)


@gluon.jit
def _store_rows(p, v, first, end, first_col, width, WG: gl.constexpr):
    """v [columns, tokens] to rows of `out` from first_col on; wide tiles turn in shared memory."""
    N: gl.constexpr = v.shape[1]
    BY_GROUP: gl.constexpr = p.GATED and p.WEIGHTS.BY_GROUP
    if N >= 64 and v.dtype == gl.bfloat16:  # room is for half of them
        v0, v1 = v.reshape([v.shape[0], 2, N // 2]).permute((0, 2, 1)).split()
        store_turned(p, v0.permute((1, 0)), first, end, 0, first_col, width, BY_GROUP, WG)
        store_turned(p, v1.permute((1, 0)), first, end, N // 2, first_col, width, BY_GROUP, WG)
    elif N >= 64:
        store_turned(p, v.permute((1, 0)), first, end, 0, first_col, width, BY_GROUP, WG)
    else:
        LAYOUT: gl.constexpr = v.type.layout
        row, is_there = rows_of(p, first, end, 0, N, gl.SliceLayout(0, LAYOUT))
        col = first_col + gl.arange(0, v.shape[0], gl.SliceLayout(1, LAYOUT))
        if BY_GROUP:
            col = pool_place(col)
        at = gl.expand_dims(row.to(gl.int64) * p.out_width, 0) + gl.expand_dims(col, 1)
        mask = gl.expand_dims(is_there, 0) & gl.expand_dims(col < width, 1)
        gl.store(p.out + at, v, mask=mask)


@gluon.jit
def store_turned(p, v, first, end, START: gl.constexpr, first_col, width, BY_GROUP: gl.constexpr,
                 WG: gl.constexpr):  # fmt: skip
    """v [tokens, columns], tokens from number START on, to rows of `out`.

    It turns in shared memory, so that a thread has whole 16 bytes of a row, or BY_GROUP its four.
    """
    N: gl.constexpr = v.shape[0]
    M: gl.constexpr = v.shape[1]
    VEC: gl.constexpr = 4 if BY_GROUP else 128 // v.dtype.primitive_bitwidth
    ACROSS: gl.constexpr = M // VEC
    WIDE: gl.constexpr = gl.BlockedLayout([1, VEC], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(VEC, 1, ACROSS, [1, 0])
    buf = p.turn.index(WG)._reinterpret(v.dtype, [N, M], shared)
    buf.store(v)
    turned = buf.load(WIDE)
    row, is_there = rows_of(p, first, end, START, N, gl.SliceLayout(1, WIDE))
    col = first_col + gl.arange(0, M, gl.SliceLayout(0, WIDE))
    if BY_GROUP:
        col = pool_place(col)
    at = gl.expand_dims(row.to(gl.int64) * p.out_width, 1) + gl.expand_dims(col, 0)
    mask = gl.expand_dims(is_there, 1) & gl.expand_dims(col < width, 0)
    gl.store(p.out + at, turned, mask=mask)


@gluon.jit
def _codes(p, ratio):
    """E4M3, or its values in BF16 where that is what wgmma multiplies."""
    codes = ratio.to(gl.float8e4nv)
    return codes.to(gl.bfloat16) if p.ACTS.HOLD == "scaled" else codes


@gluon.jit
def _nvfp4_scale(bits, acts_factor):
    """The E4M3 block scale of an amax, as FP32; 1 for zero, NaN for what is not finite."""
    limit = 6.0 * acts_factor
    size = bits.to(gl.float32, bitcast=True)
    scale = e4m3_round(divide(size, limit, _reciprocal(limit)))
    scale = gl.where(bits == 0, 1.0, scale)
    return gl.where(bits >= INF_BITS, float("nan"), scale)


@gluon.jit
def _as_bf16(p, act, acts_factor):
    """BF16 of the activations, rounded to their format if any: code times scale is exact there."""
    T: gl.constexpr = act.shape[1]
    if p.ACTS.HOLD == "plain":
        held = act
    else:
        GROUP: gl.constexpr = p.ACTS.GROUP
        split = act.reshape([32 // GROUP, GROUP, T])
        bits = gl.max(abs_bits(split), 1)
        if GROUP == 16:
            scale = _nvfp4_scale(bits, acts_factor)
            step = scale * acts_factor
            dead = (step == 0.0) | (abs_bits(step) >= INF_BITS)
            step = gl.expand_dims(gl.where(dead, 1.0, step), 1)
            ratio = divide(split, step, _reciprocal(step))
        else:
            _, scale, step = p.ACTS.scale(bits, 1.0, p.ACTS.EXPONENT, p.ACTS.MANTISSA)
            dead = abs_bits(step) >= INF_BITS
            step = gl.expand_dims(gl.where(dead, 1.0, step), 1)
            ratio = p.ACTS.divide(split, step)
        ratio = gl.where(gl.expand_dims(dead, 1), 0.0, ratio)
        held = (p.ACTS.round(ratio) * gl.expand_dims(scale, 1)).reshape([32, T])
    return held.to(gl.bfloat16)


@gluon.jit
def _values(of, IS_THERE: gl.constexpr, OTHER, START: gl.constexpr, N: gl.constexpr,
            LAYOUT: gl.constexpr):  # fmt: skip
    """N values of the notes from START on, or OTHER where there are none."""
    value = gl.full([N], OTHER, gl.float32, LAYOUT)
    if IS_THERE:
        value = of.slice(START, N, 0).load(LAYOUT)
    return value


@gluon.jit
def _gated_columns(TOKENS: gl.constexpr, MMA: gl.constexpr):
    """Zeros per token, in the layout that the gated epilogue has them in."""
    gate, _ = halves(gl.zeros([64, TOKENS], gl.float32, MMA), TOKENS)
    return gl.max(gate, 0)


@gluon.jit
def finish_gated(p, low, high, expert, slab, first, end, done, WG: gl.constexpr):
    """L1: activation, topk weight and format; 32 outputs of a slab for each token of the tile."""
    N: gl.constexpr = low.shape[1]
    MMA: gl.constexpr = low.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    columns = _gated_columns(N, MMA)
    COL: gl.constexpr = columns.type.layout
    has_factor: gl.constexpr = p.FACTOR == "row" or p.FACTOR == "expert"
    is_by_expert: gl.constexpr = p.FACTOR == "expert"
    SLAB: gl.constexpr = WG * p.SLABS  # of the tile
    weight = _values(p.notes.weight, p.WEIGHTED, 1.0, 0, N, COL)
    token_factor = _values(p.notes.token_factor, is_by_expert, 1.0, 0, N, COL)
    acts_factor = 1.0
    if is_by_expert:
        acts_factor = gl.load(p.acts_factor + expert)
    ok = first + gl.arange(0, N, COL) < end
    factor = _values(p.notes.factor, has_factor, 1.0, SLAB * 64, 64, ROW)
    bias = _values(p.notes.bias, p.HAS_BIAS, 0.0, SLAB * 64, 64, ROW)
    act = _activated(p, low, factor, bias, token_factor, weight, ok)
    other = act
    if p.SLABS == 2:
        factor = _values(p.notes.factor, has_factor, 1.0, SLAB * 64 + 64, 64, ROW)
        bias = _values(p.notes.bias, p.HAS_BIAS, 0.0, SLAB * 64 + 64, 64, ROW)
        other = _activated(p, high, factor, bias, token_factor, weight, ok)
    if p.ACTS.HOLD == "codes" or p.ACTS.HOLD == "scaled":
        gl.static_assert(GROUPS * p.SLABS == 4, "128 outputs share a scale")
        scale, inverse = _scales(p, act, other, first, end, slab, done, WG, COL)
        wide = gl.expand_dims(scale, 0)
        inverse = gl.expand_dims(inverse, 0)
        codes = _codes(p, divide(act, wide, inverse))
        _store_rows(p, codes, first, end, slab * 32, p.out_width, WG)
        if p.SLABS == 2:
            codes = _codes(p, divide(other, wide, inverse))
            _store_rows(p, codes, first, end, slab * 32 + 32, p.out_width, WG)
    else:
        _store_rows(p, _as_bf16(p, act, acts_factor), first, end, slab * 32, p.out_width, WG)
        if p.SLABS == 2:
            held = _as_bf16(p, other, acts_factor)
            _store_rows(p, held, first, end, slab * 32 + 32, p.out_width, WG)


@gluon.jit
def finish_linear(p, sums, expert, slab, first, end, NUMBER: gl.constexpr, WG: gl.constexpr):
    """L2: one BF16 row of 64 outputs for each token of the tile, at its destination.

    The slab is the tile's slab NUMBER.
    """
    ROW: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    if p.FACTOR == "row" or p.FACTOR == "expert":
        factor = p.notes.factor.slice(NUMBER * 64, 64, 0).load(ROW)
        if p.FACTOR == "expert":
            factor = factor * gl.load(p.acts_factor + expert)
        sums = times(sums, gl.expand_dims(factor, 1))
    if p.HAS_BIAS:
        extra = gl.expand_dims(p.notes.bias.slice(NUMBER * 64, 64, 0).load(ROW), 1)
        if p.WEIGHTED:
            COL: gl.constexpr = gl.SliceLayout(0, sums.type.layout)
            weight = p.notes.weight.slice(0, sums.shape[1], 0).load(COL)
            extra = times(extra, gl.expand_dims(weight, 0))
        sums = sums + extra
    _store_rows(p, sums.to(gl.bfloat16), first, end, slab * 64, p.num_outputs, WG)
