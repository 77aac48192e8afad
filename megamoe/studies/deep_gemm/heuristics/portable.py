"""Portable: plain Triton on any GPU, and in the interpreter. Simple choices, staged launches."""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.errors import ShapeError, require
from megamoe.formats.spec import recipe_named
from megamoe.hardware import Hardware
from megamoe.problem import Problem
from megamoe.planner.choice import Picked, Role, Term, Tiles

BLOCK_MS = (16, 64, 128)
BLOCK_NS = (64, 128, 256)
BLOCK_KS = (64, 128)
CLUSTER = 1
SCALE_ALIGN = 1
MODES = ("staged",)
WAVE_RULE = ("divisor", "launches are whole phases; equal waves are the simplest")
DEAL = ("static", "one program per block, or block-cyclic when persistent")

INF = float("inf")


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of one program's work, and how the compiler pipelines it."""

    block_m: int  # tokens: the MMA's N operand
    block_n: int  # weight rows: the MMA's M operand
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 1  # token tiles that run side by side on the same weights; 1 is along N


# (recipes, mean rows per expert up to, tile of L1, tile of L2, why). The first row that fits wins;
# both tiles of a row share block_m, since slots are sorted once; L2 has block_n 128, a combine scale. Measured on one H200, 2026-11-15,
# torch 2.11.0+cu130, triton 3.6.0, over one EP8 rank's share of DeepSeek-V4-Flash, -Pro and -V3.
_W8, _W4 = ("w8a8",), ("w4a16", "w4a8", "w4a4")
TILES = (
    (_W8, 16.5, Tile(16, 128, 128, 4, 3), Tile(16, 128, 128, 4, 3), "weights stream at 3.2-4.0 TB/s"),
    (_W8, INF, Tile(64, 128, 128, 8, 3, 8), Tile(64, 128, 128, 4, 3, 8), "128 tokens spill: 1.5x slower"),
    (_W4, 16.5, Tile(16, 128, 128, 4, 3), Tile(16, 128, 128, 4, 3), "best in four of six cells, within 6% in the others"),
    (_W4, 72, Tile(64, 64, 128, 4, 4, 8), Tile(64, 128, 128, 4, 3, 8), "pro at 512 tokens: 64 rows an expert fill one tile"),
    (_W4, INF, Tile(128, 128, 128, 8, 3, 8), Tile(128, 256, 128, 8, 3, 8), "decoded once for 128 tokens: best or within 5% of it"),
    (("bf16",), 16.5, Tile(16, 128, 64, 4, 4), Tile(16, 128, 64, 4, 4), "four stages fit; not measured"),
    (("bf16",), INF, Tile(64, 128, 64, 8, 3, 8), Tile(64, 128, 64, 4, 3, 8), "as w8a8; not measured"),
    (("w4a8_block",), 16.5, Tile(16, 128, 128, 4, 3), Tile(16, 128, 128, 4, 3), "as w4a16, a 1x128 scale a step"),
    (("w4a8_block",), INF, Tile(64, 128, 128, 8, 3, 8), Tile(64, 128, 128, 8, 3, 8), "as w4a16; not measured"),
    (("nvfp4",), 16.5, Tile(16, 64, 128, 4, 3), Tile(16, 128, 128, 4, 3), "as w4a16; not measured"),
    (("nvfp4",), INF, Tile(64, 128, 128, 8, 3, 8), Tile(64, 128, 128, 4, 3, 8), "128 tokens spill; not measured"),
)  # fmt: skip


# Where the MMA takes block-scaled codes, 128 rows of weights at once.
NATIVE_TILES = (
    (16.5, Tile(16, 128, 128, 4, 4), Tile(16, 128, 128, 4, 4), "few tokens; not measured"),
    (INF, Tile(64, 128, 128, 8, 4, 8), Tile(64, 128, 128, 4, 4, 8), "two sums fill TMEM; not measured"),
)  # fmt: skip


def tiles(
    recipe: str, rows_per_expert: float, *, is_native: bool = False
) -> tuple[Tile, Tile, str]:
    """(tile of L1, tile of L2, why). is_native: the MMA takes codes and scales of both operands."""
    if is_native:
        return next(row[1:] for row in NATIVE_TILES if rows_per_expert <= row[0])
    return next(
        (l1, l2, why)
        for recipes, edge, l1, l2, why in TILES
        if recipe in recipes and rows_per_expert <= edge
    )


def mma(problem: Problem) -> tuple[str, str]:
    """(operand type, why)."""
    if problem.recipe == "w8a8":
        return "fp8", "FP8 operands where the GPU has them"
    return "bf16", "decoded to BF16 before the product: exact"


def block_m(problem: Problem) -> Picked:
    """The token tile."""
    l1, _, why = tiles(problem.recipe, problem.tokens_per_expert)
    return Picked(l1.block_m, why)


def block_n(problem: Problem, hw: Hardware, num_sms: int, block_m: int) -> Picked:
    """The weight tile."""
    l1, _, why = tiles(problem.recipe, problem.tokens_per_expert)
    return Picked(l1.block_n, why)


def block_k(problem: Problem, block_m: int) -> Picked:
    """The depth of one step."""
    l1, _, why = tiles(problem.recipe, problem.tokens_per_expert)
    return Picked(l1.block_k, why)


def staged(problem: Problem) -> None:
    """None: block_m, block_n and block_k are those of the staged launches."""


def auto(problem: Problem) -> None:
    """None: there is one mode."""


def room(problem: Problem) -> None:
    """No fused group here."""


def check(problem: Problem, tiles: Tiles) -> None:
    """Refuse a depth that FP4 weights do not have: a lane decodes 32 columns of each 128."""
    require(
        tiles.block_k % 128 == 0 or recipe_named(problem.recipe).weights.element.bits != 4,
        "block_k must be a multiple of 128 for FP4 weights",
        got=tiles.block_k,
        kind=ShapeError,
    )


def shared_memory(problem: Problem, tiles: Tiles) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
    """(fixed terms, terms of one stage): what the compiler's pipeliner will ask for."""
    mma_bytes = {"bf16": 2, "fp8": 1}[tiles.mma]
    weights = int(
        tiles.block_n * tiles.block_k * recipe_named(problem.recipe).weights.element.bits / 8
    )
    fixed = (Term("scratch", 4096, "the compiler's layout conversions"),)
    stage = (
        Term("tokens", tiles.block_m * tiles.block_k * mma_bytes, "as multiplied"),
        Term("weights", weights, "as stored"),
        Term("scales", 4 * (tiles.block_m + tiles.block_n), "at most four bytes a row"),
    )
    return fixed, stage


def roles(problem: Problem, tiles: Tiles) -> tuple[Role, ...]:
    """One role: the compiler pipelines."""
    warps = 4 if tiles.block_m <= 16 else 8
    return (Role("program", warps, 255 if warps == 4 else 128, "no warp roles in plain Triton"),)
