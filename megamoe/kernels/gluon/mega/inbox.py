"""The owner's side of the exchange between ranks: what peers have pushed, read from own memory.

By source, each at a fixed place (`push`): tokens in the format of the pool, a word and a weight of
each slot, how many slots each expert gets, how many tokens there are. An expert's rows are those of
rank 0, then of rank 1, ..., each in slot order: the same in every call with the same routing, and
those of one rank that has all tokens.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.kernels.gluon.compat import reinterpret
from megamoe.kernels.gluon.mega.scheduler import running_sum
from megamoe.kernels.gluon.mega.state import FLAT, PAIRS, PART_COLS
from megamoe.kernels.gluon.mega.sync import LAUNCH_MISMATCH, expect_equal, own
from megamoe.planner.tables.hopper import MAX_RANKS

SOURCES = gl.constexpr(MAX_RANKS)
# Words after a source's counts.
NUM_TOKENS_WORD = gl.constexpr(0)
G_WORD = gl.constexpr(1)  # NVFP4: the global scale of its tokens
LIMIT_WORD = gl.constexpr(2)  # tokens of a rank that its launch is planned for
# [sources, experts]: a thread has all sources of an expert, so that sums over sources stay in it.
BY_SOURCE = gl.constexpr(gl.BlockedLayout([SOURCES.value, 1], [1, 32], [1, 4], [1, 0]))


@gluon.constexpr_function
def count_stride(experts):
    """Words of a source in `inbox_counts`."""
    return experts + 4


@gluon.constexpr_function
def values_per_element(acts):
    """Of a pooled token: two codes of FP4 share a byte."""
    return 2 if acts.STORED_AS == "placed" and acts.BITS == 4 else 1


@gluon.jit
def scale_stride(args):
    """Scales of a token in `inbox_scale`, to whole 16 bytes: FP32, or placed ones' bytes."""
    if args.ACTS.STORED_AS == "placed":
        stride = (args.width // args.ACTS.GROUP + 15) // 16 * 16
    else:
        stride = (args.width + 511) // 512 * 4
    return stride


@gluon.jit
def _tokens_by_source(args, rank):
    """[SOURCES]: tokens of each rank in this call."""
    source = gl.arange(0, SOURCES, FLAT)
    at = own(args, args.inbox_counts, rank) + source * count_stride(args.EXPERTS)
    return gl.load(at + (args.EXPERTS + NUM_TOKENS_WORD), mask=source < args.RANKS, other=0)


@gluon.jit
def num_inbox_tokens(args, rank):
    """Tokens of all ranks in this call."""
    return gl.sum(_tokens_by_source(args, rank), 0)


@gluon.jit
def limits_agree(args, rank):
    """Whether all ranks have planned this launch for the same number of tokens; else a report.

    Places in an inbox follow from that number: with another one its rows would be wrong.
    """
    source = gl.arange(0, SOURCES, FLAT)
    at = own(args, args.inbox_counts, rank) + source * count_stride(args.EXPERTS)
    want = args.tokens_per_rank + 0 * source
    limit = gl.load(at + (args.EXPERTS + LIMIT_WORD), mask=source < args.RANKS, other=0)
    limit = gl.where(source < args.RANKS, limit, want)
    expect_equal(args, rank, limit, want, LAUNCH_MISMATCH, source)
    return gl.min((limit == want).to(gl.int32), 0) != 0


@gluon.jit
def token_ends(cta):
    """[SOURCES]: tokens of all ranks up to and with each."""
    return running_sum(_tokens_by_source(cta.args, cta.rank))


@gluon.jit
def source_of(ends, token):
    """(rank of a token, its number there)."""
    is_before = ends <= token
    return gl.sum(is_before.to(gl.int32), 0), token - gl.max(gl.where(is_before, ends, 0), 0)


@gluon.jit
def inbox_counts(cta):
    """int32 [SOURCES, EXPERTS]: slots of each expert; none where this CTA did not see all ranks."""
    args = cta.args
    source = gl.expand_dims(gl.arange(0, SOURCES, gl.SliceLayout(1, BY_SOURCE)), 1)
    expert = gl.expand_dims(gl.arange(0, args.EXPERTS, gl.SliceLayout(0, BY_SOURCE)), 0)
    at = own(args, args.inbox_counts, cta.rank) + source * count_stride(args.EXPERTS) + expert
    is_there = (source < args.RANKS) & (expert < args.num_experts) & (cta.num_tokens > 0)
    return gl.load(at, mask=is_there, other=0)


@gluon.jit
def store_row_begins(cta, counts, row_begin):
    """The first row of each source's slots of each expert, for `inbox_rows`."""
    first = gl.convert_layout(row_begin, gl.SliceLayout(0, BY_SOURCE))
    before = running_sum(counts) - counts
    TABLE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    table = reinterpret(cta.expert_row_begin, gl.int32, [SOURCES, cta.args.EXPERTS], TABLE)
    table.store(gl.expand_dims(first, 0) + before)


@gluon.jit
def inbox_rows(cta, source, word):
    """(first row of the expert, row) [K_SLOTS] in the long pool of slots with these words."""
    args = cta.args
    expert = gl.expand_dims(gl.where(word >= 0, word & 0xFFFF, -1), 1)
    is_it = gl.expand_dims(gl.arange(0, args.EXPERTS, gl.SliceLayout(0, PAIRS)), 0) == expert
    first = cta.expert_row_begin.index(0).load(gl.SliceLayout(0, PAIRS))
    mine = cta.expert_row_begin.index(source).load(gl.SliceLayout(0, PAIRS))
    begin = gl.sum(gl.where(is_it, gl.expand_dims(first, 0), 0), 1)
    row = gl.sum(gl.where(is_it, gl.expand_dims(mine, 0), 0), 1)
    return begin, row + (word >> 16)


@gluon.jit
def read_slot_words(args, rank, row):
    """(words, weights) [K_SLOTS] of the slots of the token at a row of the inbox."""
    number = gl.arange(0, args.K_SLOTS, gl.SliceLayout(1, PAIRS))
    at = row * args.K_SLOTS + number
    used = number < args.TOP_K
    word = gl.load(own(args, args.inbox_slots, rank) + at, mask=used, other=-1)
    return word, gl.load(own(args, args.inbox_weights, rank) + at, mask=used, other=0.0)


@gluon.jit
def read_scales(args, rank, row, part, LAYOUT: gl.constexpr):
    """FP32 [PART_COLS / 128]: scales of a part of the token at a row of the inbox."""
    BLOCKS: gl.constexpr = PART_COLS // 128
    block = part * BLOCKS + gl.arange(0, BLOCKS, LAYOUT)
    at = own(args, args.inbox_scale, rank) + row * scale_stride(args) + block
    return gl.load(at, mask=block < args.width // 128, other=1.0)


@gluon.jit
def read_scale_bytes(args, rank, row, part):
    """Bytes [PART_COLS / group]: placed scales of a part of the token at a row of the inbox."""
    G: gl.constexpr = args.ACTS.GROUP
    BYTES: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    group = part * (PART_COLS // G) + gl.arange(0, PART_COLS // G, BYTES)
    at = own(args, args.inbox_scale, rank) + row * scale_stride(args) + group
    return gl.load(at, mask=group < args.width // G, other=0)


@gluon.jit
def read_g(args, rank, source):
    """NVFP4: the global scale of a source's tokens."""
    at = own(args, args.inbox_counts, rank) + source * count_stride(args.EXPERTS)
    return gl.load(at + (args.EXPERTS + G_WORD)).to(gl.float32, bitcast=True)
