"""The whole layer in one persistent launch: dispatch, L1, activation, L2 and combine.

Every CTA reads the routing for itself; its roles:
  deal           (`tickets`) draws tickets, all L1 tiles, then all L2 tiles, or the waves of a ring
                 (`waves`), and tells the others what they mean; at the end it meets all CTAs
  load_weights   streams the weights of each tile
  load_tokens    waits for the pool, or for a tile's activations, then brings tokens into the ring
  math           one warpgroup reads the routing, one quantises tokens into the pool; then decode,
                 wgmma, epilogue; then combine
  publish        brings what an epilogue needs, and tells the other CTAs of finished tiles, so that
                 math waits neither for memory nor for a release
Tiles are computed by `swapped`'s own functions, so bits are those of the staged launches. CTAs are
dealt to the ranks of a launch in equal parts; a rank's rows lie behind those of the rank before it.
Only higher tickets wait for a ticket, and the grid is resident: nothing waits in a circle.

Each math warpgroup has a copy of its code, and a launch waits for instructions that no cache holds:
what L1 and L2 have in common is written once, in one loop.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from megamoe.kernels.hopper.gemm.notes import fetch_notes, tell_notes
from megamoe.kernels.hopper.gemm.products import multiply
from megamoe.kernels.hopper.gemm.swap_ab import (
    compute,
    early_steps,
    finish,
    first_slab,
    load_token_tile,
    load_weight_step,
)
from megamoe.kernels.hopper.mega.combine import combine
from megamoe.kernels.hopper.mega.dispatch import (
    fetch_early,
    fill_pool,
    fill_wave,
    read_routing,
    wait_for_pool,
    wait_for_wave,
)
from megamoe.kernels.hopper.mega.events import (
    COMBINE,
    FILL,
    FIRST,
    LOAD_TOKENS,
    LOAD_WEIGHTS,
    MATH,
    MEET,
    PUBLISH,
    ROUTE,
    SECOND,
    WAIT,
    now,
    stamp,
)
from megamoe.kernels.hopper.mega.prefetch_code import fetch_code
from megamoe.kernels.hopper.mega.scheduler import deal
from megamoe.kernels.hopper.mega.state import Call, Linear, allocate, prepare
from megamoe.kernels.hopper.mega.sync import (
    READY,
    SECONDS,
    WAIT_READY,
    WAIT_WAVE,
    greet,
    of_rank,
    publish_stores,
    receive,
    wait_for,
)
from megamoe.kernels.hopper.mega.waves import tiles_of
from megamoe.kernels.hopper.pipeline import GROUPS, quotient, tiles_across


@gluon.jit
def load_weights(m, one, two):
    """Stream the weights of each tile.

    What stands in memory's queues holds up the tokens: this CTA's go first, and what is asked for
    before all are there is no more than `ahead`. Later a window holds it (`swapped`).
    """
    idx = 0
    phase = 1
    i = 0
    early = early_steps(one)
    mbarrier.wait(m.own_filled, 0)
    kind = gl.to_tensor(0)
    while kind >= 0:
        kind, ticket, tile, across, expert, first, end = receive(m, i)
        begin = now(m.call)
        if kind == SECOND:
            for k in range(two.steps):
                idx, phase = load_weight_step(two, expert, across, k, k < early, idx, phase)
            early -= two.steps
            stamp(m.call, LOAD_WEIGHTS, i, SECOND, ticket, begin)
        elif kind == FIRST:
            for k in range(one.steps):
                if (i == 0) & (k == m.call.ahead):
                    mbarrier.wait(m.filled, 0)
                idx, phase = load_weight_step(one, expert, across, k, k < early, idx, phase)
            early -= one.steps
            stamp(m.call, LOAD_WEIGHTS, i, FIRST, ticket, begin)
        i += 1


@gluon.jit
def load_tokens(m, one, two):
    """Wait until a tile's tokens are there, and bring them."""
    first_across = tiles_across(one, m.call.ROWS)
    idx = 0
    phase = 1
    i = 0
    begin = now(m.call)
    wait_for_pool(m)
    n = stamp(m.call, LOAD_TOKENS, 0, WAIT, -1, begin)
    kind = gl.to_tensor(0)
    while kind >= 0:
        kind, ticket, tile, across, expert, first, end = receive(m, i)
        if kind == SECOND:
            begin = now(m.call)
            wait_for(m, m.counters + READY + tile, first_across, WAIT_READY, tile)
            n = stamp(m.call, LOAD_TOKENS, n, WAIT, ticket, begin)
            idx, phase = load_token_tile(two, first, idx, phase)
        elif kind == FIRST:
            wait_for_wave(m, tile)
            idx, phase = load_token_tile(one, first, idx, phase)
        i += 1


