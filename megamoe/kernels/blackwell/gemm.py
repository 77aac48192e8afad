"""Grouped GEMM for sm_100a: weights are the MMA's M, a tile of tokens its N, sums in tensor memory.

out[token, row] = sum over k of w[expert, row, k] * x[token, k]. One persistent launch.

Dimensions

  here        GEMM word  size
  weight row  M          256 per tile: HALVES = 2 of 128, the M of one MMA each; a narrow tile of
                         a GEMM that is not gated has one
  half        -          L1 (GATED): 128 gate rows, and the 128 up rows of the same outputs, so that
                         a thread holds both of an output and 32 lanes the 32 outputs of an E8M0
                         scale; L2: two neighbouring blocks of 128 outputs
  token       N          TOKENS per tile: 8 to 128
  stage       BLOCK_K    of K, in one slot of the ring; `steps` of them
  accum       -          sums of a tile in tensor memory, one of SUMS; PROMOTED: of one stage
  n tile      m block    the weight rows of a tile: 128 outputs of L1, HALVES * 128 of L2

Weights lie as checkpoints have them, padded to blocks of 128 rows; only scales are placed
(`layout.tiles.placed_scales`). A tile's tokens begin at a multiple of TOKENS in the pool.

Tokens and results of a layer and of a grouped GEMM alone (`grouped.py`)

  SOURCE    a tile's rows of x                    STORE   its results
  "pool"    as in the pool                        "pool"  L1: as in the pool, scales placed
  "rows"    from row_source[its first] on         "rows"  at row_dest, scales as `formats` has them
  "gather"  each at row_source, by TMA's gather   "sum"   added to FP32 rows at row_dest, weighted

Tiles are round robin, or DYNAMIC: load_weights takes each CTA's next from a counter and posts
it in shared memory for the other roles.

In a chain (FOLLOWS) tiles wait for their tokens, not for the launch before (`tile_scheduler`): L1
for rows that are pulled, L2 for L1's tiles, which it counts (PUBLISHES). L2's rows go to other
ranks (IS_FAR).

Roles of a CTA

  store         NUM_WARPS warps: sums from tensor memory, CHUNK tokens at a time; epilogue.
                PROMOTED: adds the products of all stages, times FP32 scales, in registers
  issue_mma     one warp: scales to tensor memory, then the products; waits for none of them
  load_weights  one warp: both halves and their scales; waits for an empty stage alone
  load_tokens   one warp: rows of the pool and their scales, in a chain once they are there
  decode        DECODED only, 4 warps: FP4 of a stage to BF16 in tensor memory

Barriers

  mbarrier       n        arrivals           arrived by                      awaited by
  full           STAGES   2                  both loaders, and their TMA     its reader
  empty          STAGES   1, + store or      issue_mma's commit; store       both loaders
                          decode             (PROMOTED), decode: read it
  summed         SUMS     1                  issue_mma's commit              store
  taken          SUMS     1                  store: sums are in registers    issue_mma
  decoded        DECODES  1                  decode: weights are there       issue_mma
  decoded_empty  DECODES  1                  issue_mma's commit              decode
  posted_full    POSTS    1                  load_weights: a tile is taken   the other roles
  posted_empty   POSTS    the other roles    each of them                    load_weights

PTX orders a thread's tcgen05.cp before its later MMAs, and MMAs of the same sums; it does not order
a copy after an earlier MMA. So every stage has its own columns for scales.

PAIR (Triton 3.8 and newer): two CTAs of a cluster share every product. A tile is 512 weight rows,
of which each CTA has the 256 that are a tile otherwise, and their sums; the tokens of a product are
read from both, so each loads half of them, and the first loads their scales for both. Both run all
roles; the second's issue_mma does nothing. Of `full` and `taken` there is one mbarrier for both, in
the first CTA, which alone waits for it: arrivals and bytes of both count there, so that it has
twice the arrivals of the table. A commit arrives at `empty` and `summed` of both.

Tensor memory: SUMS * HALVES * TOKENS columns of sums, STAGES * (HALVES + 1) * BLOCK_K / VEC of
scales, and DECODES * HALVES * BLOCK_K / 2 of decoded weights, of 512.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    fence_async_shared,
    mbarrier,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma,
    tcgen05_mma_scaled,
    tensor_memory_descriptor,
)

from megamoe.kernels.blackwell.decode import decode_block
from megamoe.kernels.blackwell.epilogue import finish_gated, finish_linear
from megamoe.kernels.blackwell.fences import fence_after_wait, fence_before_arrival
from megamoe.kernels.blackwell.memory import DECODES, allocate_stages, allocate_tmem
from megamoe.kernels.blackwell.pair import ring_barriers, scales_layout
from megamoe.kernels.gluon.compat import blackwell_tma as tma
from megamoe.kernels.gluon.compat import get_tmem_reg_layout, reinterpret
from megamoe.kernels.gluon.mega.sync import publish_count
from megamoe.kernels.gluon.pipeline import (
    FLAT_SHARED,
    Stage,
    advance,
    allow_next_launch,
    barriers,
    first_stage,
    record,
    stamp_begin,
    wait_for_launch,
)
from megamoe.kernels.gluon.tile_scheduler import (
    next_item,
    num_work_items,
    tile_in_list,
    tile_word,
    wait_for_tile,
)

BLOCK_ROWS = gl.constexpr(128)  # the MMA's M
POSTS = gl.constexpr(2)  # tiles taken from the counter that wait in shared memory
DECODE_REGS = gl.constexpr(216)


@record
class TmemGemm:
    """One launch: operands in memory, the stage ring, tensor memory, and the epilogue's tensors."""

    w: tma.tensor_descriptor
    w_scale: tma.tensor_descriptor
    x: tma.tensor_descriptor
    x_scale: tma.tensor_descriptor
    w_bufs: gl.shared_memory_descriptor  # [STAGES * HALVES, 128, BLOCK_K as bytes hold it]
    ws_bufs: gl.shared_memory_descriptor  # [STAGES * HALVES, 1, 1, words, 2, 256]
    x_bufs: gl.shared_memory_descriptor  # [STAGES, TOKENS, BLOCK_K as bytes hold it]
    x_parts: gl.shared_memory_descriptor  # the same for gathers: [.., GATHERED, ..]
    xs_bufs: gl.shared_memory_descriptor  # [STAGES, ..]: placed; PROMOTED: FP32 [STAGES, tokens]
    sums: tensor_memory_descriptor  # FP32 [SUMS * HALVES, 128, TOKENS]
    scales: tensor_memory_descriptor  # [STAGES * 3, 128, scales of a row]: halves, then tokens
    ones: tensor_memory_descriptor  # [128, 4] scales of tokens that have none of the MMA's
    decoded: tensor_memory_descriptor  # BF16 [DECODES * HALVES, 128, BLOCK_K]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    summed: gl.shared_memory_descriptor
    taken: gl.shared_memory_descriptor
    decoded_full: gl.shared_memory_descriptor
    decoded_empty: gl.shared_memory_descriptor
    posted: gl.shared_memory_descriptor  # DYNAMIC: int32 [POSTS, 1]
    posted_full: gl.shared_memory_descriptor
    posted_empty: gl.shared_memory_descriptor
    factor: gl.tensor  # FP32: per 128x128 (w8a8), per matrix (nvfp4)
    bias: gl.tensor
    acts_factor: gl.tensor  # nvfp4: global scale of the activations, per expert
    row_factor: gl.tensor  # nvfp4: global scale of each token
    row_weight: gl.tensor
    row_dest: gl.tensor
    row_source: gl.tensor  # int32: rows of x, unless it is the pool
    out: gl.tensor
    out_scale: gl.tensor
    tiles: gl.tensor  # int32 [tiles, TILE_WORDS]
    num_tiles: gl.tensor
    pool_rows: gl.tensor  # of both pools: the stride of FP32 scales
    steps: gl.tensor
    num_outputs: gl.tensor  # L1: columns of the pool that is written; L2: hidden
    num_bias: gl.tensor  # outputs of a matrix: intermediate or hidden
    num_blocks: gl.tensor  # blocks of 128 rows of a matrix
    factor_cols: gl.tensor  # 128-blocks of K of `factor`
    clamp: gl.tensor
    follows: gl.tensor  # FOLLOWS: words by tile, for which its tokens wait
    publishes: gl.tensor  # PUBLISHES: L1's, for L2
    l1_n_tiles: gl.tensor  # L2 that follows: n tiles of L1
    error: gl.tensor  # FOLLOWS: -1 once a wait was given up
    bound_us: gl.tensor  # FOLLOWS: of a wait for a tile
    FORMAT: gl.constexpr
    ACTS: gl.constexpr
    GATED: gl.constexpr
    HAS_BIAS: gl.constexpr
    WEIGHTED: gl.constexpr
    ACTIVATION: gl.constexpr
    SOURCE: gl.constexpr
    STORE: gl.constexpr
    DYNAMIC: gl.constexpr
    HALVES: gl.constexpr
    TOKENS: gl.constexpr
    BLOCK_K: gl.constexpr
    STAGES: gl.constexpr
    SUMS: gl.constexpr
    CHUNK: gl.constexpr
    SPAN: gl.constexpr
    NUM_WARPS: gl.constexpr
    ACCUM_STEP: gl.constexpr  # epilogues that have every ACCUM_STEP-th of the sums: 1; fused, 2
    IS_FAR: gl.constexpr  # L2's rows may be other ranks': `row_dest` has offsets
    FOLLOWS: gl.constexpr  # tiles wait for their tokens, not for the launch before
    PUBLISHES: gl.constexpr
    PAIR: gl.constexpr
    CTAS: gl.constexpr  # that share a product: 2 for a pair


