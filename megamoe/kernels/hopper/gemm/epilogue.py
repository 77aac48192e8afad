"""Epilogues: sums to activations in the next linear's format, or to rows at their destinations.

Sums of the swap-AB GEMM are FP32 [64 weight rows, tokens]; the plain GEMM calls the arithmetic and
`store_transposed` with [tokens, weight rows]. Shapes below: N tokens of the tile. Operands come
from shared memory (`gluon/operands.py`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from megamoe.kernels.common.columns import pool_place
from megamoe.kernels.common.numbers import INF_BITS, abs_bits
from megamoe.kernels.common.quantise import round_to_format
from megamoe.kernels.gluon.arithmetic import divide, e4m3_step, glu, nvfp4_scale, reciprocal, times
from megamoe.kernels.gluon.compat import reinterpret
from megamoe.kernels.gluon.operands import operand, rows_of
from megamoe.kernels.gluon.pipeline import GROUPS
from megamoe.kernels.hopper.gemm.fp8_rows import row_codes

_PLANES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


# -- L1: activations -----------------------------------------------------------------------------


@gluon.jit
def gate_and_up(v, TOKENS: gl.constexpr):
    """[64, N] of 8 gate rows, 8 up rows, ... -> [32, N] each: a thread has both of an output."""
    gate, up = v.reshape([4, 2, 8, TOKENS]).permute((0, 2, 3, 1)).split()
    return gate.reshape([32, TOKENS]), up.reshape([32, TOKENS])


@gluon.jit
def _activated(gemm, sums, factor, bias, token_factor, weight, used):
    """FP32 [32, N] of sums [64, N]: gate and up rounded to BF16, clamped, gated, weighted.

    factor, bias [64] of the weight rows; token_factor, weight, used [N] of the tokens. Tokens that
    are not used become zero.
    """
    if gemm.FACTOR == "row" or gemm.FACTOR == "expert":
        sums = times(sums, gl.expand_dims(factor, 1))
    N: gl.constexpr = sums.shape[1]
    gate, up = gate_and_up(sums, N)
    if gemm.FACTOR == "expert":
        gate = times(gate, gl.expand_dims(token_factor, 0))
        up = times(up, gl.expand_dims(token_factor, 0))
    if gemm.HAS_BIAS:
        LAYOUT: gl.constexpr = sums.type.layout
        wide = gl.expand_dims(bias, 1) + gl.zeros([64, N], gl.float32, LAYOUT)
        gate_bias, up_bias = gate_and_up(wide, N)
        gate = gate + gate_bias
        up = up + up_bias
    act = glu(gemm, gate, up)
    if gemm.WEIGHTED:
        act = act * gl.expand_dims(weight, 0)
    return gl.where(gl.expand_dims(used, 0), act, 0.0)


@gluon.jit
def _convert_two(a, b, LAYOUT: gl.constexpr):
    """Both in another layout, by one conversion."""
    a = a.to(gl.int32, bitcast=True).to(gl.int64)
    b = b.to(gl.int32, bitcast=True).to(gl.int64)
    both = gl.convert_layout(a << 32 | b & 0xFFFFFFFF, LAYOUT)
    a = (both >> 32).to(gl.int32).to(gl.float32, bitcast=True)
    return a, both.to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def _tile_scales(gemm, act, other, tile, slab, num_l1_done, WG: gl.constexpr, COL: gl.constexpr):
    """[N] E4M3 scales of the tokens and their reciprocals, from the amax over all warpgroups.

    act, other [32, N]: the warpgroup's two slabs. Warps write their amax to shared memory, to one
    of two sets, tile by tile. Every lane then has tokens of its own, so that a warp computes a
    scale once.
    """
    N: gl.constexpr = act.shape[1]
    NUM: gl.constexpr = 4 * GROUPS
    LANES: gl.constexpr = gl.BlockedLayout([N // 32 if N > 32 else 1], [32], [4], [0])
    parity = num_l1_done & 1
    bits = gl.max(abs_bits(act).reshape([4, 8, N]), 1)
    if gemm.SLABS == 2:
        bits = gl.maximum(bits, gl.max(abs_bits(other).reshape([4, 8, N]), 1))
    sets = reinterpret(gemm.amax, gl.int32, [2 * GROUPS, 4, gemm.TOKENS], _PLANES)
    sets.index(parity * GROUPS + WG).slice(0, N, 1).store(bits)
    mbarrier.arrive(gemm.amax_full.index(parity), count=1)
    mbarrier.wait(gemm.amax_full.index(parity), (num_l1_done >> 1) & 1)
    amax = gemm.amax.index(parity * NUM).slice(0, N, 0).load(LANES)
    for i in gl.static_range(1, NUM):
        amax = gl.maximum(amax, gemm.amax.index(parity * NUM + i).slice(0, N, 0).load(LANES))
    scale, inverse = e4m3_step(amax)
    if WG == 0:
        row = tile.row_begin + gl.arange(0, N, LANES)
        gl.store(gemm.out_scale + slab // 4 * gemm.pool_rows + row, scale, mask=row < tile.row_end)
    return _convert_two(scale, inverse, COL)


@gluon.jit
def _codes(gemm, ratio):
    """E4M3, or its values in BF16 where that is what wgmma multiplies."""
    codes = ratio.to(gl.float8e4nv)
    return codes.to(gl.bfloat16) if gemm.ACTS.HOLD == "scaled" else codes


@gluon.jit
def _as_bf16(gemm, act, acts_factor):
    """BF16 [32, N] of activations rounded to their format, if any: code times scale is exact."""
    N: gl.constexpr = act.shape[1]
    if gemm.ACTS.HOLD == "plain":
        values = act
    else:
        GROUP: gl.constexpr = gemm.ACTS.GROUP
        split = act.reshape([32 // GROUP, GROUP, N])
        if GROUP == 16:
            scale = nvfp4_scale(gl.max(abs_bits(split), 1), acts_factor)
            step = scale * acts_factor
            dead = (step == 0.0) | (abs_bits(step) >= INF_BITS)
            step = gl.expand_dims(gl.where(dead, 1.0, step), 1)
            ratio = divide(split, step, reciprocal(step))
            ratio = gl.where(gl.expand_dims(dead, 1), 0.0, ratio)
            values = (gemm.ACTS.round(ratio) * gl.expand_dims(scale, 1)).reshape([32, N])
        else:
            values = round_to_format(split, gemm.ACTS).reshape([32, N])
    return values.to(gl.bfloat16)


@gluon.jit
def _gated_columns(TOKENS: gl.constexpr, MMA: gl.constexpr):
    """Zeros [TOKENS], in the layout that the gated epilogue has them in."""
    gate, _ = gate_and_up(gl.zeros([64, TOKENS], gl.float32, MMA), TOKENS)
    return gl.max(gate, 0)


@gluon.jit
def finish_gated(gemm, low, high, tile, slab, num_l1_done, WG: gl.constexpr):
    """L1: sums [64, N] of one or two slabs -> activation, topk weight, format, rows of `out`.

    A slab gives 32 outputs for each token of the tile, the CTA's L1 tile number `num_l1_done`.
    """
    N: gl.constexpr = low.shape[1]
    MMA: gl.constexpr = low.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    columns = _gated_columns(N, MMA)
    COL: gl.constexpr = columns.type.layout
    has_factor: gl.constexpr = gemm.FACTOR == "row" or gemm.FACTOR == "expert"
    is_by_expert: gl.constexpr = gemm.FACTOR == "expert"
    START: gl.constexpr = WG * gemm.SLABS * 64  # the warpgroup's first weight row in the tile
    ops = gemm.epilogue
    weight = operand(ops.weight, gemm.WEIGHTED, 1.0, 0, N, COL)
    token_factor = operand(ops.token_factor, is_by_expert, 1.0, 0, N, COL)
    acts_factor = 1.0
    if is_by_expert:
        acts_factor = gl.load(gemm.acts_factor + tile.expert)
    used = tile.row_begin + gl.arange(0, N, COL) < tile.row_end
    factor = operand(ops.factor, has_factor, 1.0, START, 64, ROW)
    bias = operand(ops.bias, gemm.HAS_BIAS, 0.0, START, 64, ROW)
    act = _activated(gemm, low, factor, bias, token_factor, weight, used)
    other = act
    if gemm.SLABS == 2:
        factor = operand(ops.factor, has_factor, 1.0, START + 64, 64, ROW)
        bias = operand(ops.bias, gemm.HAS_BIAS, 0.0, START + 64, 64, ROW)
        other = _activated(gemm, high, factor, bias, token_factor, weight, used)
    if gemm.ACTS.HOLD == "codes" or gemm.ACTS.HOLD == "scaled":
        gl.static_assert(GROUPS * gemm.SLABS == 4, "128 outputs share a scale")
        scale, inverse = _tile_scales(gemm, act, other, tile, slab, num_l1_done, WG, COL)
        wide = gl.expand_dims(scale, 0)
        inverse = gl.expand_dims(inverse, 0)
        codes = _codes(gemm, divide(act, wide, inverse))
        _store_rows(gemm, codes, tile, slab * 32, gemm.out_width, WG)
        if gemm.SLABS == 2:
            codes = _codes(gemm, divide(other, wide, inverse))
            _store_rows(gemm, codes, tile, slab * 32 + 32, gemm.out_width, WG)
    else:
        _store_rows(gemm, _as_bf16(gemm, act, acts_factor), tile, slab * 32, gemm.out_width, WG)
        if gemm.SLABS == 2:
            values = _as_bf16(gemm, other, acts_factor)
            _store_rows(gemm, values, tile, slab * 32 + 32, gemm.out_width, WG)


# -- L2: rows at their destinations --------------------------------------------------------------


@gluon.jit
def finish_linear(gemm, sums, tile, slab, SLAB: gl.constexpr, WG: gl.constexpr):
    """L2: sums [64, N] of slab number SLAB of the tile -> BF16, 64 columns of each token's row."""
    rows = _linear_rows(gemm, sums, tile, SLAB)
    _store_rows(gemm, rows, tile, slab * 64, gemm.num_outputs, WG)


