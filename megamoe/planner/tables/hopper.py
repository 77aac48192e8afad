"""Hopper's tables: tiles by recipe and load, modes by size, limits of the kernels. Reasons measured.

Measured on H200 (132 SMs), 2026-11-15 to 17, torch 2.11.0+cu130, triton 3.6.0, over one EP8 rank's
share of DeepSeek-V4-Flash, -Pro and -V3.
"""

from __future__ import annotations

from typing import NamedTuple

from megamoe.planner.launches import Gemm

INF = float("inf")

WIDTH = 256  # hidden and intermediate are padded to this: a tile of rows, two K blocks
ROW_ALIGN = 8  # rows of the pool at which an expert begins: TMA reads scales in whole 16 bytes
MAX_STAGES = 12
ACTIVATIONS = ("swiglu", "gpt_oss")  # that the epilogues compute
MAX_CTAS = (1 << 10) - 1  # of work items

# The fused launch.
MAX_SLOTS = 4096  # of one rank: every CTA reads the whole routing
# Of all ranks: 15 bits number a rank's slots of an expert, and every tile of 8 rows or more has a
# word among the counters. Up to 728 experts the rows an expert (TILES) are the lower limit.
MAX_GROUP_SLOTS = 16384
SLOT_SIZES = (128, 512, 1024, 2048, MAX_SLOTS)  # that the kernel is compiled for
MAX_RANKS = 8  # of one call
COUNTERS = 192 + MAX_SLOTS  # words of a rank: six lines, and one for each tile of tokens
MAX_WAVES = 32  # of a pool that is a ring
MATH_REGS, LOAD_REGS = 216, 72  # roles that wait and draw work need more than loaders alone
ROUTING_BYTES = 4096  # of routing that fit into shared memory beside all stages of any tile
# Stages of weights that a fused launch has in flight once what others left in L2 is written back,
# 9 MB of all CTAs. w4a8_block, after a memset and after a read: flash at 8 tokens 95.6 and 88.2 us,
# 97.4 and 90.0 with a whole ring of six; 48 experts at 32 tokens, 23 of them touched, 126.2 and
# 121.8, 126.9 and 123.4 with five. Where FP4 becomes BF16 math is the limit and wants the whole
# ring: w4a16 flash at 8 tokens 109.1 and 106.6, 109.7 and 107.6 with two stages.
MAX_IN_FLIGHT = 2

# Whether `auto` takes the chain over a group: not before it has run on GPUs, as opt-in backends.
AUTO_TAKES_CHAIN = False
WHY_OPT_IN = "it has not run on a GPU yet"

# The chain. SMs that pull tokens into the pool beside L1.
PULL_SMS = 16
WHY_PULL_SMS = (
    "16 SMs: copies by loads and stores reach 18 to 20 GB/s an SM from local memory on an H200, so 16 "
    "bring about what NVLink does; 12 that copied by TMA hid 85 to 98% of a pull, 6 were too few"
)

# Permute: slots of a call up to which one launch does it all, and up to which programs count for
# themselves; columns and warps of a program by whether it does it all; warps of `place` by whether
# there are shared experts (with more threads than slots in a chunk the compiler finds the experts
# again in every layout, which spills with shared ones).
SMALL_SLOTS, MIDDLE_SLOTS = 1024, 4096
PERMUTE_COLS = {True: (1024, 4), False: (2048, 4)}
PLACE_WARPS = {False: 8, True: 4}
CHUNK = 128  # slots that a program ranks against each other
LOOK = 2048  # slots that are counted together
PACK_WARPS = 4  # of a program that packs a slab: 1024 words of a K block at a time


class Shape(NamedTuple):
    """An entry of the tables that becomes a GemmSwapAb with as many stages as fit."""

    block_m: int
    slabs: int
    k_blocks: int
    group_m: int = 1
    evict_first: int | None = None  # None: with fewer than 64 tokens


