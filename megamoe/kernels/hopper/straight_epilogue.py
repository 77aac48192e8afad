"""Epilogues of `straight`: sums stand as [64 tokens, 128 weight rows], or gate and up apart."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.kernels.device.columns import pool_place
from megamoe.kernels.hopper.epilogue import divide, e4m3_step, glu, times

TOKENS = gl.constexpr(128)
ROWS = gl.constexpr(256)
SLABS = gl.constexpr(4)
MMA = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
)


@gluon.jit
def halves(v):
    """Columns of 8 gate, 8 up, ...: both of one output sit in one thread. [64, 128] -> [64, 64]."""
    gate, up = v.reshape([64, 8, 2, 8]).permute((0, 1, 3, 2)).split()
    return gate.reshape([64, 64]), up.reshape([64, 64])


@gluon.jit
def activated(p, sums, up, expert, across, first, end, WG: gl.constexpr):
    """FP32 [64 tokens, 64 outputs] of 64 tokens; padding rows are zero."""
    if p.DECODED:
        col = across * ROWS + WG * 128 + gl.arange(0, 128, gl.SliceLayout(0, MMA))
        factor = gl.load(p.factor + expert * p.factor_rows + col)
        sums, up = halves(times(sums, gl.expand_dims(factor, 0)))
    LAYOUT: gl.constexpr = sums.type.layout
    if p.HAS_BIAS:
        col = across * 128 + WG * 64 + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
        at = p.bias + expert * 2 * p.num_biases + col
        sums += gl.expand_dims(gl.load(at, mask=col < p.num_biases, other=0.0), 0)
        more = gl.load(at + p.num_biases, mask=col < p.num_biases, other=0.0)
        up += gl.expand_dims(more, 0)
    act = glu(p, sums, up)
    row = first + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    if p.WEIGHTED:
        weight = gl.load(p.row_weight + row, mask=row < end, other=0.0)
        act = act * gl.expand_dims(weight, 1)
    return gl.where(gl.expand_dims(row < end, 1), act, 0.0)


@gluon.jit
def store_rows(
    p, v, row, ok, first_col, width, WG: gl.constexpr, BY_GROUP: gl.constexpr = False
):  # fmt: skip
    """v [64 tokens, columns] to rows of `out`, turned to whole 16 bytes in shared memory."""
    N: gl.constexpr = v.shape[1]
    VEC: gl.constexpr = 4 if BY_GROUP else 128 // v.dtype.primitive_bitwidth
    ACROSS: gl.constexpr = N // VEC
    WIDE: gl.constexpr = gl.BlockedLayout([1, VEC], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(VEC, 1, ACROSS, [1, 0])
    buf = p.turn.index(WG)._reinterpret(v.dtype, [64, N], shared)
    buf.store(v)
    turned = buf.load(WIDE)
    row = gl.convert_layout(row, gl.SliceLayout(1, WIDE))
    ok = gl.convert_layout(ok, gl.SliceLayout(1, WIDE))
    col = first_col + gl.arange(0, N, gl.SliceLayout(0, WIDE))
    if BY_GROUP:
        col = pool_place(col)
    at = gl.expand_dims(row.to(gl.int64) * p.out_width, 1) + gl.expand_dims(col, 0)
    mask = gl.expand_dims(ok, 1) & gl.expand_dims(col < width, 0)
    gl.store(p.out + at, turned, mask=mask)


@gluon.jit
def finish_gated(p, act, bits, across, first, end, WG: gl.constexpr):
    """E4M3 codes and FP32 scales of 64 tokens x 64 outputs; `bits` is the amax of all 128."""
    LAYOUT: gl.constexpr = act.type.layout
    scale, inverse = e4m3_step(bits)
    codes = divide(act, gl.expand_dims(scale, 1), gl.expand_dims(inverse, 1)).to(gl.float8e4nv)
    row = first + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    if WG == 0:
        gl.store(p.out_scale + across * p.pool_rows + row, scale, mask=row < end)
    store_rows(p, codes, row, row < end, across * 128 + WG * 64, p.out_width, WG, p.DECODED)


@gluon.jit
def finish_linear(p, sums, expert, across, first, end, WG: gl.constexpr):
    """BF16 rows of 64 tokens x 128 outputs at their destinations, part by part: registers."""
    left, right = sums.reshape([64, 2, 64]).permute((0, 2, 1)).split()
    at = across * ROWS + WG * 128
    if p.HAS_BIAS:
        one, two = left.reshape([64, 2, 32]).permute((0, 2, 1)).split()
        _finish_part(p, one, expert, at, first, end, WG)
        _finish_part(p, two, expert, at + 32, first, end, WG)
        one, two = right.reshape([64, 2, 32]).permute((0, 2, 1)).split()
        _finish_part(p, one, expert, at + 64, first, end, WG)
        _finish_part(p, two, expert, at + 96, first, end, WG)
    else:
        _finish_part(p, left, expert, at, first, end, WG)
        _finish_part(p, right, expert, at + 64, first, end, WG)


@gluon.jit
def _finish_part(p, sums, expert, at, first, end, WG: gl.constexpr):
    LAYOUT: gl.constexpr = sums.type.layout
    col = at + gl.arange(0, sums.shape[1], gl.SliceLayout(0, LAYOUT))
    row = first + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    if p.DECODED:
        factor = gl.load(p.factor + expert * p.factor_rows + col)
        sums = times(sums, gl.expand_dims(factor, 0))
    if p.HAS_BIAS:
        extra = gl.load(p.bias + expert * p.num_biases + col, mask=col < p.num_biases, other=0.0)
        extra = gl.expand_dims(extra, 0)
        if p.WEIGHTED:
            weight = gl.load(p.row_weight + row, mask=row < end, other=0.0)
            extra = times(extra, gl.expand_dims(weight, 1))
        sums = sums + extra
    dest = gl.load(p.row_dest + row, mask=row < end, other=0)
    store_rows(p, sums.to(gl.bfloat16), dest, row < end, at, p.num_outputs, WG)