@gluon.jit
def publish(m, one, two):
    """The notes of each tile; then count it where all see it: L1 tiles, of a ring L2 tiles too."""
    done = 0
    noted = 0
    i = 0
    mbarrier.wait(m.filled, 0)
    kind = gl.to_tensor(0)
    while kind >= 0:
        kind, ticket, tile, across, expert, first, end = receive(m, i)
        if kind == SECOND:
            wait_for_wave(m, tile)  # its L1 tiles may be others', and not begun
            fetch_notes(two, noted, expert, across, first, end)
            tell_notes(two)
            noted += 1
        elif kind == FIRST:
            wait_for_wave(m, tile)
            fetch_notes(one, noted, expert, across, first, end)
            tell_notes(one)
            noted += 1
        if (kind == FIRST) | (m.call.RING & (kind == SECOND)):
            mbarrier.wait(m.stored.index(done & 1), (done >> 1) & 1)
            publish_stores()
            if kind == FIRST:
                gl.atomic_add(m.counters + READY + tile, 1, sem="release", scope="gpu")
            else:
                wave = gl.load(m.private + tile * 4 + 3)
                if tiles_of(m, wave + 2) > 0:  # a fill waits; else it could come after cleaning
                    counter = m.counters + SECONDS + wave
                    gl.atomic_add(counter, 1, sem="release", scope="gpu")
            mbarrier.arrive(m.told.index(done & 1), count=1)
            done += 1
        i += 1


@gluon.jit
def tell_stored(m, done):
    """math: let `publish` count tile number `done` of this CTA."""
    publish_stores()
    mbarrier.wait(m.told.index(done & 1), ((done >> 1) & 1) ^ 1)
    gl.thread_barrier()
    mbarrier.arrive(m.stored.index(done & 1), count=1)


@gluon.jit
def _compute(one, two, is_first, expert, across, first, end, done, firsts, idx, phase,
             WG: gl.constexpr):  # fmt: skip
    """One tile of L1 or L2, from the ring to memory; images of both linears take one loop."""
    slab = first_slab(one, across, WG)
    if one.WEIGHTS.DECODED:
        steps = gl.where(is_first, one.steps, two.steps)
        low, high, idx, phase = multiply(one, steps, expert, slab, idx, phase, WG)
        if is_first:
            finish(one, low, high, expert, slab, first, end, done, firsts, WG)
        else:
            finish(two, low, high, expert, slab, first, end, done, firsts, WG)
    elif is_first:
        idx, phase = compute(one, expert, slab, first, end, done, firsts, idx, phase, WG)
    else:
        idx, phase = compute(two, expert, slab, first, end, done, firsts, idx, phase, WG)
    return idx, phase


@gluon.jit
def _fill_later(m, wave, item, second_across, WG: gl.constexpr):
    """RING: a part of a later wave's tokens, once L2 needs those of two waves before no more."""
    before = wave - 2
    want = tiles_of(m, before) * second_across
    wait_for(m, m.counters + SECONDS + before, want, WAIT_WAVE, before)
    fill_wave(m, wave, item, WG)


@gluon.jit
def math(m, one, two, WG: gl.constexpr):
    """One warpgroup: tokens into the pool, its rows of every tile, then combine."""
    second_across = tiles_across(two, m.call.ROWS)
    begin = now(m.call)
    n = 0
    if WG == 0:
        read_routing(m)
        n = stamp(m.call, MATH, n, ROUTE, 0, begin)
    else:
        fill_pool(m)
        stamp(m.call, PUBLISH, 0, FILL, 0, begin)
    idx = 0
    phase = 0
    i = 0
    done = 0
    firsts = 0
    told = 0
    kind = gl.to_tensor(0)
    while kind >= 0:
        kind, ticket, tile, across, expert, first, end = receive(m, i)
        if (kind == FIRST) | (kind == SECOND):
            is_first = kind == FIRST
            mbarrier.wait(one.full.index(idx), phase)  # its time begins with its first stage
            begin = now(m.call)
            idx, phase = _compute(
                one, two, is_first, expert, across, first, end, done, firsts, idx, phase, WG
            )
            if is_first | m.call.RING:
                tell_stored(m, told)
                told += 1
            done += 1
            firsts += is_first.to(gl.int32)
            if WG == 0:
                n = stamp(m.call, MATH, n, kind, ticket, begin)
        if m.call.RING:  # noqa: SIM102  known at compile time, unlike the kind
            if kind == FILL:
                begin = now(m.call)
                _fill_later(m, tile, across, second_across, WG)
                if WG == 0:
                    n = stamp(m.call, MATH, n, FILL, ticket, begin)
        i += 1
    begin = now(m.call)
    mbarrier.arrive(m.own_done, count=1)
    if m.call.TRACE and WG == 0:
        mbarrier.wait(m.all_done, 0)
        n = stamp(m.call, MATH, n, MEET, 0, begin)
        begin = now(m.call)
    combine(m, WG)
    if WG == 0:
        stamp(m.call, MATH, n, COMBINE, 0, begin)


