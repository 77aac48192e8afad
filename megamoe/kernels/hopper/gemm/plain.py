"""Grouped GEMM for many tokens per expert: tokens are wgmma's M, 256 weight rows its N, in FP8.

    out[token, row] = sum over k of x[token, k] * w[expert, row, k]

The same products in the same order as the swap-AB GEMM, scaled every 128 of K in FP32: the same
bits.

Dimensions

  here        GEMM word  size
  token       M          PLAIN_TOKENS = 128 per tile, two halves of 64: the M of one wgmma
  weight row  N          PLAIN_ROWS = 256 per tile, 128 a math warpgroup: the N of one wgmma
  K block     BLOCK_K    128 of K: one stage, one wgmma per half, one scale per token
  step        k tile     one stage of one tile; `steps` = K / 128
  n tile      n block    PLAIN_ROWS weight rows; L1 (GATED): 8 gate, 8 up, ... -> 128 outputs
  tile        -          one n tile x up to 128 rows of the pool of one expert; a half tile has 64
                         rows at most, and its second half is neither loaded nor multiplied

Roles of a CTA: two math warpgroups, a decoding warpgroup or none, and single warps

  weights       decode                   warps
  E4M3          -                        load_weights, load_tokens (or load_dynamic_tokens)
  FP4 per tile  decode_per_tile.decode   load_images, load_tokens
  FP4 per wave  decode_per_wave          load_decoded, load_tokens, load_jobs, publish_jobs

Barriers; those of FP4 per wave are in `decode_per_wave`

  mbarrier        n       arrivals  arrived by                        awaited by
  full            STAGES  2         weights and tokens, and their TMA  math
  empty           STAGES  2         both math warpgroups               loaders, decode
  image_full      IMAGES  1         load_images' TMA                   decode
  image_empty     IMAGES  1         decode                             load_images
  amax_full       2       2         math: amax of an L1 tile stored    math: amax of the other half
  taken           2       1         load_dynamic_tokens: tile posted   load_weights
  epilogue.full   1       1         load_tokens                        math
  epilogue.empty  2       GROUPS    math, after the epilogue           load_tokens

Records: work items and the tile list are described in `tile_scheduler`; a posted tile is (expert,
n tile, row_begin, row_end) in shared memory, two of them.

One CTA, three tiles A B C of three steps each, STAGES = 4:

  load_weights  A0 A1 A2 B0 | waits | B1 B2 C0 C1 C2
  load_tokens   post A, A0, operands of A, A1 A2; post B, B0 | waits | B1 B2; post C, C0 ...
  math 0, 1     A0 A1 A2 epilogue A, B0 B1 B2 epilogue B, C0 C1 C2 epilogue C
"""

from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megamoe.kernels.common.numbers import abs_bits
from megamoe.kernels.gluon.arithmetic import divide, e4m3_scale, glu, times
from megamoe.kernels.gluon.compat import gl, tma
from megamoe.kernels.gluon.pipeline import (
    FLAT_SHARED,
    Tile,
    advance,
    allow_next_launch,
    barriers,
    fence_stores,
    first_stage,
    pin,
    record,
    stamp_begin,
    wait_for_launch,
)
from megamoe.kernels.gluon.tile_scheduler import (
    PLAIN_HALF,
    PLAIN_ROWS,
    PLAIN_SLABS,
    PLAIN_TOKENS,
    TIMEOUT_WORD,
    end_item,
    l1_done_counter,
    next_item,
    num_work_items,
    publish_l1_tile,
    tile_at,
    tile_word,
    wait_for_tile,
    wait_until_reached,
)
from megamoe.kernels.hopper.gemm.decode_per_tile import decode, load_images
from megamoe.kernels.hopper.gemm.decode_per_wave import (
    JOB_WORDS,
    DecodePerWave,
    decode_jobs,
    load_decoded,
    load_jobs,
    publish_jobs,
    publish_read,
    publish_rest,
)
from megamoe.kernels.hopper.gemm.epilogue import (
    PREFETCH_STEPS,
    EpilogueOperands,
    allocate_operands,
    fetch_operands,
    is_fp8,
    post_tile,
    publish_operands,
    read_tile,
    release_operands,
    row_codes,
    store_transposed,
    wait_for_operands,
)
from megamoe.kernels.hopper.weights.decode import PAIR_WORDS, PLAIN_MMA


