"""Grouped GEMM with swapped operands: weights are wgmma's M, a narrow tile of tokens its N.

For few tokens per expert: out[token, row] = sum over k of w[expert, row, k] * x[token, k].

Dimensions

  here               GEMM word  size
  weight row         M          ROWS = GROUPS * SLABS * 64 per tile: 128 or 256
  slab               -          64 weight rows: the M of one wgmma, and the unit of packed weights
  SLABS              -          slabs of one math warpgroup in a tile: 1 or 2
  token              N          TOKENS per tile: 8 to 128, the N of one wgmma
  K block            -          128 of K: the unit of scales
  stage              BLOCK_K    DEPTH K blocks, in one slot of the ring
  step               k tile     one stage of one tile; `steps` = K / 128 / DEPTH
  n tile             m block    ROWS weight rows of an expert (what the plain GEMM calls its N)
  tile               -          one n tile x TOKENS rows of the pool, all of one expert

L1 (GATED) has weight rows as 8 gate, 8 up, ..., so a thread holds both of an output, and writes
ROWS / 2 outputs per token to the pool. L2 writes ROWS outputs per token to its (token, slot) row.

Roles of a CTA: two math warpgroups, then one warp each

  load_weights            waits only for an empty stage
  load_tokens             rows of the pool and their scales; posts each tile
  load_epilogue_operands  factors, biases, topk weights, destinations
  math                    decode, wgmma, promotion to FP32 sums, epilogue; SLABS slabs each

Barriers

  mbarrier        n       arrivals  arrived by                   awaited by
  full            STAGES  2         both loaders, and their TMA  math; load_weights (IN_FLIGHT)
  empty           STAGES  GROUPS    math, after its last wgmma   both loaders
  amax_full       2       GROUPS    math: amax of an L1 tile     math: amax of all warpgroups
  epilogue.full   1       1         load_epilogue_operands       math
  epilogue.empty  2       GROUPS    math, after the epilogue     load_epilogue_operands, load_tokens

Records: a tile-list entry is `pool.TILE_*`; a posted tile is (expert, n tile, row_begin, row_end)
in shared memory, two of them; `SwapAbGemm` is the launch.

One CTA, three tiles A B C of two steps each, STAGES = 3; A0 is step 0 of tile A:

  load_weights   A0 A1 B0 | waits | B1 C0 C1
  load_tokens    post A, A0 A1; post B, B0 | waits | B1; post C (after A's epilogue), C0 C1
  operands       A | after A's epilogue: B | after B's: C
  math 0, 1      A0 A1 epilogue A, B0 B1 epilogue B, C0 C1 epilogue C
"""

from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megamoe.kernels.gluon.compat import gl, tma
from megamoe.kernels.gluon.compiler_hooks import ours
from megamoe.kernels.gluon.l2_policy import L2_WARM_BYTES, stream_copy, stream_policy
from megamoe.kernels.gluon.pipeline import (
    FLAT_SHARED,
    GROUPS,
    advance,
    allow_next_launch,
    barriers,
    fast_div,
    fence_stores,
    first_stage,
    record,
    scale_width,
    stamp_begin,
    wait_for_launch,
)
from megamoe.kernels.gluon.tile_scheduler import (
    num_work_items,
    publish_l1_tile,
    tile_in_list,
    tile_word,
    wait_for_tile,
)
from megamoe.kernels.hopper.gemm.epilogue import (
    EpilogueOperands,
    allocate_operands,
    fetch_operands,
    finish_fp8,
    finish_gated,
    finish_linear,
    is_fp8,
    post_tile,
    publish_operands,
    read_tile,
    release_operands,
    wait_for_operands,
)


