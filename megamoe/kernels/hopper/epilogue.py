"""Epilogues: sums to activations in the next linear's format, or to rows at their places.

Sums stand as [64 weight rows, tokens]. `read_rows` and `read_tokens` fetch what an epilogue needs;
narrow tiles call them before the main loop, so that nothing waits behind it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from megamoe.kernels.device.columns import pool_place
from megamoe.kernels.device.numbers import INF_BITS, abs_bits, e4m3_round

TINY_SCALE = gl.constexpr(2.0**-100)  # keeps reciprocals finite; such activations are below 1e-27


@gluon.jit
def halves(v, TOKENS: gl.constexpr):
    """Rows of 8 gate, 8 up, ...: both of one output sit in one thread."""
    gate, up = v.reshape([4, 2, 8, TOKENS]).permute((0, 2, 3, 1)).split()
    return gate.reshape([32, TOKENS]), up.reshape([32, TOKENS])


@gluon.jit
def _reciprocal(x):
    """1 / x with one Newton step."""
    y = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )
    return gl.fma(gl.fma(-x, y, 1.0 + 0.0 * x), y, y)


@gluon.jit
def times(a, b):
    """a * b, rounded before anything is added to it: the compiler may not fuse it with a sum."""
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def divide(a, b, reciprocal):
    """a / b, given 1 / b: a product and one exact correction round it correctly."""
    first = a * reciprocal
    return gl.fma(gl.fma(-first, b, a), reciprocal, first)


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
def glu(p, gate, up):
    """FP32 of the gated activation; gate and up are rounded to BF16 and clamped first."""
    gate = _at_most(_round_bf16(gate), p.clamp)
    up = -_at_most(-_at_most(_round_bf16(up), p.clamp), p.clamp)
    is_oss: gl.constexpr = p.ACTIVATION == "gpt_oss"
    power = gl.exp(-1.702 * gate if is_oss else -gate)
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
def _shared_amax(p, bits, done, WG: gl.constexpr, COL: gl.constexpr):
    """The largest of all warpgroups, per token: through shared memory and a barrier, two sets."""
    turn = done & 1
    N: gl.constexpr = bits.shape[0]
    p.amax.index(turn * p.GROUPS + WG).slice(0, N, 0).store(bits)
    mbarrier.arrive(p.met.index(turn), count=1)
    mbarrier.wait(p.met.index(turn), (done >> 1) & 1)
    for i in gl.static_range(p.GROUPS):
        bits = gl.maximum(bits, p.amax.index(turn * p.GROUPS + i).slice(0, N, 0).load(COL))
    return bits


@gluon.jit
def _split(v):
    """The first half of the tokens [.., N] and the second."""
    N: gl.constexpr = v.shape[-1]
    if len(v.shape) == 2:
        return v.reshape([v.shape[0], 2, N // 2]).permute((0, 2, 1)).split()
    else:
        return v.reshape([2, N // 2]).permute((1, 0)).split()


@gluon.jit
def _store_rows(p, v, row, ok, first_col, width, WG: gl.constexpr):
    """v [columns, tokens] to out[row of token, first_col ...]; wide tiles turn in shared memory."""
    if v.shape[1] >= 64 and v.dtype == gl.bfloat16:  # room is for half of them
        v0, v1 = _split(v)
        row0, row1 = _split(row)
        ok0, ok1 = _split(ok.to(gl.int8))
        _store_part(p, v0, row0, ok0 != 0, first_col, width, v.shape[1], WG)
        _store_part(p, v1, row1, ok1 != 0, first_col, width, v.shape[1], WG)
    else:
        _store_part(p, v, row, ok, first_col, width, v.shape[1], WG)


@gluon.jit
def _store_part(
    p, v, row, ok, first_col, width, TOKENS: gl.constexpr, WG: gl.constexpr
):  # fmt: skip
    """Some of the TOKENS tokens."""
    M: gl.constexpr = v.shape[0]
    N: gl.constexpr = v.shape[1]
    BY_GROUP: gl.constexpr = p.GATED and p.WEIGHTS.BY_GROUP
    if TOKENS < 64:
        LAYOUT: gl.constexpr = v.type.layout
        col = first_col + gl.arange(0, M, gl.SliceLayout(1, LAYOUT))
        if BY_GROUP:
            col = pool_place(col)
        at = gl.expand_dims(row.to(gl.int64) * p.out_width, 0) + gl.expand_dims(col, 1)
        mask = gl.expand_dims(ok, 0) & gl.expand_dims(col < width, 1)
        gl.store(p.out + at, v, mask=mask)
    else:
        VEC: gl.constexpr = 4 if BY_GROUP else 128 // v.dtype.primitive_bitwidth
        ACROSS: gl.constexpr = M // VEC
        WIDE: gl.constexpr = gl.BlockedLayout([1, VEC], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
        shared: gl.constexpr = gl.SwizzledSharedLayout(VEC, 1, ACROSS, [1, 0])
        buf = p.turn.index(WG)._reinterpret(v.dtype, [N, M], shared)
        buf.permute((1, 0)).store(v)
        turned = buf.load(WIDE)
        row = gl.convert_layout(row, gl.SliceLayout(1, WIDE))
        ok = gl.convert_layout(ok, gl.SliceLayout(1, WIDE))
        col = first_col + gl.arange(0, M, gl.SliceLayout(0, WIDE))
        if BY_GROUP:
            col = pool_place(col)
        at = gl.expand_dims(row.to(gl.int64) * p.out_width, 1) + gl.expand_dims(col, 0)
        mask = gl.expand_dims(ok, 1) & gl.expand_dims(col < width, 0)
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
def read_rows(p, expert, slab, ROW: gl.constexpr):
    """Factor and bias of a slab's 64 rows; 1 and 0 where there is none."""
    r = gl.arange(0, 64, ROW)
    half = r % 16 // 8
    if p.GATED:
        col = slab * 32 + r // 16 * 8 + r % 8
        matrix = expert * 2 + half
    else:
        col = slab * 64 + r
        matrix = expert + 0 * r
    factor = gl.full([64], 1.0, gl.float32, ROW)
    bias = gl.full([64], 0.0, gl.float32, ROW)
    if p.FACTOR == "row":
        factor = gl.load(p.factor + expert * p.factor_rows + slab * 64 + r)
    elif p.FACTOR == "expert":
        factor = gl.load(p.factor + matrix)
        if not p.GATED:
            factor = factor * gl.load(p.acts_factor + expert)
    if p.HAS_BIAS:
        bias = gl.load(p.bias + matrix * p.num_biases + col, mask=col < p.num_biases, other=0.0)
    return factor, bias


