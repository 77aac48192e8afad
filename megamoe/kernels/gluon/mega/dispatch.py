"""The start of a fused launch: routing, and tokens into the pool.

Each CTA reads the whole routing for itself, so none waits for another's counts: the expert of every
slot and the first row of every expert stay in shared memory, its tile list in global memory. Shared
experts are the last ones, and have the last slots of every token. One warpgroup reads the routing
while the other loads tokens and computes their scales, which do not depend on it.

Over several ranks tokens come quantised and their slots counted, from the inbox (`push`, `inbox`).

Nothing is in a cache when a launch begins, not even its instructions: short code is fast code here.
"""

from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from megamoe.kernels.common.columns import token_column
from megamoe.kernels.gluon.compat import gl, reinterpret
from megamoe.kernels.gluon.mega.inbox import (
    inbox_counts,
    inbox_rows,
    read_g,
    read_scale_bytes,
    read_scales,
    read_slot_words,
    source_of,
    store_row_begins,
    token_ends,
    values_per_element,
)
from megamoe.kernels.gluon.mega.quantise import quantise_part
from megamoe.kernels.gluon.mega.scheduler import (
    WAVES,
    ring_row,
    running_sum,
    tiles_of_wave,
    write_wave_table,
)
from megamoe.kernels.gluon.mega.state import FLAT, PAIR_SLOTS, PAIRS, PART_COLS, num_parts
from megamoe.kernels.gluon.mega.sync import (
    FILLED,
    L2_DONE,
    POOL,
    WAIT_WAVE,
    own,
    publish_count,
    wait_for,
)
from megamoe.kernels.gluon.pipeline import FLAT_SHARED, GROUPS, fast_div
from megamoe.kernels.gluon.placed import PLACED_ROWS, placed_group, placed_row
from megamoe.kernels.gluon.pool import (
    TILE_EXPERT,
    TILE_ROW_BEGIN,
    TILE_ROW_END,
    TILE_WAVE,
    TILE_WORDS,
)

# -- routing -------------------------------------------------------------------------------------


@gluon.jit
def read_slots(args, rank, slot, token, used):
    """(expert over all ranks or -1, topk weight, whether it was neither legal nor masked) [N].

    Of slots of a rank's own tokens.
    """
    ROUTED: gl.constexpr = args.TOP_K - args.SHARED
    at = slot
    is_routed = used
    if args.SHARED > 0:
        number = slot - token * args.TOP_K
        is_routed = used & (number < ROUTED)
        at = token * ROUTED + number
    idx = gl.load(own(args, args.topk_idx, rank) + at, mask=is_routed, other=-1)
    names_none = (idx < -1) | (idx >= args.num_experts * args.RANKS - args.SHARED)
    expert = gl.where(names_none, -2, idx).to(gl.int32)  # int64 ids must not wrap round
    weight = gl.load(own(args, args.topk_weights, rank) + at, mask=is_routed, other=1.0)
    if args.SHARED > 0:
        expert = gl.where(number < ROUTED, expert, args.num_experts - args.TOP_K + number)
    if args.HAS_COUNT:  # the rest is padding
        used = used & (token < gl.load(own(args, args.num_valid, rank)))
    expert = gl.where(used, expert, -1)
    legal = (expert >= 0) & (gl.abs(weight) < float("inf"))
    return gl.where(legal, expert, -1), weight, (legal == 0) & (expert != -1)


@gluon.jit
def local_expert(args, rank, expert):
    """The expert's number on a rank, or -1."""
    local = expert - rank * args.num_experts
    return gl.where((expert >= 0) & (local >= 0) & (local < args.num_experts), local, -1)


