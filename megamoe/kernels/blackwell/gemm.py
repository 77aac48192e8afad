"""Grouped GEMM for sm_100a: weights are the MMA's M, a tile of tokens its N, sums in tensor memory.

out[token, row] = sum over k of w[expert, row, k] * x[token, k]. One persistent launch.

Dimensions

  here        GEMM word  size
  weight row  M          ROWS = 256 per tile: two halves of 128, the M of one MMA each
  half        -          L1 (GATED): 128 gate rows, and the 128 up rows of the same outputs, so that
                         a thread holds both of an output and 32 lanes the 32 outputs of an E8M0
                         scale; L2: two neighbouring blocks of 128 outputs
  token       N          TOKENS per tile: 8 to 128
  stage       BLOCK_K    of K, in one slot of the ring; `steps` of them
  turn        -          sums of a tile in tensor memory, one of SUMS; PROMOTED: of one stage
  n tile      m block    256 weight rows of an expert: 128 outputs of L1, 256 of L2

Weights lie as checkpoints have them, padded to blocks of 128 rows; only scales are placed
(`layout.tiles.placed_scales`). A tile's tokens begin at a multiple of TOKENS in the pool.

Roles of a CTA

  store         NUM_WARPS warps: sums from tensor memory, CHUNK tokens at a time; epilogue.
                PROMOTED: adds the products of all stages, times FP32 scales, in registers
  issue_mma     one warp: scales to tensor memory, then the products; waits for none of them
  load_weights  one warp: both halves and their scales; waits for an empty stage alone
  load_tokens   one warp: rows of the pool and their scales
  decode        DECODED only, 4 warps: FP4 of a stage to BF16 in tensor memory

Barriers

  mbarrier       n        arrivals           arrived by                      awaited by
  full           STAGES   2                  both loaders, and their TMA     who reads the stage
  empty          STAGES   1, + store or      issue_mma's commit; store       both loaders
                          decode             (PROMOTED), decode: read it
  summed         SUMS     1                  issue_mma's commit              store
  taken          SUMS     1                  store: sums are in registers    issue_mma
  decoded        DECODES  1                  decode: weights are there       issue_mma
  decoded_empty  DECODES  1                  issue_mma's commit              decode

PTX orders a thread's tcgen05.cp before its later MMAs, and MMAs of the same sums; it does not order
a copy after an earlier MMA. So every stage has its own columns for scales.

PAIR (Triton 3.8 and newer): two CTAs of a cluster share every product. A tile is 512 weight rows,
of which each CTA has the 256 that are a tile otherwise, and their sums; the tokens of a product are
read from both, so each loads half of them, and the first loads their scales for both. Both run all
roles; the second's issue_mma does nothing. Of `full` and `taken` there is one mbarrier for both, in
the first CTA, which alone waits for it: arrivals and bytes of both count there, so that it has
twice the arrivals of the table. A commit arrives at `empty` and `summed` of both.

Tensor memory: SUMS * 2 * TOKENS columns of sums, STAGES * 3 * BLOCK_K / VEC of scales, and
DECODES * 2 * BLOCK_K / 2 of decoded weights, of 512.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
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
from megamoe.kernels.blackwell.pair import ring_barriers, scales_layout, sums_layout
from megamoe.kernels.gluon.compat import blackwell_tma as tma
from megamoe.kernels.gluon.compat import get_tmem_reg_layout, reinterpret
from megamoe.kernels.gluon.pipeline import (
    advance,
    allow_next_launch,
    barriers,
    first_stage,
    record,
    wait_for_launch,
)
from megamoe.kernels.gluon.tile_scheduler import num_work_items, read_tile_list, tile_in_list

HALVES = gl.constexpr(2)
BLOCK_ROWS = gl.constexpr(128)  # the MMA's M
ROWS = gl.constexpr(256)
DECODES = gl.constexpr(2)  # stages whose decoded weights stand in tensor memory
DECODE_REGS = gl.constexpr(216)
ONE = gl.constexpr(127)  # E8M0


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
    factor: gl.tensor  # FP32: per 128x128 (w8a8), per matrix (nvfp4)
    bias: gl.tensor
    acts_factor: gl.tensor  # nvfp4: global scale of the activations, per expert
    row_factor: gl.tensor  # nvfp4: global scale of each token
    row_weight: gl.tensor
    row_dest: gl.tensor
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
    FORMAT: gl.constexpr
    ACTS: gl.constexpr
    GATED: gl.constexpr
    HAS_BIAS: gl.constexpr
    WEIGHTED: gl.constexpr
    ACTIVATION: gl.constexpr
    TOKENS: gl.constexpr
    BLOCK_K: gl.constexpr
    STAGES: gl.constexpr
    SUMS: gl.constexpr
    CHUNK: gl.constexpr
    SPAN: gl.constexpr
    NUM_WARPS: gl.constexpr
    PAIR: gl.constexpr
    CTAS: gl.constexpr  # that share a product: 2 for a pair


# -- tiles ---------------------------------------------------------------------------------------


@gluon.jit
def _tile_at(gemm, item):
    """The tile of a work item, round robin."""
    tile_idx, n_tile_idx = tile_in_list(gemm, item, ROWS * gemm.CTAS)
    return read_tile_list(gemm.tiles, tile_idx, n_tile_idx)


@gluon.jit
def _end_item(gemm):
    """Work items of the launch."""
    return num_work_items(gemm, ROWS * gemm.CTAS)


@gluon.jit
def weight_block(gemm, tile, HALF: gl.constexpr):
    """Number of a half's block of 128 weight rows, of a pair the first CTA's."""
    if gemm.GATED:
        block = (tile.expert * 2 + HALF) * gemm.num_blocks + tile.n_tile_idx * gemm.CTAS
    else:
        block = tile.expert * gemm.num_blocks + (tile.n_tile_idx * 2 + HALF) * gemm.CTAS
    return block


# -- loads ---------------------------------------------------------------------------------------


@gluon.jit
def load_weights(gemm):
    """The weights of this CTA's tiles and their scales, both halves of each."""
    HAS_SCALES: gl.constexpr = gemm.FORMAT.SCALED or gemm.FORMAT.DECODED
    SCALE_BYTES: gl.constexpr = gemm.w_scale.block_type.nbytes if HAS_SCALES else 0
    BYTES: gl.constexpr = HALVES * (gemm.w.block_type.nbytes + SCALE_BYTES) // gemm.CTAS
    WIDTH: gl.constexpr = gemm.w.block_type.shape[1]
    stage = first_stage(1)
    for item in range(gl.program_id(0), _end_item(gemm), gl.num_programs(0)):
        tile = _tile_at(gemm, item)
        for k in range(gemm.steps):
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
            stage = advance(stage, gemm.STAGES)


