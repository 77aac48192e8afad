"""Blackwell's tables: tiles by recipe and load, limits of the kernels.

Nothing here was measured: the kernels are emulated and compiled, not yet run on the hardware. A
reason is what the compiler or arithmetic says (triton 3.6.0, sm_100a).
"""

from __future__ import annotations

from typing import NamedTuple

INF = float("inf")

WIDTH = 128  # hidden and intermediate of pools are padded to this: outputs of an L1 tile
BLOCK_ROWS = 128  # weight rows of one MMA: a block-scaled one has no other M
TMEM_COLUMNS = 512  # of a CTA, each of 128 lanes x 32 bits
MAX_STAGES = 8
BLOCK_MS = (8, 16, 32, 64, 128)  # the MMA's N: Gluon wants powers of two
# Beside M = 128, kinds f16 and f8f6f4 take N in steps of 16 by what libraries assert (PTX's table
# says 8); those with block scales take 8.
LEAST_PLAIN = 16
MAX_PROMOTED = 64  # 128 tokens spill: sums of a promoted tile are registers
# Pairs of CTAs: recipes whose kernel is written for them, and tokens whose half an MMA reads.
PAIRED = ("w4a8", "w4a4", "nvfp4")
LEAST_PAIRED = 16
CHUNK = 32  # tokens that an epilogue has in registers: 64 spill in NVFP4 (232 bytes)
WIDE_N = 4096  # weight rows of a group from which a tile of a grouped GEMM alone has 256 of them


def block_ms(recipe: str, is_promoted: bool) -> tuple[int, ...]:
    """Tokens that a tile of a recipe may have."""
    least = BLOCK_MS[0] if recipe in SCALED else LEAST_PLAIN
    most = MAX_PROMOTED if is_promoted or recipe == "w4a16" else BLOCK_MS[-1]
    return tuple(m for m in BLOCK_MS if least <= m <= most)


SCALED = ("w4a8", "w4a4", "nvfp4", "w4a8_block")  # whose MMA takes block scales
ACTIVATIONS = ("swiglu", "gpt_oss")  # that the epilogues compute


# How CTAs come to their tiles, and why. A tile costs as much as any other of its width, however many
# of its rows are used: all its weights are read and multiplied.
SCHEDULES = {
    "strided": "round robin: tiles cost the same, and every role knows its own",
    "dynamic": "from a counter: a CTA that began or ended early takes the next",
    "sorted": "from a counter, tiles of experts with many rows first",
}


# The chain: SMs that pull tokens into the pool beside L1 are as many as on Hopper.
WHY_PULL_SMS = "as many as on an H200, where they were measured; no B200 was timed"


# -- fused launches --------------------------------------------------------------------------------

FUSED_SCRATCH = 8 << 10  # the compiler's, whatever the tile
FUSED_RESERVE = 2 << 10  # work items, barriers


class Fused(NamedTuple):
    """How a recipe's fused launch is held, whatever its tile: registers are a thread's."""

    block_m: int  # at most
    why: str  # no more
    chunk: int = 16  # tokens that an epilogue has in registers: 32 spill (NVFP4: 56 bytes)
    math_regs: int = 216  # as on Hopper: twelve warps too
    load_regs: int = 72
    decode_regs: int = 0


_TURNS = "of either warpgroup's sums, two tiles' in tensor memory"
_ADDED = "sums of a promoted tile are registers of four warps; 32 spill 16 bytes beside a ring"
_CODES = "64 spill 8 bytes beside a ring with rows in FP8"
FUSED = {
    "w4a8": Fused(64, _TURNS),
    "w4a4": Fused(32, _CODES),
    "nvfp4": Fused(32, _CODES),
    "bf16": Fused(64, _TURNS),
    "w8a8": Fused(16, _ADDED),
    "w4a8_block": Fused(16, _ADDED),
    "w4a16": Fused(64, _TURNS, 8, 144, 72, 152),  # sixteen warps: four decode
}
# (slots of a call up to, mode, why): what mode="auto" takes on one rank. The first row wins.
MODES: tuple[tuple[float, str, str], ...] = (
    (INF, "staged", "neither mode has been timed; staged launches hold no CTA back for another"),
)