@gluon.jit
def _count_slots(cta):
    """One rank: [EXPERTS] slots of each expert; fills `slot_expert`."""
    args = cta.args
    E: gl.constexpr = args.EXPERTS
    count = gl.zeros([E], gl.int32, FLAT)
    for chunk in gl.static_range(args.SLOTS // args.SLOT_CHUNK):
        slot = chunk * args.SLOT_CHUNK + gl.arange(0, args.SLOT_CHUNK, FLAT)
        expert, _, _ = read_slots(args, cta.rank, slot, slot // args.TOP_K, slot < args.num_slots)
        mine = local_expert(args, cta.rank, expert)
        cta.slot_expert.index(chunk).store(mine.to(gl.int16))
        count += gl.histogram(gl.maximum(mine, 0), E, mask=mine >= 0, layout=FLAT)
    return count


@gluon.jit
def read_routing(cta):
    """One warpgroup: fill `slot_expert`, `expert_row_begin` and the tile list; arrive at `routed`.

    An expert's rows begin at a multiple of ALIGN, and its tiles have TOKENS rows.
    """
    args = cta.args
    local_rank = cta.local_rank
    tile_list = cta.tile_list
    E: gl.constexpr = args.EXPERTS
    expert_idx = gl.arange(0, E, FLAT)
    if args.RANKS == 1:
        count = _count_slots(cta)
    else:
        counts = inbox_counts(cta)
        count = gl.convert_layout(gl.sum(counts, 0), FLAT)
    rows = (count + args.ALIGN - 1) // args.ALIGN * args.ALIGN
    row_begin = running_sum(rows) - rows
    if args.RANKS == 1:
        cta.expert_row_begin.store(row_begin)
    else:
        store_row_begins(cta, counts, row_begin)
    blocks = (count + args.TOKENS - 1) // args.TOKENS
    first_tile = running_sum(blocks) - blocks
    wave_tiles = gl.zeros([WAVES], gl.int32, FLAT)
    for j in range(gl.max(blocks, 0)):
        at = tile_list + (first_tile + j) * TILE_WORDS
        row = row_begin + j * args.TOKENS
        used = j < blocks
        if args.RING:
            row, wave = ring_row(args, row, row)
            gl.store(at + TILE_WAVE, wave, mask=used)
            wave_tiles += gl.histogram(gl.where(used, wave, 0), WAVES, mask=used, layout=FLAT)
        row += local_rank * args.rows_per_rank
        gl.store(at + TILE_EXPERT, local_rank * args.num_experts + expert_idx, mask=used)
        gl.store(at + TILE_ROW_BEGIN, row, mask=used)
        row_end = row + gl.minimum(count - j * args.TOKENS, args.TOKENS)
        gl.store(at + TILE_ROW_END, row_end, mask=used)
    if args.RING:
        write_wave_table(args, tile_list, wave_tiles)
    cta.num_tiles.store(gl.zeros([1], gl.int32, FLAT) + gl.sum(blocks, 0))
    gl.thread_barrier()
    mbarrier.arrive(cta.routed, count=1)
    if args.HAS_STATS:  # noqa: SIM102  known at compile time, unlike the CTA's number
        if cta.cta_idx == 0:
            stats = args.stats + local_rank * args.num_experts + expert_idx
            is_routed = expert_idx < args.num_experts - args.SHARED
            gl.store(stats, gl.load(stats, mask=is_routed, other=0) + count, mask=is_routed)


@gluon.jit
def _token_slots(cta, token):
    """(local expert or -1, topk weight) [K_SLOTS] of a token's slots, a few in every warp."""
    args = cta.args
    number = gl.arange(0, args.K_SLOTS, gl.SliceLayout(1, PAIRS))
    slot = token * args.TOP_K + number
    expert, weight, _ = read_slots(args, cta.rank, slot, token + 0 * number, number < args.TOP_K)
    return local_expert(args, cta.rank, expert), weight


@gluon.jit
def _pool_rows(cta, token, mine, wave_begin, wave_end):
    """One rank: pool row [K_SLOTS] of each slot of a token, whose experts are `mine` [K_SLOTS].

    The row is the expert's first one plus the number of earlier slots of that expert, which are
    counted by comparing with all of them, PAIR_SLOTS at a time: K_SLOTS x earlier slots compares.
    -1 where the slot is masked, or of a pool wave outside [wave_begin, wave_end).
    """
    args = cta.args
    SHAPE: gl.constexpr = [args.SLOTS // PAIR_SLOTS, PAIR_SLOTS]
    slot_expert = reinterpret(cta.slot_expert, gl.int16, SHAPE, FLAT_SHARED)
    slot = token * args.TOP_K + gl.arange(0, args.K_SLOTS, gl.SliceLayout(1, PAIRS))
    expert_idx = gl.expand_dims(gl.arange(0, args.EXPERTS, gl.SliceLayout(0, PAIRS)), 0)
    row_begin = gl.expand_dims(cta.expert_row_begin.load(gl.SliceLayout(0, PAIRS)), 0)
    begin = gl.sum(gl.where(expert_idx == gl.expand_dims(mine, 1), row_begin, 0), 1)
    row = begin
    for chunk in range((token * args.TOP_K + args.TOP_K + PAIR_SLOTS - 1) // PAIR_SLOTS):
        other = chunk * PAIR_SLOTS + gl.arange(0, PAIR_SLOTS, gl.SliceLayout(0, PAIRS))
        theirs = slot_expert.index(chunk).load(gl.SliceLayout(0, PAIRS)).to(gl.int32)
        same = (gl.expand_dims(theirs, 0) == gl.expand_dims(mine, 1)) & (
            gl.expand_dims(other, 0) < gl.expand_dims(slot, 1)
        )
        row += gl.sum(same.to(gl.int32), 1)
    return _in_waves(cta, begin, row, mine >= 0, wave_begin, wave_end)


@gluon.jit
def _in_waves(cta, begin, row, is_here, wave_begin, wave_end):
    """Rows in the pool of rows in the long pool, of experts that begin at `begin`; -1: not here."""
    args = cta.args
    if args.RING:
        row, wave = ring_row(args, row, begin + (row - begin) // args.TOKENS * args.TOKENS)
        is_here = is_here & (wave >= wave_begin) & (wave < wave_end)
    return gl.where(is_here, cta.local_rank * args.rows_per_rank + row, -1)


# -- tokens into the pool ------------------------------------------------------------------------


@gluon.jit
def prefetch_inputs(args, cta_idx, num_ctas):
    """Bring routing and this CTA's first parts of tokens into the L2 cache: they are read soon.

    If a token's width is not a multiple of PART_COLS, neighbouring parts are prefetched instead;
    that is harmless, and cheaper than a division.
    """
    thread = gl.arange(0, 128, FLAT)
    item = cta_idx * _parts_per_cta(args, args.num_slots, num_ctas)
    last = (0 * thread + args.tokens_per_rank).to(gl.int64) * args.x_stride - 1
    x = args.x + gl.minimum(item.to(gl.int64) * PART_COLS + thread * 64, last)
    slot = gl.minimum(thread * 16, args.num_slots - 1)  # a cache line has 16 or 32
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; prefetch.global.L2 [$2]; prefetch.global.L2 [$3]; mov.b32 $0, 0;",
        "=r,l,l,l",
        [(args.topk_idx + slot).to(gl.int64), (args.topk_weights + slot).to(gl.int64),
         x.to(gl.int64)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _computed(values):
    """A volatile no-op, to have the values computed before the wait that follows.

    The assembler still sinks some of them below the wait, but no longer unpacks bytes there (48
    fewer instructions).
    """
    PACK: gl.constexpr = 32 // values.dtype.primitive_bitwidth
    return gl.inline_asm_elementwise(
        "", "=r,0", [values], dtype=values.dtype, is_pure=False, pack=PACK
    )


@gluon.jit
def _store_placed(args, scale, row, part):
    """Bytes of a part's scales to each row of the token, where the MMA's copies find them."""
    G: gl.constexpr = args.ACTS.GROUP
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    scale = gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(0, WORDS)), 0)
    group = part * (PART_COLS // G) + gl.arange(0, PART_COLS // G, gl.SliceLayout(0, WORDS))
    to = gl.convert_layout(row, gl.SliceLayout(1, WORDS))
    tile_bytes = args.width // G * PLACED_ROWS
    begin = (to // args.TOKENS).to(gl.int64) * tile_bytes + placed_row(to % args.TOKENS)
    at = gl.expand_dims(begin, 1) + gl.expand_dims(placed_group(group), 0)
    mask = gl.expand_dims(to >= 0, 1) & gl.expand_dims(group < args.width // G, 0)
    scale, at = gl.broadcast(scale, at)
    gl.store(args.pool_scale + at, scale, mask=mask)


@gluon.jit
def _store_scales(args, scale, row, part, LAYOUT: gl.constexpr):
    """FP32 scales [1, blocks] of a part to each row of the token."""
    BLOCKS: gl.constexpr = PART_COLS // 128
    block = part * BLOCKS + gl.arange(0, BLOCKS, gl.SliceLayout(0, LAYOUT))
    to = gl.convert_layout(row, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    at = gl.expand_dims(block * args.pool_rows, 0) + gl.expand_dims(to, 1)
    mask = gl.expand_dims(to >= 0, 1) & gl.expand_dims(block < args.width // 128, 0)
    scale, at = gl.broadcast(scale, at)
    gl.store(args.pool_scale + at, scale, mask=mask)


@gluon.jit
def _store_row_operands(cta, row, weight, token, source, here):
    """What epilogues read of each row of a token: destination, topk weight, NVFP4's factor.

    source, here  several ranks: the token's rank, and its number there
    """
    args = cta.args
    used = row >= 0
    number = gl.arange(0, args.K_SLOTS, gl.SliceLayout(1, PAIRS))
    dest = token * args.TOP_K + number
    if args.RANKS > 1:
        dest = (here * args.TOP_K + number).to(gl.int64) * args.hidden
        dest += gl.load(args.peers + source) >> 1  # BF16
    gl.store(args.row_dest + row, dest, mask=used)
    gl.store(args.row_weight + row, weight, mask=used)
    if args.FACTOR == "expert":
        if args.RANKS == 1:
            factor = gl.load(args.g + token * args.g_stride) + 0.0 * weight
        else:
            factor = read_g(args, cta.rank, source) + 0.0 * weight
        gl.store(args.row_factor + row, factor, mask=used)


@gluon.jit
def _fill_parts(cta, begin, end, wave_begin, wave_end, counter):
    """Parts [begin, end) of tokens: quantise once, write to each row of the token, count them.

    Finding the rows takes long: it is done once for consecutive parts of a token.
    """
    args = cta.args
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 4], [1, 0])  # [slots, columns]
    SMALL: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])  # slots as in PAIRS
    PACK: gl.constexpr = values_per_element(args.ACTS)
    IS_PLACED: gl.constexpr = args.ACTS.STORED_AS == "placed"
    parts = (args.width + PART_COLS - 1) // PART_COLS
    width = args.width  # elements of a row in memory
    if PACK == 2:
        width = args.width // 2
    before = -1
    row = gl.zeros([args.K_SLOTS], gl.int32, gl.SliceLayout(1, PAIRS))
    if args.RANKS > 1:
        ends = token_ends(cta)
    for item in range(begin, end):
        token = fast_div(item, parts)
        part = item - token * parts
        col = part * PART_COLS + gl.arange(0, PART_COLS, gl.SliceLayout(0, WIDE))
        place = col  # in memory
        if PACK == 2:
            place = part * (PART_COLS // 2) + gl.arange(0, PART_COLS // 2, gl.SliceLayout(0, WIDE))
        source = token
        here = token
        if args.RANKS == 1:
            source_col = col
            if args.BY_GROUP:
                inside = token_column(gl.arange(0, PART_COLS, gl.SliceLayout(0, WIDE)))
                source_col = part * PART_COLS + inside
            x = args.x + token.to(gl.int64) * args.x_stride + source_col
            values = gl.load(x, mask=source_col < args.hidden, other=0.0)
            mine, weight = _token_slots(cta, token)
            values, scale = quantise_part(args, values, token)
            values = gl.convert_layout(values, gl.SliceLayout(0, WIDE))
            values = gl.expand_dims(_computed(values), 0)
            if args.PROMOTED:
                scale = gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(0, SMALL)), 0)
        else:
            source, here = source_of(ends, token)
            inbox_row = source * args.tokens_per_rank + here
            x = own(args, args.inbox, cta.rank) + inbox_row.to(gl.int64) * width + place
            values = gl.expand_dims(gl.load(x, mask=place < width, other=0.0), 0)
            word, weight = read_slot_words(args, cta.rank, inbox_row)
            if args.PROMOTED:
                scale = read_scales(args, cta.rank, inbox_row, part, gl.SliceLayout(0, SMALL))
                scale = gl.expand_dims(scale, 0)
            elif IS_PLACED:
                scale = read_scale_bytes(args, cta.rank, inbox_row, part)
        if token != before:
            mbarrier.wait(cta.routed, 0)
            if args.RANKS == 1:
                row = _pool_rows(cta, token, mine, wave_begin, wave_end)
            else:
                first, row = inbox_rows(cta, source, word)
                row = _in_waves(cta, first, row, word >= 0, wave_begin, wave_end)
            before = token
        wide_row = gl.convert_layout(row, gl.SliceLayout(1, WIDE))
        at = gl.expand_dims(wide_row * width, 1) + gl.expand_dims(place, 0)
        mask = gl.expand_dims(wide_row >= 0, 1) & gl.expand_dims(place < width, 0)
        values, at = gl.broadcast(values, at)
        gl.store(args.pool + at, values, mask=mask)
        if args.PROMOTED:
            _store_scales(args, scale, row, part, SMALL)
        elif IS_PLACED:
            _store_placed(args, scale, row, part)
        if part == 0:
            _store_row_operands(cta, row, weight, token, source, here)
    if begin < end:
        publish_count(counter, end - begin)


@gluon.jit
def _parts_per_cta(args, num_tokens, num_ctas):
    """Consecutive parts that a CTA puts into the pool."""
    return fast_div(num_parts(args, num_tokens) + num_ctas - 1, num_ctas)


@gluon.jit
def fill_pool(cta):
    """One warpgroup: this CTA's parts of tokens, for the first two pool waves of a ring."""
    size = _parts_per_cta(cta.args, cta.num_tokens, cta.num_ctas)
    begin = cta.cta_idx * size
    end = gl.minimum(begin + size, num_parts(cta.args, cta.num_tokens))
    _fill_parts(cta, begin, end, 0, 2, cta.counters + POOL)
    mbarrier.arrive(cta.own_filled, count=1)


@gluon.jit
def fill_wave(cta, wave, item, WG: gl.constexpr):
    """One warpgroup's part of the tokens of a later pool wave."""
    begin = item * GROUPS + WG
    end = gl.minimum(begin + 1, num_parts(cta.args, cta.num_tokens))
    _fill_parts(cta, begin, end, wave, wave + 1, cta.counters + FILLED + wave)


@gluon.jit
def fill_later(cta, wave, item, l2_n_tiles, WG: gl.constexpr):
    """RING: a part of a later pool wave, once L2 has read the wave that it replaces."""
    before = wave - 2
    want = tiles_of_wave(cta, before) * l2_n_tiles
    wait_for(cta, cta.counters + L2_DONE + before, want, WAIT_WAVE, before)
    fill_wave(cta, wave, item, WG)