@gluon.jit
def load_tokens(gemm):
    """The tokens of this CTA's tiles and their scales."""
    HAS_SCALES: gl.constexpr = gemm.FORMAT.X_SCALED or gemm.FORMAT.PROMOTED
    SCALE_BYTES: gl.constexpr = gemm.x_scale.block_type.nbytes if HAS_SCALES else 0
    BYTES: gl.constexpr = gemm.x.block_type.nbytes // gemm.CTAS + SCALE_BYTES
    WIDTH: gl.constexpr = gemm.x.block_type.shape[1]
    stage = first_stage(1)
    wait_for_launch()
    for item in range(gl.program_id(0), _end_item(gemm), gl.num_programs(0)):
        tile = _tile_at(gemm, item)
        row = tile.row_begin
        for k in range(gemm.steps):
            full = gemm.full.index(stage.idx)
            mbarrier.wait(gemm.empty.index(stage.idx), stage.phase)
            mbarrier.expect(full, BYTES)
            tma.async_copy_global_to_shared(
                gemm.x, [row, k * WIDTH], full, gemm.x_bufs.index(stage.idx)
            )
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

    Scales cannot be allocated by stages (Gluon 3.6): FP32 of as many columns is, and is renamed.
    """
    NUM: gl.constexpr = gemm.BLOCK_K // gemm.FORMAT.VEC
    columns = gemm.scales.index(stage.idx * (HALVES + 1) + WHICH)
    IS_TOKENS: gl.constexpr = WHICH == HALVES
    ROWS_OF: gl.constexpr = 128 if IS_TOKENS else 128 * gemm.CTAS
    LAYOUT: gl.constexpr = scales_layout(gemm.PAIR, IS_TOKENS)
    return reinterpret(columns, gemm.w_scale.dtype, [ROWS_OF, NUM], LAYOUT)


@gluon.jit
def _multiply_scaled(gemm, stage, turn, use_acc):
    """Both halves of a stage, with block scales; its copies come before its products."""
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
            gemm.sums.index(turn.idx * HALVES + half), _scale_columns(gemm, stage, half), xs,
            gemm.FORMAT.W, gemm.FORMAT.X, use_acc=use_acc,
        )  # fmt: skip


@gluon.jit
def _multiply_plain(gemm, stage, ready, turn, use_acc):
    """Both halves of a stage: E4M3 or BF16; FP4 that was decoded to tensor memory."""
    x = gemm.x_bufs.index(stage.idx).permute((1, 0))
    for half in gl.static_range(HALVES):
        into = gemm.sums.index(turn.idx * HALVES + half)
        if gemm.FORMAT.DECODED:
            tcgen05_mma(gemm.decoded.index(ready.idx * HALVES + half), x, into, use_acc=use_acc)
        else:
            tcgen05_mma(gemm.w_bufs.index(stage.idx * HALVES + half), x, into, use_acc=use_acc)


@gluon.jit
def issue_mma(gemm):
    """Products of this CTA's tiles, into sums that the epilogue has read."""
    stage = first_stage(0)
    turn = first_stage(1)
    ready = first_stage(0)  # decoded weights
    for _ in range(gl.program_id(0), _end_item(gemm), gl.num_programs(0)):
        use_acc = False
        if not gemm.FORMAT.PROMOTED:
            mbarrier.wait(gemm.taken.index(turn.idx), turn.phase)
        for _k in range(gemm.steps):
            if gemm.FORMAT.PROMOTED:
                mbarrier.wait(gemm.taken.index(turn.idx), turn.phase)
            mbarrier.wait(gemm.full.index(stage.idx), stage.phase)
            if gemm.FORMAT.SCALED:
                _multiply_scaled(gemm, stage, turn, use_acc)
            else:
                if gemm.FORMAT.DECODED:
                    mbarrier.wait(gemm.decoded_full.index(ready.idx), ready.phase)
                _multiply_plain(gemm, stage, ready, turn, use_acc)
            tcgen05_commit(gemm.empty.index(stage.idx))
            if gemm.FORMAT.DECODED:
                tcgen05_commit(gemm.decoded_empty.index(ready.idx))
                ready = advance(ready, DECODES)
            if gemm.FORMAT.PROMOTED:
                tcgen05_commit(gemm.summed.index(turn.idx))
                turn = advance(turn, gemm.SUMS)
            else:
                use_acc = True
            stage = advance(stage, gemm.STAGES)
        if not gemm.FORMAT.PROMOTED:
            tcgen05_commit(gemm.summed.index(turn.idx))
            turn = advance(turn, gemm.SUMS)


