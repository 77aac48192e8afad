"""L2's rows where combine="fp8": codes for the link, scales for this rank's memory.

A row is rounded to BF16 and then to `fp8_combine`, as everywhere: E4M3 codes, and an E8M0 scale for
each 128 columns, which one warpgroup has. Codes go to the tokens' ranks from the epilogue, 16
bytes a thread. Scales are single bytes, too small for remote stores: they are collected locally,
[blocks, pool_rows], and sent by `scales_kernel` after L2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.kernels.gluon.pipeline import allow_next_launch, wait_for_launch
from megamoe.kernels.gluon.pool import TILE_ROW_BEGIN, TILE_ROW_END, TILE_WORDS

SENT_ROWS = 32  # rows whose scales a CTA sends at a time
_SENT_ROWS = gl.constexpr(SENT_ROWS)


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
    PARTS: gl.constexpr = (BLOCK + _SENT_ROWS - 1) // _SENT_ROWS  # narrower tiles are one
    THREADS: gl.constexpr = BLOCKS // 16  # of a row
    WIDE: gl.constexpr = gl.BlockedLayout(
        [1, 16], [32 // THREADS, THREADS], [gl.num_warps(), 1], [1, 0]
    )
    ALONG: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, gl.num_warps()], [0, 1])
    for number in range(gl.program_id(0), gl.load(num_tiles) * PARTS, gl.num_programs(0)):
        tile = tiles + number // PARTS * TILE_WORDS
        first = gl.load(tile + TILE_ROW_BEGIN) + number % PARTS * _SENT_ROWS
        end = gl.load(tile + TILE_ROW_END)
        row = gl.expand_dims(first + gl.arange(0, _SENT_ROWS, gl.SliceLayout(1, ALONG)), 1)
        block = gl.expand_dims(gl.arange(0, BLOCKS, gl.SliceLayout(0, ALONG)), 0)
        mask = (row < end) & (block * 128 < hidden)
        exponents = gl.load(scale + block.to(gl.int64) * pool_rows + row, mask=mask, other=127)
        row = first + gl.arange(0, _SENT_ROWS, gl.SliceLayout(1, WIDE))
        used = row < end
        to_row = gl.expand_dims(gl.load(dest + row, mask=used, other=0) * 16, 1)
        at = gl.expand_dims(gl.arange(0, BLOCKS, gl.SliceLayout(0, WIDE)), 0)
        to = rows + hidden + to_row + at
        gl.store(
            to, gl.convert_layout(exponents, WIDE), mask=gl.expand_dims(used, 1) & (at < PITCH)
        )
