"""Hopper's tables: tiles by recipe and load, modes by size, limits of the kernels. What was measured.

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
MATH_REGS, LOAD_REGS = 216, 72  # roles that wait and take work items need more than loaders alone
ROUTING_BYTES = (
    4096  # of routing up to which a launch has as many stages as staged ones, if they fit
)
# Stages of weights that a fused launch has in flight once what others left in L2 is written back,
# 9 MB of all CTAs. w4a8_block, after a memset and after a read: flash at 8 tokens 95.6 and 88.2 us,
# 97.4 and 90.0 with a whole ring of six; 48 experts at 32 tokens, 23 of them touched, 126.2 and
# 121.8, 126.9 and 123.4 with five. Where FP4 becomes BF16 math is the limit and wants the whole
# ring: w4a16 flash at 8 tokens 109.1 and 106.6, 109.7 and 107.6 with two stages.
MAX_IN_FLIGHT = 2

# Whether `auto` takes the chain over a group, for calls that one fused launch does not take.
AUTO_TAKES_CHAIN = True
WHY_CHAIN = "run with the bits of one rank as 8 ranks of one H200; no mode has run on several GPUs"
WHY_OPT_IN = "switched off in the tables"

# The chain. SMs that pull tokens into the pool beside L1.
PULL_SMS = 16
WHY_PULL_SMS = (
    "together they pulled about 240 GB/s from local memory, where others measured 402 over NVLink; "
    "6 SMs were too few in an experiment"
)

# Permute: slots of a call up to which one launch does it all, and up to which programs count for
# themselves; columns and warps of a program by whether it does it all; warps of `place` by whether
# there are shared experts (with more threads than slots in a chunk the compiler finds the experts
# again in every layout, which spills with shared ones).
SMALL_SLOTS, MIDDLE_SLOTS = 1024, 4096
PERMUTE_COLS = {True: (1024, 4), False: (2048, 4)}
PLACE_WARPS = {False: 8, True: 4}
CHUNK = 128  # slots that a program ranks against each other
COUNT_CHUNK = 2048  # slots that are counted together
PACK_WARPS = 4  # of a program that packs a slab: 1024 words of a K block at a time


class Shape(NamedTuple):
    """An entry of the tables that becomes a GemmSwapAb with as many stages as fit."""

    block_m: int
    slabs: int
    k_blocks: int
    group_m: int = 1
    evict_first: int | None = None  # None: with fewer than 64 tokens


PER_TILE_ROWS = 200.0  # rows an expert up to which `w4a8_block` is decoded per tile
PER_TILE = Gemm(3, 3, 8, 216, 56, 24)  # each CTA decodes the FP4 of its own tiles
_FP8 = ("w4a8_block", "w8a8")
_FP4 = ("w4a16", "w4a8", "w4a4", "nvfp4")  # decoded to BF16
_BF16 = (*_FP4, "bf16")
# fmt: off
# (recipes, mean rows per expert up to, tile, why, what was measured). The first row that fits wins.
# Plans print the reason; figures stay here. An edge lies where a busy expert (mean + 2 sigma of
# random routing) still fits. With FP8 activations a tile has 256 weight rows, since 128 outputs
# share a scale.
# Figures are of the row's recipe, or of the one that they name: whole layers, one rank's share of
# eight, on one H200 each, 2026-11-15 to 2026-11-18; commits and the tiles that lost are in
# benchmarks/h200/hopper-tried.txt and hopper-layer.txt.
TILES: tuple[tuple[tuple[str, ...], float, Shape | Gemm, str, str], ...] = (
    (("w4a8_block",), 4.0,  Shape(8, 2, 2),        "reading the weights takes all the time", "V4-Flash, 8 tokens, fused: 96.4 us, with four warpgroups of one slab 97.2"),
    (("w4a8_block",), 13.0, Shape(16, 2, 2),       "the narrowest tile that a busy expert fits", "V4-Flash, 64 tokens, fused: 118.7 us, with four warpgroups of one slab 119.0, and 127 in tiles of 32"),
    (("w4a8_block",), 22.5, Shape(32, 2, 2),       "two slabs a warpgroup and two K blocks a stage are faster than four warpgroups of one, or than one K block", "V3, 64 tokens: fused 191.3 us, with four warpgroups of one slab 196.1; staged 205.5, with one K block a stage 210.3"),
    (("w4a8_block",), 70.0, Shape(64, 2, 2, 1, 1), "weights are read once and evicted from L2 first", "48 experts of 6144 x 2048, 43 rows each: 322.6 us, without that hint 328.6, with four warpgroups 335.2; V4-Pro, 512 tokens (64 rows): 820.3, 827.9, 852.4"),
    (("w4a8_block",), PER_TILE_ROWS, PER_TILE, "each CTA decodes the FP4 of its own tiles: few tiles share a weight", "V4-Flash, 512 tokens: 274 us, decoded once per wave 529; V3: 617 and 930"),
    (("w4a8_block",), 700.0, Gemm(3, 3, 24, 216, 56, 24, decode_ahead=16), "FP4 is decoded once per wave, for all tiles that share it", "2048 tokens: V4-Flash 818-841 us, per tile 878, with a ring of 32 K blocks 924; V3 1603-1648, per tile 1940; V4-Pro 2242-2286, per tile 2312-2522"),
    (("w4a8_block",), 1200.0, Gemm(3, 3, 24, 216, 56, 24, decode_ahead=32), "decoded once per wave into a ring of 32 K blocks", "V4-Pro, 8192 tokens: 6603-6901 us, with rings of 16 and 64 6740-6880 and 7021, with group_m 16 6976"),
    (("w4a8_block",), INF,  Gemm(3, 3, 24, 216, 56, 24, decode_ahead=64), "decoded once per wave into a ring of 64 K blocks", "8192 tokens: V4-Flash 2582 us, with rings of 32 and 16 2737 and 2816; V3 5883, with 32 5923"),
    (("w8a8",),       4.0,  Shape(8, 2, 2),        "reading the weights takes all the time", "V4-Flash, 8 tokens: 171.2 us, with one K block a stage 172.8"),
    (("w8a8",),       13.0, Shape(16, 2, 2),       "the narrowest tile that a busy expert fits", "V4-Flash, 64 tokens: 208.7 us, with one K block a stage 211.8, in tiles of 32 213.4"),
    (("w8a8",),       22.5, Shape(32, 2, 2),       "two K blocks a stage are faster than one", "V3, 64 tokens: 349.2 us, with one 356.5"),
    (("w8a8",),       40.0, Shape(64, 2, 1),       "with two K blocks a stage only two stages would fit", "not compared"),
    (("w8a8",),       200.0, Gemm(4, schedule="dynamic"), "CTAs take tiles from a counter, and L2 follows L1 tile by tile", "512 tokens: V3 504 us, statically scheduled 523; V4-Pro 817-843, strided 866; V4-Flash 262-267, strided 270"),
    (("w8a8",),       300.0, Gemm(4, schedule="static"), "neighbouring CTAs have tiles of the same weights, which then come from L2", "V4-Pro, 2048 tokens: 1766-1835 us, from a counter 1852-1886"),
    (("w8a8",),       INF,  Gemm(4, group_m=16, schedule="dynamic"), "16 token tiles share each weight tile, and CTAs take them from a counter", "V4-Pro, 8192 tokens: 6361 us, with group_m 8 6547, statically scheduled 6441-6604; V3 5837, static 5781-5879; V4-Flash, 2048 tokens: 650, static 672"),
    (_FP4,            4.0,  Shape(8, 2, 2),        "two K blocks a stage are faster than one", "V4-Flash, 8 tokens: w4a16 132 us, with one 139; nvfp4 166, with one 172"),
    (_FP4,            13.0, Shape(16, 2, 2),       "the narrowest tile that a busy expert fits", "V4-Flash, 64 tokens: w4a16 146 us, with one K block a stage 153, in tiles of 32 161; nvfp4 186, with one K block 190"),
    (_FP4,            22.5, Shape(32, 2, 2),       "two K blocks a stage are as fast as one, or faster", "V3, 64 tokens: w4a16 262 us, with one 273; nvfp4 338, with one 337-338"),
    (("bf16",),       4.0,  Shape(8, 2, 1),        "one K block a stage leaves space for more stages", "V4-Flash, 8 tokens: 315 us, with two 349"),
    (("bf16",),       9.75, Shape(16, 2, 1),       "the narrowest tile that a busy expert fits", "V4-Flash, 64 tokens (12 rows an expert): 389 us, in tiles of 32 387"),
    (("bf16",),       22.5, Shape(32, 2, 1),       "one K block a stage leaves space for more stages", "V3, 64 tokens: 661 us, with two 664"),
    (_BF16,           49.8, Shape(64, 1, 1),       "64 tokens leave registers for one slab a warpgroup", ""),
    (_BF16,           INF,  Shape(128, 1, 1, 4),   "the widest tile: with 256 tokens only two stages fit, and accumulators spill", ""),
)
# An FP4 layer whose exponents do not fit E4M3 multiplies in BF16 and still promotes every 128.
WIDE_RANGE: tuple[tuple[float, Shape, str], ...] = (
    (4.0,  Shape(8, 2, 1),  "some weight scales lie outside E4M3's exponents, so products are BF16, which holds them exactly"),
    (22.5, Shape(32, 2, 1), "some weight scales lie outside E4M3's exponents, so products are BF16, which holds them exactly"),
    (INF,  Shape(64, 2, 1), "some weight scales lie outside E4M3's exponents, so products are BF16, which holds them exactly"),
)

# (slots of a call up to, mode, why, what was measured): what mode="auto" takes on one rank. The first
# row wins. Figures: w4a8_block, benchmarks/h200/hopper-layer.txt and public-48.txt.
MODES: tuple[tuple[float, str, str, str], ...] = (
    (1024, "fused", "few tokens: one launch is faster than several", "V4-Flash, 8 and 64 tokens: 97 and 119 us, staged 109 and 126; 1024 slots over 48 experts: 242, staged 261"),
    (INF, "staged", "many tokens: wider tiles are faster, which one launch cannot hold", "at the edge, 256 tokens over 48 experts, both take the same: 322 us fused, 323 staged"),
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
