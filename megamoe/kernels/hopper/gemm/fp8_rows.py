"""L2's rows where combine="fp8": codes for the link, scales for this rank's memory.

A row is rounded to BF16 and then to `fp8_combine`, as everywhere: E4M3 codes, and an E8M0 scale for
each 128 columns, which one warpgroup has. Codes go home from the epilogue, 16 bytes a thread. A
scale is a byte a row and block: scales are kept, [blocks, pool_rows], and `scales_kernel` sends
those of a row together, after L2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.kernels.common.numbers import abs_bits, e8m0_scale, pow2
from megamoe.kernels.gluon.pipeline import allow_next_launch, wait_for_launch
from megamoe.kernels.gluon.pool import TILE_ROW_BEGIN, TILE_ROW_END, TILE_WORDS
from megamoe.kernels.portable.acts import CODES

GROUP = 32  # rows whose scales a CTA sends at a time
_GROUP = gl.constexpr(GROUP)
_EXPONENT = gl.constexpr(CODES["fp8_combine"].EXPONENT)
_MANTISSA = gl.constexpr(CODES["fp8_combine"].MANTISSA)


@gluon.constexpr_function
def is_fp8(pointer_dtype):
    """Whether rows leave as E4M3."""
    return pointer_dtype.element_ty.primitive_bitwidth == 8


@gluon.jit
def row_codes(gemm, one, two, tile, first_col, START: gl.constexpr, AXIS: gl.constexpr):
    """E4M3 of BF16 values of the tile's rows from number START on; their scales are kept.

    one, two  64 columns each along AXIS, the first from `first_col` on: a block that shares scales
    """
    one = _within(gemm, one, first_col, AXIS)
    two = _within(gemm, two, first_col + 64, AXIS)
    bits = gl.maximum(gl.max(abs_bits(one), AXIS), gl.max(abs_bits(two), AXIS))
    code = e8m0_scale(bits, _EXPONENT, _MANTISSA)
    row = tile.row_begin + START + gl.arange(0, code.shape[0], code.type.layout)
    block = first_col // 128
    at = gemm.out_scale + block.to(gl.int64) * gemm.pool_rows + row
    gl.store(at, code.to(gl.uint8), mask=row < tile.row_end)
    is_dead = code == 255  # a value is not finite: all are +0
    inverse = gl.expand_dims(pow2(254 - gl.where(is_dead, 0, code)), AXIS)
    is_dead = gl.expand_dims(is_dead, AXIS)
    one = gl.where(is_dead, 0.0, one * inverse)
    two = gl.where(is_dead, 0.0, two * inverse)
    return one.to(gl.float8e4nv), two.to(gl.float8e4nv)


@gluon.jit
def _within(gemm, values, first_col, AXIS: gl.constexpr):
    """FP32 of 64 columns along AXIS, zero from the last column of a row on."""
    col = first_col + gl.arange(0, 64, gl.SliceLayout(1 - AXIS, values.type.layout))
    inside = gl.expand_dims(col < gemm.num_outputs, 1 - AXIS)
    return gl.where(inside, values.to(gl.float32), 0.0)


@gluon.jit
def scales_kernel(
    scale, rows, dest, tiles, num_tiles, pool_rows, hidden,
    BLOCK: gl.constexpr, BLOCKS: gl.constexpr, PITCH: gl.constexpr,
):  # fmt: skip
    """CTA: the scales of every num_programs-th group of rows of the pool, after their codes.

    scale   uint8 [blocks, pool_rows] of this rank
    rows    uint8 [.., hidden + PITCH]: of this rank; `dest` leads to those of all, in 16 bytes
    BLOCKS  blocks of 128 columns to a power of two of at least 16; PITCH: to a multiple of 16
    """
    wait_for_launch()
    allow_next_launch()
    PARTS: gl.constexpr = (BLOCK + _GROUP - 1) // _GROUP  # narrower tiles are one
    THREADS: gl.constexpr = BLOCKS // 16  # of a row
    WIDE: gl.constexpr = gl.BlockedLayout(
        [1, 16], [32 // THREADS, THREADS], [gl.num_warps(), 1], [1, 0]
    )
    ALONG: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, gl.num_warps()], [0, 1])
    for number in range(gl.program_id(0), gl.load(num_tiles) * PARTS, gl.num_programs(0)):
        tile = tiles + number // PARTS * TILE_WORDS
        first = gl.load(tile + TILE_ROW_BEGIN) + number % PARTS * _GROUP
        end = gl.load(tile + TILE_ROW_END)
        row = gl.expand_dims(first + gl.arange(0, _GROUP, gl.SliceLayout(1, ALONG)), 1)
        block = gl.expand_dims(gl.arange(0, BLOCKS, gl.SliceLayout(0, ALONG)), 0)
        mask = (row < end) & (block * 128 < hidden)
        exponents = gl.load(scale + block.to(gl.int64) * pool_rows + row, mask=mask, other=127)
        row = first + gl.arange(0, _GROUP, gl.SliceLayout(1, WIDE))
        used = row < end
        home = gl.expand_dims(gl.load(dest + row, mask=used, other=0) * 16, 1)
        at = gl.expand_dims(gl.arange(0, BLOCKS, gl.SliceLayout(0, WIDE)), 0)
        to = rows + hidden + home + at
        gl.store(
            to, gl.convert_layout(exponents, WIDE), mask=gl.expand_dims(used, 1) & (at < PITCH)
        )