# -- tiles ---------------------------------------------------------------------------------------


@gluon.jit
def _tile_at(gemm, item):
    """The tile of a work item."""
    ROWS: gl.constexpr = gemm.HALVES * BLOCK_ROWS * gemm.CTAS
    return tile_in_list(gemm, item, ROWS)


@gluon.jit
def _end_item(gemm):
    """Work items of the launch."""
    ROWS: gl.constexpr = gemm.HALVES * BLOCK_ROWS * gemm.CTAS
    return num_work_items(gemm, ROWS)


@gluon.jit
def take_item(gemm, item, post, end):
    """load_weights: (the CTA's next item, its next place in the ring of posted ones)."""
    if gemm.DYNAMIC:
        item = next_item(gemm, end)
        mbarrier.wait(gemm.posted_empty.index(post.idx), post.phase)
        lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        gemm.posted.index(post.idx).store(gl.zeros([1], gl.int32, lanes) + item)
        mbarrier.arrive(gemm.posted_full.index(post.idx), count=1)
        post = advance(post, POSTS)
    else:
        item += gl.num_programs(0)
    return item, post


@gluon.jit
def next_posted(gemm, item, post):
    """The other roles: the item that load_weights has taken."""
    if gemm.DYNAMIC:
        lanes: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        mbarrier.wait(gemm.posted_full.index(post.idx), post.phase)
        item = gl.max(gemm.posted.index(post.idx).load(lanes), 0)
        mbarrier.arrive(gemm.posted_empty.index(post.idx), count=1)
        post = advance(post, POSTS)
    else:
        item += gl.num_programs(0)
    return item, post