@gluon.jit
def finish_fp8(gemm, low, high, tile, slab, WG: gl.constexpr):
    """L2: sums [64, N] of the warpgroup's two slabs -> E4M3, 128 columns of each token's row."""
    gl.static_assert(gemm.SLABS == 2, "128 columns share a scale")
    low = _linear_rows(gemm, low, tile, WG * 2)
    high = _linear_rows(gemm, high, tile, WG * 2 + 1)
    low, high = row_codes(gemm, low, high, tile, slab * 64, 0, 0)
    _store_rows(gemm, low, tile, slab * 64, gemm.num_outputs, WG)
    _store_rows(gemm, high, tile, slab * 64 + 64, gemm.num_outputs, WG)


@gluon.jit
def _linear_rows(gemm, sums, tile, SLAB: gl.constexpr):
    """Sums [64, N] of slab number SLAB of the tile with their factors and biases, as BF16."""
    ROW: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    if gemm.FACTOR == "row" or gemm.FACTOR == "expert":
        factor = gemm.epilogue.factor.slice(SLAB * 64, 64, 0).load(ROW)
        if gemm.FACTOR == "expert":
            factor = factor * gl.load(gemm.acts_factor + tile.expert)
        sums = times(sums, gl.expand_dims(factor, 1))
    if gemm.HAS_BIAS:
        extra = gl.expand_dims(gemm.epilogue.bias.slice(SLAB * 64, 64, 0).load(ROW), 1)
        if gemm.WEIGHTED:
            COL: gl.constexpr = gl.SliceLayout(0, sums.type.layout)
            weight = gemm.epilogue.weight.slice(0, sums.shape[1], 0).load(COL)
            extra = times(extra, gl.expand_dims(weight, 0))
        sums = sums + extra
    return sums.to(gl.bfloat16)


