"""What the CTAs of a fused launch hold: the call, the two linears, their ring and barriers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from megamoe.kernels.hopper.gemm.notes import allocate_notes
from megamoe.kernels.hopper.gemm.swap_ab import Work
from megamoe.kernels.hopper.mega.sync import MAIL
from megamoe.kernels.hopper.pipeline import GROUPS, barriers, record


@record
class Call:
    """One launch: its tensors, sizes and constants, the same for every CTA."""

    x: gl.tensor
    x_stride: gl.tensor
    g: gl.tensor  # NVFP4: global scale of the tokens
    g_stride: gl.tensor
    idx: gl.tensor
    weights: gl.tensor
    num_valid: gl.tensor
    error: gl.tensor
    stats: gl.tensor
    y: gl.tensor
    pool: gl.tensor
    pool_scale: gl.tensor
    row_dest: gl.tensor
    row_weight: gl.tensor
    row_factor: gl.tensor
    rows: gl.tensor  # BF16 [slots, hidden]: what combine adds
    private: gl.tensor
    counters: gl.tensor
    signals: gl.tensor  # what ranks of other launches say
    peers: gl.tensor  # int64: bytes from a pointer of this launch to the same of each rank
    report: gl.tensor
    trace: gl.tensor
    bound_ns: gl.tensor
    ahead: gl.tensor  # steps of a CTA's first tile that come before all tokens are in the pool
    absent: gl.tensor  # a rank that never says it is done, for tests of the bound; -1 is none
    first_rank: gl.tensor  # of this launch
    first_slot: gl.tensor  # of the call that this launch has, on each rank
    num_slots: gl.tensor  # of all ranks
    tokens_per_rank: gl.tensor
    num_experts: gl.tensor  # of one rank
    rows_per_rank: gl.tensor
    pool_rows: gl.tensor
    wave_rows: gl.tensor  # RING: of the rows of all experts, so many begin a wave's tiles
    private_stride: gl.tensor
    num_counters: gl.tensor
    hidden: gl.tensor
    width: gl.tensor  # of a pooled token
    clamp: gl.tensor
    WEIGHTS: gl.constexpr
    ACTS: gl.constexpr
    FACTOR: gl.constexpr
    HAS_BIAS: gl.constexpr
    ACTIVATION: gl.constexpr
    PROMOTED: gl.constexpr
    WEIGHTED: gl.constexpr
    HAS_COUNT: gl.constexpr
    HAS_STATS: gl.constexpr
    RANKS: gl.constexpr
    LOCAL: gl.constexpr  # ranks of this launch
    EXPERTS: gl.constexpr  # of one rank, to the next power of two
    SLOTS: gl.constexpr  # likewise
    CHUNK: gl.constexpr  # slots that are looked at together
    TOP_K: gl.constexpr  # slots of a token, those of shared experts too
    SHARED: gl.constexpr  # of these: the last experts, and the last slots
    K_SLOTS: gl.constexpr  # TOP_K to the next power of two
    TOKENS: gl.constexpr
    SLABS: gl.constexpr
    DEPTH: gl.constexpr
    STAGES: gl.constexpr
    ROWS: gl.constexpr  # weight rows of a tile
    TRACE: gl.constexpr
    WINDOW: gl.constexpr  # as in `swapped.Work`
    RING: gl.constexpr  # the pool is too small for all rows (`waves`)
    ROWS_AS: gl.constexpr  # the format that combine rounds rows to


@record
class Linear:
    """One of the two products, as `swapped.Work` asks for it."""

    w: tma.tensor_descriptor
    w_scale: tma.tensor_descriptor
    x: tma.tensor_descriptor
    x_scale: tma.tensor_descriptor
    factor: gl.tensor
    bias: gl.tensor
    acts_factor: gl.tensor
    out: gl.tensor
    out_scale: gl.tensor
    steps: gl.tensor
    num_outputs: gl.tensor
    num_biases: gl.tensor
    factor_rows: gl.tensor
    factor_cols: gl.tensor
    ACTS: gl.constexpr
    GATED: gl.constexpr


@record
class Mega:
    """One CTA: its place, its list, its barriers."""

    call: Call
    rank: gl.tensor
    local: gl.tensor  # its number in this launch
    cta: gl.tensor  # within the rank
    num_ctas: gl.tensor  # of the rank
    private: gl.tensor  # this CTA's list of tiles
    counters: gl.tensor  # this rank's
    experts: gl.shared_memory_descriptor  # int16 [SLOTS / CHUNK, CHUNK]: of each slot, or -1
    firsts: gl.shared_memory_descriptor  # int32 [EXPERTS]: first row of each expert
    num: gl.shared_memory_descriptor  # int32 [1]: tiles of tokens
    routed: gl.shared_memory_descriptor  # the routing is read
    own_filled: gl.shared_memory_descriptor  # this CTA's parts of tokens are in the pool
    filled: gl.shared_memory_descriptor  # all tokens are
    mail: gl.shared_memory_descriptor
    mail_sent: gl.shared_memory_descriptor
    mail_read: gl.shared_memory_descriptor
    stored: gl.shared_memory_descriptor  # math has stored a tile: L1, and of a ring L2
    told: gl.shared_memory_descriptor  # publish has counted it
    own_done: gl.shared_memory_descriptor  # no warpgroup of this CTA has a tile left
    all_done: gl.shared_memory_descriptor  # none of any CTA


@gluon.jit
def _rings(c, one, two):
    """Shared memory of the ring: weights as each linear sees them, scales, tokens, their scales."""
    ALL: gl.constexpr = GROUPS * c.SLABS
    NUM: gl.constexpr = c.STAGES * c.DEPTH
    kind: gl.constexpr = c.WEIGHTS
    w = one.w
    if kind.DECODED:
        shape: gl.constexpr = [c.STAGES, 1, ALL, 4 * c.DEPTH, 256]
        first = gl.allocate_shared_memory(w.dtype, shape, w.layout)
        second = first
        words: gl.constexpr = kind.SCALE_BYTES // 4 * c.DEPTH
        scales = gl.allocate_shared_memory(gl.int32, [c.STAGES, 1, ALL, words], one.w_scale.layout)
    else:
        other = two.w
        first = gl.allocate_shared_memory(w.dtype, [NUM] + w.block_type.shape, w.layout)
        second = first._reinterpret(other.dtype, [NUM] + other.block_type.shape, other.layout)
        scales = first
    x = gl.allocate_shared_memory(one.x.dtype, [NUM, c.TOKENS, 128], one.x.layout)
    x_scales = x
    if c.PROMOTED:
        SCALES: gl.constexpr = c.TOKENS if c.TOKENS >= 32 else 32
        x_scales = gl.allocate_shared_memory(gl.float32, [NUM, SCALES], one.x_scale.layout)
    return first, second, scales, x, x_scales


@gluon.jit
def _work(c, linear, w_bufs, ws_bufs, x_bufs, xs_bufs, kept, tiles):
    """The linear over this CTA's ring."""
    amax, turn, full, empty, met, notes = kept
    out_width = linear.num_outputs
    if c.RANKS > 1 and not linear.GATED:
        out_width = gl.to_tensor(1)  # destinations are offsets: rows go to other ranks too
    IS_STREAM: gl.constexpr = True
    SPAN: gl.constexpr = 1
    return Work(
        linear.w, linear.w_scale, linear.x, linear.x_scale, w_bufs, ws_bufs, x_bufs, xs_bufs, amax,
        turn, full, empty, met, notes, linear.factor, linear.bias, linear.acts_factor, c.row_factor,
        c.row_weight, c.row_dest, linear.out, linear.out_scale, tiles, tiles, c.pool_rows,
        linear.steps, linear.num_outputs, linear.num_biases, out_width, linear.factor_rows,
        linear.factor_cols, c.clamp, c.WEIGHTS, linear.ACTS, linear.GATED, c.PROMOTED, c.FACTOR,
        c.HAS_BIAS, c.WEIGHTED, c.ACTIVATION, c.TOKENS, IS_STREAM, c.SLABS, c.DEPTH, c.STAGES, SPAN,
        c.WINDOW,
    )  # fmt: skip


