"""The whole layer in one persistent launch on sm_100a: dispatch, L1, activation, L2 and combine.

Emulated and compiled, not yet run on the hardware.

Dimensions: those of the staged GEMM (`blackwell/gemm.py`), whose functions compute the tiles, so
the bits are those of the staged launches; slots, parts, tickets, pool waves and counters: those of
a fused launch on Hopper (`kernels/gluon/mega`, docs/fused.md). Experts begin at a multiple of
TOKENS in the pool, as placed scales want it.

CTAs are split over the ranks of a launch in equal parts. Roles of a CTA:

  schedule_tiles  takes tickets and pushes what they mean to the others; at the end it waits for all
                  CTAs
  load_weights    weights of each tile and their scales, as checkpoints have them
  load_tokens     waits for the pool, or for a tile's activations, then loads them and their scales
  issue_mma       scales to tensor memory, then products; waits for none of them
  math            two warpgroups. One reads the routing, one quantises tokens into the pool; then
                  they take tiles in turn, from sums in tensor memory to memory, and count them for
                  other CTAs; then combine
  decode          DECODED only: FP4 of a stage to BF16 in tensor memory

Barriers of a CTA

  mbarrier       n        arrivals            arrived by                       awaited by
  full           STAGES   2                   both loaders, and their TMA      its reader
  empty          STAGES   1, + math (PRO-     issue_mma's commit; its reader   both loaders
                          MOTED) or decode    it besides
  summed         SUMS     1                   issue_mma's commit               math: its tile
  taken          SUMS     1                   math: sums are in registers      issue_mma
  decoded_full   DECODES  1                   decode                           issue_mma
  decoded_empty  DECODES  1                   issue_mma's commit               decode
  item_full      2        1                   schedule_tiles                   the other roles
  item_empty     2        GROUPS + 3, + 1     the other roles                  schedule_tiles
                          with decode
  routed         1        1                   math 0: routing is read          schedule_tiles, math
  own_filled     1        1                   math 1: own parts in pool        load_weights
  pool_filled    1        1                   load_tokens: all parts are       load_weights, math,
                                                                               schedule_tiles
  own_done       1        GROUPS              math: no tile left               schedule_tiles
  all_done       1        1                   schedule_tiles: no CTA's         math, before combine

Math reads destinations and weights of rows from memory, while tensor cores go on with the next
tile. Without a wave's fill they would be garbage: after a report L2 stores no rows.

One CTA, three tickets (L1 tiles A and B, L2 tile C) of two steps each:

  load_weights  own_filled, A0 (early)  A1 B0 B1 C0 C1
  load_tokens   wait POOL               A0 A1 B0 B1, wait L1_DONE of C's tokens, C0 C1
  issue_mma                             A0 A1 B0 B1 | C0 C1 (A's sums are taken)
  math 0        routing                 wait A; epilogue A, count       wait C; epilogue C
  math 1        parts into the pool             wait B; epilogue B, count
"""

from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from megamoe.kernels.blackwell.gemm import (
    decode_tile,
    finish_tile,
    load_token_tile,
    load_weight_step,
    multiply_tile,
)
from megamoe.kernels.blackwell.mega.smem import TmemLinear, TmemTile, allocate_shared, gemm_of
from megamoe.kernels.gluon.compat import gl
from megamoe.kernels.gluon.mega.begin import begin_cta
from megamoe.kernels.gluon.mega.combine import combine
from megamoe.kernels.gluon.mega.dispatch import (
    fill_later,
    fill_pool,
    prefetch_inputs,
    read_routing,
)
from megamoe.kernels.gluon.mega.events import (
    COMBINE,
    END,
    FILL,
    L1,
    L2,
    LOAD_TOKENS,
    LOAD_WEIGHTS,
    MATH,
    PUBLISH,
    ROUTE,
    WAIT,
    now,
    stamp,
)
from megamoe.kernels.gluon.mega.scheduler import (
    pop_item,
    schedule_tiles,
    wait_for_pool,
    wait_for_wave,
    wave_of,
)
from megamoe.kernels.gluon.mega.state import KernelArgs
from megamoe.kernels.gluon.mega.sync import (
    L1_DONE,
    L2_DONE,
    WAIT_L1,
    publish_count,
    read_report,
    wait_for,
)
from megamoe.kernels.gluon.pipeline import (
    GROUPS,
    Stage,
    Tile,
    fast_div,
    first_stage,
)
from megamoe.kernels.gluon.pool import num_n_tiles


