"""The source's side of the exchange between ranks: tokens and routing to the ranks that need them.

A rank quantises its own tokens once, in the format of the pool, and stores each to the inbox of
every rank that owns one of its experts, at a fixed place: [source, token]. To every rank go, of
each token, a word and a weight a slot, and once the slots of each of its experts and the number of
tokens. All of it is stored, in 16 bytes a thread; nothing is read from a peer, and no atomic leaves
the GPU. After the last CTA's stores one word a rank says that they are there (`sync`).

Slot words  -1 where the slot is not that rank's; else its local expert, and above 16 bits how many
            slots of that source and expert come before it: with the counts, a row of the pool.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.kernels.common.columns import token_column
from megamoe.kernels.gluon.mega.dispatch import local_expert, read_slots
from megamoe.kernels.gluon.mega.inbox import (
    G_WORD,
    LIMIT_WORD,
    NUM_TOKENS_WORD,
    count_stride,
    scale_stride,
    values_per_element,
)
from megamoe.kernels.gluon.mega.quantise import quantise_part
from megamoe.kernels.gluon.mega.state import FLAT, PAIR_SLOTS, PAIRS, PART_COLS
from megamoe.kernels.gluon.mega.sync import num_own_tokens, on_rank, own
from megamoe.kernels.gluon.pipeline import fast_div

COUNTED_SLOTS = gl.constexpr(512)  # slots that are counted at a time


@gluon.jit
def num_ranks(args):
    """RANKS as a run-time value, so that loops over ranks are not unrolled."""
    return gl.minimum(gl.program_id(0) + args.RANKS, args.RANKS)


@gluon.jit
def _earlier_slots(args, rank, token, expert):
    """[K_SLOTS]: of each slot of a token, this rank's slots before it with the same expert."""
    number = gl.arange(0, args.K_SLOTS, gl.SliceLayout(1, PAIRS))
    slot = token * args.TOP_K + number
    count = 0 * number
    for chunk in range((token * args.TOP_K + args.TOP_K + PAIR_SLOTS - 1) // PAIR_SLOTS):
        other = chunk * PAIR_SLOTS + gl.arange(0, PAIR_SLOTS, gl.SliceLayout(0, PAIRS))
        other_token = other // args.TOP_K
        theirs, _, _ = read_slots(args, rank, other, other_token, other_token <= token)
        same = (gl.expand_dims(theirs, 0) == gl.expand_dims(expert, 1)) & (
            gl.expand_dims(other, 0) < gl.expand_dims(slot, 1)
        )
        count += gl.sum(same.to(gl.int32), 1)
    return count


@gluon.jit
def _store_words(pointer, words, at):
    """[K_SLOTS] words of a token, up to 16 bytes a thread."""
    NUM: gl.constexpr = words.shape[0]
    VEC: gl.constexpr = NUM if NUM < 4 else 4
    WORDS: gl.constexpr = gl.BlockedLayout([VEC], [32], [4], [0])
    place = gl.arange(0, NUM, WORDS)
    gl.store(pointer + at * NUM + place, gl.convert_layout(words, WORDS))


@gluon.jit
def _push_scale_bytes(args, other, scale, row, part):
    """Placed scales of a part to a rank, 16 bytes a thread."""
    G: gl.constexpr = args.ACTS.GROUP
    BYTES: gl.constexpr = gl.BlockedLayout([16], [32], [4], [0])
    group = part * (PART_COLS // G) + gl.arange(0, PART_COLS // G, BYTES)
    to = on_rank(args, args.inbox_scale, other) + row * scale_stride(args)
    gl.store(to + group, gl.convert_layout(scale, BYTES), mask=group < args.width // G)


@gluon.jit
def _push_parts(args, rank, begin, end):
    """Parts [begin, end) of this rank's tokens, to every rank that needs them."""
    VEC: gl.constexpr = 128 // args.pool.dtype.element_ty.primitive_bitwidth
    COLS: gl.constexpr = gl.BlockedLayout([VEC], [32], [4], [0])
    BLOCKS: gl.constexpr = PART_COLS // 128
    SCALES: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    PACK: gl.constexpr = values_per_element(args.ACTS)
    IS_PLACED: gl.constexpr = args.ACTS.STORED_AS == "placed"
    width = args.width  # elements of a row in memory
    if PACK == 2:
        width = args.width // 2
    parts = (args.width + PART_COLS - 1) // PART_COLS
    number = gl.arange(0, args.K_SLOTS, gl.SliceLayout(1, PAIRS))
    place = gl.arange(0, PART_COLS, COLS)
    x = own(args, args.x, rank)
    for item in range(begin, end):
        token = fast_div(item, parts)
        part = item - token * parts
        col = part * PART_COLS + place
        source_col = col
        if args.BY_GROUP:
            source_col = part * PART_COLS + token_column(place)
        at = x + token.to(gl.int64) * args.x_stride + source_col
        values = gl.load(at, mask=source_col < args.hidden, other=0.0)
        slot = token * args.TOP_K + number
        expert, weight, _ = read_slots(args, rank, slot, token + 0 * number, number < args.TOP_K)
        values, scale = quantise_part(args, values, token)
        values = gl.convert_layout(values, COLS)
        if PACK == 2:
            col = part * (PART_COLS // 2) + gl.arange(0, PART_COLS // 2, COLS)
        if args.PROMOTED:
            scale = gl.convert_layout(scale, SCALES)
        earlier = 0 * number
        if part == 0:
            earlier = _earlier_slots(args, rank, token, expert)
        row = rank * args.tokens_per_rank + token
        for other in range(num_ranks(args)):
            mine = local_expert(args, other, expert)
            if gl.max(mine, 0) >= 0:
                to = on_rank(args, args.inbox, other) + row.to(gl.int64) * width
                gl.store(to + col, values, mask=col < width)
                if args.PROMOTED:
                    block = part * BLOCKS + gl.arange(0, BLOCKS, SCALES)
                    to = on_rank(args, args.inbox_scale, other) + row * scale_stride(args)
                    gl.store(to + block, scale, mask=block < args.width // 128)
                elif IS_PLACED:
                    _push_scale_bytes(args, other, scale, row, part)
            if part == 0:
                words = gl.where(mine >= 0, mine | earlier << 16, -1)
                _store_words(on_rank(args, args.inbox_slots, other), words, row)
                _store_words(on_rank(args, args.inbox_weights, other), weight, row)


@gluon.jit
def _push_counts(args, rank, other, num_tokens):
    """To one rank: how many of this rank's slots each of its experts gets; how many tokens."""
    E: gl.constexpr = args.EXPERTS
    WIDE: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    count = gl.zeros([E], gl.int32, FLAT)
    for chunk in range((num_tokens * args.TOP_K + COUNTED_SLOTS - 1) // COUNTED_SLOTS):
        slot = chunk * COUNTED_SLOTS + gl.arange(0, COUNTED_SLOTS, FLAT)
        token = slot // args.TOP_K
        expert, _, _ = read_slots(args, rank, slot, token, token < num_tokens)
        mine = local_expert(args, other, expert)
        count += gl.histogram(gl.maximum(mine, 0), E, mask=mine >= 0, layout=FLAT)
    to = on_rank(args, args.inbox_counts, other) + rank * count_stride(E)
    gl.store(to + gl.arange(0, E, WIDE), gl.convert_layout(count, WIDE))
    gl.store(to + (E + NUM_TOKENS_WORD), num_tokens)
    gl.store(to + (E + LIMIT_WORD), args.tokens_per_rank)
    if args.FACTOR == "expert":
        gl.store(to + (E + G_WORD), gl.load(args.g).to(gl.int32, bitcast=True))


@gluon.jit
def push_tokens(args, rank, cta_idx, num_ctas):
    """The launch's first warpgroup: this CTA's share of what its rank sends."""
    num_tokens = num_own_tokens(args, rank)
    num = num_tokens * ((args.width + PART_COLS - 1) // PART_COLS)
    size = fast_div(num + num_ctas - 1, num_ctas)
    begin = cta_idx * size
    _push_parts(args, rank, begin, gl.minimum(begin + size, num))
    for other in range(num_ctas - 1 - cta_idx, num_ranks(args), num_ctas):
        _push_counts(args, rank, other, num_tokens)