@gluon.jit(
    do_not_specialize=[
        "g_stride", "bound_ns", "ahead", "absent", "first_rank", "first_slot", "num_slots",
        "tokens_per_rank", "num_experts", "rows_per_rank", "pool_rows", "wave_rows",
        "private_stride", "num_counters", "steps1", "steps2", "rows1", "cols1", "rows2", "cols2",
    ],
    do_not_specialize_on_alignment=["idx", "weights", "num_valid", "error", "stats"],
)  # fmt: skip
def mega_kernel(
    x, x_stride, g, g_stride, idx, weights, num_valid, error, stats, y, pool, pool_scale, row_dest,
    row_weight, row_factor, acts, acts_scale, rows, private, counters, signals, peers, report,
    trace,
    bound_ns: gl.int64,
    ahead, absent, first_rank, first_slot, num_slots, tokens_per_rank, num_experts, rows_per_rank,
    pool_rows, wave_rows, private_stride, num_counters, hidden, width, clamp, acts_factor,
    w1, ws1, x1, xs1, factor1, bias1, steps1, outputs1, biases1, rows1, cols1,
    w2, ws2, x2, xs2, factor2, bias2, steps2, outputs2, biases2, rows2, cols2,
    WEIGHTS: gl.constexpr, ACTS: gl.constexpr, LAST: gl.constexpr, PROMOTED: gl.constexpr,
    FACTOR: gl.constexpr, HAS_BIAS: gl.constexpr, WEIGHTED: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_COUNT: gl.constexpr, HAS_STATS: gl.constexpr,
    RANKS: gl.constexpr, LOCAL: gl.constexpr, EXPERTS: gl.constexpr, SLOTS: gl.constexpr,
    TOP_K: gl.constexpr, SHARED: gl.constexpr, K_SLOTS: gl.constexpr, TOKENS: gl.constexpr,
    SLABS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
    MATH_REGS: gl.constexpr, LOAD_REGS: gl.constexpr, TRACE: gl.constexpr, RING: gl.constexpr,
    ROWS_AS: gl.constexpr,
):  # fmt: skip
    """Two math warpgroups (the first is the launch's own), then four warps."""
    CHUNK: gl.constexpr = SLOTS if SLOTS < 512 else 512
    c = Call(
        x, x_stride, g, g_stride, idx, weights, num_valid, error, stats, y, pool, pool_scale,
        row_dest, row_weight, row_factor, rows, private, counters, signals, peers, report, trace,
        bound_ns, ahead, absent, first_rank, first_slot, num_slots, tokens_per_rank, num_experts,
        rows_per_rank, pool_rows, wave_rows, private_stride, num_counters, hidden, width, clamp,
        WEIGHTS, ACTS, FACTOR, HAS_BIAS, ACTIVATION, PROMOTED, WEIGHTED, HAS_COUNT, HAS_STATS,
        RANKS, LOCAL, EXPERTS, SLOTS, CHUNK, TOP_K, SHARED, K_SLOTS, TOKENS, SLABS, DEPTH,
        STAGES, GROUPS * SLABS * 64, TRACE, WINDOW, RING, ROWS_AS,
    )  # fmt: skip
    one = Linear(
        w1, ws1, x1, xs1, factor1, bias1, acts_factor, acts, acts_scale, steps1, outputs1, biases1,
        rows1, cols1, ACTS, True,
    )  # fmt: skip
    two = Linear(
        w2, ws2, x2, xs2, factor2, bias2, acts_factor, rows, rows, steps2, outputs2, biases2,
        rows2, cols2, LAST, False,
    )  # fmt: skip
    pid = gl.program_id(0)
    num_ctas = gl.num_programs(0) // LOCAL
    local = 0 * pid
    if LOCAL > 1:
        local = quotient(pid, num_ctas)
    rank = first_rank + local
    cta = pid - local * num_ctas
    mine = private + pid * private_stride
    fetch_code()
    if RANKS == 1:
        fetch_early(c, cta, num_ctas)
    memory = allocate(c, one, two)  # while the routing comes
    greet(c, rank, cta)
    place = (rank, local, cta, num_ctas, mine, of_rank(c, counters, rank))
    m, first, second = prepare(c, one, two, place, memory)
    gl.thread_barrier()
    gl.warp_specialize(
        [(math, (m, first, second, 0)), (math, (m, first, second, 1)),
         (load_weights, (m, first, second)), (load_tokens, (m, first, second)),
         (publish, (m, first, second)), (deal, (m, first, second))],
        [4, 1, 1, 1, 1], [MATH_REGS] + [LOAD_REGS] * 4,
    )  # fmt: skip