PER_TILE_ROWS = 200.0  # rows an expert up to which `w4a8_block` is decoded per tile
_FP8 = ("w4a8_block", "w8a8")
_FP4 = ("w4a16", "w4a8", "w4a4", "nvfp4")  # decoded to BF16
_BF16 = (*_FP4, "bf16")
# fmt: off
# (recipes, mean rows per expert up to, tile, why). The first row that fits wins. An edge lies where
# a busy expert (mean + 2 sigma of random routing) still fits. With FP8 activations a tile has 256
# weight rows, since 128 outputs share a scale.
TILES: tuple[tuple[tuple[str, ...], float, Shape | Gemm, str], ...] = (
    (("w4a8_block",), 4.0,  Shape(8, 2, 2),        "the stream of weights is the limit; fused flash at 8 tokens 96.4 us, 97.2 with four warpgroups of one slab"),
    (("w4a8_block",), 13.0, Shape(16, 2, 2),       "fused flash at 64 tokens 118.7 us, 119.0 with four warpgroups of one slab, which took 127 with 32 tokens"),
    (("w4a8_block",), 22.5, Shape(32, 2, 2),       "v3 at 64 tokens: fused 191.3 us, 196.1 with four warpgroups of one slab; staged 205.5, 210.3 with one K block a stage"),
    (("w4a8_block",), 70.0, Shape(64, 2, 2, 1, 1), "43 rows an expert (48 of 6144 x 2048) 322.6 us, 328.6 where weights are no stream, 335.2 with four warpgroups; 64 rows (pro at 512 tokens) 820.3, 827.9, 852.4"),
    (("w4a8_block",), PER_TILE_ROWS, Gemm(3, 3, 8, 216, 56, 24), "a warpgroup decodes: flash at 512 tokens 274 us, 529 decoded ahead; v3 617 and 930"),
    (("w4a8_block",), 700.0, Gemm(3, 3, 24, 216, 56, 24, decode_ahead=16), "decoded once per wave: flash at 2048 tokens 818-841 us, 878 per tile, 924 with a ring of 32; v3 1603-1648 and 1940; pro 2242-2286, 2312-2522"),
    (("w4a8_block",), 1200.0, Gemm(3, 3, 24, 216, 56, 24, decode_ahead=32), "pro at 8192 tokens: 6603-6901 us, 6740-6880 and 7021 with rings of 16 and 64, 6976 with 16 tiles together"),
    (("w4a8_block",), INF,  Gemm(3, 3, 24, 216, 56, 24, decode_ahead=64), "flash at 8192 tokens: 2582 us, 2737 and 2816 with rings of 32 and 16; v3 5883 and 5923"),
    (("w8a8",),       4.0,  Shape(8, 2, 2),        "flash at 8 tokens 171.2 us, 172.8 with one K block a stage"),
    (("w8a8",),       13.0, Shape(16, 2, 2),       "flash at 64 tokens 208.7 us, 211.8 with one K block a stage, 213.4 with 32 tokens"),
    (("w8a8",),       22.5, Shape(32, 2, 2),       "v3 at 64 tokens 349.2 us, 356.5 with one K block a stage"),
    (("w8a8",),       40.0, Shape(64, 2, 1),       "two K blocks leave two stages; not measured apart"),
    (("w8a8",),       200.0, Gemm(4, schedule="dynamic"), "L2 follows L1 tile by tile: v3 at 512 tokens 504 us, 523 dealt; pro 817-843, 866 by turns; flash 262-267, 270"),
    (("w8a8",),       300.0, Gemm(4, schedule="static"), "two tiles share their weights while they run side by side: pro at 2048 tokens 1766-1835 us, 1852-1886 drawn"),
    (("w8a8",),       INF,  Gemm(4, group_m=16, schedule="dynamic"), "pro at 8192 tokens 6361 us, 6547 with 8 tiles together, 6441-6604 dealt; v3 5837 and 5781-5879; flash at 2048 650, 672 dealt"),
    (_FP4,            4.0,  Shape(8, 2, 2),        "flash at 8 tokens: w4a16 132 us, 139 with one K block a stage; nvfp4 166, 172"),
    (_FP4,            13.0, Shape(16, 2, 2),       "flash at 64 tokens: w4a16 146 us, 153 with one K block a stage, 161 with 32 tokens; nvfp4 186 and 190"),
    (_FP4,            22.5, Shape(32, 2, 2),       "v3 at 64 tokens: w4a16 262 us, 273 with one K block a stage; nvfp4 338 and 337-338"),
    (("bf16",),       4.0,  Shape(8, 2, 1),        "flash at 8 tokens 315 us, 349 with two K blocks a stage"),
    (("bf16",),       9.75, Shape(16, 2, 1),       "the narrowest tile that covers a busy expert; flash at 64 tokens (12 rows) 389 us, 387 with 32 tokens"),
    (("bf16",),       22.5, Shape(32, 2, 1),       "v3 at 64 tokens 661 us, 664 with two K blocks a stage"),
    (_BF16,           49.8, Shape(64, 1, 1),       "two slabs of 64 tokens lack registers"),
    (_BF16,           INF,  Shape(128, 1, 1, 4),   "256 tokens leave two stages and spill"),
)
# An FP4 layer whose exponents do not fit E4M3 multiplies in BF16 and still promotes every 128.
WIDE_RANGE: tuple[tuple[float, Shape, str], ...] = (
    (4.0,  Shape(8, 2, 1),  "exact path for exponents that E4M3 lacks"),
    (22.5, Shape(32, 2, 1), "exact path for exponents that E4M3 lacks"),
    (INF,  Shape(64, 2, 1), "exact path for exponents that E4M3 lacks"),
)

