"""The whole layer in one persistent launch: dispatch, L1, activation, L2 and combine.

Dimensions: those of the swap-AB GEMM (`gemm/swap_ab.py`), whose functions compute the tiles, so the
bits are those of the staged launches; and

  here       size
  slot       one (token, expert) pair: num_slots = tokens of all ranks * TOP_K
  part       PART_COLS = 2048 columns of a token: what one warpgroup quantises at a time
  ticket     one work item of a rank: an L1 tile, an L2 tile, or a part of a pool wave's fill
  pool wave  RING: tiles whose rows share one half of the pool (`scheduler`)

CTAs are split over the ranks of a launch in equal parts; a rank's rows in the pool follow those of
the rank before it. Every CTA reads the routing for itself. Its roles:

  schedule_tiles  takes tickets and pushes what they mean to the others; at the end it waits for all
                  CTAs
  load_weights    streams the weights of each tile
  load_tokens     waits for the pool, or for a tile's activations, then loads them into the ring
  math            one warpgroup reads the routing, one quantises tokens into the pool; then decode,
                  wgmma, epilogue; then combine
  publish         copies the epilogue's operands, and counts finished tiles for other CTAs, so that
                  math waits neither for memory nor for a release

Barriers of a CTA

  mbarrier         n       arrivals    arrived by                   awaited by
  full             STAGES  2           both loaders, and their TMA  math; load_weights (IN_FLIGHT)
  empty            STAGES  GROUPS      math                         both loaders
  amax_full        2       GROUPS      math                         math
  epilogue.full    1       1           publish                      math
  epilogue.empty   2       GROUPS      math                         publish
  item_full        2       1           schedule_tiles               the five other roles
  item_empty       2       GROUPS + 3  the five other roles         schedule_tiles
  tile_stored      2       GROUPS      math: a tile is in memory    publish
  tile_counted     2       1           publish: it is counted       math
  routed           1       1           math 0: routing is read      schedule_tiles, math 1
  own_filled       1       1           math 1: own parts in pool    load_weights
  pool_filled      1       1           load_tokens: all parts are   load_weights, publish
  own_done         1       GROUPS      math: no tile left           schedule_tiles
  all_done         1       1           schedule_tiles: no CTA's     math, before combine

Counters of a rank in global memory (`sync`): POOL, TICKET, DONE, EXIT, FILLED[wave], L2_DONE[wave],
L1_DONE[tile]. Records: the tile list and the work item are described in `scheduler`.

One CTA, three tickets (L1 tiles A and B, L2 tile C) of two steps each:

  schedule_tiles  push A, push B | A popped | take C, push C | C popped | no ticket left, push end
  math 0          routing                   A0 A1 epilogue A, B0 B1 epilogue B, C0 C1 epilogue C
  math 1          parts into the pool       the same tiles, its own slabs
  load_weights    own_filled, A0 (early)    A1 B0 B1 C0 C1
  load_tokens     wait POOL                 A0 A1 B0 B1, wait L1_DONE of C's tokens, C0 C1
  publish         pool_filled               operands A, count A, operands B, count B, operands C

Each math warpgroup has a copy of its code, and a launch waits for instructions that no cache holds:
what L1 and L2 have in common is written once, in one loop.
"""

from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from megamoe.kernels.gluon.compat import gl
from megamoe.kernels.gluon.compiler_hooks import ours
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
from megamoe.kernels.gluon.mega.prefetch_code import prefetch_code
from megamoe.kernels.gluon.mega.scheduler import (
    pop_item,
    schedule_tiles,
    tiles_of_wave,
    wait_for_pool,
    wait_for_wave,
    wave_of,
)
from megamoe.kernels.gluon.mega.state import KernelArgs
from megamoe.kernels.gluon.mega.sync import (
    L1_DONE,
    L2_DONE,
    WAIT_L1,
    read_report,
    wait_for,
)
from megamoe.kernels.gluon.pipeline import (
    GROUPS,
    fast_div,
    fence_stores,
    first_stage,
)
from megamoe.kernels.gluon.pool import ROW_ALIGN, num_n_tiles
from megamoe.kernels.hopper.gemm.epilogue import fetch_operands, publish_operands
from megamoe.kernels.hopper.gemm.swap_ab import (
    compute,
    finish,
    first_slab,
    load_token_tile,
    load_weight_step,
    multiply,
    num_warming_steps,
)
from megamoe.kernels.hopper.mega.smem import Linear, Shape, allocate_shared, gemm_of


