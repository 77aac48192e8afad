"""Portable: plain Triton on any GPU, and in the interpreter. Simple choices, staged launches."""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.formats.spec import recipe_named
from megamoe.hardware import Hardware
from megamoe.problem import Problem
from megamoe.schedule.choice import Picked, Role, Term, Tiles

BLOCK_MS = (16, 32, 64, 128)
BLOCK_NS = (64, 128)
BLOCK_KS = (64, 128)
CLUSTER = 1
SCALE_ALIGN = 1
MODES = ("staged",)
WAVE_RULE = ("divisor", "launches are whole phases; equal waves are the simplest")
DEAL = ("static", "one program per block, or block-cyclic when persistent")

# fmt: off
# (mean rows per expert up to, block_m, why). tl.dot needs 16 rows.
BLOCK_M = (
    (16.5,         16,  "decode: the least that tl.dot takes"),
    (32.5,         32,  "small batches: one tile covers an expert"),
    (64.5,         64,  "middle batches: one tile covers an expert"),
    (float("inf"), 128, "prefill: the widest tile that eight warps hold"),
)
# fmt: on


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of one program's work, and how the compiler pipelines it."""

    block_m: int  # tokens: the MMA's N operand
    block_n: int  # weight rows: the MMA's M operand
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 1  # token tiles that run side by side on the same weights; 1 is along N


def tile(recipe: str, rows_per_expert: float, phase: str) -> Tile:
    """The tile of "l1" or "l2". Both phases share block_m: slots are sorted once."""
    m = next(m for edge, m, _ in BLOCK_M if rows_per_expert <= edge)
    return Tile(m, 128, 128, 4 if m <= 32 else 8, 3)


def mma(problem: Problem) -> tuple[str, str]:
    """(operand type, why)."""
    if problem.recipe == "w8a8":
        return "fp8", "FP8 operands where the GPU has them"
    if problem.recipe in ("w4a8", "w4a8_block"):
        return "fp8", "FP4 decoded to FP8 before the product"
    return "bf16", "decoded to BF16 before the product: exact"


def block_m(problem: Problem) -> Picked:
    """The token tile."""
    load = problem.tokens_per_expert
    return next(Picked(m, why) for edge, m, why in BLOCK_M if load <= edge)


def block_n(problem: Problem, hw: Hardware, num_sms: int, block_m: int) -> Picked:
    """The weight tile."""
    return Picked(128, "fills eight warps; 256 spills")


def block_k(problem: Problem, block_m: int) -> Picked:
    """The depth: 128 so that a scale of 1x128 covers one step."""
    return Picked(128, "one 1x128 scale a step")


def check(problem: Problem, tiles: Tiles) -> None:
    """Nothing to refuse: every combination of the lists compiles."""


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
    warps = 4 if tiles.block_m <= 32 else 8
    return (Role("program", warps, 255 if warps == 4 else 128, "no warp roles in plain Triton"),)