@record
class PlainGemm:
    """One launch: operands in memory, the rings, and the epilogue's tensors (see `SwapAbGemm`)."""

    w: tma.tensor_descriptor
    w_scale: tma.tensor_descriptor
    x: tma.tensor_descriptor
    x_scale: tma.tensor_descriptor
    w_bufs: gl.shared_memory_descriptor  # E4M3 [STAGES, 256, 128]
    image: gl.shared_memory_descriptor  # FP4 per tile: int32 [IMAGES, 1, PLAIN_SLABS, 4, 256]
    image_scale: gl.shared_memory_descriptor
    x_bufs: gl.shared_memory_descriptor  # E4M3 [2 * STAGES, 64, 128]
    xs_bufs: gl.shared_memory_descriptor  # FP32 [STAGES, 128]
    amax: gl.shared_memory_descriptor  # int32 [2 sets * 2 warpgroups, 128]: bits
    transpose_smem: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    image_full: gl.shared_memory_descriptor
    image_empty: gl.shared_memory_descriptor
    amax_full: gl.shared_memory_descriptor
    taken: gl.shared_memory_descriptor
    epilogue: EpilogueOperands
    factor: gl.tensor
    bias: gl.tensor
    row_weight: gl.tensor
    row_dest: gl.tensor
    out: gl.tensor
    out_scale: gl.tensor
    tiles: gl.tensor
    num_tiles: gl.tensor
    follows: gl.tensor  # FOLLOWS: words by tile, for which its tokens wait (`follow`)
    publishes: gl.tensor  # PUBLISHES: L1's, for L2
    bound_us: gl.tensor  # FOLLOWS: of a wait for a tile
    l1_n_tiles: (
        gl.tensor
    )  # L2 that follows, or DYNAMIC: n tiles of L1, for which a tile of tokens waits
    items: gl.tensor  # HAS_ITEMS: int32 [items, ITEM_WORDS]
    decoded: DecodePerWave
    pool_rows: gl.tensor
    steps: gl.tensor
    num_outputs: gl.tensor
    num_bias: gl.tensor
    out_width: gl.tensor
    factor_rows: gl.tensor
    factor_cols: gl.tensor
    clamp: gl.tensor
    DECODED: gl.constexpr  # weights are FP4: a factor per row
    HAS_ITEMS: gl.constexpr  # work items were written before
    DYNAMIC: gl.constexpr  # CTAs take them from a counter
    FOLLOWS: gl.constexpr  # tiles wait for their tokens, not for the launch before
    PUBLISHES: gl.constexpr
    GATED: gl.constexpr
    HAS_BIAS: gl.constexpr
    WEIGHTED: gl.constexpr
    ACTIVATION: gl.constexpr
    STAGES: gl.constexpr
    IMAGES: gl.constexpr  # slots of the ring of FP4 images, or jobs in flight
    SPAN: gl.constexpr


# -- loads ---------------------------------------------------------------------------------------


@gluon.jit
def _load_weight_tile(gemm, tile, stage):
    """All steps of the E4M3 weights of a tile; -> the next stage."""
    for k in range(gemm.steps):
        full = gemm.full.index(stage.idx)
        mbarrier.wait(gemm.empty.index(stage.idx), stage.phase)
        mbarrier.expect(full, PLAIN_ROWS * 128)
        if gemm.GATED:
            at = [tile.expert, tile.n_tile_idx * 16, 0, 0, k * 128]
            tma.async_copy_global_to_shared(gemm.w, at, full, gemm.w_bufs.index(stage.idx))
        else:
            at = [tile.expert, tile.n_tile_idx * PLAIN_ROWS, k * 128]
            tma.async_copy_global_to_shared(gemm.w, at, full, gemm.w_bufs.index(stage.idx))
        stage = advance(stage, gemm.STAGES)
    return stage


@gluon.jit
def _taken_tile(gemm, num_done):
    """load_weights: the CTA's tile number `num_done`, once `load_dynamic_tokens` has posted it."""
    mbarrier.wait(gemm.taken.index(num_done & 1), (num_done >> 1) & 1)
    return read_tile(gemm, num_done)


@gluon.jit
def _arrive_last(gemm, stage):
    """A loader: completes an empty stage, so that math wakes up and reads expert -1, the end."""
    mbarrier.wait(gemm.empty.index(stage.idx), stage.phase)
    mbarrier.arrive(gemm.full.index(stage.idx), count=1)


@gluon.jit
def load_weights(gemm):
    """One warp: the E4M3 weights of each tile."""
    stage = first_stage(1)
    if gemm.DYNAMIC:
        num_done = 0
        tile = _taken_tile(gemm, num_done)
        while tile.expert >= 0:
            stage = _load_weight_tile(gemm, tile, stage)
            num_done += 1
            tile = _taken_tile(gemm, num_done)
        _arrive_last(gemm, stage)
    else:
        for item in range(gl.program_id(0), end_item(gemm), gl.num_programs(0)):
            stage = _load_weight_tile(gemm, tile_at(gemm, item), stage)


