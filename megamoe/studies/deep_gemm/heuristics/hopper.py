"""Hopper: the published schedule with tiles that wgmma could have. Nothing of it was measured.

Weights are wgmma's M (64 rows each), tokens its N. This library's own tiles for Hopper, which were
measured, are `planner/tables/hopper.py`.
"""

from __future__ import annotations

from megamoe.errors import CapacityError, ShapeError, require
from megamoe.formats.spec import Scale, recipe_named
from megamoe.hardware import Hardware
from megamoe.layout.regions import align_up, ceil_div
from megamoe.planner.choice import Term
from megamoe.planner.launches import WARPGROUPS
from megamoe.planner.numerics import narrowest_mma
from megamoe.problem import Problem
from megamoe.studies.deep_gemm.choice import Picked, Role, Tiles
from megamoe.studies.deep_gemm.heuristics.blackwell import TIERS, pull_bytes

BLOCK_MS = (8, 16, 32, 64, 128, 256)
BLOCK_NS = (64, 128, 256)
BLOCK_KS = (64, 128, 256)
CLUSTER = 1
SCALE_ALIGN = 1  # FP32 and E8M0 scales are read as plain rows
WAVE_RULE = ("tail", "waves need not be equal, so the fullest last wave wins")
DEAL = ("ticket", "SMs differ in speed on equal work")

NUM_PULL_WARPS = 1
SLAB = 64  # weight rows of one wgmma
PROMOTION = 128  # of K: what one FP32 scale covers
STORE_TOKENS = 128  # a wider tile leaves in two halves
TMA_BYTES = 128  # shared destinations of TMA are aligned to this


# fmt: off
# (block_m up to, weight tile, why).
BLOCK_N = (
    (32,  256, "few tokens leave registers for two slabs of 64 weight rows a warpgroup"),
    (256, 128, "64 tokens and more: accumulators leave room for one slab a warpgroup"),
)

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
    narrow = narrowest_mma(problem.recipe)
    if narrow == "fp4":
        return "bf16", "no FP4 tensor cores; FP4 times its scale is exact in BF16"
    return narrow, "the narrowest type that holds both operands"


def block_m(problem: Problem) -> Picked:
    """The published tiers; wgmma's widest token tile here is 128."""
    row = next(row for row in TIERS if problem.tokens_per_expert <= row.edge)
    return Picked(max(m for m in BLOCK_MS if m <= min(row.block_m, 128)), f"{row.why}")


def block_n(problem: Problem, hw: Hardware, num_sms: int, block_m: int) -> Picked:
    """The weight tile."""
    return next(Picked(n, why) for limit, n, why in BLOCK_N if block_m <= limit)


def block_k(problem: Problem, block_m: int) -> Picked:
    """The depth of a stage."""
    table = BLOCK_K[mma(problem)[0]]
    return next(Picked(k, why) for limit, k, why in table if block_m <= limit)


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


def shared_memory(problem: Problem, tiles: Tiles) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
    """(fixed terms, terms of one stage)."""
    recipe = recipe_named(problem.recipe)
    m, n, k = tiles.block_m, tiles.block_n, tiles.block_k
    groups = min(n // SLAB, WARPGROUPS)
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
        Term("mailbox", TMA_BYTES, "drawn blocks on their way to the other roles"),
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
    groups = min(tiles.block_n // SLAB, WARPGROUPS)
    rows = tiles.block_n // groups
    return (
        Role("math", 4 * groups, consumer, f"{why}; {rows} rows each, epilogue and combine too"),
        Role("load_weights", 1, other, "streams ahead of every dependency"),
        Role("load_tokens", 1, other, "waits for arrivals, then copies rows and scales"),
        Role("pull_tokens", NUM_PULL_WARPS, other, "counts, pulls rows, cleans the workspace"),
        Role("publish", 1, other, "releases finished blocks so that math never waits for it"),
    )