# (slots of a call up to, mode, why): what mode="auto" takes on one rank. The first row wins.
MODES: tuple[tuple[float, str, str], ...] = (
    (1024, "fused", "decode: flash at 8 and 64 tokens 97 and 119 us, 109 and 126 staged; 1024 slots over 48 experts 242, staged 261"),
    (INF, "staged", "more rows an expert want wider tiles; of 64 tokens, 256 over 48 experts, a fused launch takes 322 us, staged ones 323"),
)

# What `megamoe bench sweep` tries beside the table's tile, and overrides may name. None of them
# spilled when it was compiled for sm_90a (triton 3.6.0, 2026-11-16).
CANDIDATES: tuple[tuple[tuple[str, ...], Shape | Gemm], ...] = (
    *((_FP8, Shape(tokens, 2, depth)) for tokens in (8, 16, 32, 64) for depth in (1, 2)),
    *((_FP8, Shape(64, 2, 1, span)) for span in (2, 4)),
    *((("w4a8_block",), Shape(64, 2, 2, span, stream)) for span, stream in ((1, 1), (2, 0))),
    *((("w4a8_block",), Gemm(3, 3, span, 216, 56, 24)) for span in (4, 8, 16)),
    (("w4a8_block",), Gemm(3, 2, 8, 216, 56, 24)),
    *((("w4a8_block",), Gemm(3, 3, 24, 216, 56, 24, decode_ahead=ahead)) for ahead in (16, 32, 64)),
    *((("w8a8",), Gemm(stages, group_m=8)) for stages in (3, 4)),
    *((("w8a8",), Gemm(4, group_m=span, schedule="static")) for span in (8, 16)),
    *((("w8a8",), Gemm(4, group_m=span, schedule="dynamic")) for span in (8, 16, 24)),
    *((("w8a8",), Gemm(4, group_m=span)) for span in (4, 16)),
    *((_BF16, Shape(tokens, slabs, depth)) for tokens in (8, 16, 32) for slabs in (1, 2) for depth in (1, 2)),
    *((_BF16, Shape(tokens, 1, 1)) for tokens in (64, 128)),
    *((_BF16, Shape(tokens, 1, 1, span)) for tokens in (64, 128) for span in (2, 4, 8)),
)
# fmt: on