@gluon.jit
def weight_block(gemm, tile, HALF: gl.constexpr):
    """Number of a half's block of 128 weight rows, of a pair the first CTA's."""
    if gemm.GATED:
        block = (tile.expert * 2 + HALF) * gemm.num_blocks + tile.n_tile_idx * gemm.CTAS
    else:
        block = tile.expert * gemm.num_blocks + (tile.n_tile_idx * gemm.HALVES + HALF) * gemm.CTAS
    return block


# -- loads ---------------------------------------------------------------------------------------


@gluon.jit
def load_weight_step(gemm, tile, k, stage):
    """Step k of both halves of a tile and their scales, once a stage is empty; -> the next one."""
    HALVES: gl.constexpr = gemm.HALVES
    HAS_SCALES: gl.constexpr = gemm.FORMAT.SCALED or gemm.FORMAT.DECODED
    SCALE_BYTES: gl.constexpr = gemm.w_scale.block_type.nbytes if HAS_SCALES else 0
    BYTES: gl.constexpr = HALVES * (gemm.w.block_type.nbytes + SCALE_BYTES) // gemm.CTAS
    WIDTH: gl.constexpr = gemm.w.block_type.shape[1]
    full = gemm.full.index(stage.idx)
    mbarrier.wait(gemm.empty.index(stage.idx), stage.phase)
    mbarrier.expect(full, BYTES)
    for half in gl.static_range(HALVES):
        block = weight_block(gemm, tile, half)
        to = stage.idx * HALVES + half
        at = [block * BLOCK_ROWS, k * WIDTH]
        tma.async_copy_global_to_shared(gemm.w, at, full, gemm.w_bufs.index(to))
        if HAS_SCALES:
            at = [0, block, k * (gemm.BLOCK_K // (4 * gemm.FORMAT.VEC)), 0, 0]
            tma.async_copy_global_to_shared(gemm.w_scale, at, full, gemm.ws_bufs.index(to))
    return advance(stage, gemm.STAGES)


@gluon.jit
def load_weights(gemm):
    """The weights of this CTA's tiles, which it takes from the counter where DYNAMIC."""
    stage = first_stage(1)
    post = first_stage(1)
    item = gl.program_id(0)
    end = _end_item(gemm)
    while item < end:
        tile = _tile_at(gemm, item)
        for k in range(gemm.steps):
            stage = load_weight_step(gemm, tile, k, stage)
        item, post = take_item(gemm, item, post, end)


@gluon.jit
def _gather_tokens(gemm, row, col, full, stage):
    """Columns of a tile's rows, each from where it stands in x; few at a time: few registers."""
    NUM: gl.constexpr = gemm.x_parts.shape[1]
    PARTS: gl.constexpr = gemm.TOKENS // NUM
    LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 4], [32, 1], [1, 1], [1, 0]))
    for part in gl.static_range(PARTS):
        source = gl.load(gemm.row_source + row + part * NUM + gl.arange(0, NUM, LAYOUT))
        tma.async_gather(gemm.x, source, col, full, gemm.x_parts.index(stage.idx * PARTS + part))


