"""The start of a fused launch: routing, and tokens into the pool.

Each CTA reads the whole routing for itself, so nobody waits for a count: the expert of every slot
and the first row of every expert stay in shared memory, its list of tiles in memory (`private`).
Slots are those of all ranks; a rank takes the ones of its own experts. Shared experts, of one rank
alone, are the last ones, and have the last slots of every token. One warpgroup reads the
routing while two others load tokens and find their scales, which do not depend on it.

Nothing is in a cache when a launch begins, its instructions neither: here short code is fast code.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from megamoe.kernels.common.columns import token_column
from megamoe.kernels.common.numbers import INF_BITS, abs_bits, e4m3_round
from megamoe.kernels.hopper.gemm.epilogue import divide
from megamoe.kernels.hopper.mega.sync import (
    FILLED,
    POOL,
    WAIT_POOL,
    WAIT_WAVE,
    add_to,
    of_rank,
    wait_for,
)
from megamoe.kernels.hopper.mega.waves import WAVES, ring_row, running_sum, write_table
from megamoe.kernels.hopper.pipeline import GROUPS, quotient

COLS = gl.constexpr(2048)  # columns of a part of a token
ALIGN = gl.constexpr(8)  # an expert's first row: TMA reads scales in whole 16 bytes
LOOK = gl.constexpr(128)  # slots that are looked at together for the rows of others
FLAT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# A warp looks at all others' slots for its own ones: no sum leaves it, and code is short.
PAIRS = gl.constexpr(gl.BlockedLayout([1, LOOK.value // 32], [1, 32], [4, 1], [1, 0]))
_FLAT_SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _source(c, token):
    """(rank of a token, its number there); some token's for one beyond the last."""
    if c.RANKS == 1:
        return 0 * token, token
    else:
        source = gl.minimum(quotient(token, c.tokens_per_rank), c.RANKS - 1)
        return source, token - source * c.tokens_per_rank


@gluon.jit
def read_slots(c, slot, token, used):
    """(expert over all ranks or -1, topk weight, whether it was neither legal nor masked)."""
    source, token = _source(c, token)
    ROUTED: gl.constexpr = c.TOP_K - c.SHARED
    at = slot
    is_routed = used
    if c.RANKS > 1:
        at = token * c.TOP_K + slot % c.TOP_K
    if c.SHARED > 0:
        number = slot - token * c.TOP_K
        is_routed = used & (number < ROUTED)
        at = token * ROUTED + number
    given = gl.load(of_rank(c, c.idx, source) + at, mask=is_routed, other=-1)
    names_none = (given < -1) | (given >= c.num_experts * c.RANKS - c.SHARED)
    expert = gl.where(names_none, -2, given).to(gl.int32)  # int64 ids must not wrap round
    weight = gl.load(of_rank(c, c.weights, source) + at, mask=is_routed, other=1.0)
    if c.SHARED > 0:
        expert = gl.where(number < ROUTED, expert, c.num_experts - c.TOP_K + number)
    if c.HAS_COUNT:  # the rest is padding
        used = used & (token < gl.load(of_rank(c, c.num_valid, source)))
    expert = gl.where(used, expert, -1)
    legal = (expert >= 0) & (gl.abs(weight) < float("inf"))
    return gl.where(legal, expert, -1), weight, (legal == 0) & (expert != -1)


@gluon.jit
def _own(c, rank, expert):
    """The expert's number on this rank, or -1."""
    local = expert - rank * c.num_experts
    return gl.where((expert >= 0) & (local >= 0) & (local < c.num_experts), local, -1)


