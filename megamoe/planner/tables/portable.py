"""Portable's tables: tiles of both linears by recipe and load, and the blocks of its quantiser."""

from __future__ import annotations

from megamoe.planner.launches import PortableGemm

INF = float("inf")

CHUNK = 128  # slots a program ranks against each other
COMBINE_COLS, COMBINE_WARPS = 2048, 4
PROGRAMS_PER_SM = 4  # that take tiles from a counter: more than fit find none left and end at once

# kind of activations -> (rows and columns of a program, warps) where they are not QUANTIZE's: from
# a sweep on one H200 at 8192 x 7168 (docs/measurements/portable.md).
QUANTIZE = ((2, 1024), 2)
PACKED = {"codes-nvfp4": 16, "codes-mxfp4": 32}  # values of a scale, where words are packed
QUANTIZE_AS = {"codes-nvfp4": ((4, 512), 1), "codes-mxfp4": ((2, 1024), 1)}

# (recipes, mean rows per expert up to, tile of L1, tile of L2, why). The first row that fits wins;
# both tiles of a row share block_m, since slots are sorted once; L2 has block_n 128, a combine scale.
# Measured on one H200, 2026-11-15, torch 2.11.0+cu130, triton 3.6.0, over one EP8 rank's share of
# DeepSeek-V4-Flash, -Pro and -V3.
_W8, _W4, _NV = ("w8a8",), ("w4a16", "w4a8", "w4a4"), ("nvfp4", "nvfp4a16")
TILES = (
    (_W8, 16.5, PortableGemm(16, 128, 128, 4, 3), PortableGemm(16, 128, 128, 4, 3), "reading the weights takes all the time"),
    (_W8, INF, PortableGemm(64, 128, 128, 8, 3, 8), PortableGemm(64, 128, 128, 4, 3, 8), "tiles of 128 tokens spill registers: 1.5 times slower"),
    (_W4, 16.5, PortableGemm(16, 128, 128, 4, 3), PortableGemm(16, 128, 128, 4, 3), "best in four of six cells, within 6% in the others"),
    (_W4, 72, PortableGemm(64, 64, 128, 4, 4, 8), PortableGemm(64, 128, 128, 4, 3, 8), "64 rows an expert fill one tile (V4-Pro, 512 tokens)"),
    (_W4, INF, PortableGemm(128, 128, 128, 8, 3, 8), PortableGemm(128, 256, 128, 8, 3, 8), "FP4 is decoded once for 128 tokens: the best, or within 5% of it"),
    (("bf16",), 16.5, PortableGemm(16, 128, 64, 4, 4), PortableGemm(16, 128, 64, 4, 4), "four stages fit; not measured"),
    (("bf16",), INF, PortableGemm(64, 128, 64, 8, 3, 8), PortableGemm(64, 128, 64, 4, 3, 8), "as w8a8; not measured"),
    (("w4a8_block",), 16.5, PortableGemm(16, 128, 128, 4, 3), PortableGemm(16, 128, 128, 4, 3), "as w4a16, with a 1x128 scale a step of K"),
    (("w4a8_block",), INF, PortableGemm(64, 128, 128, 8, 3, 8), PortableGemm(64, 128, 128, 8, 3, 8), "as w4a16; not measured"),
    (_NV, 16.5, PortableGemm(16, 64, 128, 4, 3), PortableGemm(16, 128, 128, 4, 3), "as w4a16; not measured"),
    (_NV, INF, PortableGemm(64, 128, 128, 8, 3, 8), PortableGemm(64, 128, 128, 4, 3, 8), "tiles of 128 tokens spill registers; not measured"),
)  # fmt: skip


# Where the MMA takes block-scaled codes, 128 rows of weights at once.
NATIVE_TILES = (
    (16.5, PortableGemm(16, 128, 128, 4, 4), PortableGemm(16, 128, 128, 4, 4), "the narrowest tile of the MMA; not measured"),
    (INF, PortableGemm(64, 128, 128, 8, 4, 8), PortableGemm(64, 128, 128, 4, 4, 8), "two accumulators fill tensor memory; not measured"),
)  # fmt: skip
