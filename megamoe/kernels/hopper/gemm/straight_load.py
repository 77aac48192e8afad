"""Who brings the tiles of `straight`: weights that are E4M3, tokens, and what epilogues need."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from megamoe.kernels.hopper.gemm.decode_per_wave import tell_read, tell_rest
from megamoe.kernels.hopper.gemm.draw import (
    arrive_last,
    await_rows,
    draw,
    drawn_tile,
    publish_rows,
    rows_counter,
)
from megamoe.kernels.hopper.gemm.notes import EARLY, fetch_notes, tell_notes, tell_tile
from megamoe.kernels.hopper.gemm.straight_epilogue import ROWS, TOKENS
from megamoe.kernels.hopper.gemm.tile_scheduler import HALF, end_item, tile_at
from megamoe.kernels.hopper.pipeline import advance, num_items, wait_for_launch


@gluon.jit
def load_rows(p, expert, across, idx, phase):
    """The E4M3 rows of a tile into the stages."""
    for k in range(p.steps):
        ready = p.full.index(idx)
        mbarrier.wait(p.empty.index(idx), phase)
        mbarrier.expect(ready, ROWS * 128)
        if p.GATED:
            tma.async_copy_global_to_shared(
                p.w, [expert, across * 16, 0, 0, k * 128], ready, p.w_bufs.index(idx)
            )
        else:
            tma.async_copy_global_to_shared(
                p.w, [expert, across * ROWS, k * 128], ready, p.w_bufs.index(idx)
            )
        idx, phase = advance(idx, phase, p.STAGES)
    return idx, phase


@gluon.jit
def load_weights(p):
    """The weights of each tile; `draw_tokens` tells of those that are drawn."""
    idx = 0
    phase = 1
    if p.DRAWN:
        done = 0
        expert, across = drawn_tile(p, done)
        while expert >= 0:
            idx, phase = load_rows(p, expert, across, idx, phase)
            done += 1
            expert, across = drawn_tile(p, done)
        arrive_last(p, idx, phase)
    else:
        for item in range(gl.program_id(0), end_item(p), gl.num_programs(0)):
            expert, row, end, across = tile_at(p, item)
            idx, phase = load_rows(p, expert, across, idx, phase)


@gluon.jit
def load_token_block(p, row, k, both, idx, phase):
    """K block k of a tile's tokens and their scales; a half tile has no more than the first 64."""
    ready = p.full.index(idx)
    mbarrier.wait(p.empty.index(idx), phase)
    mbarrier.expect(ready, TOKENS * 128 + TOKENS * 4, pred=both)
    mbarrier.expect(ready, HALF * 128 + TOKENS * 4, pred=both == 0)
    low = p.x_bufs.index(2 * idx)
    high = p.x_bufs.index(2 * idx + 1)
    tma.async_copy_global_to_shared(p.x, [row, k * 128], ready, low)
    tma.async_copy_global_to_shared(p.x, [row + HALF, k * 128], ready, high, pred=both)
    tma.async_copy_global_to_shared(p.x_scale, [k * p.pool_rows + row], ready, p.xs_bufs.index(idx))
    return advance(idx, phase, p.STAGES)


@gluon.jit
def load_tokens(p):
    """Tokens of each tile, their scales and notes; tells what is read of weights decoded ahead."""
    idx = 0
    phase = 1
    done = 0
    early = gl.maximum(p.steps - 1 - EARLY, 0)
    block = 1 - p.STAGES  # K blocks that have left the stages, over all tiles
    wait_for_launch()
    for item in range(gl.program_id(0), end_item(p), gl.num_programs(0)):
        expert, row, end, across = tile_at(p, item)
        tell_tile(p, done, expert, across, row, end)
        both = row + HALF < end
        for k in range(p.steps):
            if k == early:
                fetch_notes(p, done, expert, across, row, end)
            if k == p.steps - 1:
                tell_notes(p)
            idx, phase = load_token_block(p, row, k, both, idx, phase)
            if p.ahead.DEPTH:
                tell_read(p, block)
                block += 1
        done += 1
    if p.ahead.DEPTH:
        tell_rest(p, block, idx, phase)


@gluon.jit
def draw_tokens(p):
    """Draws tiles, tells the other roles, and brings tokens, scales and notes.

    The next tile is drawn as the last blocks of one are loaded: not before, or a slow CTA would
    hold a tile that another could begin. L2 begins on SMs that L1 has left, tile by tile.
    """
    idx = 0
    phase = 1
    done = 0
    early = gl.maximum(p.steps - 1 - EARLY, 0)
    soon = gl.minimum(p.STAGES + 2, p.steps - 1)  # the epilogue of the tile before is over by then
    num = num_items(p, ROWS)
    item = gl.program_id(0)
    before = p.tiles
    while item < num:
        expert, row, end, across = tile_at(p, item)
        count = rows_counter(p, item)
        tell_tile(p, done, expert, across, row, end)
        mbarrier.arrive(p.drawn.index(done & 1), count=1)
        if not p.GATED:
            await_rows(p, count)
        both = row + HALF < end
        for k in range(p.steps):
            if p.GATED:  # noqa: SIM102  known at compile time
                if (k == soon) & (done > 0):
                    publish_rows(p, done - 1, before)
            if k == early:
                fetch_notes(p, done, expert, across, row, end)
                item = draw(p, num)
            if k == p.steps - 1:
                tell_notes(p)
            idx, phase = load_token_block(p, row, k, both, idx, phase)
        before = count
        done += 1
    if p.GATED:  # noqa: SIM102  likewise
        if done > 0:
            publish_rows(p, done - 1, before)
    tell_tile(p, done, -1, 0, 0, 0)
    mbarrier.arrive(p.drawn.index(done & 1), count=1)
    arrive_last(p, idx, phase)
    wait_for_launch()  # whoever comes after this launch comes after the one before it too