@gluon.jit
def read_routing(m):
    """One warpgroup: fill `experts`, `firsts` and this CTA's list of tiles, and tell all roles."""
    c = m.call
    local = m.local
    private = m.private
    E: gl.constexpr = c.EXPERTS
    which = gl.arange(0, E, FLAT)
    count = gl.zeros([E], gl.int32, FLAT)
    for chunk in gl.static_range(c.SLOTS // c.CHUNK):
        slot = chunk * c.CHUNK + gl.arange(0, c.CHUNK, FLAT)
        expert, _, _ = read_slots(c, slot, slot // c.TOP_K, slot < c.num_slots)
        mine = _own(c, m.rank, expert)
        m.experts.index(chunk).store(mine.to(gl.int16))
        count += gl.histogram(gl.maximum(mine, 0), E, mask=mine >= 0, layout=FLAT)
    rows = (count + ALIGN - 1) // ALIGN * ALIGN
    first = running_sum(rows) - rows
    m.firsts.store(first)
    blocks = (count + c.TOKENS - 1) // c.TOKENS
    number = running_sum(blocks) - blocks
    tiles = gl.zeros([WAVES], gl.int32, FLAT)
    for j in range(gl.max(blocks, 0)):
        at = private + (number + j) * 4
        row = first + j * c.TOKENS
        used = j < blocks
        if c.RING:
            row, wave = ring_row(c, row, row)
            gl.store(at + 3, wave, mask=used)
            tiles += gl.histogram(gl.where(used, wave, 0), WAVES, mask=used, layout=FLAT)
        row += local * c.rows_per_rank
        gl.store(at, local * c.num_experts + which, mask=used)
        gl.store(at + 1, row, mask=used)
        gl.store(at + 2, row + gl.minimum(count - j * c.TOKENS, c.TOKENS), mask=used)
    if c.RING:
        write_table(c, private, tiles)
    m.num.store(gl.zeros([1], gl.int32, FLAT) + gl.sum(blocks, 0))
    gl.thread_barrier()
    mbarrier.arrive(m.routed, count=1)
    if c.HAS_STATS:  # noqa: SIM102  known at compile time, unlike the CTA's number
        if m.cta == 0:
            stats = c.stats + local * c.num_experts + which
            there = which < c.num_experts - c.SHARED
            gl.store(stats, gl.load(stats, mask=there, other=0) + count, mask=there)


@gluon.jit
def num_tiles(m):
    """Tiles of tokens, once the routing is read."""
    mbarrier.wait(m.routed, 0)
    return gl.max(m.num.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def fetch_early(c, cta, num_ctas):
    """Have routing and this CTA's first parts of tokens brought into L2: they are read soon.

    Where a token has no whole number of parts, other parts come; no division is worth it here.
    """
    thread = gl.arange(0, 128, FLAT)
    item = cta * _run_of(c, num_ctas)
    last = (0 * thread + c.tokens_per_rank).to(gl.int64) * c.x_stride - 1
    x = c.x + gl.minimum(item.to(gl.int64) * COLS + thread * 64, last)
    slot = gl.minimum(thread * 16, c.num_slots - 1)  # a line has as many, or twice that
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; prefetch.global.L2 [$2]; prefetch.global.L2 [$3]; mov.b32 $0, 0;",
        "=r,l,l,l", [(c.idx + slot).to(gl.int64), (c.weights + slot).to(gl.int64), x.to(gl.int64)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _ratio(x, step):
    """x / step, correctly rounded for BF16 x and the step of their amax: one division a group.

    A test goes through all pairs of mantissas. Tiny steps are lifted, or 1 / step overflows.
    """
    lift = gl.where(step < 2.0**-60, 2.0**64, 1.0)
    by = step * lift
    inverse = gl.expand_dims(gl.div_rn(1.0 + 0.0 * by, by), 1)
    return divide(x * gl.expand_dims(lift, 1), gl.expand_dims(by, 1), inverse)


@gluon.jit
def _held(c, source, token):
    """Columns as the pool holds them, and their FP32 scales per 128 where it has any."""
    A: gl.constexpr = c.ACTS
    scale = 1.0
    if A.HOLD == "plain":
        held = source
    else:
        GROUP: gl.constexpr = A.GROUP
        x = source.to(gl.float32).reshape([COLS // GROUP, GROUP])
        bits = gl.max(abs_bits(x), 1)
        if GROUP == 128:
            size = bits.to(gl.float32, bitcast=True)
            by: gl.constexpr = 1.0 / 448.0
            scale = gl.where(bits == 0, 1.0, divide(size, 448.0 + 0.0 * size, by))
            scale = gl.where(bits >= INF_BITS, float("nan"), scale)
            step = scale
        elif GROUP == 16:
            size = bits.to(gl.float32, bitcast=True)
            by = gl.load(c.g + token * c.g_stride)
            scale = e4m3_round(gl.where(bits == 0, 1.0, gl.div_rn(size, 6.0 * by + 0.0 * size)))
            scale = gl.where(bits >= INF_BITS, float("nan"), scale)
            step = scale * by
        else:
            _, scale, step = A.scale(bits, 1.0, A.EXPONENT, A.MANTISSA)
        dead = (step == 0.0) | (abs_bits(step) >= INF_BITS)
        step = gl.where(dead, 1.0, step)
        if GROUP == 128:  # noqa: SIM108  known at compile time
            ratio = _ratio(x, step)
        else:
            ratio = gl.div_rn(x, gl.expand_dims(step, 1) + 0.0 * x)
        ratio = gl.where(gl.expand_dims(dead, 1), 0.0, ratio)
        if A.HOLD == "codes":
            held = ratio.to(gl.float8e4nv).reshape([COLS])
        elif A.HOLD == "scaled":
            held = A.round(ratio).to(gl.bfloat16).reshape([COLS])
        else:
            held = (A.round(ratio) * gl.expand_dims(scale, 1)).to(gl.bfloat16).reshape([COLS])
    return held, scale


@gluon.jit
def _slots_of(m, token):
    """(expert of this rank or -1, topk weight) of each slot of a token, a few in every warp."""
    c = m.call
    number = gl.arange(0, c.K_SLOTS, gl.SliceLayout(1, PAIRS))
    slot = token * c.TOP_K + number
    expert, weight, _ = read_slots(c, slot, token + 0 * number, number < c.TOP_K)
    return _own(c, m.rank, expert), weight


@gluon.jit
def _rows_of(m, token, mine, low, high):
    """Pool row of each slot of a token whose experts are `mine`.

    -1 where the slot is not this rank's, or of a ring's wave below `low`, or not below `high`.
    """
    c = m.call
    experts = m.experts._reinterpret(gl.int16, [c.SLOTS // LOOK, LOOK], _FLAT_SHARED)
    slot = token * c.TOP_K + gl.arange(0, c.K_SLOTS, gl.SliceLayout(1, PAIRS))
    which = gl.expand_dims(gl.arange(0, c.EXPERTS, gl.SliceLayout(0, PAIRS)), 0)
    firsts = gl.expand_dims(m.firsts.load(gl.SliceLayout(0, PAIRS)), 0)
    first = gl.sum(gl.where(which == gl.expand_dims(mine, 1), firsts, 0), 1)
    row = first
    for chunk in range((token * c.TOP_K + c.TOP_K + LOOK - 1) // LOOK):
        other = chunk * LOOK + gl.arange(0, LOOK, gl.SliceLayout(0, PAIRS))
        theirs = experts.index(chunk).load(gl.SliceLayout(0, PAIRS)).to(gl.int32)
        same = (gl.expand_dims(theirs, 0) == gl.expand_dims(mine, 1)) & (
            gl.expand_dims(other, 0) < gl.expand_dims(slot, 1)
        )
        row += gl.sum(same.to(gl.int32), 1)
    is_here = mine >= 0
    if c.RING:
        row, wave = ring_row(c, row, first + (row - first) // c.TOKENS * c.TOKENS)
        is_here = is_here & (wave >= low) & (wave < high)
    return gl.where(is_here, m.local * c.rows_per_rank + row, -1)


@gluon.jit
def num_parts(c):
    """Parts of tokens, of all ranks."""
    return c.num_slots // c.TOP_K * ((c.width + COLS - 1) // COLS)


@gluon.jit
def wait_for_pool(m):
    """One warp: until all tokens are in the pool; the CTA's other roles wait for `filled`."""
    wait_for(m, m.counters + POOL, num_parts(m.call), WAIT_POOL, m.rank)
    mbarrier.arrive(m.filled, count=1)


@gluon.jit
def wait_for_wave(m, tile):
    """Until the wave of a ring that has the tile is in the pool; the first two wait with it."""
    if m.call.RING:
        wave = gl.load(m.private + tile * 4 + 3)
        if wave >= 2:
            wait_for(m, m.counters + FILLED + wave, num_parts(m.call), WAIT_WAVE, wave)


@gluon.jit
def _run_of(c, num_ctas):
    """How many parts, one behind the other, a CTA puts into the pool: all in one go."""
    return quotient(num_parts(c) + num_ctas - 1, num_ctas)


@gluon.jit
def fill_pool(m):
    """This CTA's share of the tokens, for the first two waves where the pool is a ring."""
    run = _run_of(m.call, m.num_ctas)
    begin = m.cta * run
    end = gl.minimum(begin + run, num_parts(m.call))
    _fill(m, begin, end, 0, 2, m.counters + POOL)
    mbarrier.arrive(m.own_filled, count=1)


@gluon.jit
def fill_wave(m, wave, item, WG: gl.constexpr):
    """One warpgroup's part of the tokens of a later wave."""
    begin = item * GROUPS + WG
    end = gl.minimum(begin + 1, num_parts(m.call))
    _fill(m, begin, end, wave, wave + 1, m.counters + FILLED + wave)


@gluon.jit
def _before(held):
    """A volatile no-op, to have the values computed before the wait that follows.

    The assembler still puts some behind it, but takes no bytes apart: 48 instructions less.
    """
    PACK: gl.constexpr = 32 // held.dtype.primitive_bitwidth
    return gl.inline_asm_elementwise("", "=r,0", [held], dtype=held.dtype, is_pure=False, pack=PACK)


@gluon.jit
def _fill(m, begin, end, low, high, counter):
    """Parts from `begin` to `end`: quantise once, write to each row of the token.

    Finding the rows takes long: it is done once for the parts of a token that come together.
    """
    c = m.call
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 4], [1, 0])
    SMALL: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])  # rows as in PAIRS
    parts = (c.width + COLS - 1) // COLS
    before = -1
    row = gl.zeros([c.K_SLOTS], gl.int32, gl.SliceLayout(1, PAIRS))
    for item in range(begin, end):
        token = quotient(item, parts)
        part = item - token * parts
        col = part * COLS + gl.arange(0, COLS, gl.SliceLayout(0, WIDE))
        source, here = _source(c, token)
        given = col
        if c.WEIGHTS.BY_GROUP:
            given = part * COLS + token_column(gl.arange(0, COLS, gl.SliceLayout(0, WIDE)))
        x = of_rank(c, c.x, source) + here.to(gl.int64) * c.x_stride + given
        values = gl.load(x, mask=given < c.hidden, other=0.0)
        mine, weight = _slots_of(m, token)
        held, scale = _held(c, values, token)
        held = gl.expand_dims(_before(gl.convert_layout(held, gl.SliceLayout(0, WIDE))), 0)
        if c.PROMOTED:
            scale = gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(0, SMALL)), 0)
        if token != before:
            mbarrier.wait(m.routed, 0)
            row = _rows_of(m, token, mine, low, high)
            before = token
        wide_row = gl.convert_layout(row, gl.SliceLayout(1, WIDE))
        at = gl.expand_dims(wide_row * c.width, 1) + gl.expand_dims(col, 0)
        mask = gl.expand_dims(wide_row >= 0, 1) & gl.expand_dims(col < c.width, 0)
        held, at = gl.broadcast(held, at)
        gl.store(c.pool + at, held, mask=mask)
        if c.PROMOTED:
            block = part * (COLS // 128) + gl.arange(0, COLS // 128, gl.SliceLayout(0, SMALL))
            to = gl.convert_layout(row, gl.SliceLayout(1, SMALL), assert_trivial=True)
            at = gl.expand_dims(block * c.pool_rows, 0) + gl.expand_dims(to, 1)
            mask = gl.expand_dims(to >= 0, 1) & gl.expand_dims(block < c.width // 128, 0)
            scale, at = gl.broadcast(scale, at)
            gl.store(c.pool_scale + at, scale, mask=mask)
        if part == 0:
            used = row >= 0
            number = gl.arange(0, c.K_SLOTS, gl.SliceLayout(1, PAIRS))
            dest = token * c.TOP_K + number
            if c.RANKS > 1:
                dest = (here * c.TOP_K + number).to(gl.int64) * c.hidden
                dest += gl.load(c.peers + source) >> 1  # BF16
            gl.store(c.row_dest + row, dest, mask=used)
            gl.store(c.row_weight + row, weight, mask=used)
            if c.FACTOR == "expert":
                by = gl.load(c.g + token * c.g_stride) + 0.0 * weight
                gl.store(c.row_factor + row, by, mask=used)
    if begin < end:
        add_to(counter, end - begin)