@record
class SwapAbGemm:
    """One launch: operands in memory, the stage ring, and the epilogue's tensors."""

    w: tma.tensor_descriptor
    w_scale: tma.tensor_descriptor
    x: tma.tensor_descriptor
    x_scale: tma.tensor_descriptor
    w_bufs: gl.shared_memory_descriptor  # the stages, as `allocate_stages` shapes them
    ws_bufs: gl.shared_memory_descriptor
    x_bufs: gl.shared_memory_descriptor
    xs_bufs: gl.shared_memory_descriptor
    amax: gl.shared_memory_descriptor  # int32 [2 sets * GROUPS * 4 warps, TOKENS]: bits
    transpose_smem: gl.shared_memory_descriptor  # BF16 [GROUPS, tokens, 64], of tiles from 64 on
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    amax_full: gl.shared_memory_descriptor
    epilogue: EpilogueOperands
    factor: gl.tensor  # FP32: per row (images), per 128x128 (fp8), per expert (nvfp4)
    bias: gl.tensor
    acts_factor: gl.tensor  # nvfp4: global scale of the activations, per expert
    row_factor: gl.tensor  # nvfp4: global scale of each token
    row_weight: gl.tensor
    row_dest: gl.tensor
    out: gl.tensor
    out_scale: gl.tensor
    tiles: gl.tensor  # int32 [tiles, TILE_WORDS]
    num_tiles: gl.tensor
    follows: gl.tensor  # FOLLOWS: words by tile, for which its tokens wait (`follow`)
    publishes: gl.tensor  # PUBLISHES: L1's, for L2
    bound_us: gl.tensor  # FOLLOWS: of a wait for a tile
    l1_n_tiles: gl.tensor  # L2 that follows: n tiles of L1
    error: gl.tensor  # the layer's word, where a wait may be given up
    pool_rows: gl.tensor  # of both pools: the stride of their scales
    steps: gl.tensor
    num_outputs: gl.tensor  # computed: intermediate, padded, or hidden
    num_bias: gl.tensor  # biases of a matrix: intermediate or hidden
    out_width: gl.tensor  # columns of a row in memory
    factor_rows: gl.tensor  # rows of `factor` per expert, or its 128-blocks of rows
    factor_cols: gl.tensor  # 128-blocks of K of `factor`
    clamp: gl.tensor
    WEIGHTS: gl.constexpr
    ACTS: gl.constexpr
    GATED: gl.constexpr
    PROMOTED: gl.constexpr
    FACTOR: gl.constexpr  # "none", "row", "block", "expert"
    HAS_BIAS: gl.constexpr
    WEIGHTED: gl.constexpr
    ACTIVATION: gl.constexpr
    TOKENS: gl.constexpr
    IS_STREAM: gl.constexpr  # weights are read once, and need not stay in the L2 cache
    SLABS: gl.constexpr
    DEPTH: gl.constexpr
    STAGES: gl.constexpr
    SPAN: gl.constexpr  # tiles of tokens that share a sweep over the n tiles
    IN_FLIGHT: gl.constexpr  # stages in flight once the L2 cache is warm; 0: all of them
    IS_FAR: gl.constexpr  # rows may be other ranks': `row_dest` has offsets, `out_width` is 1
    FOLLOWS: gl.constexpr  # tiles wait for their tokens, not for the launch before
    PUBLISHES: gl.constexpr


