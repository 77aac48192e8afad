"""Epilogues: sums [128 weight rows, N tokens] to activations in the next linear's format, or rows.

The tensor cores go on with the next tile meanwhile (or the next K blocks), so operands are read
from memory as they are needed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.kernels.blackwell.pair import part_of, rows_layout
from megamoe.kernels.common.numbers import INF_BITS, abs_bits, e4m3_code, e8m0_scale, pow2
from megamoe.kernels.gluon.arithmetic import divide, e4m3_scale, glu, nvfp4_scale, reciprocal, times
from megamoe.kernels.gluon.placed import PLACED_ROWS, placed_group, placed_row

# -- L1: activations -----------------------------------------------------------------------------


@gluon.jit
def _biased(gemm, sums, matrix, output):
    """Sums [128, N] and the bias of their rows, which are outputs of a matrix."""
    at = gemm.bias + matrix * gemm.num_bias + output
    bias = gl.load(at, mask=output < gemm.num_bias, other=0.0)
    return sums + gl.expand_dims(bias, 1)


@gluon.jit
def _activated(gemm, gate, up, tile, START: gl.constexpr):
    """FP32 [128, N] of gate and up: factors, biases, activation, topk weight; unused tokens 0."""
    N: gl.constexpr = gate.shape[1]
    token = tile.row_begin + START + gl.arange(0, N, gl.SliceLayout(0, gate.type.layout))
    used = token < tile.row_end
    if gemm.FORMAT.FACTOR == "expert":
        token_factor = gl.load(gemm.row_factor + token, mask=used, other=1.0)
        factor = gl.load(gemm.factor + tile.expert * 2)
        gate = times(times(gate, factor), gl.expand_dims(token_factor, 0))
        factor = gl.load(gemm.factor + tile.expert * 2 + 1)
        up = times(times(up, factor), gl.expand_dims(token_factor, 0))
    if gemm.HAS_BIAS:
        output = part_of(gate.shape[0], gl.SliceLayout(1, gate.type.layout))
        output += tile.n_tile_idx * (128 * gemm.CTAS)
        gate = _biased(gemm, gate, tile.expert * 2, output)
        up = _biased(gemm, up, tile.expert * 2 + 1, output)
    act = glu(gemm, gate, up)
    if gemm.WEIGHTED:
        weight = gl.load(gemm.row_weight + token, mask=used, other=0.0)
        act = act * gl.expand_dims(weight, 0)
    return gl.where(gl.expand_dims(used, 0), act, 0.0)


@gluon.jit
def _group_scales(gemm, split, acts_factor):
    """(bytes of the groups' scales, quotients) of activations [groups, group, N]."""
    bits = gl.max(abs_bits(split), 1)
    if gemm.ACTS.GROUP == 16:
        scale = nvfp4_scale(bits, acts_factor)
        step = scale * acts_factor
        dead = (step == 0.0) | (abs_bits(step) >= INF_BITS)
        step = gl.expand_dims(gl.where(dead, 1.0, step), 1)
        ratio = divide(split, step, reciprocal(step))
        stored = gl.where(bits >= INF_BITS, 0x7F, e4m3_code(scale).to(gl.int32))
    else:
        stored = e8m0_scale(bits, gemm.ACTS.EXPONENT, gemm.ACTS.MANTISSA)
        dead = stored == 255
        ratio = split * gl.expand_dims(pow2(254 - gl.minimum(stored, 254)), 1)
    return stored.to(gl.uint8), gl.where(gl.expand_dims(dead, 1), 0.0, ratio)


@gluon.jit
def _store_scales(gemm, stored, tile, START: gl.constexpr):
    """Bytes [groups, N] where the next linear's copies find them (`gluon/placed`), or by rows."""
    NUM: gl.constexpr = 128 * gemm.CTAS // gemm.ACTS.GROUP
    LAYOUT: gl.constexpr = stored.type.layout
    group = tile.n_tile_idx * NUM + part_of(stored.shape[0], gl.SliceLayout(1, LAYOUT))
    token = START + gl.arange(0, stored.shape[1], gl.SliceLayout(0, LAYOUT))
    num_groups = gemm.num_outputs // gemm.ACTS.GROUP
    used = tile.row_begin + token < tile.row_end
    if gemm.STORE == "pool":
        begin = (tile.row_begin // gemm.TOKENS).to(gl.int64) * (num_groups * PLACED_ROWS)
        at = gl.expand_dims(placed_group(group), 1) + gl.expand_dims(placed_row(token), 0)
        mask = gl.expand_dims(used, 0) & (at >= 0)
        if gemm.PAIR:  # the second CTA of the last tile may have outputs that are not there
            mask = mask & gl.expand_dims(group < num_groups, 1)
    else:
        begin = 0
        row = gl.load(gemm.row_dest + tile.row_begin + token, mask=used, other=0).to(gl.int64)
        at = gl.expand_dims(group, 1) + gl.expand_dims(row * num_groups, 0)
        mask = gl.expand_dims(used, 0) & gl.expand_dims(group < num_groups, 1)
    gl.store(gemm.out_scale + begin + at, stored, mask=mask)


@gluon.jit
def finish_gated(gemm, gate, up, tile, START: gl.constexpr):
    """L1: sums [128, N] of gate and up -> 128 outputs of each token, in their format."""
    M: gl.constexpr = gate.shape[0]
    N: gl.constexpr = gate.shape[1]
    OUTPUTS: gl.constexpr = 128 * gemm.CTAS
    act = _activated(gemm, gate, up, tile, START)
    if gemm.ACTS.STORED_AS == "placed":
        G: gl.constexpr = gemm.ACTS.GROUP
        acts_factor = 1.0
        if gemm.FORMAT.FACTOR == "expert":
            acts_factor = gl.load(gemm.acts_factor + tile.expert)
        stored, ratio = _group_scales(gemm, act.reshape([M // G, G, N]), acts_factor)
        codes = gemm.ACTS.code(ratio).reshape([M, N])
        PACKED: gl.constexpr = gemm.ACTS.BITS == 4
        _store_rows(gemm, codes, tile, tile.n_tile_idx * OUTPUTS, START, PACKED)
        _store_scales(gemm, stored, tile, START)
    elif gemm.ACTS.STORED_AS == "codes":
        scale, inverse = e4m3_scale(gl.max(abs_bits(act), 0))
        row = tile.row_begin + START + gl.arange(0, N, scale.type.layout)
        used = row < tile.row_end
        if gemm.STORE == "pool":
            at = tile.n_tile_idx * gemm.pool_rows + row
        else:
            num_scales = (gemm.num_outputs + 127) // 128
            at = gl.load(gemm.row_dest + row, mask=used, other=0) * num_scales + tile.n_tile_idx
        gl.store(gemm.out_scale + at, scale, mask=used)
        ratio = divide(act, gl.expand_dims(scale, 0), gl.expand_dims(inverse, 0))
        _store_rows(gemm, e4m3_code(ratio), tile, tile.n_tile_idx * OUTPUTS, START, False)
    else:
        _store_rows(gemm, act.to(gl.bfloat16), tile, tile.n_tile_idx * OUTPUTS, START, False)


# -- L2: rows at their destinations --------------------------------------------------------------


@gluon.jit
def finish_linear(gemm, sums, tile, HALF: gl.constexpr, START: gl.constexpr):
    """L2: sums [128, N] of a half -> BF16, 128 columns of each token's row."""
    N: gl.constexpr = sums.shape[1]
    first = (tile.n_tile_idx * gemm.HALVES + HALF) * (128 * gemm.CTAS)
    if gemm.FORMAT.FACTOR == "expert":
        factor = gl.load(gemm.factor + tile.expert) * gl.load(gemm.acts_factor + tile.expert)
        sums = times(sums, factor)
    if gemm.HAS_BIAS:
        output = first + part_of(sums.shape[0], gl.SliceLayout(1, sums.type.layout))
        at = gemm.bias + tile.expert * gemm.num_bias + output
        bias = gl.load(at, mask=output < gemm.num_bias, other=0.0)
        extra = gl.expand_dims(bias, 1)
        if gemm.WEIGHTED:
            token = tile.row_begin + START + gl.arange(0, N, gl.SliceLayout(0, sums.type.layout))
            weight = gl.load(gemm.row_weight + token, mask=token < tile.row_end, other=0.0)
            extra = times(extra, gl.expand_dims(weight, 0))
        sums = sums + extra
    _store_rows(gemm, sums.to(gl.bfloat16), tile, first, START, False)


# -- stores --------------------------------------------------------------------------------------


@gluon.jit
def _store_rows(gemm, v, tile, first_col, START: gl.constexpr, PACKED: gl.constexpr):
    """v [128 columns, N tokens from number START on] to rows of `out`, 16 bytes a thread.

    PACKED: codes of FP4, two a byte. Rows go to their destinations, or stay where they are in the
    pool. Sums over rows are added in no fixed order.
    """
    N: gl.constexpr = v.shape[1]
    VEC: gl.constexpr = 128 // v.dtype.primitive_bitwidth
    ACROSS: gl.constexpr = 128 // VEC
    WIDE: gl.constexpr = rows_layout(ACROSS, VEC, gemm.NUM_WARPS, gemm.PAIR)
    turned = gl.convert_layout(v.permute((1, 0)), WIDE)
    PACK: gl.constexpr = 2 if PACKED else 1
    if PACKED:
        low, high = turned.reshape([N, v.shape[0] // 2, 2]).split()
        turned = low | (high << 4)
    LAYOUT: gl.constexpr = turned.type.layout
    row = tile.row_begin + START + gl.arange(0, N, gl.SliceLayout(1, LAYOUT))
    used = row < tile.row_end
    weight = 1.0
    if gemm.STORE == "sum":
        weight = gl.load(gemm.row_weight + row, mask=used, other=0.0)
    if gemm.STORE != "pool":
        row = gl.load(gemm.row_dest + row, mask=used, other=0)
        if gemm.SOURCE != "pool":  # whose destinations come from outside, -1 where they were wrong
            used = used & (row >= 0)
    col = first_col // PACK + part_of(v.shape[0] // PACK, gl.SliceLayout(0, LAYOUT))
    width = gemm.num_outputs // PACK
    begin = row.to(gl.int64) * width
    if gemm.IS_FAR and not gemm.GATED:
        begin = (row >> 3) * 8  # an offset; the compiler sees multiples of 16 bytes
    at = gl.expand_dims(begin, 1) + gl.expand_dims(col, 0)
    mask = gl.expand_dims(used, 1) & gl.expand_dims(col < width, 0)
    if gemm.STORE == "sum":
        weighted = times(turned.to(gl.float32), gl.expand_dims(weight, 1))
        gl.atomic_add(gemm.out + at, weighted, mask=mask, sem="relaxed")
    else:
        gl.store(gemm.out + at, turned, mask=mask)