@gluon.jit
def read_tokens(p, expert, first, end, N: gl.constexpr, COL: gl.constexpr):
    """What the epilogue needs of each token: L1 (weight, factor, factor of the output),
    L2 (weight, destination row, 1)."""
    row = first + gl.arange(0, N, COL)
    weight = gl.full([N], 1.0, gl.float32, COL)
    if p.WEIGHTED and (p.GATED or p.HAS_BIAS):
        weight = gl.load(p.row_weight + row, mask=row < end, other=0.0)
    acts_factor = 1.0
    if p.GATED:
        second = weight
        if p.FACTOR == "expert":
            second = gl.load(p.row_factor + row, mask=row < end, other=0.0)
            acts_factor = gl.load(p.acts_factor + expert)
    else:
        second = gl.load(p.row_dest + row, mask=row < end, other=0)
    return weight, second, acts_factor


@gluon.jit
def gated_columns(TOKENS: gl.constexpr, MMA: gl.constexpr):
    """Zeros per token, in the layout that the gated epilogue has them in."""
    gate, _ = halves(gl.zeros([64, TOKENS], gl.float32, MMA), TOKENS)
    return gl.max(gate, 0)


@gluon.jit
def finish_gated(p, low, high, rows, tokens, expert, slab, first, end, done, WG: gl.constexpr):
    """L1: activation, topk weight and format; 32 outputs of a slab for each token of the tile."""
    factor, bias = rows
    weight, token_factor, acts_factor = tokens
    COL: gl.constexpr = weight.type.layout
    row = first + gl.arange(0, weight.shape[0], COL)
    ok = row < end
    act = _activated(p, low, factor, bias, token_factor, weight, ok)
    other = act
    if p.SLABS == 2:
        ROW: gl.constexpr = factor.type.layout
        factor, bias = read_rows(p, expert, slab + 1, ROW)
        other = _activated(p, high, factor, bias, token_factor, weight, ok)
    if p.ACTS.HOLD == "codes" or p.ACTS.HOLD == "scaled":
        gl.static_assert(p.GROUPS * p.SLABS == 4, "128 outputs share a scale")
        bits = gl.max(abs_bits(act), 0)
        if p.SLABS == 2:
            bits = gl.maximum(bits, gl.max(abs_bits(other), 0))
        bits = _shared_amax(p, bits, done, WG, COL)
        scale, inverse = e4m3_step(bits)
        wide = gl.expand_dims(scale, 0)
        inverse = gl.expand_dims(inverse, 0)
        codes = _codes(p, divide(act, wide, inverse))
        _store_rows(p, codes, row, ok, slab * 32, p.out_width, WG)
        if p.SLABS == 2:
            codes = _codes(p, divide(other, wide, inverse))
            _store_rows(p, codes, row, ok, slab * 32 + 32, p.out_width, WG)
        if WG == 0:
            gl.store(p.out_scale + slab // 4 * p.pool_rows + row, scale, mask=ok)
    else:
        _store_rows(p, _as_bf16(p, act, acts_factor), row, ok, slab * 32, p.out_width, WG)
        if p.SLABS == 2:
            held = _as_bf16(p, other, acts_factor)
            _store_rows(p, held, row, ok, slab * 32 + 32, p.out_width, WG)


@gluon.jit
def finish_linear(p, sums, rows, tokens, slab, first, end, WG: gl.constexpr):
    """L2: one BF16 row of 64 outputs for each token of the tile, at its destination."""
    factor, bias = rows
    weight, dest, _ = tokens
    ok = first + gl.arange(0, dest.shape[0], dest.type.layout) < end
    if p.FACTOR == "row" or p.FACTOR == "expert":
        sums = times(sums, gl.expand_dims(factor, 1))
    if p.HAS_BIAS:
        extra = gl.expand_dims(bias, 1)
        if p.WEIGHTED:
            extra = times(extra, gl.expand_dims(weight, 0))
        sums = sums + extra
    _store_rows(p, sums.to(gl.bfloat16), dest, ok, slab * 64, p.num_outputs, WG)