@gluon.jit
def allocate_stages(
    w, w_scale, x, x_scale, WEIGHTS: gl.constexpr, PROMOTED: gl.constexpr, TOKENS: gl.constexpr,
    SLABS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Shared memory of the ring: weights, their scales, tokens, their scales.

    w_bufs   images: int32 [STAGES, 1, slabs, 4 * DEPTH, 256]; else [STAGES * DEPTH, rows.., 128]
    ws_bufs  images: int32 [STAGES, 1, slabs, words of scales]; else w_bufs
    x_bufs   [STAGES * DEPTH, TOKENS, 128]
    xs_bufs  PROMOTED: FP32 [STAGES * DEPTH, scale_width]; else x_bufs
    """
    ALL: gl.constexpr = GROUPS * SLABS
    NUM: gl.constexpr = STAGES * DEPTH
    if WEIGHTS.DECODED:
        w_bufs = gl.allocate_shared_memory(w.dtype, [STAGES, 1, ALL, 4 * DEPTH, 256], w.layout)
        words: gl.constexpr = WEIGHTS.SCALE_BYTES // 4 * DEPTH
        ws_bufs = gl.allocate_shared_memory(gl.int32, [STAGES, 1, ALL, words], w_scale.layout)
    else:
        w_bufs = gl.allocate_shared_memory(w.dtype, [NUM] + w.block_type.shape, w.layout)
        ws_bufs = w_bufs
    x_bufs = gl.allocate_shared_memory(x.dtype, [NUM, TOKENS, 128], x.layout)
    xs_bufs = x_bufs
    if PROMOTED:
        SCALES: gl.constexpr = scale_width(TOKENS)
        xs_bufs = gl.allocate_shared_memory(gl.float32, [NUM, SCALES], x_scale.layout)
    return w_bufs, ws_bufs, x_bufs, xs_bufs


# -- loads ---------------------------------------------------------------------------------------


@gluon.constexpr_function
def _weight_bytes(kind, slabs, depth):
    """Of one stage."""
    return slabs * depth * (kind.SLAB_BYTES + kind.SCALE_BYTES)


@gluon.jit
def num_warming_steps(gemm):
    """Steps of a CTA until the launch has replaced what was in the L2 cache (`l2_policy`)."""
    BYTES: gl.constexpr = _weight_bytes(gemm.WEIGHTS, GROUPS * gemm.SLABS, gemm.DEPTH)
    return fast_div(gl.to_tensor(L2_WARM_BYTES // BYTES), gl.num_programs(0))


@gluon.jit
def _throttle(gemm, stage):
    """Wait until the stage IN_FLIGHT before this one is full.

    Every request that misses a cache (tokens, counters, code) queues after all requested weights;
    two stages of every CTA keep memory busy.
    """
    back = stage.idx - gemm.IN_FLIGHT
    wraps = back < 0
    at = gl.where(wraps, back + gemm.STAGES, back)
    mbarrier.wait(gemm.full.index(at), gl.where(wraps, stage.phase, stage.phase ^ 1))


@gluon.jit
def load_weight_step(gemm, tile, k, is_warming, stage):
    """Step k of the weights of a tile into the ring, once a stage is empty; -> the next stage."""
    SLABS: gl.constexpr = GROUPS * gemm.SLABS
    kind: gl.constexpr = gemm.WEIGHTS
    BYTES: gl.constexpr = _weight_bytes(kind, SLABS, gemm.DEPTH)
    n_tile_idx = tile.n_tile_idx
    policy = stream_policy(is_warming)
    full = gemm.full.index(stage.idx)
    mbarrier.wait(gemm.empty.index(stage.idx), stage.phase)
    if gemm.IN_FLIGHT > 0 and gemm.IN_FLIGHT < gemm.STAGES:  # noqa: SIM102  known at compile time
        if not is_warming:
            _throttle(gemm, stage)
    mbarrier.expect(full, BYTES)
    if kind.DECODED:
        at = [tile.expert, n_tile_idx * SLABS, k * gemm.DEPTH * 4, 0]
        stream_copy(gemm.w, at, full, gemm.w_bufs.index(stage.idx), policy, gemm.IS_STREAM)
        at = [tile.expert, n_tile_idx * SLABS, k * gemm.DEPTH * (kind.SCALE_BYTES // 4)]
        stream_copy(gemm.w_scale, at, full, gemm.ws_bufs.index(stage.idx), policy, gemm.IS_STREAM)
    else:
        for j in gl.static_range(gemm.DEPTH):
            to = gemm.w_bufs.index(stage.idx * gemm.DEPTH + j)
            col = (k * gemm.DEPTH + j) * 128
            if gemm.GATED:
                at = [tile.expert, n_tile_idx * SLABS * 4, 0, 0, col]
                stream_copy(gemm.w, at, full, to, policy, gemm.IS_STREAM)
            else:
                at = [tile.expert, n_tile_idx * SLABS * 64, col]
                stream_copy(gemm.w, at, full, to, policy, gemm.IS_STREAM)
    return advance(stage, gemm.STAGES)


@gluon.jit
def load_token_tile(gemm, row, stage):
    """All steps of the tokens from `row` of the pool on, and of their scales; -> the next stage."""
    SCALES: gl.constexpr = scale_width(gemm.TOKENS)
    ELEMENT_BYTES: gl.constexpr = gemm.WEIGHTS.ELEMENT.primitive_bitwidth // 8
    X_BYTES: gl.constexpr = gemm.TOKENS * 128 * ELEMENT_BYTES
    BYTES: gl.constexpr = gemm.DEPTH * (X_BYTES + (SCALES * 4 if gemm.PROMOTED else 0))
    for k in range(gemm.steps):
        full = gemm.full.index(stage.idx)
        mbarrier.wait(gemm.empty.index(stage.idx), stage.phase)
        mbarrier.expect(full, BYTES)
        for j in gl.static_range(gemm.DEPTH):
            block = k * gemm.DEPTH + j
            at = stage.idx * gemm.DEPTH + j
            tma.async_copy_global_to_shared(gemm.x, [row, block * 128], full, gemm.x_bufs.index(at))
            if gemm.PROMOTED:
                tma.async_copy_global_to_shared(
                    gemm.x_scale, [block * gemm.pool_rows + row], full, gemm.xs_bufs.index(at)
                )
        stage = advance(stage, gemm.STAGES)
    return stage


@gluon.jit
def _tile_at(gemm, item):
    """The tile of a work item, round robin."""
    return tile_in_list(gemm, item, GROUPS * gemm.SLABS * 64)


@gluon.jit
def _end_item(gemm):
    """Work items of the launch."""
    return num_work_items(gemm, GROUPS * gemm.SLABS * 64)


@gluon.jit
def load_weights(gemm):
    """The weights of this CTA's tiles."""
    stage = first_stage(1)
    warming_steps = 0 * gemm.steps
    if gemm.GATED:  # the cache is warm when the second linear begins
        warming_steps = num_warming_steps(gemm)
    for item in range(gl.program_id(0), _end_item(gemm), gl.num_programs(0)):
        tile = _tile_at(gemm, item)
        for k in range(gemm.steps):
            stage = load_weight_step(gemm, tile, k, k < warming_steps, stage)
        warming_steps -= gemm.steps


@gluon.jit
def load_tokens(gemm):
    """The tokens of this CTA's tiles; posts each tile before its first stage."""
    stage = first_stage(1)
    num_done = 0
    if not gemm.FOLLOWS:
        wait_for_launch()
    for item in range(gl.program_id(0), _end_item(gemm), gl.num_programs(0)):
        tile = _tile_at(gemm, item)
        post_tile(gemm, num_done, tile)
        if gemm.FOLLOWS:
            wait_for_tile(gemm, tile, gemm.error)
        stage = load_token_tile(gemm, tile.row_begin, stage)
        num_done += 1
    if gemm.FOLLOWS:
        wait_for_launch()  # a launch that comes after this one also comes after the one before


@gluon.jit
def load_epilogue_operands(gemm):
    """One warp: the epilogue's operands of this CTA's tiles."""
    num_done = 0
    before = 0  # first row of the tile before
    if not gemm.FOLLOWS:
        wait_for_launch()
    for item in range(gl.program_id(0), _end_item(gemm), gl.num_programs(0)):
        tile = _tile_at(gemm, item)
        if gemm.FOLLOWS and gemm.GATED and gemm.FACTOR == "expert":
            wait_for_tile(gemm, tile, gemm.error)  # factors of tokens come with them
        fetch_operands(gemm, num_done, tile)
        if gemm.PUBLISHES:
            if num_done > 0:  # `fetch_operands` has waited until its epilogue was over
                publish_l1_tile(tile_word(gemm.publishes, before))
            before = tile.row_begin
        publish_operands(gemm)
        num_done += 1
    if gemm.PUBLISHES:  # noqa: SIM102  known at compile time
        if num_done > 0:
            last = num_done - 1
            mbarrier.wait(gemm.epilogue.empty.index(last & 1), (last >> 1) & 1)
            publish_l1_tile(tile_word(gemm.publishes, before))


# -- products ------------------------------------------------------------------------------------


@gluon.jit
def _weight_operand(gemm, idx, j: gl.constexpr, slab: gl.constexpr, DOT: gl.constexpr):
    """wgmma's A [64, 128]: slab `slab` of K block j of stage idx, in registers or shared memory."""
    SLABS: gl.constexpr = GROUPS * gemm.SLABS
    if gemm.WEIGHTS.DECODED:
        NUM: gl.constexpr = gemm.STAGES * SLABS * gemm.DEPTH
        at = (idx * SLABS + slab) * gemm.DEPTH + j
        return gemm.WEIGHTS.decode(gemm.w_bufs, gemm.ws_bufs, at, NUM, DOT)
    else:
        block = gemm.w_bufs.index(idx * gemm.DEPTH + j).reshape([SLABS * 64, 128])
        return block.slice(slab * 64, 64, 0)


@gluon.jit
def _token_operand(gemm, idx, j: gl.constexpr):
    """wgmma's B [128, TOKENS]: K block j of the tokens of stage idx."""
    return gemm.x_bufs.index(idx * gemm.DEPTH + j).permute((1, 0))


@gluon.jit
def _block_factors(gemm, expert, slab, k, ROW: gl.constexpr):
    """FP32 scales of E4M3 weights at K block k, for the rows of a slab and of the one after it.

    L1: [64], since gate rows and up rows belong to different 128x128 blocks. L2: a scalar, since
    the 128 rows lie in one block.
    """
    k = gl.minimum(k, gemm.factor_cols - 1)
    if gemm.GATED:
        n = gl.minimum(slab // 4, gemm.factor_rows - 1)
        gate = gl.load(gemm.factor + (expert * 2 * gemm.factor_rows + n) * gemm.factor_cols + k)
        up = gl.load(gemm.factor + ((expert * 2 + 1) * gemm.factor_rows + n) * gemm.factor_cols + k)
        factors = gl.where(gl.arange(0, 64, ROW) % 16 < 8, gate, up)
    else:
        n = gl.minimum(slab // 2, gemm.factor_rows - 1)
        factors = gl.load(gemm.factor + (expert * gemm.factor_rows + n) * gemm.factor_cols + k)
    return factors


@gluon.jit
def _scales(gemm, factors, at, MMA: gl.constexpr):
    """[1, TOKENS] or [64, TOKENS]: scales of the tokens of K block `at`, times the weights'."""
    scale = gemm.xs_bufs.index(at).slice(0, gemm.TOKENS, 0).load(gl.SliceLayout(0, MMA))
    if gemm.FACTOR == "block" and not gemm.GATED:
        scale = scale * factors
    scale = gl.expand_dims(scale, 0)
    if gemm.FACTOR == "block" and gemm.GATED:
        scale = scale * gl.expand_dims(factors, 1)
    return scale


@gluon.jit
def _release_stage(gemm, stage):
    """The stage may be written again."""
    # Reads of the stage come before the copies that follow: without the fence a few of thousands
    # of launches have a wrong row.
    fence_async_shared()
    mbarrier.arrive(gemm.empty.index(stage.idx), count=1)


@gluon.jit
def _begin(gemm, a, x, part):
    """Issue a product: alone where it takes scales, else added to the sums."""
    return warpgroup_mma(a, x, part, use_acc=not gemm.PROMOTED, is_async=True)


@gluon.jit
def _end(gemm, sums, part, scale):
    """(sums, part) once the product is complete."""
    part = warpgroup_mma_wait(0, deps=[part])
    if gemm.PROMOTED:
        sums += part * scale
    return sums, part


@gluon.jit
def _one_slab(gemm, steps, stage, WG: gl.constexpr, MMA: gl.constexpr):
    """Sums [64, TOKENS] of one slab a warpgroup: decoding and products follow each other."""
    gl.static_assert(not gemm.PROMOTED, "128 outputs share a scale: 256 rows")
    DOT: gl.constexpr = gl.DotOperandLayout(0, MMA, gemm.WEIGHTS.K_WIDTH)
    sums = gl.zeros([64, gemm.TOKENS], gl.float32, MMA)
    for _ in range(steps):
        mbarrier.wait(gemm.full.index(stage.idx), stage.phase)
        for j in gl.static_range(gemm.DEPTH):
            a = _weight_operand(gemm, stage.idx, j, WG, DOT)
            sums = _begin(gemm, a, _token_operand(gemm, stage.idx, j), sums)
            sums = warpgroup_mma_wait(0, deps=[sums])
        _release_stage(gemm, stage)
        stage = advance(stage, gemm.STAGES)
    return sums, stage


@gluon.jit
def _two_slabs(gemm, steps, expert, slab, stage, WG: gl.constexpr, MMA: gl.constexpr):
    """Sums [64, TOKENS] of two slabs a warpgroup, one product always in flight.

        decode low   decode high          decode low (j + 1)
                     wgmma low            wgmma high          wgmma low (j + 1)

    So there is no wait between decoding and issuing: an operand is decoded under the product of the
    other slab, and the wait for that product stands after the decode. The assembler interleaves
    both, given registers for two operands and two products.
    """
    DOT: gl.constexpr = gl.DotOperandLayout(0, MMA, gemm.WEIGHTS.K_WIDTH)
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    low = gl.zeros([64, gemm.TOKENS], gl.float32, MMA)
    high = gl.zeros([64, gemm.TOKENS], gl.float32, MMA)
    low_part = gl.zeros([64, gemm.TOKENS], gl.float32, MMA)
    high_part = gl.zeros([64, gemm.TOKENS], gl.float32, MMA)
    factors = 1.0
    if gemm.FACTOR == "block":
        factors = _block_factors(gemm, expert, slab, 0, ROW)
    for k in range(steps):
        mbarrier.wait(gemm.full.index(stage.idx), stage.phase)
        scale = 1.0
        for j in gl.static_range(gemm.DEPTH):
            x = _token_operand(gemm, stage.idx, j)
            a = _weight_operand(gemm, stage.idx, j, WG * 2, DOT)
            if j > 0:
                high, high_part = _end(gemm, high, high_part, scale)
            low_part = _begin(gemm, a, x, low_part)
            if gemm.PROMOTED:
                scale = _scales(gemm, factors, stage.idx * gemm.DEPTH + j, MMA)
            b = _weight_operand(gemm, stage.idx, j, WG * 2 + 1, DOT)
            low_part = warpgroup_mma_wait(0, deps=[low_part])
            high_part = _begin(gemm, b, x, high_part)
            if gemm.PROMOTED:
                low += low_part * scale
            if gemm.FACTOR == "block":
                factors = _block_factors(gemm, expert, slab, k * gemm.DEPTH + j + 1, ROW)
        high, high_part = _end(gemm, high, high_part, scale)
        _release_stage(gemm, stage)
        stage = advance(stage, gemm.STAGES)
    if not gemm.PROMOTED:
        low = low_part
        high = high_part
    return low, high, stage


@gluon.constexpr_function
def _mma_layout(tokens, instr_k):
    """Of sums [64, tokens]."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, tokens, instr_k]
    )


@gluon.jit
def multiply(gemm, steps, expert, slab, stage, WG: gl.constexpr):
    """(low, high, next stage): sums [64, TOKENS] of the warpgroup's slab or two, over `steps`."""
    MMA: gl.constexpr = _mma_layout(gemm.TOKENS, gemm.WEIGHTS.INSTR_K)
    if gemm.SLABS == 2:
        low, high, stage = _two_slabs(gemm, steps, expert, slab, stage, WG, MMA)
    else:
        low, stage = _one_slab(gemm, steps, stage, WG, MMA)
        high = low
    return low, high, stage


# -- math ----------------------------------------------------------------------------------------


@gluon.jit
def first_slab(gemm, n_tile_idx, WG: gl.constexpr):
    """The first slab of a warpgroup, of all slabs of an expert."""
    return n_tile_idx * (GROUPS * gemm.SLABS) + WG * gemm.SLABS


@gluon.jit
def finish(gemm, low, high, tile, slab, num_done, num_l1_done, WG: gl.constexpr):
    """The epilogue of the CTA's tile number `num_done`, of L1: its L1 tile number `num_l1_done`."""
    wait_for_operands(gemm, num_done)
    if gemm.GATED:
        finish_gated(gemm, low, high, tile, slab, num_l1_done, WG)
        if gemm.PUBLISHES:
            fence_stores()
            gl.thread_barrier()
    elif is_fp8(gemm.out.dtype):
        finish_fp8(gemm, low, high, tile, slab, WG)
    else:
        finish_linear(gemm, low, tile, slab, WG * gemm.SLABS, WG)
        if gemm.SLABS == 2:
            finish_linear(gemm, high, tile, slab + 1, WG * gemm.SLABS + 1, WG)
    release_operands(gemm, num_done)


@gluon.jit
def compute(gemm, tile, slab, num_done, num_l1_done, stage, WG: gl.constexpr):
    """One tile, from the ring to memory; numbered as in `finish`. -> the next stage."""
    low, high, stage = multiply(gemm, gemm.steps, tile.expert, slab, stage, WG)
    finish(gemm, low, high, tile, slab, num_done, num_l1_done, WG)
    return stage


@gluon.jit
def _compute_wide(gemm, tile, num_done, stage, WG: gl.constexpr):
    """As `compute`; the posted tile is read again after the main loop, to free registers in it."""
    slab = first_slab(gemm, tile.n_tile_idx, WG)
    low, high, stage = multiply(gemm, gemm.steps, tile.expert, slab, stage, WG)
    tile = read_tile(gemm, num_done)
    slab = first_slab(gemm, tile.n_tile_idx, WG)
    finish(gemm, low, high, tile, slab, num_done, num_done, WG)
    return stage


@gluon.jit
def math(gemm, WG: gl.constexpr):
    """One warpgroup: its slabs of every tile of this CTA."""
    stage = first_stage(0)
    num_done = 0
    if not gemm.FOLLOWS:
        wait_for_launch()
    for _ in range(gl.program_id(0), _end_item(gemm), gl.num_programs(0)):
        mbarrier.wait(gemm.full.index(stage.idx), stage.phase)
        tile = read_tile(gemm, num_done)
        if gemm.TOKENS >= 64:
            stage = _compute_wide(gemm, tile, num_done, stage, WG)
        else:
            slab = first_slab(gemm, tile.n_tile_idx, WG)
            stage = compute(gemm, tile, slab, num_done, num_done, stage, WG)
        num_done += 1


@ours
@gluon.jit(do_not_specialize=["pool_rows", "steps", "factor_rows", "factor_cols", "bound_us"])
def gemm_swap_ab_kernel(
    w, w_scale, x, x_scale, factor, bias, acts_factor, row_factor, row_weight, row_dest, out,
    out_scale, tiles, num_tiles, pool_rows, steps, num_outputs, out_width, factor_rows,
    factor_cols, clamp, num_bias, follows, publishes, l1_n_tiles, error, begun,
    bound_us,
    WEIGHTS: gl.constexpr, ACTS: gl.constexpr, GATED: gl.constexpr, PROMOTED: gl.constexpr,
    FACTOR: gl.constexpr, HAS_BIAS: gl.constexpr, WEIGHTED: gl.constexpr,
    ACTIVATION: gl.constexpr, TOKENS: gl.constexpr, IS_STREAM: gl.constexpr, SLABS: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr, SPAN: gl.constexpr, MATH_REGS: gl.constexpr,
    LOAD_REGS: gl.constexpr,
):  # fmt: skip
    """The launch: one persistent CTA per SM. Arguments as the fields of `SwapAbGemm`.

    follows, publishes: None, or words by tile of the chain (`follow`); then with l1_n_tiles, error,
    bound_us. begun: None, or where CTA 0 says when it began.
    """
    if begun is not None:
        stamp_begin(begun)
    w_bufs, ws_bufs, x_bufs, xs_bufs = allocate_stages(
        w, w_scale, x, x_scale, WEIGHTS, PROMOTED, TOKENS, SLABS, DEPTH, STAGES
    )
    # E4M3 is transposed, not BF16.
    HALF: gl.constexpr = 2 if GATED and ACTS.STORED_AS == "codes" else 1
    amax = gl.allocate_shared_memory(gl.int32, [2 * GROUPS * 4, TOKENS], FLAT_SHARED)
    transpose_smem = amax
    if TOKENS >= 64:
        rows: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        shape: gl.constexpr = [GROUPS, TOKENS // 2 // HALF, 64]
        transpose_smem = gl.allocate_shared_memory(gl.bfloat16, shape, rows)
    full = barriers(STAGES, 2)
    empty = barriers(STAGES, GROUPS)
    amax_full = full
    if GATED and PROMOTED:
        amax_full = barriers(2, GROUPS)
    epilogue = allocate_operands(row_dest, GROUPS * SLABS * 64, TOKENS, FACTOR, HAS_BIAS)
    FOLLOWS: gl.constexpr = follows is not None
    PUBLISHES: gl.constexpr = publishes is not None
    if GATED and not FOLLOWS:
        wait_for_launch()  # L1's tile list is written by the launch before; L2's is older
    allow_next_launch()
    gemm = SwapAbGemm(
        w=w, w_scale=w_scale, x=x, x_scale=x_scale, w_bufs=w_bufs, ws_bufs=ws_bufs, x_bufs=x_bufs,
        xs_bufs=xs_bufs, amax=amax, transpose_smem=transpose_smem, full=full, empty=empty,
        amax_full=amax_full, epilogue=epilogue, factor=factor, bias=bias, acts_factor=acts_factor,
        row_factor=row_factor, row_weight=row_weight, row_dest=row_dest, out=out,
        out_scale=out_scale, tiles=tiles, num_tiles=num_tiles, pool_rows=pool_rows, steps=steps,
        num_outputs=num_outputs, num_bias=num_bias, out_width=out_width, factor_rows=factor_rows,
        factor_cols=factor_cols, clamp=clamp, WEIGHTS=WEIGHTS, ACTS=ACTS, GATED=GATED,
        PROMOTED=PROMOTED, FACTOR=FACTOR, HAS_BIAS=HAS_BIAS, WEIGHTED=WEIGHTED,
        ACTIVATION=ACTIVATION, TOKENS=TOKENS, IS_STREAM=IS_STREAM, SLABS=SLABS, DEPTH=DEPTH,
        STAGES=STAGES, SPAN=SPAN, IN_FLIGHT=0, IS_FAR=False, FOLLOWS=FOLLOWS, PUBLISHES=PUBLISHES,
        follows=follows if FOLLOWS else tiles, publishes=publishes if PUBLISHES else tiles,
        l1_n_tiles=l1_n_tiles if FOLLOWS else steps, error=error if FOLLOWS else tiles,
        bound_us=bound_us if FOLLOWS else steps,
    )  # fmt: skip
    gl.warp_specialize(
        [(math, (gemm, 0)), (math, (gemm, 1)), (load_weights, (gemm,)), (load_tokens, (gemm,)),
         (load_epilogue_operands, (gemm,))],
        [4, 1, 1, 1], [MATH_REGS] + [LOAD_REGS] * 3,
    )  # fmt: skip
