"""Epilogues of `straight`: sums stand as [64 tokens, 128 weight rows], or gate and up apart."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.kernels.hopper.gemm.epilogue import divide, e4m3_step, glu, store_turned, times

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
def activated(p, sums, up, expert, across, first, end, HALF: gl.constexpr, WG: gl.constexpr):
    """FP32 [64 tokens, 64 outputs] of a half of the tokens; padding rows are zero."""
    if p.DECODED:
        factor = p.notes.factor.slice(WG * 128, 128, 0).load(gl.SliceLayout(0, MMA))
        sums, up = halves(times(sums, gl.expand_dims(factor, 0)))
    LAYOUT: gl.constexpr = sums.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    if p.HAS_BIAS:
        col = across * 128 + WG * 64 + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
        at = p.bias + expert * 2 * p.num_biases + col
        sums += gl.expand_dims(gl.load(at, mask=col < p.num_biases, other=0.0), 0)
        more = gl.load(at + p.num_biases, mask=col < p.num_biases, other=0.0)
        up += gl.expand_dims(more, 0)
    act = glu(p, sums, up)
    if p.WEIGHTED:
        act = act * gl.expand_dims(p.notes.weight.slice(HALF * 64, 64, 0).load(ROW), 1)
    row = first + HALF * 64 + gl.arange(0, 64, ROW)
    return gl.where(gl.expand_dims(row < end, 1), act, 0.0)


@gluon.jit
def finish_gated(p, act, bits, across, first, end, HALF: gl.constexpr, WG: gl.constexpr):
    """E4M3 codes and FP32 scales of 64 tokens x 64 outputs; `bits` is the amax of all 128."""
    LAYOUT: gl.constexpr = act.type.layout
    scale, inverse = e4m3_step(bits)
    codes = divide(act, gl.expand_dims(scale, 1), gl.expand_dims(inverse, 1)).to(gl.float8e4nv)
    if WG == 0:
        row = first + HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        gl.store(p.out_scale + across * p.pool_rows + row, scale, mask=row < end)
    col = across * 128 + WG * 64
    store_turned(p, codes, first, end, HALF * 64, col, p.out_width, p.DECODED, WG)


@gluon.jit
def finish_linear(p, sums, across, first, end, HALF: gl.constexpr, WG: gl.constexpr):
    """BF16 rows of 64 tokens x 128 outputs at their destinations, part by part: registers."""
    left, right = sums.reshape([64, 2, 64]).permute((0, 2, 1)).split()
    if p.HAS_BIAS:
        one, two = left.reshape([64, 2, 32]).permute((0, 2, 1)).split()
        _finish_part(p, one, across, first, end, 0, HALF, WG)
        _finish_part(p, two, across, first, end, 32, HALF, WG)
        one, two = right.reshape([64, 2, 32]).permute((0, 2, 1)).split()
        _finish_part(p, one, across, first, end, 64, HALF, WG)
        _finish_part(p, two, across, first, end, 96, HALF, WG)
    else:
        _finish_part(p, left, across, first, end, 0, HALF, WG)
        _finish_part(p, right, across, first, end, 64, HALF, WG)


@gluon.jit
def _finish_part(
    p, sums, across, first, end, START: gl.constexpr, HALF: gl.constexpr, WG: gl.constexpr
):
    """The columns of a warpgroup from number START on."""
    LAYOUT: gl.constexpr = sums.type.layout
    COL: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    N: gl.constexpr = sums.shape[1]
    at = across * ROWS + WG * 128 + START
    if p.DECODED:
        factor = p.notes.factor.slice(WG * 128 + START, N, 0).load(COL)
        sums = times(sums, gl.expand_dims(factor, 0))
    if p.HAS_BIAS:
        extra = gl.expand_dims(p.notes.bias.slice(WG * 128 + START, N, 0).load(COL), 0)
        if p.WEIGHTED:
            weight = p.notes.weight.slice(HALF * 64, 64, 0).load(gl.SliceLayout(1, LAYOUT))
            extra = times(extra, gl.expand_dims(weight, 1))
        sums = sums + extra
    rows = sums.to(gl.bfloat16)
    store_turned(p, rows, first, end, HALF * 64, at, p.num_outputs, False, WG)