@gluon.jit
def load_weights(cta, l1, l2):
    """One warp: stream the weights of each tile.

    Requested weights delay the tokens in memory's queues: this CTA's parts go first, and no more
    than `weights_ahead` are requested before the whole pool is filled. Later IN_FLIGHT limits them.
    """
    stage = first_stage(1)
    i = 0
    warming_steps = num_warming_steps(l1)
    mbarrier.wait(cta.own_filled, 0)
    kind = gl.to_tensor(0)
    while kind >= 0:
        item = pop_item(cta, i)
        kind = item.kind
        begin = now(cta.args)
        if kind == L2:
            for k in range(l2.steps):
                stage = load_weight_step(l2, item.tile, k, k < warming_steps, stage)
            warming_steps -= l2.steps
            stamp(cta.args, LOAD_WEIGHTS, i, L2, item.ticket, begin)
        elif kind == L1:
            for k in range(l1.steps):
                if (i == 0) & (k == cta.args.weights_ahead):
                    mbarrier.wait(cta.pool_filled, 0)
                stage = load_weight_step(l1, item.tile, k, k < warming_steps, stage)
            warming_steps -= l1.steps
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
def publish(cta, l1, l2):
    """One warp: the epilogue's operands of each tile; then count it for all CTAs.

    L1 tiles are counted, with a ring L2 tiles too. Rows' destinations are in memory unless there is
    a report once the pool, or the tile's pool wave, was waited for.
    """
    num_counted = 0
    num_done = 0
    i = 0
    mbarrier.wait(cta.pool_filled, 0)
    report = read_report(cta.args)
    kind = gl.to_tensor(0)
    while kind >= 0:
        item = pop_item(cta, i)
        kind = item.kind
        if kind == L2:
            wait_for_wave(cta, item.tile_idx)  # its L1 tiles may be other CTAs', and not begun
            if cta.args.RING:
                report = read_report(cta.args)
            fetch_operands(l2, num_done, item.tile)
            publish_operands(l2, report)
            num_done += 1
        elif kind == L1:
            wait_for_wave(cta, item.tile_idx)
            fetch_operands(l1, num_done, item.tile)
            publish_operands(l1)
            num_done += 1
        if (kind == L1) | (cta.args.RING & (kind == L2)):
            mbarrier.wait(cta.tile_stored.index(num_counted & 1), (num_counted >> 1) & 1)
            fence_stores()
            if kind == L1:
                counter = cta.counters + L1_DONE + item.tile_idx
                gl.atomic_add(counter, 1, sem="release", scope="gpu")
            else:
                wave = wave_of(cta, item.tile_idx)
                if tiles_of_wave(cta, wave + 2) > 0:  # else the count could come after cleaning
                    counter = cta.counters + L2_DONE + wave
                    gl.atomic_add(counter, 1, sem="release", scope="gpu")
            mbarrier.arrive(cta.tile_counted.index(num_counted & 1), count=1)
            num_counted += 1
        i += 1


@gluon.jit
def _arrive_stored(cta, num_stored):
    """math: let `publish` count the CTA's stored tile number `num_stored`."""
    fence_stores()
    mbarrier.wait(cta.tile_counted.index(num_stored & 1), ((num_stored >> 1) & 1) ^ 1)
    gl.thread_barrier()
    mbarrier.arrive(cta.tile_stored.index(num_stored & 1), count=1)


@gluon.jit
def _compute(l1, l2, is_l1, tile, num_done, num_l1_done, stage, WG: gl.constexpr):
    """One tile of L1 or L2, from the ring to memory; images of both linears share one loop."""
    slab = first_slab(l1, tile.n_tile_idx, WG)
    if l1.WEIGHTS.DECODED:
        steps = gl.where(is_l1, l1.steps, l2.steps)
        low, high, stage = multiply(l1, steps, tile.expert, slab, stage, WG)
        if is_l1:
            finish(l1, low, high, tile, slab, num_done, num_l1_done, WG)
        else:
            finish(l2, low, high, tile, slab, num_done, num_l1_done, WG)
    elif is_l1:
        stage = compute(l1, tile, slab, num_done, num_l1_done, stage, WG)
    else:
        stage = compute(l2, tile, slab, num_done, num_l1_done, stage, WG)
    return stage