@gluon.jit
def _load_token_block(gemm, row, k, both, stage):
    """K block k of a tile's tokens and their scales, of the first 64 or of `both` halves."""
    full = gemm.full.index(stage.idx)
    mbarrier.wait(gemm.empty.index(stage.idx), stage.phase)
    mbarrier.expect(full, PLAIN_TOKENS * 128 + PLAIN_TOKENS * 4, pred=both)
    mbarrier.expect(full, PLAIN_HALF * 128 + PLAIN_TOKENS * 4, pred=both == 0)
    low = gemm.x_bufs.index(2 * stage.idx)
    high = gemm.x_bufs.index(2 * stage.idx + 1)
    tma.async_copy_global_to_shared(gemm.x, [row, k * 128], full, low)
    tma.async_copy_global_to_shared(gemm.x, [row + PLAIN_HALF, k * 128], full, high, pred=both)
    tma.async_copy_global_to_shared(
        gemm.x_scale, [k * gemm.pool_rows + row], full, gemm.xs_bufs.index(stage.idx)
    )
    return advance(stage, gemm.STAGES)


@gluon.jit
def load_tokens(gemm):
    """One warp: tokens of each tile, their scales, and the epilogue's operands.

    Where weights are decoded per wave it also publishes which of them this CTA has read.
    """
    stage = first_stage(1)
    num_done = 0
    prefetch = gl.maximum(gemm.steps - 1 - PREFETCH_STEPS, 0)
    block = 1 - gemm.STAGES  # K blocks that have left the stages, over all tiles
    # By this step the epilogue of the tile before is over.
    publish = gl.minimum(gemm.STAGES + 2, gemm.steps - 1)
    before = 0  # first row of the tile before
    if not gemm.FOLLOWS:
        wait_for_launch()
    for item in range(gl.program_id(0), end_item(gemm), gl.num_programs(0)):
        tile = tile_at(gemm, item)
        post_tile(gemm, num_done, tile)
        if gemm.FOLLOWS:
            wait_for_tile(gemm, tile, gemm.decoded.error)
        both = tile.row_begin + PLAIN_HALF < tile.row_end
        for k in range(gemm.steps):
            if gemm.PUBLISHES:  # noqa: SIM102  known at compile time
                if (k == publish) & (num_done > 0):
                    _publish_tile(gemm, num_done - 1, tile_word(gemm.publishes, before))
            if k == prefetch:
                fetch_operands(gemm, num_done, tile)
            if k == gemm.steps - 1:
                publish_operands(gemm)
            stage = _load_token_block(gemm, tile.row_begin, k, both, stage)
            if gemm.decoded.DEPTH:
                publish_read(gemm, block)
                block += 1
        if gemm.PUBLISHES:
            before = tile.row_begin
        num_done += 1
    if gemm.decoded.DEPTH:
        publish_rest(gemm, block, stage)
    if gemm.PUBLISHES:  # noqa: SIM102  known at compile time
        if num_done > 0:
            _publish_tile(gemm, num_done - 1, tile_word(gemm.publishes, before))
    if gemm.FOLLOWS:
        wait_for_launch()  # a launch that comes after this one also comes after the one before


@gluon.jit
def _publish_tile(gemm, num_done, counter):
    """L1: count the CTA's tile number `num_done`, once all warpgroups have stored it."""
    mbarrier.wait(gemm.epilogue.empty.index(num_done & 1), (num_done >> 1) & 1)
    publish_l1_tile(counter)