@gluon.jit
def decode(gemm):
    """DECODED: FP4 weights of every stage as BF16, in tensor memory."""
    NUM: gl.constexpr = gemm.BLOCK_K // gemm.FORMAT.VEC
    stage = first_stage(0)
    room = first_stage(1)
    for _ in range(gl.program_id(0), _end_item(gemm), gl.num_programs(0)):
        for _k in range(gemm.steps):
            mbarrier.wait(gemm.full.index(stage.idx), stage.phase)
            mbarrier.wait(gemm.decoded_empty.index(room.idx), room.phase)
            for half in gl.static_range(HALVES):
                at = stage.idx * HALVES + half
                scales = scale_block(gemm.ws_bufs.index(at), NUM)
                decode_block(
                    gemm.w_bufs.index(at), scales, gemm.decoded.index(room.idx * HALVES + half)
                )
            fence_async_shared()
            mbarrier.arrive(gemm.empty.index(stage.idx), count=1)
            mbarrier.arrive(gemm.decoded_full.index(room.idx), count=1)
            stage = advance(stage, gemm.STAGES)
            room = advance(room, DECODES)


# -- sums ----------------------------------------------------------------------------------------


@gluon.jit
def _read_sums(gemm, turn, START: gl.constexpr, N: gl.constexpr):
    """N tokens of a turn's sums from number START on, of both halves."""
    low = gemm.sums.index(turn.idx * HALVES).slice(START, N)
    high = gemm.sums.index(turn.idx * HALVES + 1).slice(START, N)
    LAYOUT: gl.constexpr = get_tmem_reg_layout(
        gl.float32, (128 * gemm.CTAS, N), low.type.layout, gemm.NUM_WARPS
    )
    return low.load(LAYOUT), high.load(LAYOUT)


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
def _add_stages(gemm, tile, stage, turn):
    """PROMOTED: (sums of both halves, next stage, next turn) of a tile, scales applied."""
    LAYOUT: gl.constexpr = get_tmem_reg_layout(
        gl.float32, (128, gemm.TOKENS), gemm.sums.type.layout, gemm.NUM_WARPS
    )
    low = gl.zeros([128, gemm.TOKENS], gl.float32, LAYOUT)
    high = gl.zeros([128, gemm.TOKENS], gl.float32, LAYOUT)
    for k in range(gemm.steps):
        low_factor = _block_factor(gemm, tile, k, 0)
        high_factor = _block_factor(gemm, tile, k, 1)
        mbarrier.wait(gemm.full.index(stage.idx), stage.phase)
        scales = gemm.xs_bufs.index(stage.idx).slice(0, gemm.TOKENS, 0)
        scale = scales.load(gl.SliceLayout(0, LAYOUT))
        # Reads of the stage come before the copies that follow.
        fence_async_shared()
        mbarrier.arrive(gemm.empty.index(stage.idx), count=1)
        mbarrier.wait(gemm.summed.index(turn.idx), turn.phase)
        part, other = _read_sums(gemm, turn, 0, gemm.TOKENS)
        mbarrier.arrive(gemm.taken.index(turn.idx), count=1)
        low += part * gl.expand_dims(scale * low_factor, 0)
        high += other * gl.expand_dims(scale * high_factor, 0)
        stage = advance(stage, gemm.STAGES)
        turn = advance(turn, gemm.SUMS)
    return low, high, stage, turn