@gluon.jit
def load_token_tile(gemm, row, stage):
    """All steps of the tokens from `row` of the pool on, and of their scales; -> the next stage."""
    HAS_SCALES: gl.constexpr = gemm.FORMAT.X_SCALED or gemm.FORMAT.PROMOTED
    SCALE_BYTES: gl.constexpr = gemm.x_scale.block_type.nbytes if HAS_SCALES else 0
    TIMES: gl.constexpr = gemm.TOKENS if gemm.SOURCE == "gather" else 1
    BYTES: gl.constexpr = TIMES * gemm.x.block_type.nbytes // gemm.CTAS + SCALE_BYTES
    WIDTH: gl.constexpr = gemm.x.block_type.shape[1]
    source = row
    if gemm.SOURCE == "rows":
        source = gl.load(gemm.row_source + row)
    for k in range(gemm.steps):
        full = gemm.full.index(stage.idx)
        mbarrier.wait(gemm.empty.index(stage.idx), stage.phase)
        mbarrier.expect(full, BYTES)
        if gemm.SOURCE == "gather":
            _gather_tokens(gemm, row, k * WIDTH, full, stage)
        else:
            to = gemm.x_bufs.index(stage.idx)
            tma.async_copy_global_to_shared(gemm.x, [source, k * WIDTH], full, to)
        to = gemm.xs_bufs.index(stage.idx)
        if gemm.FORMAT.X_SCALED:
            words = k * (gemm.BLOCK_K // (4 * gemm.FORMAT.VEC))
            at = [0, row // gemm.TOKENS, words, 0, 0]
            if gemm.PAIR:
                tma.async_copy_global_to_shared(gemm.x_scale, at, full, to, multicast=True)
            else:
                tma.async_copy_global_to_shared(gemm.x_scale, at, full, to)
        elif gemm.FORMAT.PROMOTED:
            at = [k * gemm.pool_rows + row]
            tma.async_copy_global_to_shared(gemm.x_scale, at, full, to)
        stage = advance(stage, gemm.STAGES)
    return stage


@gluon.jit
def load_tokens(gemm):
    """The tokens of this CTA's tiles."""
    stage = first_stage(1)
    post = first_stage(0)
    if not gemm.FOLLOWS:
        wait_for_launch()
    item = gl.program_id(0)
    end = _end_item(gemm)
    while item < end:
        tile = _tile_at(gemm, item)
        if gemm.FOLLOWS:
            wait_for_tile(gemm, tile, gemm.error)
        stage = load_token_tile(gemm, tile.row_begin, stage)
        item, post = next_posted(gemm, item, post)
    if gemm.FOLLOWS:
        wait_for_launch()  # a launch that comes after this one also comes after the one before


# -- products ------------------------------------------------------------------------------------


@gluon.jit
def scale_block(buf, NUM: gl.constexpr):
    """Placed scales of 128 rows as [128, NUM]: tcgen05_copy makes UTCCP 32x128b.warpx4 of it."""
    BLOCKS: gl.constexpr = buf.shape[1]  # of 128 rows: two of a pair's weights
    parts = buf.reshape([BLOCKS, NUM // 4, 32, 4, 4]).permute((0, 3, 2, 1, 4))
    return parts.reshape([BLOCKS * 128, NUM])


@gluon.jit
def _scale_columns(gemm, stage, WHICH: gl.constexpr):
    """A stage's place in tensor memory for scales: WHICH half of the weights, or 2, the tokens'.

    Scales cannot be allocated by stages (Gluon 3.6): FP32 of the same columns is, and
    is renamed.
    """
    NUM: gl.constexpr = gemm.BLOCK_K // gemm.FORMAT.VEC
    columns = gemm.scales.index(stage.idx * (gemm.HALVES + 1) + WHICH)
    IS_TOKENS: gl.constexpr = WHICH == gemm.HALVES
    ROWS_OF: gl.constexpr = 128 if IS_TOKENS else 128 * gemm.CTAS
    LAYOUT: gl.constexpr = scales_layout(gemm.PAIR, IS_TOKENS)
    return reinterpret(columns, gemm.w_scale.dtype, [ROWS_OF, NUM], LAYOUT)


@gluon.jit
def _multiply_scaled(gemm, stage, accum, use_acc):
    """Both halves of a stage, with block scales; its copies come before its products."""
    HALVES: gl.constexpr = gemm.HALVES
    NUM: gl.constexpr = gemm.BLOCK_K // gemm.FORMAT.VEC
    x = gemm.x_bufs.index(stage.idx).permute((1, 0))
    for half in gl.static_range(HALVES):
        buf = gemm.ws_bufs.index(stage.idx * HALVES + half)
        tcgen05_copy(scale_block(buf, NUM), _scale_columns(gemm, stage, half))
    if gemm.FORMAT.X_SCALED:
        xs = _scale_columns(gemm, stage, HALVES)
        tcgen05_copy(scale_block(gemm.xs_bufs.index(stage.idx), NUM), xs)
    else:
        xs = gemm.ones
    for half in gl.static_range(HALVES):
        tcgen05_mma_scaled(
            gemm.w_bufs.index(stage.idx * HALVES + half), x,
            gemm.sums.index(accum.idx * HALVES + half), _scale_columns(gemm, stage, half), xs,
            gemm.FORMAT.W, gemm.FORMAT.X, use_acc=use_acc,
        )  # fmt: skip


@gluon.jit
def _multiply_plain(gemm, stage, ready, accum, use_acc):
    """Both halves of a stage: E4M3 or BF16; FP4 that was decoded to tensor memory."""
    HALVES: gl.constexpr = gemm.HALVES
    x = gemm.x_bufs.index(stage.idx).permute((1, 0))
    for half in gl.static_range(HALVES):
        into = gemm.sums.index(accum.idx * HALVES + half)
        if gemm.FORMAT.DECODED:
            tcgen05_mma(gemm.decoded.index(ready.idx * HALVES + half), x, into, use_acc=use_acc)
        else:
            tcgen05_mma(gemm.w_bufs.index(stage.idx * HALVES + half), x, into, use_acc=use_acc)


@gluon.jit
def _advance_by(stage, NUM: gl.constexpr, NUM_STAGES: gl.constexpr):
    """The slot NUM further, of a ring whose slots are shared out to NUM users in turn."""
    idx = stage.idx + NUM
    wraps = idx >= NUM_STAGES
    idx = gl.where(wraps, idx - NUM_STAGES, idx)
    return Stage(idx=idx, phase=gl.where(wraps, stage.phase ^ 1, stage.phase))


@gluon.jit
def multiply_tile(gemm, steps, stage, accum, ready):
    """Products of a tile's steps, into sums that were read; -> next stage, accumulator, ready."""
    use_acc = False
    if not gemm.FORMAT.PROMOTED:
        mbarrier.wait(gemm.taken.index(accum.idx), accum.phase)
    for _k in range(steps):
        if gemm.FORMAT.PROMOTED:
            mbarrier.wait(gemm.taken.index(accum.idx), accum.phase)
        mbarrier.wait(gemm.full.index(stage.idx), stage.phase)
        if gemm.FORMAT.DECODED:
            mbarrier.wait(gemm.decoded_full.index(ready.idx), ready.phase)
        fence_after_wait()
        if gemm.FORMAT.SCALED:
            _multiply_scaled(gemm, stage, accum, use_acc)
        else:
            _multiply_plain(gemm, stage, ready, accum, use_acc)
        tcgen05_commit(gemm.empty.index(stage.idx))
        if gemm.FORMAT.DECODED:
            tcgen05_commit(gemm.decoded_empty.index(ready.idx))
            ready = advance(ready, DECODES)
        if gemm.FORMAT.PROMOTED:
            tcgen05_commit(gemm.summed.index(accum.idx))
            accum = _advance_by(accum, gemm.ACCUM_STEP, gemm.SUMS)
        else:
            use_acc = True
        stage = advance(stage, gemm.STAGES)
    if not gemm.FORMAT.PROMOTED:
        tcgen05_commit(gemm.summed.index(accum.idx))
        accum = _advance_by(accum, gemm.ACCUM_STEP, gemm.SUMS)
    return stage, accum, ready


@gluon.jit
def issue_mma(gemm):
    """Products of this CTA's tiles, into sums that the epilogue has read."""
    stage = first_stage(0)
    accum = first_stage(1)
    ready = first_stage(0)  # decoded weights
    post = first_stage(0)
    item = gl.program_id(0)
    end = _end_item(gemm)
    while item < end:
        stage, accum, ready = multiply_tile(gemm, gemm.steps, stage, accum, ready)
        item, post = next_posted(gemm, item, post)


@gluon.jit
def decode_tile(gemm, steps, stage, decoded_stage):
    """FP4 weights of a tile's steps as BF16, in tensor memory; -> the next stages of both rings."""
    HALVES: gl.constexpr = gemm.HALVES
    NUM: gl.constexpr = gemm.BLOCK_K // gemm.FORMAT.VEC
    for _k in range(steps):
        mbarrier.wait(gemm.full.index(stage.idx), stage.phase)
        mbarrier.wait(gemm.decoded_empty.index(decoded_stage.idx), decoded_stage.phase)
        fence_after_wait()
        for half in gl.static_range(HALVES):
            at = stage.idx * HALVES + half
            scales = scale_block(gemm.ws_bufs.index(at), NUM)
            decode_block(
                gemm.w_bufs.index(at), scales, gemm.decoded.index(decoded_stage.idx * HALVES + half)
            )
        fence_async_shared()
        fence_before_arrival()
        mbarrier.arrive(gemm.empty.index(stage.idx), count=1)
        mbarrier.arrive(gemm.decoded_full.index(decoded_stage.idx), count=1)
        stage = advance(stage, gemm.STAGES)
        decoded_stage = advance(decoded_stage, DECODES)
    return stage, decoded_stage


@gluon.jit
def decode(gemm):
    """DECODED: the weights of this CTA's tiles."""
    stage = first_stage(0)
    decoded_stage = first_stage(1)
    post = first_stage(0)
    item = gl.program_id(0)
    end = _end_item(gemm)
    while item < end:
        stage, decoded_stage = decode_tile(gemm, gemm.steps, stage, decoded_stage)
        item, post = next_posted(gemm, item, post)


# -- sums ----------------------------------------------------------------------------------------


@gluon.jit
def _read_sums(gemm, accum, START: gl.constexpr, N: gl.constexpr):
    """N tokens of a sum from number START on, of both halves, or twice of the one."""
    low = gemm.sums.index(accum.idx * gemm.HALVES).slice(START, N)
    high = gemm.sums.index(accum.idx * gemm.HALVES + gemm.HALVES - 1).slice(START, N)
    LAYOUT: gl.constexpr = get_tmem_reg_layout(
        gl.float32, (128 * gemm.CTAS, N), low.type.layout, gemm.NUM_WARPS
    )
    first = low.load(LAYOUT)
    second = high.load(LAYOUT) if gemm.HALVES == 2 else first
    return first, second


@gluon.jit
def _block_factor(gemm, tile, k, HALF: gl.constexpr):
    """The FP32 scale of a half of E4M3 weights at K block k; 1 of others."""
    factor = 1.0
    if gemm.FORMAT.FACTOR == "block":
        block = weight_block(gemm, tile, HALF)
        if not gemm.GATED:  # the second half of the last tile may not be there
            last = (tile.expert + 1) * gemm.num_blocks - 1
            block = gl.minimum(block, last)
        factor = gl.load(gemm.factor + block * gemm.factor_cols + k)
    return factor


@gluon.jit
def _add_stages(gemm, tile, stage, accum):
    """PROMOTED: (sums of both halves, next stage, next accumulator) of a tile, scales applied."""
    LAYOUT: gl.constexpr = get_tmem_reg_layout(
        gl.float32, (128, gemm.TOKENS), gemm.sums.type.layout, gemm.NUM_WARPS
    )
    low = gl.zeros([128, gemm.TOKENS], gl.float32, LAYOUT)
    high = gl.zeros([128, gemm.TOKENS], gl.float32, LAYOUT)
    for k in range(gemm.steps):
        low_factor = _block_factor(gemm, tile, k, 0)
        high_factor = _block_factor(gemm, tile, k, gemm.HALVES - 1)
        # Sums first: fused, the other epilogue's stages come between, and phases of `full` would
        # be taken for each other. Now the stage is full, and this role alone keeps it so.
        mbarrier.wait(gemm.summed.index(accum.idx), accum.phase)
        mbarrier.wait(gemm.full.index(stage.idx), stage.phase)
        scales = gemm.xs_bufs.index(stage.idx).slice(0, gemm.TOKENS, 0)
        scale = scales.load(gl.SliceLayout(0, LAYOUT))
        # Reads of the stage come before the copies that follow.
        fence_async_shared()
        mbarrier.arrive(gemm.empty.index(stage.idx), count=1)
        fence_after_wait()
        part, other = _read_sums(gemm, accum, 0, gemm.TOKENS)
        fence_before_arrival()
        mbarrier.arrive(gemm.taken.index(accum.idx), count=1)
        low += part * gl.expand_dims(scale * low_factor, 0)
        if gemm.HALVES == 2:
            high += other * gl.expand_dims(scale * high_factor, 0)
        stage = advance(stage, gemm.STAGES)
        accum = _advance_by(accum, gemm.ACCUM_STEP, gemm.SUMS)
    return low, high, stage, accum


@gluon.jit
def _finish(gemm, low, high, tile, START: gl.constexpr):
    """The epilogue of the tile's tokens from number START on."""
    if gemm.GATED:
        finish_gated(gemm, low, high, tile, START)
    else:
        finish_linear(gemm, low, tile, 0, START)
        if gemm.HALVES == 2:
            finish_linear(gemm, high, tile, 1, START)


@gluon.jit
def finish_tile(gemm, tile, stage, accum):
    """A tile's sums and their epilogue, to memory; -> the next stage and accumulator."""
    if gemm.FORMAT.PROMOTED:
        low, high, stage, accum = _add_stages(gemm, tile, stage, accum)
        _finish(gemm, low, high, tile, 0)
    else:
        mbarrier.wait(gemm.summed.index(accum.idx), accum.phase)
        fence_after_wait()
        for start in gl.static_range(0, gemm.TOKENS, gemm.CHUNK):
            low, high = _read_sums(gemm, accum, start, gemm.CHUNK)
            if start + gemm.CHUNK == gemm.TOKENS:
                fence_before_arrival()
                mbarrier.arrive(gemm.taken.index(accum.idx), count=1)
            _finish(gemm, low, high, tile, start)
        accum = _advance_by(accum, gemm.ACCUM_STEP, gemm.SUMS)
    return stage, accum


@gluon.jit
def store(gemm):
    """The epilogue of this CTA's tiles."""
    stage = first_stage(0)
    accum = first_stage(0)
    post = first_stage(0)
    if not gemm.FOLLOWS:
        wait_for_launch()
    item = gl.program_id(0)
    end = _end_item(gemm)
    while item < end:
        tile = _tile_at(gemm, item)
        if gemm.FOLLOWS and gemm.GATED and gemm.FORMAT.FACTOR == "expert":
            wait_for_tile(gemm, tile, gemm.error)  # factors of tokens come with them
        stage, accum = finish_tile(gemm, tile, stage, accum)
        if gemm.PUBLISHES:
            publish_count(tile_word(gemm.publishes, tile.row_begin), 1)
        item, post = next_posted(gemm, item, post)


# -- the launch ----------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["pool_rows", "steps", "num_blocks", "factor_cols", "bound_us"])
def gemm_tmem_kernel(
    w, w_scale, x, x_scale, factor, bias, acts_factor, row_factor, row_weight, row_dest,
    row_source, out, out_scale, tiles, num_tiles, pool_rows, steps, num_outputs, num_bias,
    num_blocks, factor_cols, clamp, follows, publishes, l1_n_tiles, error, begun, bound_us,
    FORMAT: gl.constexpr, ACTS: gl.constexpr, GATED: gl.constexpr, HAS_BIAS: gl.constexpr,
    WEIGHTED: gl.constexpr, ACTIVATION: gl.constexpr, SOURCE: gl.constexpr, STORE: gl.constexpr,
    DYNAMIC: gl.constexpr, HALVES: gl.constexpr, TOKENS: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, SUMS: gl.constexpr, CHUNK: gl.constexpr, SPAN: gl.constexpr,
    LOAD_REGS: gl.constexpr, NUM_WARPS: gl.constexpr, IS_FAR: gl.constexpr = False,
    PAIR: gl.constexpr = False,
):  # fmt: skip
    """The launch: one persistent CTA per SM. Arguments as the fields of `TmemGemm`.

    follows, publishes: None, or words by tile of the chain; then with l1_n_tiles, error, bound_us.
    begun: None, or where CTA 0 says when it began.
    """
    if begun is not None:
        stamp_begin(begun)
    FOLLOWS: gl.constexpr = follows is not None
    PUBLISHES: gl.constexpr = publishes is not None
    w_bufs, ws_bufs, x_bufs, x_parts, xs_bufs = allocate_stages(
        w, w_scale, x, x_scale, FORMAT, SOURCE, HALVES, TOKENS, STAGES
    )
    sums, scales, ones, decoded = allocate_tmem(FORMAT, HALVES, TOKENS, BLOCK_K, STAGES, SUMS, PAIR)
    full = ring_barriers(STAGES, 2, PAIR, True)
    READERS: gl.constexpr = 2 if FORMAT.PROMOTED or FORMAT.DECODED else 1
    empty = ring_barriers(STAGES, READERS, PAIR)
    summed = ring_barriers(SUMS, 1, PAIR)
    taken = ring_barriers(SUMS, 1, PAIR, True)
    decoded_full = full
    decoded_empty = full
    if FORMAT.DECODED:
        decoded_full = barriers(DECODES, 1)
        decoded_empty = barriers(DECODES, 1)
    posted = full
    posted_full = full
    posted_empty = full
    if DYNAMIC:
        posted = gl.allocate_shared_memory(gl.int32, [POSTS, 1], FLAT_SHARED)
        posted_full = barriers(POSTS, 1)
        OTHERS: gl.constexpr = 4 if FORMAT.DECODED else 3
        posted_empty = barriers(POSTS, OTHERS)
    if (GATED or SOURCE != "pool") and not FOLLOWS:
        wait_for_launch()  # the tile list is written by the launch before; L2's is older
    allow_next_launch()
    gemm = TmemGemm(
        w=w, w_scale=w_scale, x=x, x_scale=x_scale, w_bufs=w_bufs, ws_bufs=ws_bufs, x_bufs=x_bufs,
        x_parts=x_parts, xs_bufs=xs_bufs, sums=sums, scales=scales, ones=ones, decoded=decoded,
        full=full, empty=empty, summed=summed, taken=taken, decoded_full=decoded_full,
        decoded_empty=decoded_empty, posted=posted, posted_full=posted_full,
        posted_empty=posted_empty, factor=factor, bias=bias, acts_factor=acts_factor,
        row_factor=row_factor, row_weight=row_weight, row_dest=row_dest,
        row_source=row_source, out=out, out_scale=out_scale, tiles=tiles, num_tiles=num_tiles,
        pool_rows=pool_rows, steps=steps, num_outputs=num_outputs, num_bias=num_bias,
        num_blocks=num_blocks, factor_cols=factor_cols, clamp=clamp, FORMAT=FORMAT, ACTS=ACTS,
        GATED=GATED, HAS_BIAS=HAS_BIAS, WEIGHTED=WEIGHTED, ACTIVATION=ACTIVATION, SOURCE=SOURCE,
        STORE=STORE, DYNAMIC=DYNAMIC, HALVES=HALVES, TOKENS=TOKENS, BLOCK_K=BLOCK_K,
        STAGES=STAGES, SUMS=SUMS, CHUNK=CHUNK, SPAN=SPAN, NUM_WARPS=NUM_WARPS,
        ACCUM_STEP=1, follows=follows if FOLLOWS else tiles,
        publishes=publishes if PUBLISHES else tiles,
        l1_n_tiles=l1_n_tiles if FOLLOWS else steps, error=error if FOLLOWS else tiles,
        bound_us=bound_us if FOLLOWS else steps, FOLLOWS=FOLLOWS, PUBLISHES=PUBLISHES,
        IS_FAR=IS_FAR, PAIR=PAIR, CTAS=2 if PAIR else 1,
    )  # fmt: skip
    if FORMAT.DECODED:
        gl.warp_specialize(
            [(store, (gemm,)), (decode, (gemm,)), (issue_mma, (gemm,)), (load_weights, (gemm,)),
             (load_tokens, (gemm,))],
            [4, 1, 1, 1], [DECODE_REGS, LOAD_REGS, LOAD_REGS, LOAD_REGS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(store, (gemm,)), (issue_mma, (gemm,)), (load_weights, (gemm,)),
             (load_tokens, (gemm,))],
            [1, 1, 1], [LOAD_REGS, LOAD_REGS, LOAD_REGS],
        )  # fmt: skip