@gluon.jit
def load_dynamic_tokens(gemm):
    """One warp: takes tiles from the counter, posts them, loads tokens and operands.

    The next tile is taken when the last blocks of one are loaded: not before, or a slow CTA would
    have a tile that another could begin. L2 begins on SMs that L1 has left, tile by tile.
    """
    stage = first_stage(1)
    num_done = 0
    prefetch = gl.maximum(gemm.steps - 1 - PREFETCH_STEPS, 0)
    # By this step the epilogue of the tile before is over.
    publish = gl.minimum(gemm.STAGES + 2, gemm.steps - 1)
    num_items = num_work_items(gemm, PLAIN_ROWS)
    item = gl.program_id(0)
    before = gemm.tiles  # the counter of the tile before
    while item < num_items:
        tile = tile_at(gemm, item)
        counter = l1_done_counter(gemm, item)
        post_tile(gemm, num_done, tile)
        mbarrier.arrive(gemm.taken.index(num_done & 1), count=1)
        if not gemm.GATED:
            wait_until_reached(gemm, counter, gemm.l1_n_tiles, gemm.num_tiles + TIMEOUT_WORD)
        elif gemm.FOLLOWS:
            wait_for_tile(gemm, tile, gemm.decoded.error)
        both = tile.row_begin + PLAIN_HALF < tile.row_end
        for k in range(gemm.steps):
            if gemm.GATED:  # noqa: SIM102  known at compile time
                if (k == publish) & (num_done > 0):
                    _publish_tile(gemm, num_done - 1, before)
            if k == prefetch:
                fetch_operands(gemm, num_done, tile)
                item = next_item(gemm, num_items)
            if k == gemm.steps - 1:
                publish_operands(gemm)
            stage = _load_token_block(gemm, tile.row_begin, k, both, stage)
        before = counter
        num_done += 1
    if gemm.GATED:  # noqa: SIM102  known at compile time
        if num_done > 0:
            _publish_tile(gemm, num_done - 1, before)
    zero = gl.to_tensor(0)
    end = Tile(expert=gl.to_tensor(-1), n_tile_idx=zero, row_begin=zero, row_end=zero)
    post_tile(gemm, num_done, end)
    mbarrier.arrive(gemm.taken.index(num_done & 1), count=1)
    _arrive_last(gemm, stage)
    wait_for_launch()  # a launch that comes after this one also comes after the one before


# -- products ------------------------------------------------------------------------------------


@gluon.jit
def gate_and_up(v):
    """[64, 128] of 8 gate columns, 8 up columns, ... -> [64, 64] each: a thread has both."""
    gate, up = v.reshape([64, 8, 2, 8]).permute((0, 1, 3, 2)).split()
    return gate.reshape([64, 64]), up.reshape([64, 64])


@gluon.jit
def _block_factors(gemm, tile, k, WG: gl.constexpr):
    """FP32 scales of E4M3 weights at K block k: gate's and up's, or twice the same."""
    k = gl.minimum(k, gemm.factor_cols - 1)
    rows = gemm.factor_rows
    if gemm.GATED:
        n = gl.minimum(tile.n_tile_idx, rows - 1)
        factor = gl.load(gemm.factor + (tile.expert * 2 * rows + n) * gemm.factor_cols + k)
        up_factor = gl.load(gemm.factor + ((tile.expert * 2 + 1) * rows + n) * gemm.factor_cols + k)
    else:
        n = gl.minimum(tile.n_tile_idx * 2 + WG, rows - 1)
        factor = gl.load(gemm.factor + (tile.expert * rows + n) * gemm.factor_cols + k)
        up_factor = factor
    return factor, up_factor


@gluon.jit
def _promoted(gemm, sums, up_sums, part, scale, factor, up_factor):
    """The sums plus part [64, 128] times scales [64]; gate and up apart where theirs differ."""
    if gemm.DECODED:
        sums = pin(sums + part * gl.expand_dims(scale, 1))
    elif gemm.GATED:
        gate, up = gate_and_up(part)
        sums = pin(sums + gate * gl.expand_dims(scale * factor, 1))
        up_sums = pin(up_sums + up * gl.expand_dims(scale * up_factor, 1))
    else:
        sums = pin(sums + part * gl.expand_dims(scale * factor, 1))
    return sums, up_sums