@gluon.jit
def load_weights(cta, l1, l2):
    """One warp: the weights of each tile.

    Requested weights delay the tokens in memory's queues: this CTA's parts go first, and no more
    than `weights_ahead` are requested before the whole pool is filled.
    """
    stage = first_stage(1)
    i = 0
    mbarrier.wait(cta.own_filled, 0)
    kind = gl.to_tensor(0)
    while kind >= 0:
        item = pop_item(cta, i)
        kind = item.kind
        begin = now(cta.args)
        if kind == L2:
            for k in range(l2.steps):
                stage = load_weight_step(l2, item.tile, k, stage)
            stamp(cta.args, LOAD_WEIGHTS, i, L2, item.ticket, begin)
        elif kind == L1:
            for k in range(l1.steps):
                if (i == 0) & (k == cta.args.weights_ahead):
                    mbarrier.wait(cta.pool_filled, 0)
                stage = load_weight_step(l1, item.tile, k, stage)
            stamp(cta.args, LOAD_WEIGHTS, i, L1, item.ticket, begin)
        i += 1


@gluon.jit
def load_tokens(cta, l1, l2):
    """One warp: wait until a tile's tokens are in memory, and load them."""
    l1_n_tiles = num_n_tiles(l1, cta.args.ROWS)
    stage = first_stage(1)
    i = 0
    begin = now(cta.args)
    wait_for_pool(cta)
    n = stamp(cta.args, LOAD_TOKENS, 0, WAIT, -1, begin)
    kind = gl.to_tensor(0)
    while kind >= 0:
        item = pop_item(cta, i)
        kind = item.kind
        if kind == L2:
            begin = now(cta.args)
            counter = cta.counters + L1_DONE + item.tile_idx
            wait_for(cta, counter, l1_n_tiles, WAIT_L1, item.tile_idx)
            n = stamp(cta.args, LOAD_TOKENS, n, WAIT, item.ticket, begin)
            stage = load_token_tile(l2, item.tile.row_begin, stage)
        elif kind == L1:
            wait_for_wave(cta, item.tile_idx)
            stage = load_token_tile(l1, item.tile.row_begin, stage)
        i += 1


@gluon.jit
def _steps_of(kind, l1, l2):
    """Steps of a tile of L1 or L2."""
    return gl.where(kind == L1, l1.steps, l2.steps)


@gluon.jit
def _accum_of(WG: gl.constexpr, PHASE: gl.constexpr):
    """A warpgroup's first sums: it has every second of them, so it sees every phase of its own."""
    return Stage(idx=gl.to_tensor(WG), phase=gl.to_tensor(PHASE))


@gluon.jit
def issue_mma(cta, l1, l2):
    """One warp: the products of each tile. Both linears have the same stages and sums."""
    stage = first_stage(0)
    accum = _accum_of(0, 1)  # of the warpgroup whose tile is next
    other = _accum_of(1, 1)
    ready = first_stage(0)  # decoded weights
    i = 0
    kind = gl.to_tensor(0)
    while kind >= 0:
        item = pop_item(cta, i)
        kind = item.kind
        if (kind == L1) | (kind == L2):
            steps = _steps_of(kind, l1, l2)
            stage, mine, ready = multiply_tile(l1, steps, stage, accum, ready)
            accum = Stage(idx=other.idx, phase=other.phase)
            other = Stage(idx=mine.idx, phase=mine.phase)
        i += 1


