"""What a tile's epilogue needs of memory, in shared memory before the main loop ends.

Tensor cores stand still behind a main loop, so nobody waits for memory there. A letter comes with
the tile's first stage and tells which tile it is; notes hold the factors of its weight rows and the
weights and places of its tokens. Who brings them has time: its code is not in a cache at first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from megamoe.kernels.hopper.pipeline import GROUPS, barriers, record

WORDS = gl.constexpr(4)  # of a letter: expert, row tile, first row, end row
EARLY = gl.constexpr(2)  # steps before the last one: notes are fetched
_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@record
class Notes:
    """The letters of two tiles and the notes of one."""

    letters: gl.shared_memory_descriptor
    factor: gl.shared_memory_descriptor  # FP32, of each weight row
    bias: gl.shared_memory_descriptor  # likewise
    weight: gl.shared_memory_descriptor  # FP32, of each token, as the two below
    token_factor: gl.shared_memory_descriptor
    dest: gl.shared_memory_descriptor
    there: gl.shared_memory_descriptor
    read: gl.shared_memory_descriptor  # by all warpgroups; two, which take turns
    FACTOR: gl.constexpr  # "row", "expert" or neither
    HAS_BIAS: gl.constexpr


@gluon.jit
def allocate_notes(
    row_dest, ROWS: gl.constexpr, TOKENS: gl.constexpr, FACTOR: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):  # fmt: skip
    letters = gl.allocate_shared_memory(gl.int32, [2 * WORDS, 1], _FLAT)
    weight = gl.allocate_shared_memory(gl.float32, [TOKENS], _FLAT)
    dest = gl.allocate_shared_memory(row_dest.dtype.element_ty, [TOKENS], _FLAT)
    factor = weight
    bias = weight
    token_factor = weight
    if HAS_BIAS:
        bias = gl.allocate_shared_memory(gl.float32, [ROWS], _FLAT)
    if FACTOR == "row" or FACTOR == "expert":
        factor = gl.allocate_shared_memory(gl.float32, [ROWS], _FLAT)
    if FACTOR == "expert":
        token_factor = gl.allocate_shared_memory(gl.float32, [TOKENS], _FLAT)
    there = barriers(1, 1).index(0)
    read = barriers(2, GROUPS)
    return Notes(letters, factor, bias, weight, token_factor, dest, there, read, FACTOR, HAS_BIAS)


@gluon.jit
def tell_tile(p, done, expert, across, first, end):
    """load_tokens: which tile is the CTA's number `done`, before its first stage."""
    mbarrier.wait(p.notes.read.index(done & 1), ((done >> 1) & 1) ^ 1)
    slot = (done & 1) * WORDS
    zero = gl.zeros([1], gl.int32, _LANES)
    p.notes.letters.index(slot).store(zero + expert)
    p.notes.letters.index(slot + 1).store(zero + across)
    p.notes.letters.index(slot + 2).store(zero + first)
    p.notes.letters.index(slot + 3).store(zero + end)
    gl.thread_barrier()


@gluon.jit
def told_tile(p, done):
    """math, once the tile's first stage is there: (expert, row tile, first row, end row)."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot = (done & 1) * WORDS
    expert = gl.max(p.notes.letters.index(slot).load(LAYOUT), 0)
    across = gl.max(p.notes.letters.index(slot + 1).load(LAYOUT), 0)
    first = gl.max(p.notes.letters.index(slot + 2).load(LAYOUT), 0)
    return expert, across, first, gl.max(p.notes.letters.index(slot + 3).load(LAYOUT), 0)


@gluon.jit
def _here(x):
    """A volatile no-op: addresses are computed behind it, or they take registers all the tile."""
    return gl.inline_asm_elementwise("", "=r,0", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _fetch_rows(p, expert, across):
    """Factors and biases of a tile's weight rows, one after another: few registers."""
    n = p.notes
    ROWS: gl.constexpr = n.bias.shape[0] if n.HAS_BIAS else n.factor.shape[0]
    factors = n.factor._reinterpret(gl.float32, [n.factor.shape[0] // 32, 32], _FLAT)
    biases = n.bias._reinterpret(gl.float32, [n.bias.shape[0] // 32, 32], _FLAT)
    for i in range(ROWS // 32):
        r = i * 32 + gl.arange(0, 32, _LANES)
        row = across * ROWS + r
        matrix = expert + 0 * r
        col = row
        if p.GATED:  # 8 gate, 8 up, ...
            matrix = expert * 2 + r % 16 // 8
            col = across * (ROWS // 2) + r // 16 * 8 + r % 8
        if n.FACTOR == "row":
            at = p.factor + expert * p.factor_rows + row
            async_copy.async_copy_global_to_shared(factors.index(i), at)
        elif n.FACTOR == "expert":
            async_copy.async_copy_global_to_shared(factors.index(i), p.factor + matrix)
        if n.HAS_BIAS:
            at = p.bias + matrix * p.num_biases + col
            async_copy.async_copy_global_to_shared(biases.index(i), at, mask=col < p.num_biases)


@gluon.jit
def fetch_notes(p, done, expert, across, first, end):
    """One warp: have the notes of the CTA's tile number `done` brought."""
    n = p.notes
    before = done - 1
    mbarrier.wait(n.read.index(before & 1), (before >> 1) & 1)  # at once for the first tile
    expert = _here(expert)
    across = _here(across)
    first = _here(first)
    if n.HAS_BIAS or n.FACTOR == "row" or n.FACTOR == "expert":
        _fetch_rows(p, expert, across)
    row = first + gl.arange(0, n.weight.shape[0], _LANES)
    if p.GATED and n.FACTOR == "expert":
        async_copy.async_copy_global_to_shared(n.token_factor, p.row_factor + row, mask=row < end)
    if p.WEIGHTED and (p.GATED or p.HAS_BIAS):
        async_copy.async_copy_global_to_shared(n.weight, p.row_weight + row, mask=row < end)
    if not p.GATED:
        async_copy.async_copy_global_to_shared(n.dest, p.row_dest + row, mask=row < end)
    async_copy.commit_group()


@gluon.jit
def tell_notes(p):
    """The same warp, some time later."""
    async_copy.wait_group(0)
    gl.thread_barrier()
    mbarrier.arrive(p.notes.there, count=1)


@gluon.jit
def wait_for_notes(p, done):
    """math, behind the main loop of the CTA's tile number `done`."""
    mbarrier.wait(p.notes.there, done & 1)


@gluon.jit
def have_read(p, done):
    """math: letter and notes of the CTA's tile number `done` are needed no more."""
    mbarrier.arrive(p.notes.read.index(done & 1), count=1)


@gluon.jit
def rows_of(p, first, end, START: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Rows of `out` of N tokens of a tile from number START on, and whether there are any."""
    row = first + START + gl.arange(0, N, LAYOUT)
    is_there = row < end
    if not p.GATED:
        row = p.notes.dest.slice(START, N, 0).load(LAYOUT)
    return row, is_there