@gluon.jit
def _multiply(gemm, tile, stage, BOTH: gl.constexpr, WG: gl.constexpr):
    """Sums of 64 tokens x 128 rows, or of BOTH halves of the tile; then the next stage.

    (low, low_up, high, high_up): [64, 128], or gate and up [64, 64] where the weights are E4M3.
    """
    part = gl.zeros([64, 128], gl.float32, PLAIN_MMA)
    if gemm.GATED and not gemm.DECODED:
        low, low_up = gate_and_up(part)
        high, high_up = gate_and_up(part)
    else:
        low = gl.zeros([64, 128], gl.float32, PLAIN_MMA)
        high = gl.zeros([64, 128], gl.float32, PLAIN_MMA)
        low_up = low
        high_up = high
    SUMS: gl.constexpr = low.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    factor = 1.0
    up_factor = 1.0
    if not gemm.DECODED:
        factor, up_factor = _block_factors(gemm, tile, 0, WG)
    for k in range(gemm.steps):
        if not gemm.DECODED:
            next_factor, next_up_factor = _block_factors(gemm, tile, k + 1, WG)
        idx = stage.idx
        w = gemm.w_bufs.index(idx).reshape([PLAIN_ROWS, 128])
        w = w.slice(WG * 128, 128, 0).permute((1, 0))
        scales = gemm.xs_bufs.index(idx)
        mbarrier.wait(gemm.full.index(idx), stage.phase)
        part = warpgroup_mma(gemm.x_bufs.index(2 * idx), w, part, use_acc=False, is_async=True)
        scale_low = scales.slice(0, 64, 0).load(ROW)
        scale_high = scales.slice(64, 64, 0).load(ROW)
        part = warpgroup_mma_wait(0, deps=[part])
        low, low_up = _promoted(gemm, low, low_up, part, scale_low, factor, up_factor)
        if BOTH:
            x = gemm.x_bufs.index(2 * idx + 1)
            part = warpgroup_mma(x, w, part, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=[part])
        fence_async_shared()
        mbarrier.arrive(gemm.empty.index(idx), count=1)
        if BOTH:
            high, high_up = _promoted(gemm, high, high_up, part, scale_high, factor, up_factor)
        if not gemm.DECODED:
            factor = next_factor
            up_factor = next_up_factor
        stage = advance(stage, gemm.STAGES)
    return low, low_up, high, high_up, stage


# -- epilogue ------------------------------------------------------------------------------------


@gluon.jit
def _activated(gemm, sums, up, tile, START: gl.constexpr, WG: gl.constexpr):
    """FP32 [64 tokens, 64 outputs] of the tile's tokens from number START on; padding is zero."""
    if gemm.DECODED:
        factor = gemm.epilogue.factor.slice(WG * 128, 128, 0).load(gl.SliceLayout(0, PLAIN_MMA))
        sums, up = gate_and_up(times(sums, gl.expand_dims(factor, 0)))
    LAYOUT: gl.constexpr = sums.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    if gemm.HAS_BIAS:
        col = tile.n_tile_idx * 128 + WG * 64 + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
        at = gemm.bias + tile.expert * 2 * gemm.num_bias + col
        sums += gl.expand_dims(gl.load(at, mask=col < gemm.num_bias, other=0.0), 0)
        more = gl.load(at + gemm.num_bias, mask=col < gemm.num_bias, other=0.0)
        up += gl.expand_dims(more, 0)
    act = glu(gemm, sums, up)
    if gemm.WEIGHTED:
        act = act * gl.expand_dims(gemm.epilogue.weight.slice(START, 64, 0).load(ROW), 1)
    row = tile.row_begin + START + gl.arange(0, 64, ROW)
    return gl.where(gl.expand_dims(row < tile.row_end, 1), act, 0.0)


@gluon.jit
def _finish_gated(gemm, act, bits, tile, START: gl.constexpr, WG: gl.constexpr):
    """E4M3 codes and FP32 scales of act [64 tokens, 64 outputs]; `bits` [64]: amax of all 128."""
    LAYOUT: gl.constexpr = act.type.layout
    scale, inverse = e4m3_scale(bits)
    codes = divide(act, gl.expand_dims(scale, 1), gl.expand_dims(inverse, 1)).to(gl.float8e4nv)
    if WG == 0:
        row = tile.row_begin + START + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        gl.store(
            gemm.out_scale + tile.n_tile_idx * gemm.pool_rows + row, scale, mask=row < tile.row_end
        )
    col = tile.n_tile_idx * 128 + WG * 64
    store_transposed(gemm, codes, tile, START, col, gemm.out_width, gemm.DECODED, WG)


@gluon.jit
def _finish_linear(gemm, sums, tile, START: gl.constexpr, WG: gl.constexpr):
    """Rows of sums [64 tokens, 128 outputs] at their destinations, 64 or 32 columns at a time, to
    limit registers."""
    left, right = sums.reshape([64, 2, 64]).permute((0, 2, 1)).split()
    if is_fp8(gemm.out.dtype):
        _finish_fp8(gemm, left, right, tile, START, WG)
    elif gemm.HAS_BIAS:
        first, second = left.reshape([64, 2, 32]).permute((0, 2, 1)).split()
        _finish_columns(gemm, first, tile, 0, START, WG)
        _finish_columns(gemm, second, tile, 32, START, WG)
        first, second = right.reshape([64, 2, 32]).permute((0, 2, 1)).split()
        _finish_columns(gemm, first, tile, 64, START, WG)
        _finish_columns(gemm, second, tile, 96, START, WG)
    else:
        _finish_columns(gemm, left, tile, 0, START, WG)
        _finish_columns(gemm, right, tile, 64, START, WG)


