"""Hopper: weights are wgmma's M (64 rows each), tokens its N; decode is a weight stream.

Measured figures come from one H200 (132 SMs), layers of 32-48 local experts.
"""

from __future__ import annotations

from megamoe.errors import CapacityError, ShapeError, require
from megamoe.formats.spec import Scale, recipe_named
from megamoe.hardware import Hardware
from megamoe.layout.exchange import exchange
from megamoe.layout.regions import align_up, ceil_div
from megamoe.problem import Problem
from megamoe.planner.choice import Picked, Role, Term, Tiles
from megamoe.studies.deep_gemm.heuristics.hopper_fused import COUNTERS, MOST_RANKS, auto_mode, passes
from megamoe.planner.tables.hopper import GROUPS
from megamoe.planner.tables.hopper import tiles as staged_tiles
from megamoe.planner.load import rows_per_rank, touched_experts

BLOCK_MS = (8, 16, 32, 64, 128, 256)
BLOCK_NS = (64, 128, 256)
BLOCK_KS = (64, 128, 256)
CLUSTER = 1
SCALE_ALIGN = 1  # FP32 and E8M0 scales are read as plain rows
MODES = ("fused", "staged", "split")
WAVE_RULE = ("tail", "waves need not be equal, so the fullest last wave wins")
DEAL = ("ticket", "SMs differ by 10% in speed on equal work; tickets for L2 gained 3% at 8 tokens")

NUM_PULL_WARPS = 1
MAX_PULL_BYTES = 4096  # A028: a row longer than this is pulled in halves
SLAB = 64  # weight rows of one wgmma
PROMOTION = 128  # of K: what one FP32 scale covers
STORE_TOKENS = 128  # a wider tile leaves in two halves
TMA_BYTES = 128  # shared destinations of TMA are aligned to this


# fmt: off
# What the tensor cores multiply, per recipe: one arithmetic per recipe, never per call.
MMA = {
    "bf16":       ("bf16", "BF16 operands"),
    "w8a8":       ("fp8",  "FP8 operands, promoted to FP32 every 128 of K"),
    "w4a16":      ("bf16", "FP4 decoded to BF16 in registers: exact"),
    "w4a8":       ("fp8",  "FP4 decoded to FP8 in registers, promoted every 32 of K"),
    "w4a8_block": ("fp8",  "FP4 decoded to FP8 in registers, promoted every 128 of K"),
    "w4a4":       ("bf16", "no FP4 tensor cores; FP4 times its scale is exact in BF16"),
    "nvfp4":      ("bf16", "no FP4 tensor cores; FP4 times its scale is exact in BF16"),
}

# (block_m up to, weight tiles to choose from, why).
BLOCK_N = (
    (32,  (256, 128, 64), "few tokens leave registers for two slabs of 64 weight rows a warpgroup"),
    (256, (128, 64),      "64 tokens and more: accumulators leave room for one slab a warpgroup"),
)
# block_m -> us that math takes for a tile's 128 of K, FP4 weights, on H200: 256 weight rows up to 32
# tokens, by a launch that only computes; 128 rows above, such that whole layers come out: pro at
# 512 tokens, flash at 2048 (benchmarks/h200/hopper-layer.txt). 256 tokens as two tiles of 128.
MATH_US = {8: 0.33, 16: 0.38, 32: 0.43, 64: 0.31, 128: 0.47, 256: 0.94}

# recipe -> bits of a weight, scale included, as launches read it where that is not the checkpoint's.
HELD_BITS = {"w4a8_block": 4.125}  # two exponents share a byte

# operand type -> (block_m up to, depth, why).
BLOCK_K = {
    "fp8": (
        (16,  256, "two 128-blocks a stage: fewer barriers where a block is short"),
        (256, 128, "one promotion step a stage; deeper stages would be too few"),
    ),
    "bf16": (
        (64,  128, "128 columns: the sum of BF16 products needs no promotion"),
        (256, 64,  "BF16 rows are twice as wide: 128 bytes a row, and more stages"),
    ),
}