@gluon.jit
def decode(cta, l1, l2):
    """DECODED, one warpgroup: FP4 weights of each tile as BF16, in tensor memory."""
    stage = first_stage(0)
    decoded_stage = first_stage(1)
    i = 0
    kind = gl.to_tensor(0)
    while kind >= 0:
        item = pop_item(cta, i)
        kind = item.kind
        if (kind == L1) | (kind == L2):
            stage, decoded_stage = decode_tile(l1, _steps_of(kind, l1, l2), stage, decoded_stage)
        i += 1


@gluon.jit
def _finish(l1, l2, item, report, stage, accum):
    """This warpgroup's tile, from its sums to memory; -> the next stage and accumulator.

    report  not zero: destinations may be garbage, so L2 has no rows
    """
    tile = item.tile
    if item.kind == L1:
        stage, accum = finish_tile(l1, tile, stage, accum)
    else:
        row_end = gl.where(report == 0, tile.row_end, tile.row_begin)
        known = Tile(
            expert=tile.expert, n_tile_idx=tile.n_tile_idx, row_begin=tile.row_begin,
            row_end=row_end,
        )  # fmt: skip
        stage, accum = finish_tile(l2, known, stage, accum)
    return stage, accum


@gluon.jit
def _skip(stage, num, NUM_STAGES: gl.constexpr):
    """The slot `num` further in the ring, and its phase."""
    at = stage.idx + num
    return Stage(idx=at % NUM_STAGES, phase=stage.phase ^ (at // NUM_STAGES & 1))


@gluon.jit
def _count(cta, item):
    """Count a tile that this warpgroup has stored, for all CTAs: L1's, in a ring L2's too.

    The release takes long, but the other warpgroup has the next tile.
    """
    if item.kind == L1:
        publish_count(cta.counters + L1_DONE + item.tile_idx, 1)
    elif cta.args.RING:
        publish_count(cta.counters + L2_DONE + wave_of(cta, item.tile_idx), 1)


@gluon.jit
def math(cta, l1, l2, WG: gl.constexpr):
    """One warpgroup: routing or tokens into the pool, every second tile, then combine.

    An event of a tile begins as its sums begin to come: it shows the epilogue.
    """
    args = cta.args
    l2_n_tiles = num_n_tiles(l2, args.ROWS)
    begin = now(args)
    if WG == 0:
        read_routing(cta)
        stamp(args, MATH, 0, ROUTE, 0, begin)
    else:
        fill_pool(cta)
        stamp(args, PUBLISH, 0, FILL, 0, begin)
    mbarrier.wait(cta.pool_filled, 0)
    report = read_report(args)
    stage = first_stage(0)
    accum = _accum_of(WG, 0)
    i = 0
    num_done = 0
    kind = gl.to_tensor(0)
    while kind >= 0:
        item = pop_item(cta, i)
        kind = item.kind
        if (kind == L1) | (kind == L2):
            if (num_done & 1) == WG:
                if args.RING:
                    wait_for_wave(cta, item.tile_idx)
                    report = read_report(args)
                begin = now(args)
                stage, accum = _finish(l1, l2, item, report, stage, accum)
                _count(cta, item)
                stamp(args, MATH, i + 1, kind, item.ticket, begin)
            elif l1.FORMAT.PROMOTED:  # it reads stages itself
                stage = _skip(stage, _steps_of(kind, l1, l2), l1.STAGES)
            num_done += 1
        if args.RING:  # noqa: SIM102  known at compile time, unlike the kind
            if kind == FILL:
                begin = now(args)
                fill_later(cta, item.tile_idx, item.tile.n_tile_idx, l2_n_tiles, WG)
                if WG == 0:
                    stamp(args, MATH, i + 1, FILL, item.ticket, begin)
        i += 1
    begin = now(args)
    mbarrier.arrive(cta.own_done, count=1)
    if args.TRACE and WG == 0:
        mbarrier.wait(cta.all_done, 0)
        stamp(args, MATH, i, END, 0, begin)
        begin = now(args)
    combine(cta, WG)
    if WG == 0:
        stamp(args, MATH, i + 1, COMBINE, 0, begin)


@gluon.jit(
    do_not_specialize=[
        "g_stride", "bound_ns", "weights_ahead", "absent_rank", "first_rank", "first_slot",
        "num_slots", "tokens_per_rank", "num_experts", "rows_per_rank", "pool_rows", "wave_rows",
        "tile_list_stride", "num_counters", "l1_steps", "l2_steps", "l1_num_blocks",
        "l1_factor_cols", "l2_num_blocks", "l2_factor_cols",
    ],
    do_not_specialize_on_alignment=["topk_idx", "topk_weights", "num_valid", "error", "stats"],
)  # fmt: skip
def mega_tmem_kernel(
    x, x_stride, g, g_stride, topk_idx, topk_weights, num_valid, error, stats, y, pool, pool_scale,
    row_dest, row_weight, row_factor, acts, acts_scale, rows, tile_lists, counters, signals, peers,
    inbox, inbox_scale, inbox_slots, inbox_weights, inbox_counts, report, trace,
    bound_ns: gl.int64,
    weights_ahead, absent_rank, first_rank, first_slot, num_slots, tokens_per_rank, num_experts,
    rows_per_rank, pool_rows, wave_rows, tile_list_stride, num_counters, hidden, width, clamp,
    acts_factor,
    l1_w, l1_w_scale, l1_x, l1_x_scale, l1_factor, l1_bias, l1_steps, l1_outputs, l1_num_bias,
    l1_num_blocks, l1_factor_cols,
    l2_w, l2_w_scale, l2_x, l2_x_scale, l2_factor, l2_bias, l2_steps, l2_outputs, l2_num_bias,
    l2_num_blocks, l2_factor_cols,
    FORMAT: gl.constexpr, ACTS: gl.constexpr, L2_ACTS: gl.constexpr, HAS_BIAS: gl.constexpr,
    WEIGHTED: gl.constexpr, ACTIVATION: gl.constexpr, HAS_COUNT: gl.constexpr,
    HAS_STATS: gl.constexpr, RANKS: gl.constexpr, LOCAL: gl.constexpr, EXPERTS: gl.constexpr,
    SLOTS: gl.constexpr, TOP_K: gl.constexpr, K_SLOTS: gl.constexpr, TOKENS: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SUMS: gl.constexpr, CHUNK: gl.constexpr,
    MATH_REGS: gl.constexpr, LOAD_REGS: gl.constexpr, DECODE_REGS: gl.constexpr,
    TRACE: gl.constexpr, RING: gl.constexpr, ROWS_AS: gl.constexpr,
):  # fmt: skip
    """The launch: persistent CTAs, all resident. Arguments as in `KernelArgs` and `TmemLinear`.

    tile_lists  int32 [CTAs, tile_list_stride]; first_rank: of this launch
    """
    if RANKS == 1:  # None: no arguments at all
        inbox = report
        inbox_scale = report
        inbox_slots = report
        inbox_weights = report
        inbox_counts = report
    args = KernelArgs(
        x=x, x_stride=x_stride, g=g, g_stride=g_stride, topk_idx=topk_idx,
        topk_weights=topk_weights, num_valid=num_valid, error=error, stats=stats, y=y, pool=pool,
        pool_scale=pool_scale, row_dest=row_dest, row_weight=row_weight, row_factor=row_factor,
        rows=rows, counters=counters, signals=signals, peers=peers,
        inbox=inbox, inbox_scale=inbox_scale, inbox_slots=inbox_slots,
        inbox_weights=inbox_weights, inbox_counts=inbox_counts, report=report, trace=trace,
        bound_ns=bound_ns, weights_ahead=weights_ahead,
        absent_rank=absent_rank, first_slot=first_slot,
        num_slots=num_slots, tokens_per_rank=tokens_per_rank, num_experts=num_experts,
        rows_per_rank=rows_per_rank, pool_rows=pool_rows, wave_rows=wave_rows,
        tile_list_stride=tile_list_stride, num_counters=num_counters, hidden=hidden, width=width,
        clamp=clamp, ACTS=ACTS, BY_GROUP=False, FACTOR=FORMAT.FACTOR, HAS_BIAS=HAS_BIAS,
        ACTIVATION=ACTIVATION, PROMOTED=FORMAT.PROMOTED, WEIGHTED=WEIGHTED, HAS_COUNT=HAS_COUNT,
        HAS_STATS=HAS_STATS, RANKS=RANKS, LOCAL=LOCAL, EXPERTS=EXPERTS, SLOTS=SLOTS,
        SLOT_CHUNK=SLOTS if SLOTS < 512 else 512, TOP_K=TOP_K, SHARED=0, K_SLOTS=K_SLOTS,
        TOKENS=TOKENS, ROWS=256, ALIGN=TOKENS, TRACE=TRACE, RING=RING, ROWS_AS=ROWS_AS,
    )  # fmt: skip
    shape = TmemTile(FORMAT=FORMAT, BLOCK_K=BLOCK_K, STAGES=STAGES, SUMS=SUMS, CHUNK=CHUNK)
    linear1 = TmemLinear(
        w=l1_w, w_scale=l1_w_scale, x=l1_x, x_scale=l1_x_scale, factor=l1_factor, bias=l1_bias,
        acts_factor=acts_factor, out=acts, out_scale=acts_scale, steps=l1_steps,
        num_outputs=l1_outputs, num_bias=l1_num_bias, num_blocks=l1_num_blocks,
        factor_cols=l1_factor_cols, ACTS=ACTS, GATED=True,
    )  # fmt: skip
    linear2 = TmemLinear(
        w=l2_w, w_scale=l2_w_scale, x=l2_x, x_scale=l2_x_scale, factor=l2_factor, bias=l2_bias,
        acts_factor=acts_factor, out=rows, out_scale=rows, steps=l2_steps,
        num_outputs=l2_outputs, num_bias=l2_num_bias, num_blocks=l2_num_blocks,
        factor_cols=l2_factor_cols, ACTS=L2_ACTS, GATED=False,
    )  # fmt: skip
    pid = gl.program_id(0)
    num_ctas = gl.num_programs(0) // LOCAL
    local_rank = 0 * pid
    if LOCAL > 1:
        local_rank = fast_div(pid, num_ctas)
    rank = first_rank + local_rank
    cta_idx = pid - local_rank * num_ctas
    tile_list = tile_lists + pid * tile_list_stride
    if RANKS == 1:
        prefetch_inputs(args, cta_idx, num_ctas)
    shared = allocate_shared(args, shape, linear1)  # while the routing comes
    READERS: gl.constexpr = GROUPS + 4 if FORMAT.DECODED else GROUPS + 3
    cta = begin_cta(
        args, rank, local_rank, cta_idx, num_ctas, tile_list, READERS=READERS, STORERS=0
    )
    l1 = gemm_of(args, shape, linear1, shared, tile_list)
    l2 = gemm_of(args, shape, linear2, shared, tile_list)
    gl.thread_barrier()
    if FORMAT.DECODED:
        gl.warp_specialize(
            [(math, (cta, l1, l2, 0)), (math, (cta, l1, l2, 1)), (decode, (cta, l1, l2)),
             (issue_mma, (cta, l1, l2)), (load_weights, (cta, l1, l2)),
             (load_tokens, (cta, l1, l2)), (schedule_tiles, (cta, l1, l2))],
            [4, 4, 1, 1, 1, 1], [MATH_REGS, DECODE_REGS] + [LOAD_REGS] * 4,
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(math, (cta, l1, l2, 0)), (math, (cta, l1, l2, 1)), (issue_mma, (cta, l1, l2)),
             (load_weights, (cta, l1, l2)), (load_tokens, (cta, l1, l2)),
             (schedule_tiles, (cta, l1, l2))],
            [4, 1, 1, 1, 1], [MATH_REGS] + [LOAD_REGS] * 4,
        )  # fmt: skip