@gluon.jit
def _finish_fp8(gemm, left, right, tile, START: gl.constexpr, WG: gl.constexpr):
    """E4M3 of sums [64 tokens, 64] of the two halves of 128 columns, which share a scale."""
    col = tile.n_tile_idx * PLAIN_ROWS + WG * 128
    left = _linear_columns(gemm, left, 0, START, WG)
    right = _linear_columns(gemm, right, 64, START, WG)
    left, right = row_codes(gemm, left, right, tile, col, START, 1)
    store_transposed(gemm, left, tile, START, col, gemm.num_outputs, False, WG)
    store_transposed(gemm, right, tile, START, col + 64, gemm.num_outputs, False, WG)


@gluon.jit
def _finish_columns(gemm, sums, tile, COL_START: gl.constexpr, START: gl.constexpr,
                    WG: gl.constexpr):  # fmt: skip
    """Sums [64 tokens, N] of the warpgroup's columns from COL_START on."""
    rows = _linear_columns(gemm, sums, COL_START, START, WG)
    col = tile.n_tile_idx * PLAIN_ROWS + WG * 128 + COL_START
    store_transposed(gemm, rows, tile, START, col, gemm.num_outputs, False, WG)


@gluon.jit
def _linear_columns(gemm, sums, COL_START: gl.constexpr, START: gl.constexpr,
                    WG: gl.constexpr):  # fmt: skip
    """Sums [64 tokens, N] with their factors and biases, as BF16."""
    LAYOUT: gl.constexpr = sums.type.layout
    COL: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    N: gl.constexpr = sums.shape[1]
    if gemm.DECODED:
        factor = gemm.epilogue.factor.slice(WG * 128 + COL_START, N, 0).load(COL)
        sums = times(sums, gl.expand_dims(factor, 0))
    if gemm.HAS_BIAS:
        extra = gl.expand_dims(gemm.epilogue.bias.slice(WG * 128 + COL_START, N, 0).load(COL), 0)
        if gemm.WEIGHTED:
            weight = gemm.epilogue.weight.slice(START, 64, 0).load(gl.SliceLayout(1, LAYOUT))
            extra = times(extra, gl.expand_dims(weight, 1))
        sums = sums + extra
    return sums.to(gl.bfloat16)


@gluon.jit
def _compute(gemm, num_done, tile, stage, WG: gl.constexpr):
    """The CTA's tile number `num_done`, from the stages to memory; -> the next stage."""
    if tile.row_begin + 64 < tile.row_end:
        low, low_up, high, high_up, stage = _multiply(gemm, tile, stage, True, WG)
    else:
        low, low_up, high, high_up, stage = _multiply(gemm, tile, stage, False, WG)
    wait_for_operands(gemm, num_done)
    if gemm.GATED:
        low = _activated(gemm, low, low_up, tile, 0, WG)
        high = _activated(gemm, high, high_up, tile, 64, WG)
        low_bits = gl.max(abs_bits(low), 1)
        high_bits = gl.max(abs_bits(high), 1)
        parity = num_done & 1
        mine = gemm.amax.index(parity * 2 + WG)
        mine.slice(0, 64, 0).store(low_bits)
        mine.slice(64, 64, 0).store(high_bits)
        mbarrier.arrive(gemm.amax_full.index(parity), count=1)
        mbarrier.wait(gemm.amax_full.index(parity), (num_done >> 1) & 1)
        LAYOUT: gl.constexpr = low_bits.type.layout
        other = gemm.amax.index(parity * 2 + 1 - WG)
        low_bits = gl.maximum(low_bits, other.slice(0, 64, 0).load(LAYOUT))
        high_bits = gl.maximum(high_bits, other.slice(64, 64, 0).load(LAYOUT))
        _finish_gated(gemm, low, low_bits, tile, 0, WG)
        _finish_gated(gemm, high, high_bits, tile, 64, WG)
        if gemm.DYNAMIC or gemm.PUBLISHES:
            fence_stores()
            gl.thread_barrier()
    else:
        _finish_linear(gemm, low, tile, 0, WG)
        _finish_linear(gemm, high, tile, 64, WG)
    release_operands(gemm, num_done)
    return stage