@gluon.jit
def _finish(gemm, low, high, tile, START: gl.constexpr):
    """The epilogue of the tile's tokens from number START on."""
    if gemm.GATED:
        finish_gated(gemm, low, high, tile, START)
    else:
        finish_linear(gemm, low, tile, 0, START)
        finish_linear(gemm, high, tile, 1, START)


@gluon.jit
def store(gemm):
    """The epilogue of this CTA's tiles."""
    stage = first_stage(0)
    turn = first_stage(0)
    wait_for_launch()
    for item in range(gl.program_id(0), _end_item(gemm), gl.num_programs(0)):
        tile = _tile_at(gemm, item)
        if gemm.FORMAT.PROMOTED:
            low, high, stage, turn = _add_stages(gemm, tile, stage, turn)
            _finish(gemm, low, high, tile, 0)
        else:
            mbarrier.wait(gemm.summed.index(turn.idx), turn.phase)
            for start in gl.static_range(0, gemm.TOKENS, gemm.CHUNK):
                low, high = _read_sums(gemm, turn, start, gemm.CHUNK)
                if start + gemm.CHUNK == gemm.TOKENS:
                    mbarrier.arrive(gemm.taken.index(turn.idx), count=1)
                _finish(gemm, low, high, tile, start)
            turn = advance(turn, gemm.SUMS)


# -- the launch ----------------------------------------------------------------------------------


@gluon.jit
def _allocate_tmem(
    FORMAT: gl.constexpr, TOKENS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    SUMS: gl.constexpr, PAIR: gl.constexpr,
):  # fmt: skip
    """(sums, scales, ones, decoded) in tensor memory; what a format lacks stands for `sums`."""
    NUM: gl.constexpr = BLOCK_K // FORMAT.VEC
    LANES: gl.constexpr = 256 if PAIR else 128
    layout: gl.constexpr = sums_layout(TOKENS, PAIR)
    sums = allocate_tensor_memory(gl.float32, [SUMS * HALVES, LANES, TOKENS], layout)
    scales = sums
    ones = sums
    decoded = sums
    if FORMAT.SCALED:
        columns: gl.constexpr = sums_layout(NUM, PAIR)
        scales = allocate_tensor_memory(gl.float32, [STAGES * (HALVES + 1), LANES, NUM], columns)
        if not FORMAT.X_SCALED:
            rows: gl.constexpr = TensorMemoryScalesLayout()
            REGS: gl.constexpr = get_tmem_reg_layout(gl.uint8, (128, NUM), rows, gl.num_warps())
            ones = allocate_tensor_memory(gl.uint8, [128, NUM], rows)
            ones.store(gl.full([128, NUM], ONE, gl.uint8, REGS))
    if FORMAT.DECODED:
        halves: gl.constexpr = TensorMemoryLayout((128, BLOCK_K), col_stride=1)
        decoded = allocate_tensor_memory(gl.bfloat16, [DECODES * HALVES, 128, BLOCK_K], halves)
    return sums, scales, ones, decoded