@gluon.jit
def allocate(c, one, two):
    """Shared memory of a CTA: its ring, what the epilogue keeps, its barriers."""
    bufs = _rings(c, one, two)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    amax = gl.allocate_shared_memory(gl.int32, [2 * GROUPS * 4, c.TOKENS], flat)
    gl.static_assert(c.TOKENS < 64, "rows of wider tiles turn in memory that is not here")
    turn = amax
    full = barriers(c.STAGES, 2, LOOP=True)
    empty = barriers(c.STAGES, GROUPS, LOOP=True)
    met = full
    if c.PROMOTED:
        met = barriers(2, GROUPS)
    notes = allocate_notes(c.row_dest, c.ROWS, c.TOKENS, c.FACTOR, c.HAS_BIAS)
    mail = gl.allocate_shared_memory(gl.int32, [2 * MAIL, 1], flat)
    post = (
        mail, barriers(2, 1), barriers(2, GROUPS + 3), barriers(2, GROUPS), barriers(2, 1),
        barriers(1, GROUPS).index(0), barriers(1, 1).index(0),
    )  # fmt: skip
    routing = (
        gl.allocate_shared_memory(gl.int16, [c.SLOTS // c.CHUNK, c.CHUNK], flat),
        gl.allocate_shared_memory(gl.int32, [c.EXPERTS], flat),
        gl.allocate_shared_memory(gl.int32, [1], flat),
        barriers(1, 1).index(0),
        barriers(1, 1).index(0),
        barriers(1, 1).index(0),
    )
    return bufs, (amax, turn, full, empty, met, notes), routing, post


@gluon.jit
def prepare(c, one, two, place, memory):
    """(the CTA, its L1, its L2), in the memory that `allocate` gave."""
    rank, local, cta, num_ctas, private, counters = place
    bufs, kept, routing, post = memory
    w_first, w_second, ws_bufs, x_bufs, xs_bufs = bufs
    experts, firsts, num, routed, own_filled, filled = routing
    mail, mail_sent, mail_read, stored, told, own_done, all_done = post
    m = Mega(
        c, rank, local, cta, num_ctas, private, counters, experts, firsts, num, routed, own_filled,
        filled, mail, mail_sent, mail_read, stored, told, own_done, all_done,
    )  # fmt: skip
    first = _work(c, one, w_first, ws_bufs, x_bufs, xs_bufs, kept, private)
    second = _work(c, two, w_second, ws_bufs, x_bufs, xs_bufs, kept, private)
    return m, first, second