@gluon.jit
def math(gemm, WG: gl.constexpr):
    """One warpgroup: 128 weight rows of every tile of this CTA."""
    stage = first_stage(0)
    num_done = 0
    if gemm.DYNAMIC:
        mbarrier.wait(gemm.full.index(stage.idx), stage.phase)
        tile = read_tile(gemm, num_done)
        while tile.expert >= 0:
            stage = _compute(gemm, num_done, tile, stage, WG)
            num_done += 1
            mbarrier.wait(gemm.full.index(stage.idx), stage.phase)
            tile = read_tile(gemm, num_done)
    else:
        if not gemm.FOLLOWS:
            wait_for_launch()
        for _ in range(gl.program_id(0), end_item(gemm), gl.num_programs(0)):
            mbarrier.wait(gemm.full.index(stage.idx), stage.phase)
            tile = read_tile(gemm, num_done)
            stage = _compute(gemm, num_done, tile, stage, WG)
            num_done += 1


# -- the launch ----------------------------------------------------------------------------------


@gluon.jit
def _allocate_weights(w, w_scale, IN_STAGE: gl.constexpr, STAGES: gl.constexpr,
                      IMAGES: gl.constexpr):  # fmt: skip
    """(stages, FP4 images, their scales); without IN_STAGE decoding the stages alone."""
    if IN_STAGE:
        plain: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
        w_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, PLAIN_ROWS, 128], plain)
        image = gl.allocate_shared_memory(gl.int32, [IMAGES, 1, PLAIN_SLABS, 4, 256], w.layout)
        scale_shape: gl.constexpr = [IMAGES, 1, PLAIN_SLABS, PAIR_WORDS]
        image_scale = gl.allocate_shared_memory(gl.int32, scale_shape, w_scale.layout)
        return w_bufs, image, image_scale
    else:
        w_shape: gl.constexpr = [STAGES] + w.block_type.shape
        w_bufs = gl.allocate_shared_memory(gl.float8e4nv, w_shape, w.layout)
        return w_bufs, w_bufs, w_bufs