@gluon.jit
def math(cta, l1, l2, WG: gl.constexpr):
    """One warpgroup: routing or tokens into the pool, its slabs of every tile, then combine."""
    l2_n_tiles = num_n_tiles(l2, cta.args.ROWS)
    begin = now(cta.args)
    n = 0
    if WG == 0:
        read_routing(cta)
        n = stamp(cta.args, MATH, n, ROUTE, 0, begin)
    else:
        fill_pool(cta)
        stamp(cta.args, PUBLISH, 0, FILL, 0, begin)
    stage = first_stage(0)
    i = 0
    num_done = 0
    num_l1_done = 0
    num_stored = 0
    kind = gl.to_tensor(0)
    while kind >= 0:
        item = pop_item(cta, i)
        kind = item.kind
        if (kind == L1) | (kind == L2):
            is_l1 = kind == L1
            mbarrier.wait(l1.full.index(stage.idx), stage.phase)  # its time begins here
            begin = now(cta.args)
            stage = _compute(l1, l2, is_l1, item.tile, num_done, num_l1_done, stage, WG)
            if is_l1 | cta.args.RING:
                _arrive_stored(cta, num_stored)
                num_stored += 1
            num_done += 1
            num_l1_done += is_l1.to(gl.int32)
            if WG == 0:
                n = stamp(cta.args, MATH, n, kind, item.ticket, begin)
        if cta.args.RING:  # noqa: SIM102  known at compile time, unlike the kind
            if kind == FILL:
                begin = now(cta.args)
                fill_later(cta, item.tile_idx, item.tile.n_tile_idx, l2_n_tiles, WG)
                if WG == 0:
                    n = stamp(cta.args, MATH, n, FILL, item.ticket, begin)
        i += 1
    begin = now(cta.args)
    mbarrier.arrive(cta.own_done, count=1)
    if cta.args.TRACE and WG == 0:
        mbarrier.wait(cta.all_done, 0)
        n = stamp(cta.args, MATH, n, END, 0, begin)
        begin = now(cta.args)
    combine(cta, WG)
    if WG == 0:
        stamp(cta.args, MATH, n, COMBINE, 0, begin)