@gluon.jit
def _allocate_stages(w, w_scale, x, x_scale, FORMAT: gl.constexpr, STAGES: gl.constexpr):
    """(w_bufs, ws_bufs, x_bufs, xs_bufs) in shared memory; unused ones stand for others."""
    NUM: gl.constexpr = STAGES * HALVES
    w_bufs = gl.allocate_shared_memory(w.dtype, [NUM] + w.block_type.shape, w.layout)
    x_bufs = gl.allocate_shared_memory(x.dtype, [STAGES] + x.block_type.shape, x.layout)
    ws_bufs = w_bufs
    xs_bufs = x_bufs
    if FORMAT.SCALED or FORMAT.DECODED:
        ws_bufs = gl.allocate_shared_memory(
            w_scale.dtype, [NUM] + w_scale.block_type.shape, w_scale.layout
        )
    if FORMAT.X_SCALED or FORMAT.PROMOTED:
        xs_bufs = gl.allocate_shared_memory(
            x_scale.dtype, [STAGES] + x_scale.block_type.shape, x_scale.layout
        )
    return w_bufs, ws_bufs, x_bufs, xs_bufs


@gluon.jit(do_not_specialize=["pool_rows", "steps", "num_blocks", "factor_cols"])
def gemm_tmem_kernel(
    w, w_scale, x, x_scale, factor, bias, acts_factor, row_factor, row_weight, row_dest, out,
    out_scale, tiles, num_tiles, pool_rows, steps, num_outputs, num_bias, num_blocks, factor_cols,
    clamp,
    FORMAT: gl.constexpr, ACTS: gl.constexpr, GATED: gl.constexpr, HAS_BIAS: gl.constexpr,
    WEIGHTED: gl.constexpr, ACTIVATION: gl.constexpr, TOKENS: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, SUMS: gl.constexpr, CHUNK: gl.constexpr, SPAN: gl.constexpr,
    LOAD_REGS: gl.constexpr, NUM_WARPS: gl.constexpr, PAIR: gl.constexpr = False,
):  # fmt: skip
    """The launch: one persistent CTA per SM. Arguments as the fields of `TmemGemm`."""
    w_bufs, ws_bufs, x_bufs, xs_bufs = _allocate_stages(w, w_scale, x, x_scale, FORMAT, STAGES)
    sums, scales, ones, decoded = _allocate_tmem(FORMAT, TOKENS, BLOCK_K, STAGES, SUMS, PAIR)
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
    if GATED:
        wait_for_launch()  # L1's tile list is written by the launch before; L2's is older
    allow_next_launch()
    gemm = TmemGemm(
        w=w, w_scale=w_scale, x=x, x_scale=x_scale, w_bufs=w_bufs, ws_bufs=ws_bufs, x_bufs=x_bufs,
        xs_bufs=xs_bufs, sums=sums, scales=scales, ones=ones, decoded=decoded, full=full,
        empty=empty, summed=summed, taken=taken, decoded_full=decoded_full,
        decoded_empty=decoded_empty, factor=factor, bias=bias, acts_factor=acts_factor,
        row_factor=row_factor, row_weight=row_weight, row_dest=row_dest, out=out,
        out_scale=out_scale, tiles=tiles, num_tiles=num_tiles, pool_rows=pool_rows, steps=steps,
        num_outputs=num_outputs, num_bias=num_bias, num_blocks=num_blocks,
        factor_cols=factor_cols, clamp=clamp, FORMAT=FORMAT, ACTS=ACTS, GATED=GATED,
        HAS_BIAS=HAS_BIAS, WEIGHTED=WEIGHTED, ACTIVATION=ACTIVATION, TOKENS=TOKENS,
        BLOCK_K=BLOCK_K, STAGES=STAGES, SUMS=SUMS, CHUNK=CHUNK, SPAN=SPAN, NUM_WARPS=NUM_WARPS,
        PAIR=PAIR, CTAS=2 if PAIR else 1,
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
