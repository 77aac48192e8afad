"""Epilogues: sums to activations in the next linear's format, or to rows at their destinations.

Sums of the swap-AB GEMM are FP32 [64 weight rows, tokens]; the plain GEMM calls the arithmetic and
`store_transposed` with [tokens, weight rows]. Shapes below: N tokens of the tile.

Operands: factors of the tile's weight rows, topk weights and destinations of its tokens are copied
to shared memory by one warp during the main loop: tensor cores are idle during an epilogue, so it
should not wait for memory.

  barrier   arrivals  arrived by             awaited by
  full      1         the warp that copies  math, before the epilogue
  empty[2]  GROUPS    math, after it        that warp, before the next tile's; `post_tile`
"""

from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from megamoe.kernels.common.columns import pool_place
from megamoe.kernels.common.numbers import INF_BITS, abs_bits, e8m0_scale, pow2
from megamoe.kernels.common.quantise import round_to_format
from megamoe.kernels.gluon.arithmetic import divide, e4m3_scale, glu, nvfp4_scale, reciprocal, times
from megamoe.kernels.gluon.compat import async_copy, gl, reinterpret
from megamoe.kernels.gluon.pipeline import FLAT_SHARED, GROUPS, Tile, barriers, record
from megamoe.kernels.portable.acts import CODES

# Words of a posted tile.
POSTED_WORDS = gl.constexpr(4)
POSTED_EXPERT = gl.constexpr(0)
POSTED_N_TILE = gl.constexpr(1)
POSTED_ROW_BEGIN = gl.constexpr(2)
POSTED_ROW_END = gl.constexpr(3)
PREFETCH_STEPS = gl.constexpr(2)  # the operands are copied this many steps before a tile's last
_LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
_PLANES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_EXPONENT = gl.constexpr(CODES["fp8_combine"].EXPONENT)
_MANTISSA = gl.constexpr(CODES["fp8_combine"].MANTISSA)

# -- operands in shared memory ---------------------------------------------------------------------


@record
class EpilogueOperands:
    """Two tiles as they were posted, and the operands of one tile's epilogue."""

    posted: gl.shared_memory_descriptor  # int32 [2 * POSTED_WORDS, 1]
    factor: gl.shared_memory_descriptor  # FP32 [ROWS]: of each weight row
    bias: gl.shared_memory_descriptor  # FP32 [ROWS]
    weight: gl.shared_memory_descriptor  # FP32 [TOKENS]: topk weights
    token_factor: gl.shared_memory_descriptor  # FP32 [TOKENS]: NVFP4's global scale of each token
    dest: gl.shared_memory_descriptor  # int32 or int64 [TOKENS]: destination of each row
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    FACTOR: gl.constexpr  # "row", "expert" or neither
    HAS_BIAS: gl.constexpr


