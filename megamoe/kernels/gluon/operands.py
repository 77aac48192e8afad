"""The epilogue's operands in shared memory.

Factors of the tile's weight rows, topk weights and destinations of its tokens are copied by one
warp during the main loop: tensor cores are idle during an epilogue, so it should not wait for
memory.

  barrier   arrivals  arrived by               awaited by
  full      1         who copies the operands  math, before the epilogue
  empty[2]  GROUPS    math, after it           who copies, before the next tile's; `post_tile`
"""

from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from megamoe.kernels.gluon.compat import async_copy, gl, reinterpret
from megamoe.kernels.gluon.pipeline import FLAT_SHARED, GROUPS, Tile, barriers, record

POSTED_WORDS = gl.constexpr(4)  # of a posted tile: expert, n tile, row_begin, row_end
PREFETCH_STEPS = gl.constexpr(2)  # the operands are copied so many steps before a tile's last one
_LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@record
class EpilogueOperands:
    """Two tiles as they were posted, and the operands of one tile's epilogue."""

    posted: gl.shared_memory_descriptor  # int32 [2 * POSTED_WORDS, 1]
    factor: gl.shared_memory_descriptor  # FP32 [ROWS]: of each weight row
    bias: gl.shared_memory_descriptor  # FP32 [ROWS]
    weight: gl.shared_memory_descriptor  # FP32 [TOKENS]: topk weights
    token_factor: gl.shared_memory_descriptor  # FP32 [TOKENS]: NVFP4's global scale of each token
    dest: gl.shared_memory_descriptor  # int32 or int64 [TOKENS]: destination of each row
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    FACTOR: gl.constexpr  # "row", "expert" or neither
    HAS_BIAS: gl.constexpr