class Shape(NamedTuple):
    """An entry of the table; stages fill shared memory."""

    block_m: int
    block_k: int
    num_sums: int  # tiles (or, promoted, K blocks) whose sums stand in tensor memory
    num_warps: int = 4  # of the epilogue
    group_m: int = 1


_SCALED = ("w4a8",)
_FP4 = ("w4a4", "nvfp4")
_MXFP4 = ("w4a4",)
_PROMOTED = ("w8a8", "w4a8_block")
_BLOCK = ("w4a8_block",)
_PLAIN = ("bf16",)
_DECODED = ("w4a16",)
# fmt: off
# (recipes, mean rows per expert up to, shape, why). The first row that fits wins; edges as on
# Hopper, where a busy expert (mean + 2 sigma of random routing) still fits the tile.
TILES: tuple[tuple[tuple[str, ...], float, Shape, str], ...] = (
    (_SCALED,   4.0,  Shape(8, 128, 2),       "weights are the limit; padded FP4 takes a byte a value, so a stage has 128 of K"),
    (_SCALED,   13.0, Shape(16, 128, 2),      "the narrowest tile that a busy expert fits"),
    (_SCALED,   22.5, Shape(32, 128, 2),      "the narrowest tile that a busy expert fits"),
    (_SCALED,   49.8, Shape(64, 128, 2),      "two tiles' sums are 256 columns: the widest that is double-buffered"),
    (_SCALED,   INF,  Shape(128, 128, 1, 4, 4), "sums of one tile are 256 columns, its scales 48: not twice"),
    (_FP4,      4.0,  Shape(8, 256, 2),       "weights are the limit; packed FP4 has 256 of K in the bytes of 128"),
    (_FP4,      13.0, Shape(16, 256, 2),      "the narrowest tile that a busy expert fits"),
    (_FP4,      22.5, Shape(32, 256, 2),      "the narrowest tile that a busy expert fits"),
    (_FP4,      49.8, Shape(64, 256, 2),      "two tiles' sums are 256 columns: the widest that is double-buffered"),
    (_MXFP4,    96.5, Shape(128, 128, 1, 4, 4), "published kernels have 256 of K for 32, 64 and 192 tokens, not for 96 and 128 (D004)"),
    (_FP4,      INF,  Shape(128, 256, 1, 4, 4), "sums of one tile are 256 columns: not twice beside the scales"),
    (_BLOCK,    4.0,  Shape(8, 128, 4),       "a product of 128 of K at a time, four of them ahead of the sums"),
    (_PROMOTED, 13.0, Shape(16, 128, 4),      "the narrowest tile that a busy expert fits"),
    (_PROMOTED, 22.5, Shape(32, 128, 4, 8),   "eight warps add: half the registers of a thread"),
    (_PROMOTED, INF,  Shape(64, 128, 2, 8, 4), "128 tokens spill 696 bytes; w8a8 has room for four products, scales of w4a8_block for two"),
    (_PLAIN,    13.0, Shape(16, 64, 2),       "weights are the limit: 64 of K are 32 KB of them; no MMA of 8 tokens"),
    (_PLAIN,    22.5, Shape(32, 64, 2),       "the narrowest tile that a busy expert fits"),
    (_PLAIN,    49.8, Shape(64, 64, 2),       "two tiles' sums are 256 columns: the widest that is double-buffered"),
    (_PLAIN,    INF,  Shape(128, 64, 2, 4, 4), "two tiles' sums are all 512 columns"),
    (_DECODED,  13.0, Shape(16, 128, 2),      "weights of two stages stand decoded in 256 columns; no MMA of 8 tokens"),
    (_DECODED,  22.5, Shape(32, 128, 2),      "the narrowest tile that a busy expert fits"),
    (_DECODED,  INF,  Shape(64, 128, 2, 4, 4), "sums of two tiles and decoded weights are all 512 columns"),
)
# fmt: on