# slabs of a tile: (registers of a consumer thread, of the other roles, why)
REGISTERS = {
    1: (232, 40, "one warpgroup: as for two"),
    2: (232, 40, "two warpgroups: 24 for the loaders makes the compiler spill"),
    4: (216, 72, "two warpgroups of two slabs: 65 536 registers over 12 warps"),
}
# slabs of a tile: (widest token tile whose accumulators fit their registers, why)
WIDEST = {
    1: (256, "accumulators of two 128-token tiles and a partial sum fill 232 registers"),
    2: (256, "accumulators of two 128-token tiles and a partial sum fill 232 registers"),
    4: (32,  "two slabs of 64 tokens spill beside what a fused launch holds"),
}
# fmt: on


def mma(problem: Problem) -> tuple[str, str]:
    """(operand type, why)."""
    return MMA[problem.recipe]


def block_m(problem: Problem) -> Picked:
    """The token tile of this library's launches at the mean load of an expert."""
    tile, why = staged_tiles(problem.recipe, problem.tokens_per_expert)
    return Picked(tile.tokens, why)


def tile_us(problem: Problem, hw: Hardware, num_sms: int, block_m: int, block_n: int) -> float:
    """Time of both linears in whole tile waves: 400 tiles on 132 SMs are four, not three.

    A 128-deep step of a tile takes as long as its weights take to arrive at the SM's share of HBM,
    or as long as its math takes: narrow tiles waste warpgroups, wide ones the last tile wave.
    """
    touched = round(touched_experts(problem))
    row_blocks = touched * ceil_div(ceil_div(rows_per_rank(problem), max(touched, 1)), block_m)
    tile_bytes = block_n * 128 * recipe_named(problem.recipe).weights.bits_per_value / 8
    load_us = tile_bytes * num_sms / (hw.hbm_gbs.reached.value * 1e3)
    step_us = max(load_us, MATH_US[block_m])
    total = 0.0
    for width, depth in (
        (2 * problem.intermediate, problem.hidden),
        (problem.hidden, problem.intermediate),
    ):
        tile_waves = ceil_div(row_blocks * ceil_div(width, block_n), num_sms)
        total += tile_waves * ceil_div(depth, 128) * step_us
    return total


def block_n(problem: Problem, hw: Hardware, num_sms: int, block_m: int) -> Picked:
    """The weight tile whose whole tile waves take the least time; the wider wins a tie."""
    candidates, why = next((tiles, why) for limit, tiles, why in BLOCK_N if block_m <= limit)
    times = {n: tile_us(problem, hw, num_sms, block_m, n) for n in candidates}
    told = ", ".join(f"{n}: {us:.0f} us" for n, us in times.items())
    return Picked(min(candidates, key=lambda n: times[n]), f"{why}; in whole tile waves {told}")


def block_k(problem: Problem, block_m: int) -> Picked:
    """The depth of a stage."""
    table = BLOCK_K[mma(problem)[0]]
    return next(Picked(k, why) for limit, k, why in table if block_m <= limit)


def staged(problem: Problem) -> tuple[str, str]:
    """(tile of the staged launches, why)."""
    tile, why = staged_tiles(problem.recipe, problem.tokens_per_expert)
    return str(tile), why


def auto(problem: Problem) -> tuple[str, str]:
    """(what mode="auto" launches for the slots of one rank, why)."""
    tile, _ = staged_tiles(problem.recipe, problem.tokens_per_expert)
    return auto_mode(problem.num_tokens * problem.top_k, tile)


def room(problem: Problem) -> tuple[int, str] | None:
    """(symmetric bytes that a rank of a fused group allocates, why); None where none does."""
    if not 1 < problem.num_ranks <= MOST_RANKS:
        return None
    num, each = passes(
        problem.recipe,
        max(problem.num_tokens, 1),
        problem.num_ranks * problem.top_k,
        problem.num_experts,
    )
    where = exchange(num * each, problem.hidden, problem.top_k, COUNTERS, num)
    return where.num_bytes, (
        f"fused over a group: tokens and combine rows, in {num} launches of {each} tokens a rank; "
        "no pool is shared"
    )