@gluon.jit(
    do_not_specialize=[
        "l1_n_tiles", "pool_rows", "steps", "factor_rows", "factor_cols", "bound_us",
    ]
)  # fmt: skip
def gemm_kernel(
    w, w_scale, x, x_scale, factor, bias, row_weight, row_dest, out, out_scale, tiles, num_tiles,
    l1_n_tiles, items, fp4, fp4_scale, ring, error,
    pool_rows, steps, num_outputs, out_width, factor_rows, factor_cols, clamp, num_bias,
    follows, publishes, begun, bound_us,
    DECODED: gl.constexpr, HAS_ITEMS: gl.constexpr, DYNAMIC: gl.constexpr, DEPTH: gl.constexpr,
    CHUNK: gl.constexpr, GATED: gl.constexpr, HAS_BIAS: gl.constexpr, WEIGHTED: gl.constexpr,
    ACTIVATION: gl.constexpr, STAGES: gl.constexpr, IMAGES: gl.constexpr, SPAN: gl.constexpr,
    MATH_REGS: gl.constexpr, DECODE_REGS: gl.constexpr, LOAD_REGS: gl.constexpr,
):  # fmt: skip
    """The launch: one persistent CTA per SM. Arguments as the fields of `PlainGemm`.

    DEPTH > 0: FP4 weights (fp4, fp4_scale) are decoded per wave into `ring`, which w describes.
    follows, publishes: None, or words by tile of the chain (`follow`), which waits bound_us for one
    at most; begun: None, or where CTA 0 says when it began.
    """
    if begun is not None:
        stamp_begin(begun)
    IN_STAGE: gl.constexpr = DECODED and not DEPTH
    w_bufs, image, image_scale = _allocate_weights(w, w_scale, IN_STAGE, STAGES, IMAGES)
    x_bufs = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, PLAIN_HALF, 128], x.layout)
    xs_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, PLAIN_TOKENS], x_scale.layout)
    amax = gl.allocate_shared_memory(gl.int32, [4, PLAIN_TOKENS], FLAT_SHARED)
    COLS: gl.constexpr = 32 if GATED else 64  # as BF16
    rows: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    transpose_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, COLS], rows)
    full = barriers(STAGES, 2)
    empty = barriers(STAGES, 2)
    image_full = full
    image_empty = empty
    amax_full = full
    if DEPTH:
        words: gl.constexpr = [IMAGES, 1, 4 * CHUNK, 256]
        decoded = DecodePerWave(
            words=fp4, scale=fp4_scale, ring=ring, error=error,
            word_bufs=gl.allocate_shared_memory(gl.int32, words, fp4.layout),
            scale_bufs=gl.allocate_shared_memory(
                gl.int32, [IMAGES, 1, CHUNK * PAIR_WORDS], fp4_scale.layout
            ),
            jobs=gl.allocate_shared_memory(gl.int32, [IMAGES * JOB_WORDS, 1], FLAT_SHARED),
            ready=barriers(IMAGES, 2), stored=barriers(IMAGES, 1), free=barriers(IMAGES, 2),
            DEPTH=DEPTH, CHUNK=CHUNK, JOBS=IMAGES,
        )  # fmt: skip
    else:
        decoded = DecodePerWave(
            words=w, scale=w, ring=ring, error=error, word_bufs=w_bufs, scale_bufs=w_bufs,
            jobs=w_bufs, ready=full, stored=full, free=full, DEPTH=DEPTH, CHUNK=CHUNK, JOBS=IMAGES,
        )  # fmt: skip
    if IN_STAGE:
        image_full = barriers(IMAGES, 1)
        image_empty = barriers(IMAGES, 1)
    if GATED:
        amax_full = barriers(2, 2)
    taken = full
    if DYNAMIC:
        taken = barriers(2, 1)
    FACTOR: gl.constexpr = "row" if DECODED else "none"
    # L1's biases, gate's and up's apart, would take a register more than there is.
    epilogue = allocate_operands(row_dest, PLAIN_ROWS, PLAIN_TOKENS, FACTOR, HAS_BIAS and not GATED)
    FOLLOWS: gl.constexpr = follows is not None
    PUBLISHES: gl.constexpr = publishes is not None
    # Where L2 begins, and where tiles are followed, only weights and items are read before roles
    # wait: they are older than the launch before.
    if (GATED or DEPTH) and not FOLLOWS:
        wait_for_launch()
    allow_next_launch()
    gemm = PlainGemm(
        w=w, w_scale=w_scale, x=x, x_scale=x_scale, w_bufs=w_bufs, image=image,
        image_scale=image_scale, x_bufs=x_bufs, xs_bufs=xs_bufs, amax=amax,
        transpose_smem=transpose_smem, full=full, empty=empty, image_full=image_full,
        image_empty=image_empty, amax_full=amax_full, taken=taken, epilogue=epilogue,
        factor=factor, bias=bias, row_weight=row_weight, row_dest=row_dest, out=out,
        out_scale=out_scale, tiles=tiles, num_tiles=num_tiles, l1_n_tiles=l1_n_tiles, items=items,
        follows=follows if FOLLOWS else tiles, publishes=publishes if PUBLISHES else tiles,
        bound_us=bound_us if FOLLOWS else steps, FOLLOWS=FOLLOWS, PUBLISHES=PUBLISHES,
        decoded=decoded, pool_rows=pool_rows, steps=steps, num_outputs=num_outputs,
        num_bias=num_bias, out_width=out_width, factor_rows=factor_rows, factor_cols=factor_cols,
        clamp=clamp, DECODED=DECODED, HAS_ITEMS=HAS_ITEMS, DYNAMIC=DYNAMIC, GATED=GATED,
        HAS_BIAS=HAS_BIAS, WEIGHTED=WEIGHTED, ACTIVATION=ACTIVATION, STAGES=STAGES,
        IMAGES=IMAGES, SPAN=SPAN,
    )  # fmt: skip
    if DEPTH:
        gl.warp_specialize(
            [(math, (gemm, 0)), (math, (gemm, 1)), (decode_jobs, (gemm,)),
             (load_decoded, (gemm,)), (load_tokens, (gemm,)), (load_jobs, (gemm,)),
             (publish_jobs, (gemm,))],
            [4, 4, 1, 1, 1, 1], [MATH_REGS, DECODE_REGS] + [LOAD_REGS] * 4,
        )  # fmt: skip
    elif DECODED:
        gl.warp_specialize(
            [(math, (gemm, 0)), (math, (gemm, 1)), (decode, (gemm,)), (load_images, (gemm,)),
             (load_tokens, (gemm,))],
            [4, 4, 1, 1], [MATH_REGS, DECODE_REGS, LOAD_REGS, LOAD_REGS],
        )  # fmt: skip
    elif DYNAMIC:
        gl.warp_specialize(
            [(math, (gemm, 0)), (math, (gemm, 1)), (load_weights, (gemm,)),
             (load_dynamic_tokens, (gemm,))],
            [4, 1, 1], [MATH_REGS, LOAD_REGS, LOAD_REGS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(math, (gemm, 0)), (math, (gemm, 1)), (load_weights, (gemm,)), (load_tokens, (gemm,))],
            [4, 1, 1], [MATH_REGS, LOAD_REGS, LOAD_REGS],
        )  # fmt: skip