@gluon.jit
def allocate_operands(
    row_dest, ROWS: gl.constexpr, TOKENS: gl.constexpr, FACTOR: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Their shared memory; what a launch does not need stands for `weight`."""
    posted = gl.allocate_shared_memory(gl.int32, [2 * POSTED_WORDS, 1], FLAT_SHARED)
    weight = gl.allocate_shared_memory(gl.float32, [TOKENS], FLAT_SHARED)
    dest = gl.allocate_shared_memory(row_dest.dtype.element_ty, [TOKENS], FLAT_SHARED)
    factor = weight
    bias = weight
    token_factor = weight
    if HAS_BIAS:
        bias = gl.allocate_shared_memory(gl.float32, [ROWS], FLAT_SHARED)
    if FACTOR == "row" or FACTOR == "expert":
        factor = gl.allocate_shared_memory(gl.float32, [ROWS], FLAT_SHARED)
    if FACTOR == "expert":
        token_factor = gl.allocate_shared_memory(gl.float32, [TOKENS], FLAT_SHARED)
    full = barriers(1, 1).index(0)
    empty = barriers(2, GROUPS)
    return EpilogueOperands(
        posted=posted, factor=factor, bias=bias, weight=weight, token_factor=token_factor,
        dest=dest, full=full, empty=empty, FACTOR=FACTOR, HAS_BIAS=HAS_BIAS,
    )  # fmt: skip


@gluon.jit
def post_tile(gemm, num_done, tile):
    """load_tokens: the CTA's tile number `num_done`, before its first stage."""
    ops = gemm.epilogue
    mbarrier.wait(ops.empty.index(num_done & 1), ((num_done >> 1) & 1) ^ 1)
    slot = (num_done & 1) * POSTED_WORDS
    zero = gl.zeros([1], gl.int32, _LANES)
    ops.posted.index(slot + POSTED_EXPERT).store(zero + tile.expert)
    ops.posted.index(slot + POSTED_N_TILE).store(zero + tile.n_tile_idx)
    ops.posted.index(slot + POSTED_ROW_BEGIN).store(zero + tile.row_begin)
    ops.posted.index(slot + POSTED_ROW_END).store(zero + tile.row_end)
    gl.thread_barrier()


@gluon.jit
def read_tile(gemm, num_done):
    """math: the posted tile, once its first stage is full."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot = (num_done & 1) * POSTED_WORDS
    posted = gemm.epilogue.posted
    return Tile(
        expert=gl.max(posted.index(slot + POSTED_EXPERT).load(LAYOUT), 0),
        n_tile_idx=gl.max(posted.index(slot + POSTED_N_TILE).load(LAYOUT), 0),
        row_begin=gl.max(posted.index(slot + POSTED_ROW_BEGIN).load(LAYOUT), 0),
        row_end=gl.max(posted.index(slot + POSTED_ROW_END).load(LAYOUT), 0),
    )


@gluon.jit
def _opaque(x):
    """A volatile no-op: addresses are computed after it, or hold registers during all the tile."""
    return gl.inline_asm_elementwise("", "=r,0", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _part(buf, i):
    """Values 32 * i and the 31 after it."""
    return reinterpret(buf, gl.float32, [buf.shape[0] // 32, 32], FLAT_SHARED).index(i)


@gluon.jit
def _fetch_weight_rows(gemm, expert, n_tile_idx):
    """Factors and biases of a tile's weight rows, 32 after 32: few registers."""
    ops = gemm.epilogue
    ROWS: gl.constexpr = ops.bias.shape[0] if ops.HAS_BIAS else ops.factor.shape[0]
    for i in range(ROWS // 32):
        r = i * 32 + gl.arange(0, 32, _LANES)
        row = n_tile_idx * ROWS + r
        matrix = expert + 0 * r
        col = row
        if gemm.GATED:  # 8 gate, 8 up, ...
            matrix = expert * 2 + r % 16 // 8
            col = n_tile_idx * (ROWS // 2) + r // 16 * 8 + r % 8
        if ops.FACTOR == "row":
            at = gemm.factor + expert * gemm.factor_rows + row
            async_copy.async_copy_global_to_shared(_part(ops.factor, i), at)
        elif ops.FACTOR == "expert":
            async_copy.async_copy_global_to_shared(_part(ops.factor, i), gemm.factor + matrix)
        if ops.HAS_BIAS:
            at = gemm.bias + matrix * gemm.num_bias + col
            to = _part(ops.bias, i)
            async_copy.async_copy_global_to_shared(to, at, mask=col < gemm.num_bias)


@gluon.jit
def fetch_operands(gemm, num_done, tile):
    """One warp: begin to copy the operands of the CTA's tile number `num_done`."""
    ops = gemm.epilogue
    before = num_done - 1
    mbarrier.wait(ops.empty.index(before & 1), (before >> 1) & 1)  # no wait for the first tile
    expert = _opaque(tile.expert)
    n_tile_idx = _opaque(tile.n_tile_idx)
    row_begin = _opaque(tile.row_begin)
    row_end = tile.row_end
    if ops.HAS_BIAS or ops.FACTOR == "row" or ops.FACTOR == "expert":
        _fetch_weight_rows(gemm, expert, n_tile_idx)
    row = row_begin + gl.arange(0, ops.weight.shape[0], _LANES)
    if gemm.GATED and ops.FACTOR == "expert":
        async_copy.async_copy_global_to_shared(
            ops.token_factor, gemm.row_factor + row, mask=row < row_end
        )
    if gemm.WEIGHTED and (gemm.GATED or gemm.HAS_BIAS):
        async_copy.async_copy_global_to_shared(
            ops.weight, gemm.row_weight + row, mask=row < row_end
        )
    if not gemm.GATED:
        async_copy.async_copy_global_to_shared(ops.dest, gemm.row_dest + row, mask=row < row_end)
    async_copy.commit_group()


@gluon.jit
def publish_operands(gemm, report=0):
    """The same warp, some steps later: the copies are complete.

    After a timeout report `row_dest` may be unwritten; all rows then go to destination 0.
    """
    dest = gemm.epilogue.dest
    NUM: gl.constexpr = dest.shape[0]
    async_copy.wait_group(0)
    if not gemm.GATED:  # noqa: SIM102  known at compile time
        if report != 0:
            dest.store(gl.zeros([NUM], dest.dtype, _LANES))
    gl.thread_barrier()
    mbarrier.arrive(gemm.epilogue.full, count=1)


@gluon.jit
def wait_for_operands(gemm, num_done):
    """math, after the main loop of the CTA's tile number `num_done`."""
    mbarrier.wait(gemm.epilogue.full, num_done & 1)


@gluon.jit
def release_operands(gemm, num_done):
    """math: the operands and the posted tile number `num_done` may be overwritten."""
    mbarrier.arrive(gemm.epilogue.empty.index(num_done & 1), count=1)


@gluon.jit
def rows_of(gemm, tile, START: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr):
    """[N] rows of `out` of the tile's tokens from number START on, and whether they are used."""
    row = tile.row_begin + START + gl.arange(0, N, LAYOUT)
    used = row < tile.row_end
    if not gemm.GATED:
        row = gemm.epilogue.dest.slice(START, N, 0).load(LAYOUT)
    return row, used


@gluon.jit
def operand(
    of, IS_USED: gl.constexpr, OTHER, START: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr
):
    """FP32 [N] of an operand from START on, or OTHER where the launch does not have it."""
    value = gl.full([N], OTHER, gl.float32, LAYOUT)
    if IS_USED:
        value = of.slice(START, N, 0).load(LAYOUT)
    return value


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
def _convert_both(a, b, LAYOUT: gl.constexpr):
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
    scale, inverse = e4m3_scale(amax)
    if WG == 0:
        row = tile.row_begin + gl.arange(0, N, LANES)
        gl.store(gemm.out_scale + slab // 4 * gemm.pool_rows + row, scale, mask=row < tile.row_end)
    return _convert_both(scale, inverse, COL)


@gluon.jit
def _codes(gemm, ratio):
    """E4M3, or its values in BF16 where that is what wgmma multiplies."""
    codes = ratio.to(gl.float8e4nv)
    return codes.to(gl.bfloat16) if gemm.ACTS.STORED_AS == "scaled" else codes


@gluon.jit
def _as_bf16(gemm, act, acts_factor):
    """BF16 [32, N] of activations rounded to their format, if any: code times scale is exact."""
    N: gl.constexpr = act.shape[1]
    if gemm.ACTS.STORED_AS == "plain":
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
    if gemm.ACTS.STORED_AS == "codes" or gemm.ACTS.STORED_AS == "scaled":
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


# -- rows of combine="fp8" -------------------------------------------------------------------------


@gluon.constexpr_function
def is_fp8(pointer_dtype):
    """Whether rows leave as E4M3."""
    return pointer_dtype.element_ty.primitive_bitwidth == 8


@gluon.jit
def row_codes(gemm, first, second, tile, first_col, START: gl.constexpr, AXIS: gl.constexpr):
    """E4M3 of BF16 values of the tile's rows from number START on; their scales go to `out_scale`.

    first, second  64 columns each along AXIS, from `first_col` on: a block that shares scales
    """
    first = _within(gemm, first, first_col, AXIS)
    second = _within(gemm, second, first_col + 64, AXIS)
    bits = gl.maximum(gl.max(abs_bits(first), AXIS), gl.max(abs_bits(second), AXIS))
    code = e8m0_scale(bits, _EXPONENT, _MANTISSA)
    row = tile.row_begin + START + gl.arange(0, code.shape[0], code.type.layout)
    block = first_col // 128
    at = gemm.out_scale + block.to(gl.int64) * gemm.pool_rows + row
    gl.store(at, code.to(gl.uint8), mask=row < tile.row_end)
    is_dead = code == 255  # a value is not finite: all are +0
    inverse = gl.expand_dims(pow2(254 - gl.where(is_dead, 0, code)), AXIS)
    is_dead = gl.expand_dims(is_dead, AXIS)
    first = gl.where(is_dead, 0.0, first * inverse)
    second = gl.where(is_dead, 0.0, second * inverse)
    return first.to(gl.float8e4nv), second.to(gl.float8e4nv)


@gluon.jit
def _within(gemm, values, first_col, AXIS: gl.constexpr):
    """FP32 of 64 columns along AXIS, zero from the last column of a row on."""
    col = first_col + gl.arange(0, 64, gl.SliceLayout(1 - AXIS, values.type.layout))
    inside = gl.expand_dims(col < gemm.num_outputs, 1 - AXIS)
    return gl.where(inside, values.to(gl.float32), 0.0)


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
    together, as a link takes them. Rows begin at multiples of 16 bytes, as
    `hidden` is a multiple of 8.
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
