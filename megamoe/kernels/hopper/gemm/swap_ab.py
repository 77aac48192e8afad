"""Grouped GEMM with the operands swapped: weights are wgmma's M, a narrow tile of tokens its N.

One persistent launch; a CTA walks its tiles and its roles share a ring of stages:
  load_weights   waits for nothing but a free stage
  load_tokens    rows of the expert-sorted pool and their scales
  note           what the epilogue needs
  math           two warpgroups of 64 or 128 weight rows: decode, wgmma, promote, epilogue
A tile is ROWS weight rows x TOKENS tokens of one expert. L1 (GATED) reads rows as 8 gate, 8 up,
..., so a thread holds both of an output; L2 writes each row to its (token, slot) place.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from megamoe.kernels.hopper.gemm.epilogue import finish_gated, finish_linear
from megamoe.kernels.hopper.gemm.notes import (
    Notes,
    allocate_notes,
    fetch_notes,
    have_read,
    tell_notes,
    tell_tile,
    told_tile,
    wait_for_notes,
)
from megamoe.kernels.hopper.gemm.products import multiply
from megamoe.kernels.hopper.pipeline import (
    GROUPS,
    advance,
    allow_next_launch,
    barriers,
    num_items,
    place,
    quotient,
    record,
    wait_for_launch,
)
from megamoe.kernels.hopper.weights.l2_policy import EARLY, stream_copy, stream_policy


@record
class Work:
    """One launch: operands in memory, the ring, and the epilogue's tensors."""

    w: tma.tensor_descriptor
    w_scale: tma.tensor_descriptor
    x: tma.tensor_descriptor
    x_scale: tma.tensor_descriptor
    w_bufs: gl.shared_memory_descriptor
    ws_bufs: gl.shared_memory_descriptor
    x_bufs: gl.shared_memory_descriptor
    xs_bufs: gl.shared_memory_descriptor
    amax: gl.shared_memory_descriptor
    turn: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    met: gl.shared_memory_descriptor
    notes: Notes
    factor: gl.tensor  # FP32: per row (images), per 128x128 (fp8), per expert (nvfp4)
    bias: gl.tensor
    acts_factor: gl.tensor  # nvfp4: global scale of the activations, per expert
    row_factor: gl.tensor  # nvfp4: global scale of each token
    row_weight: gl.tensor
    row_dest: gl.tensor
    out: gl.tensor
    out_scale: gl.tensor
    tiles: gl.tensor  # int32 [tiles, 4]: expert, first row, end row
    num_tiles: gl.tensor
    pool_rows: gl.tensor  # of both pools: the stride of their scales
    steps: gl.tensor  # ring stages of one tile
    num_outputs: gl.tensor  # computed: intermediate, padded, or hidden
    num_biases: gl.tensor  # intermediate or hidden
    out_width: gl.tensor  # of a row in memory
    factor_rows: gl.tensor  # rows of `factor` per expert, or its 128-blocks of rows
    factor_cols: gl.tensor  # its 128-blocks of K
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
    IS_STREAM: gl.constexpr  # weights are read once, and need not stay in L2
    SLABS: gl.constexpr  # of 64 rows, per warpgroup
    DEPTH: gl.constexpr  # K blocks of 128 per stage
    STAGES: gl.constexpr
    SPAN: gl.constexpr  # token tiles that share a sweep over the rows
    WINDOW: gl.constexpr  # stages in flight once the launch is not young; 0: as many as there are


@gluon.constexpr_function
def _weight_bytes(kind, slabs, depth):
    """Of one stage."""
    return slabs * depth * (kind.SLAB_BYTES + kind.SCALE_BYTES)