@ours
@gluon.jit(
    do_not_specialize=[
        "g_stride", "bound_ns", "weights_ahead", "absent_rank", "first_rank", "first_slot",
        "num_slots", "tokens_per_rank", "num_experts", "rows_per_rank", "pool_rows", "wave_rows",
        "tile_list_stride", "num_counters", "l1_steps", "l2_steps", "l1_factor_rows",
        "l1_factor_cols", "l2_factor_rows", "l2_factor_cols",
    ],
    do_not_specialize_on_alignment=["topk_idx", "topk_weights", "num_valid", "error", "stats"],
)  # fmt: skip
def mega_kernel(
    x, x_stride, g, g_stride, topk_idx, topk_weights, num_valid, error, stats, y, pool, pool_scale,
    row_dest, row_weight, row_factor, acts, acts_scale, rows, tile_lists, counters, signals, peers,
    inbox, inbox_scale, inbox_slots, inbox_weights, inbox_counts, report, trace,
    bound_ns: gl.int64,
    weights_ahead, absent_rank, first_rank, first_slot, num_slots, tokens_per_rank, num_experts,
    rows_per_rank, pool_rows, wave_rows, tile_list_stride, num_counters, hidden, width, clamp,
    acts_factor,
    l1_w, l1_w_scale, l1_x, l1_x_scale, l1_factor, l1_bias, l1_steps, l1_outputs, l1_num_bias,
    l1_factor_rows, l1_factor_cols,
    l2_w, l2_w_scale, l2_x, l2_x_scale, l2_factor, l2_bias, l2_steps, l2_outputs, l2_num_bias,
    l2_factor_rows, l2_factor_cols,
    WEIGHTS: gl.constexpr, ACTS: gl.constexpr, L2_ACTS: gl.constexpr, PROMOTED: gl.constexpr,
    FACTOR: gl.constexpr, HAS_BIAS: gl.constexpr, WEIGHTED: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_COUNT: gl.constexpr, HAS_STATS: gl.constexpr,
    RANKS: gl.constexpr, LOCAL: gl.constexpr, EXPERTS: gl.constexpr, SLOTS: gl.constexpr,
    TOP_K: gl.constexpr, SHARED: gl.constexpr, K_SLOTS: gl.constexpr, TOKENS: gl.constexpr,
    SLABS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, IN_FLIGHT: gl.constexpr,
    MATH_REGS: gl.constexpr, LOAD_REGS: gl.constexpr, TRACE: gl.constexpr, RING: gl.constexpr,
    ROWS_AS: gl.constexpr,
):  # fmt: skip
    """The launch: persistent CTAs, all resident. Arguments as in `KernelArgs` and `Linear`.

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
        clamp=clamp, ACTS=ACTS, BY_GROUP=WEIGHTS.BY_GROUP, FACTOR=FACTOR, HAS_BIAS=HAS_BIAS,
        ACTIVATION=ACTIVATION, PROMOTED=PROMOTED, WEIGHTED=WEIGHTED, HAS_COUNT=HAS_COUNT,
        HAS_STATS=HAS_STATS, RANKS=RANKS, LOCAL=LOCAL, EXPERTS=EXPERTS, SLOTS=SLOTS,
        SLOT_CHUNK=SLOTS if SLOTS < 512 else 512, TOP_K=TOP_K, SHARED=SHARED, K_SLOTS=K_SLOTS,
        TOKENS=TOKENS, ROWS=GROUPS * SLABS * 64, ALIGN=ROW_ALIGN, TRACE=TRACE, RING=RING,
        ROWS_AS=ROWS_AS,
    )  # fmt: skip
    shape = Shape(WEIGHTS=WEIGHTS, SLABS=SLABS, DEPTH=DEPTH, STAGES=STAGES, IN_FLIGHT=IN_FLIGHT)
    linear1 = Linear(
        w=l1_w, w_scale=l1_w_scale, x=l1_x, x_scale=l1_x_scale, factor=l1_factor, bias=l1_bias,
        acts_factor=acts_factor, out=acts, out_scale=acts_scale, steps=l1_steps,
        num_outputs=l1_outputs, num_bias=l1_num_bias, factor_rows=l1_factor_rows,
        factor_cols=l1_factor_cols, ACTS=ACTS, GATED=True,
    )  # fmt: skip
    linear2 = Linear(
        w=l2_w, w_scale=l2_w_scale, x=l2_x, x_scale=l2_x_scale, factor=l2_factor, bias=l2_bias,
        acts_factor=acts_factor, out=rows, out_scale=rows, steps=l2_steps,
        num_outputs=l2_outputs, num_bias=l2_num_bias, factor_rows=l2_factor_rows,
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
    prefetch_code(RANKS > 1)
    if RANKS == 1:
        prefetch_inputs(args, cta_idx, num_ctas)
    shared = allocate_shared(args, shape, linear1, linear2)  # while the routing comes
    cta = begin_cta(
        args, rank, local_rank, cta_idx, num_ctas, tile_list, READERS=GROUPS + 3, STORERS=GROUPS
    )
    l1 = gemm_of(args, shape, linear1, shared.w_l1, shared, tile_list)
    l2 = gemm_of(args, shape, linear2, shared.w_l2, shared, tile_list)
    gl.thread_barrier()
    gl.warp_specialize(
        [(math, (cta, l1, l2, 0)), (math, (cta, l1, l2, 1)), (load_weights, (cta, l1, l2)),
         (load_tokens, (cta, l1, l2)), (publish, (cta, l1, l2)), (schedule_tiles, (cta, l1, l2))],
        [4, 1, 1, 1, 1], [MATH_REGS] + [LOAD_REGS] * 4,
    )  # fmt: skip