# -- stores --------------------------------------------------------------------------------------


@gluon.jit
def _store_rows(gemm, v, tile, first_col, width, WG: gl.constexpr):
    """v [columns, N] to rows of `out` from first_col on; wide tiles are transposed before."""
    N: gl.constexpr = v.shape[1]
    BY_GROUP: gl.constexpr = gemm.GATED and gemm.WEIGHTS.BY_GROUP
    if N >= 64 and v.dtype == gl.bfloat16:  # shared memory is for half of them
        v0, v1 = v.reshape([v.shape[0], 2, N // 2]).permute((0, 2, 1)).split()
        store_transposed(gemm, v0.permute((1, 0)), tile, 0, first_col, width, BY_GROUP, WG)
        store_transposed(gemm, v1.permute((1, 0)), tile, N // 2, first_col, width, BY_GROUP, WG)
    elif N >= 64:
        store_transposed(gemm, v.permute((1, 0)), tile, 0, first_col, width, BY_GROUP, WG)
    elif gemm.IS_FAR and not gemm.GATED:
        _store_far(gemm, v, tile, first_col, width)
    else:
        LAYOUT: gl.constexpr = v.type.layout
        row, used = rows_of(gemm, tile, 0, N, gl.SliceLayout(0, LAYOUT))
        col = first_col + gl.arange(0, v.shape[0], gl.SliceLayout(1, LAYOUT))
        if BY_GROUP:
            col = pool_place(col)
        at = gl.expand_dims(row.to(gl.int64) * gemm.out_width, 0) + gl.expand_dims(col, 1)
        mask = gl.expand_dims(used, 0) & gl.expand_dims(col < width, 1)
        gl.store(gemm.out + at, v, mask=mask)


@gluon.jit
def _store_far(gemm, v, tile, first_col, width):
    """BF16 [64 columns, N] to rows that may be other ranks', 16 bytes a thread.

    A warp has 16 columns of every token: they are transposed by shuffles, and stored 32 bytes
    together, as a link takes them. Rows begin at multiples of 16 bytes: so many are a `hidden`.
    """
    N: gl.constexpr = v.shape[1]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [1, 4], [1, 0])
    v = gl.convert_layout(v.permute((1, 0)), WIDE)
    row, used = rows_of(gemm, tile, 0, N, gl.SliceLayout(1, WIDE))
    col = first_col + gl.arange(0, v.shape[1], gl.SliceLayout(0, WIDE))
    at = gl.expand_dims((row >> 3) * 8, 1) + gl.expand_dims(col, 0)  # the compiler sees multiples
    mask = gl.expand_dims(used, 1) & gl.expand_dims(col < width, 0)
    gl.store(gemm.out + at, v, mask=mask)


@gluon.jit
def store_transposed(
    gemm, v, tile, START: gl.constexpr, first_col, width, BY_GROUP: gl.constexpr, WG: gl.constexpr
):
    """v [N, columns], the tile's tokens from number START on, to rows of `out`.

    It is transposed in shared memory, so that a thread has 16 bytes of a row; BY_GROUP: four values
    that stay together (`common.columns`).
    """
    N: gl.constexpr = v.shape[0]
    M: gl.constexpr = v.shape[1]
    VEC: gl.constexpr = 4 if BY_GROUP else 128 // v.dtype.primitive_bitwidth
    THREADS: gl.constexpr = M // VEC  # of a row
    WIDE: gl.constexpr = gl.BlockedLayout([1, VEC], [32 // THREADS, THREADS], [4, 1], [1, 0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(VEC, 1, THREADS, [1, 0])
    buf = reinterpret(gemm.transpose_smem.index(WG), v.dtype, [N, M], shared)
    buf.store(v)
    transposed = buf.load(WIDE)
    row, used = rows_of(gemm, tile, START, N, gl.SliceLayout(1, WIDE))
    col = first_col + gl.arange(0, M, gl.SliceLayout(0, WIDE))
    if BY_GROUP:
        col = pool_place(col)
    at = gl.expand_dims(row.to(gl.int64) * gemm.out_width, 1) + gl.expand_dims(col, 0)
    mask = gl.expand_dims(used, 1) & gl.expand_dims(col < width, 0)
    gl.store(gemm.out + at, transposed, mask=mask)