@gluon.jit
def early_steps(p):
    """How many of a CTA's first steps are early in the launch (`stream`)."""
    BYTES: gl.constexpr = _weight_bytes(p.WEIGHTS, GROUPS * p.SLABS, p.DEPTH)
    return quotient(gl.to_tensor(EARLY // BYTES), gl.num_programs(0))


@gluon.jit
def _hold(p, idx, phase):
    """Wait until the stage WINDOW before this one is full.

    What misses a cache waits behind all the weights that are asked for: tokens, counters, code. Two
    stages of every CTA keep memory busy.
    """
    back = idx - p.WINDOW
    wraps = back < 0
    at = gl.where(wraps, back + p.STAGES, back)
    mbarrier.wait(p.full.index(at), gl.where(wraps, phase, phase ^ 1))


@gluon.jit
def load_weight_step(p, expert, across, k, is_early, idx, phase):
    """Step k of one tile of weights into the ring, when there is room."""
    SLABS: gl.constexpr = GROUPS * p.SLABS
    kind: gl.constexpr = p.WEIGHTS
    BYTES: gl.constexpr = _weight_bytes(kind, SLABS, p.DEPTH)
    policy = stream_policy(is_early)
    ready = p.full.index(idx)
    mbarrier.wait(p.empty.index(idx), phase)
    if p.WINDOW > 0 and p.WINDOW < p.STAGES:  # noqa: SIM102  known at compile time
        if not is_early:
            _hold(p, idx, phase)
    mbarrier.expect(ready, BYTES)
    if kind.DECODED:
        at = [expert, across * SLABS, k * p.DEPTH * 4, 0]
        stream_copy(p.w, at, ready, p.w_bufs.index(idx), policy, p.IS_STREAM)
        at = [expert, across * SLABS, k * p.DEPTH * (kind.SCALE_BYTES // 4)]
        stream_copy(p.w_scale, at, ready, p.ws_bufs.index(idx), policy, p.IS_STREAM)
    else:
        for j in gl.static_range(p.DEPTH):
            to = p.w_bufs.index(idx * p.DEPTH + j)
            col = (k * p.DEPTH + j) * 128
            if p.GATED:
                at = [expert, across * SLABS * 4, 0, 0, col]
                stream_copy(p.w, at, ready, to, policy, p.IS_STREAM)
            else:
                at = [expert, across * SLABS * 64, col]
                stream_copy(p.w, at, ready, to, policy, p.IS_STREAM)
    return advance(idx, phase, p.STAGES)


@gluon.jit
def load_token_tile(p, row, idx, phase):
    """Bring the tokens from `row` on, and their scales, into the ring."""
    SCALES: gl.constexpr = p.TOKENS if p.TOKENS >= 32 else 32  # a TMA destination is 128 bytes
    ELEMENT_BYTES: gl.constexpr = p.WEIGHTS.ELEMENT.primitive_bitwidth // 8
    X_BYTES: gl.constexpr = p.TOKENS * 128 * ELEMENT_BYTES
    BYTES: gl.constexpr = p.DEPTH * (X_BYTES + (SCALES * 4 if p.PROMOTED else 0))
    for k in range(p.steps):
        ready = p.full.index(idx)
        mbarrier.wait(p.empty.index(idx), phase)
        mbarrier.expect(ready, BYTES)
        for j in gl.static_range(p.DEPTH):
            block = k * p.DEPTH + j
            at = idx * p.DEPTH + j
            tma.async_copy_global_to_shared(p.x, [row, block * 128], ready, p.x_bufs.index(at))
            if p.PROMOTED:
                tma.async_copy_global_to_shared(
                    p.x_scale, [block * p.pool_rows + row], ready, p.xs_bufs.index(at)
                )
        idx, phase = advance(idx, phase, p.STAGES)
    return idx, phase


@gluon.jit
def load_weights(p):
    """The weights of this CTA's tiles; waits for nothing but free stages."""
    SLABS: gl.constexpr = GROUPS * p.SLABS
    idx = 0
    phase = 1
    early = 0 * p.steps
    if p.GATED:  # behind it L2 (the linear) finds nothing left in L2 (the cache)
        early = early_steps(p)
    for item in range(gl.program_id(0), num_items(p, SLABS * 64), gl.num_programs(0)):
        tile, across = place(p, item, SLABS * 64)
        expert = gl.load(p.tiles + tile * 4)
        for k in range(p.steps):
            idx, phase = load_weight_step(p, expert, across, k, k < early, idx, phase)
        early -= p.steps


@gluon.jit
def _tile(p, item):
    """(expert, row tile, first row, end row) of a work item."""
    tile, across = place(p, item, GROUPS * p.SLABS * 64)
    at = p.tiles + tile * 4
    return gl.load(at), across, gl.load(at + 1), gl.load(at + 2)


@gluon.jit
def load_tokens(p):
    """The tokens of this CTA's tiles, and their letters."""
    idx = 0
    phase = 1
    done = 0
    wait_for_launch()
    for item in range(gl.program_id(0), num_items(p, GROUPS * p.SLABS * 64), gl.num_programs(0)):
        expert, across, first, end = _tile(p, item)
        tell_tile(p, done, expert, across, first, end)
        idx, phase = load_token_tile(p, first, idx, phase)
        done += 1


@gluon.jit
def note(p):
    """One warp: the notes of this CTA's tiles."""
    done = 0
    wait_for_launch()
    for item in range(gl.program_id(0), num_items(p, GROUPS * p.SLABS * 64), gl.num_programs(0)):
        expert, across, first, end = _tile(p, item)
        fetch_notes(p, done, expert, across, first, end)
        tell_notes(p)
        done += 1


@gluon.jit
def first_slab(p, across, WG: gl.constexpr):
    """Of a row tile, the first slab of a warpgroup."""
    return across * (GROUPS * p.SLABS) + WG * p.SLABS


@gluon.jit
def finish(p, low, high, expert, slab, first, end, done, firsts, WG: gl.constexpr):
    """The epilogue of the CTA's tile number `done`, its L1 tile number `firsts` if it is one."""
    wait_for_notes(p, done)
    if p.GATED:
        finish_gated(p, low, high, expert, slab, first, end, firsts, WG)
    else:
        finish_linear(p, low, expert, slab, first, end, WG * p.SLABS, WG)
        if p.SLABS == 2:
            finish_linear(p, high, expert, slab + 1, first, end, WG * p.SLABS + 1, WG)
    have_read(p, done)


@gluon.jit
def compute(p, expert, slab, first, end, done, firsts, idx, phase, WG: gl.constexpr):
    """One tile, from the ring to memory; numbered as in `finish`."""
    low, high, idx, phase = multiply(p, p.steps, expert, slab, idx, phase, WG)
    finish(p, low, high, expert, slab, first, end, done, firsts, WG)
    return idx, phase


@gluon.jit
def _compute_wide(p, expert, across, done, idx, phase, WG: gl.constexpr):
    """As `compute`; the letter is read again behind the main loop, for registers."""
    slab = first_slab(p, across, WG)
    low, high, idx, phase = multiply(p, p.steps, expert, slab, idx, phase, WG)
    expert, across, first, end = told_tile(p, done)
    slab = first_slab(p, across, WG)
    finish(p, low, high, expert, slab, first, end, done, done, WG)
    return idx, phase


@gluon.jit
def math(p, WG: gl.constexpr):
    """One warpgroup: its rows of every tile of this CTA."""
    SLABS: gl.constexpr = GROUPS * p.SLABS
    idx = 0
    phase = 0
    done = 0
    wait_for_launch()
    for _ in range(gl.program_id(0), num_items(p, SLABS * 64), gl.num_programs(0)):
        mbarrier.wait(p.full.index(idx), phase)
        expert, across, first, end = told_tile(p, done)
        if p.TOKENS >= 64:
            idx, phase = _compute_wide(p, expert, across, done, idx, phase, WG)
        else:
            slab = first_slab(p, across, WG)
            idx, phase = compute(p, expert, slab, first, end, done, done, idx, phase, WG)
        done += 1


@gluon.jit(do_not_specialize=["pool_rows", "steps", "factor_rows", "factor_cols"])
def swapped_kernel(
    w, w_scale, x, x_scale, factor, bias, acts_factor, row_factor, row_weight, row_dest, out,
    out_scale, tiles, num_tiles, pool_rows, steps, num_outputs, out_width, factor_rows,
    factor_cols, clamp, num_biases,
    WEIGHTS: gl.constexpr, ACTS: gl.constexpr, GATED: gl.constexpr, PROMOTED: gl.constexpr,
    FACTOR: gl.constexpr, HAS_BIAS: gl.constexpr, WEIGHTED: gl.constexpr,
    ACTIVATION: gl.constexpr, TOKENS: gl.constexpr, IS_STREAM: gl.constexpr, SLABS: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr, SPAN: gl.constexpr, MATH_REGS: gl.constexpr,
    LOAD_REGS: gl.constexpr,
):  # fmt: skip
    """Two math warpgroups (the first is the launch's own), then three warps."""
    ALL: gl.constexpr = GROUPS * SLABS
    WINDOW: gl.constexpr = 0
    SCALES: gl.constexpr = TOKENS if TOKENS >= 32 else 32
    if WEIGHTS.DECODED:
        w_bufs = gl.allocate_shared_memory(w.dtype, [STAGES, 1, ALL, 4 * DEPTH, 256], w.layout)
        ws_bufs = gl.allocate_shared_memory(
            gl.int32, [STAGES, 1, ALL, WEIGHTS.SCALE_BYTES // 4 * DEPTH], w_scale.layout
        )
    else:
        w_bufs = gl.allocate_shared_memory(w.dtype, [STAGES * DEPTH] + w.block_type.shape, w.layout)
        ws_bufs = w_bufs
    x_bufs = gl.allocate_shared_memory(x.dtype, [STAGES * DEPTH, TOKENS, 128], x.layout)
    xs_bufs = x_bufs
    if PROMOTED:
        xs_bufs = gl.allocate_shared_memory(gl.float32, [STAGES * DEPTH, SCALES], x_scale.layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    HALF: gl.constexpr = 2 if GATED and ACTS.HOLD == "codes" else 1  # E4M3 turns, not BF16
    amax = gl.allocate_shared_memory(gl.int32, [2 * GROUPS * 4, TOKENS], flat)
    turn = amax
    if TOKENS >= 64:
        rows: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        shape: gl.constexpr = [GROUPS, TOKENS // 2 // HALF, 64]
        turn = gl.allocate_shared_memory(gl.bfloat16, shape, rows)
    full = barriers(STAGES, 2)
    empty = barriers(STAGES, GROUPS)
    met = full
    if GATED and PROMOTED:
        met = barriers(2, GROUPS)
    notes = allocate_notes(row_dest, ALL * 64, TOKENS, FACTOR, HAS_BIAS)
    if GATED:
        wait_for_launch()  # the tiles are the launch's before this one; L2's are older
    allow_next_launch()
    p = Work(
        w, w_scale, x, x_scale, w_bufs, ws_bufs, x_bufs, xs_bufs, amax, turn, full, empty, met,
        notes, factor, bias, acts_factor, row_factor, row_weight, row_dest, out, out_scale, tiles,
        num_tiles, pool_rows, steps, num_outputs, num_biases, out_width, factor_rows,
        factor_cols, clamp, WEIGHTS, ACTS, GATED, PROMOTED, FACTOR, HAS_BIAS, WEIGHTED,
        ACTIVATION, TOKENS, IS_STREAM, SLABS, DEPTH, STAGES, SPAN, WINDOW,
    )  # fmt: skip
    gl.warp_specialize(
        [(math, (p, 0)), (math, (p, 1)), (load_weights, (p,)), (load_tokens, (p,)), (note, (p,))],
        [4, 1, 1, 1], [MATH_REGS] + [LOAD_REGS] * 3,
    )  # fmt: skip