@gluon.jit
def allocate_operands(
    row_dest, ROWS: gl.constexpr, TOKENS: gl.constexpr, FACTOR: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Their shared memory; what a launch does not need stands for `weight`."""
    posted = gl.allocate_shared_memory(gl.int32, [2 * POSTED_WORDS, 1], FLAT_SHARED)
    weight = gl.allocate_shared_memory(gl.float32, [TOKENS], FLAT_SHARED)
    dest = gl.allocate_shared_memory(row_dest.dtype.element_ty, [TOKENS], FLAT_SHARED)
    factor = weight
    bias = weight
    token_factor = weight
    if HAS_BIAS:
        bias = gl.allocate_shared_memory(gl.float32, [ROWS], FLAT_SHARED)
    if FACTOR == "row" or FACTOR == "expert":
        factor = gl.allocate_shared_memory(gl.float32, [ROWS], FLAT_SHARED)
    if FACTOR == "expert":
        token_factor = gl.allocate_shared_memory(gl.float32, [TOKENS], FLAT_SHARED)
    full = barriers(1, 1).index(0)
    empty = barriers(2, GROUPS)
    return EpilogueOperands(
        posted=posted, factor=factor, bias=bias, weight=weight, token_factor=token_factor,
        dest=dest, full=full, empty=empty, FACTOR=FACTOR, HAS_BIAS=HAS_BIAS,
    )  # fmt: skip


@gluon.jit
def post_tile(gemm, num_done, tile):
    """load_tokens: the CTA's tile number `num_done`, before its first stage."""
    ops = gemm.epilogue
    mbarrier.wait(ops.empty.index(num_done & 1), ((num_done >> 1) & 1) ^ 1)
    slot = (num_done & 1) * POSTED_WORDS
    zero = gl.zeros([1], gl.int32, _LANES)
    ops.posted.index(slot).store(zero + tile.expert)
    ops.posted.index(slot + 1).store(zero + tile.n_tile_idx)
    ops.posted.index(slot + 2).store(zero + tile.row_begin)
    ops.posted.index(slot + 3).store(zero + tile.row_end)
    gl.thread_barrier()


@gluon.jit
def read_tile(gemm, num_done):
    """math: the posted tile, once its first stage is full."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot = (num_done & 1) * POSTED_WORDS
    posted = gemm.epilogue.posted
    return Tile(
        expert=gl.max(posted.index(slot).load(LAYOUT), 0),
        n_tile_idx=gl.max(posted.index(slot + 1).load(LAYOUT), 0),
        row_begin=gl.max(posted.index(slot + 2).load(LAYOUT), 0),
        row_end=gl.max(posted.index(slot + 3).load(LAYOUT), 0),
    )


@gluon.jit
def _opaque(x):
    """A volatile no-op: addresses are computed after it, or hold registers during all the tile."""
    return gl.inline_asm_elementwise("", "=r,0", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _part(buf, i):
    """Values 32 * i and the 31 after it."""
    return reinterpret(buf, gl.float32, [buf.shape[0] // 32, 32], FLAT_SHARED).index(i)


@gluon.jit
def _fetch_weight_rows(gemm, expert, n_tile_idx):
    """Factors and biases of a tile's weight rows, 32 after 32: few registers."""
    ops = gemm.epilogue
    ROWS: gl.constexpr = ops.bias.shape[0] if ops.HAS_BIAS else ops.factor.shape[0]
    for i in range(ROWS // 32):
        r = i * 32 + gl.arange(0, 32, _LANES)
        row = n_tile_idx * ROWS + r
        matrix = expert + 0 * r
        col = row
        if gemm.GATED:  # 8 gate, 8 up, ...
            matrix = expert * 2 + r % 16 // 8
            col = n_tile_idx * (ROWS // 2) + r // 16 * 8 + r % 8
        if ops.FACTOR == "row":
            at = gemm.factor + expert * gemm.factor_rows + row
            async_copy.async_copy_global_to_shared(_part(ops.factor, i), at)
        elif ops.FACTOR == "expert":
            async_copy.async_copy_global_to_shared(_part(ops.factor, i), gemm.factor + matrix)
        if ops.HAS_BIAS:
            at = gemm.bias + matrix * gemm.num_bias + col
            to = _part(ops.bias, i)
            async_copy.async_copy_global_to_shared(to, at, mask=col < gemm.num_bias)


@gluon.jit
def fetch_operands(gemm, num_done, tile):
    """One warp: begin to copy the operands of the CTA's tile number `num_done`."""
    ops = gemm.epilogue
    before = num_done - 1
    mbarrier.wait(ops.empty.index(before & 1), (before >> 1) & 1)  # no wait for the first tile
    expert = _opaque(tile.expert)
    n_tile_idx = _opaque(tile.n_tile_idx)
    row_begin = _opaque(tile.row_begin)
    row_end = tile.row_end
    if ops.HAS_BIAS or ops.FACTOR == "row" or ops.FACTOR == "expert":
        _fetch_weight_rows(gemm, expert, n_tile_idx)
    row = row_begin + gl.arange(0, ops.weight.shape[0], _LANES)
    if gemm.GATED and ops.FACTOR == "expert":
        async_copy.async_copy_global_to_shared(
            ops.token_factor, gemm.row_factor + row, mask=row < row_end
        )
    if gemm.WEIGHTED and (gemm.GATED or gemm.HAS_BIAS):
        async_copy.async_copy_global_to_shared(
            ops.weight, gemm.row_weight + row, mask=row < row_end
        )
    if not gemm.GATED:
        async_copy.async_copy_global_to_shared(ops.dest, gemm.row_dest + row, mask=row < row_end)
    async_copy.commit_group()


@gluon.jit
def publish_operands(gemm, report=0):
    """The same warp, some steps later: the copies are complete.

    After a report, who fills `row_dest` may not have: rows of L2 then go to the first one's place.
    """
    dest = gemm.epilogue.dest
    NUM: gl.constexpr = dest.shape[0]
    async_copy.wait_group(0)
    if not gemm.GATED:  # noqa: SIM102  known at compile time
        if report != 0:
            dest.store(gl.zeros([NUM], dest.dtype, _LANES))
    gl.thread_barrier()
    mbarrier.arrive(gemm.epilogue.full, count=1)


@gluon.jit
def wait_for_operands(gemm, num_done):
    """math, after the main loop of the CTA's tile number `num_done`."""
    mbarrier.wait(gemm.epilogue.full, num_done & 1)


@gluon.jit
def release_operands(gemm, num_done):
    """math: the operands and the posted tile number `num_done` may be overwritten."""
    mbarrier.arrive(gemm.epilogue.empty.index(num_done & 1), count=1)


@gluon.jit
def rows_of(gemm, tile, START: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr):
    """[N] rows of `out` of the tile's tokens from number START on, and whether they are used."""
    row = tile.row_begin + START + gl.arange(0, N, LAYOUT)
    used = row < tile.row_end
    if not gemm.GATED:
        row = gemm.epilogue.dest.slice(START, N, 0).load(LAYOUT)
    return row, used


@gluon.jit
def operand(
    of, IS_THERE: gl.constexpr, OTHER, START: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr
):
    """FP32 [N] of an operand from START on, or OTHER where the launch does not have it."""
    value = gl.full([N], OTHER, gl.float32, LAYOUT)
    if IS_THERE:
        value = of.slice(START, N, 0).load(LAYOUT)
    return value