def check(problem: Problem, tiles: Tiles) -> None:
    """Refuse a tile whose accumulators spill."""
    widest, why = WIDEST[tiles.block_n // SLAB]
    require(
        tiles.block_m <= widest,
        f"with block_n {tiles.block_n} block_m must be at most {widest}",
        got=f"block_m {tiles.block_m}",
        fix=f"take block_n 128 ({why})",
        kind=CapacityError,
    )
    require(
        tiles.mma == "bf16" or tiles.block_k % PROMOTION == 0,
        f"block_k must be a multiple of {PROMOTION}: FP8 sums are promoted that often",
        got=tiles.block_k,
        kind=ShapeError,
    )


def pull_bytes(problem: Problem) -> int:
    """Bytes of one pull: the row, halved until it is at most 4096 (A028)."""
    row = ceil_div(problem.hidden * recipe_named(problem.recipe).acts.element.bits, 8)
    while row > MAX_PULL_BYTES:
        row = ceil_div(row, 2)
    return align_up(row, 16)


def shared_memory(problem: Problem, tiles: Tiles) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
    """(fixed terms, terms of one stage)."""
    recipe = recipe_named(problem.recipe)
    m, n, k = tiles.block_m, tiles.block_n, tiles.block_k
    groups = min(n // SLAB, GROUPS)
    mma_bytes = {"bf16": 2, "fp8": 1}[tiles.mma]
    out_bytes = recipe.acts.element.bits / 8
    stored_m = min(m, STORE_TOKENS)
    staged = max(2 * stored_m * n, int(stored_m * n / 2 * out_bytes))
    pulls = NUM_PULL_WARPS * pull_bytes(problem) if problem.num_ranks > 1 else 0
    fixed = (
        Term("expert counts", align_up(4 * problem.num_experts, 1024), "4 B an expert, to 1 KiB"),
        Term(
            "pulled rows",
            align_up(pulls, 1024),
            "one row, or half of it, a pull warp; none with one rank",
        ),
        Term(
            "output tile",
            align_up(staged, 1024),
            "the larger of L2 in BF16 and L1 in the row format",
        ),
        Term("amax", align_up(4 * m * groups, TMA_BYTES), "one FP32 a token and warpgroup"),
        Term("mailbox", TMA_BYTES, "drawn blocks on their way from the loader to the other roles"),
        Term("barriers", 256, "pulls, amax, mailbox"),
    )
    scales = {Scale.NONE: 0, Scale.FP32: 4, Scale.E8M0: k // 32, Scale.E4M3: k // 16}
    per_row = {
        Scale.NONE: 0,
        Scale.FP32: 4 * ceil_div(k, 128),
        Scale.E8M0: k // 32,
        Scale.E4M3: k // 16,
    }
    weight_scale = scales[recipe.weights.scale] * (1 if recipe.weights.block[0] > 1 else n)
    act_scale = per_row[recipe.acts.scale] * max(m, 32)
    stage = (
        Term(
            "weights",
            int(n * k * recipe.weights.element.bits / 8),
            "as stored: one contiguous copy",
        ),
        Term("weight scales", align_up(weight_scale, TMA_BYTES), "of the tile's rows"),
        Term("tokens", m * k * mma_bytes, "as the tensor cores read them"),
        Term("token scales", align_up(act_scale, TMA_BYTES), "at least 32 rows: TMA alignment"),
        Term("barriers", 16, "full and empty"),
    )
    return fixed, stage


def roles(problem: Problem, tiles: Tiles) -> tuple[Role, ...]:
    """Warps of a CTA and their registers."""
    consumer, other, why = REGISTERS[tiles.block_n // SLAB]
    groups = min(tiles.block_n // SLAB, GROUPS)
    rows = tiles.block_n // groups
    return (
        Role("math", 4 * groups, consumer, f"{why}; {rows} rows each, epilogue and combine too"),
        Role("load_weights", 1, other, "streams ahead of every dependency"),
        Role("load_tokens", 1, other, "waits for arrivals, then copies rows and scales"),
        Role("pull_tokens", NUM_PULL_WARPS, other, "counts, pulls rows, cleans the workspace"),
        Role("publish", 1, other, "releases finished blocks so that math never waits for it"),
    )
