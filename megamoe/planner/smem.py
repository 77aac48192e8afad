"""Shared memory of a CTA: the one formula of each Gluon kernel, as a named sum.

Stages fill what is left. The compile tests hold every shipped kernel to its sum.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from megamoe.formats.spec import recipe_named
from megamoe.hardware import SMEM_PER_CTA
from megamoe.layout.images import block_bytes
from megamoe.layout.regions import align_up
from megamoe.planner.choice import SharedMemory, Term
from megamoe.planner.launches import K_BLOCK, SLAB, WARPGROUPS, Gemm, GemmSwapAb
from megamoe.planner.numerics import Numerics, image_of

RESERVE = 4096  # epilogue operands, work queue, and the compiler's scratch
WIDE_OPERANDS = 2048
DECODE_JOBS = 6144  # what decoding ahead keeps beside its images
TMA_ROWS = 32  # a TMA destination is 128 bytes: FP32 scales of so many tokens
TRANSPOSE_FROM = 64  # tokens of a tile from which rows are transposed in shared memory

# The compiler's scratch of a fused launch, with barriers and work items, as Triton 3.6 lays it out
# for sm_90a: on one rank 3.75 bytes an expert and up to 860 more; over ranks what turns tokens and
# rows on their way is larger, 2420 bytes in tiles of 8 tokens and up to 4276 in wider ones.
SCRATCH, SCRATCH_OF_AN_EXPERT = 1024, 4
RANKS_SCRATCH = {8: 2560, 16: 4352, 32: 4352}
PROMOTED_TOKEN = 72  # bytes more for each token of a tile whose sums are promoted


class Beside(NamedTuple):
    """What a CTA of a fused launch holds beside its stages."""

    routing: int  # bytes of `fused.routing_bytes`
    max_experts: int  # of one rank, a power of two
    num_ranks: int = 1
    has_bias: bool = False


def gemm_swap_ab(recipe: str, how: Numerics, tile: GemmSwapAb) -> SharedMemory:
    """Of `gemm_swap_ab_kernel`."""
    m, k = tile.block_m, tile.k_blocks
    slabs = WARPGROUPS * tile.slabs
    block = block_bytes(image_of(recipe, fits_e4m3=how.mma == "fp8"))
    element = 1 if how.mma == "fp8" else 2
    has_scales = how.promotion > 0
    transpose = WARPGROUPS * m * 64 if m >= TRANSPOSE_FROM else 0
    fixed = (
        Term("amax", 2 * WARPGROUPS * m * 4, "one FP32 a token and warpgroup, twice"),
        Term("transpose", transpose, "rows of wide tiles, transposed before they are stored"),
        Term("operands", WIDE_OPERANDS if transpose else 0, "epilogue operands of wide tiles"),
    )
    padding = align_up(sum(t.num_bytes for t in fixed), 1024) - sum(t.num_bytes for t in fixed)
    stage = (
        Term("weights", k * block * slabs, "as packed, with their scales"),
        Term("tokens", k * m * K_BLOCK * element, "as the tensor cores read them"),
        Term(
            "token scales",
            k * max(m, TMA_ROWS) * 4 if has_scales else 0,
            "at least 32 rows: TMA alignment",
        ),
        Term("barriers", 16, "full and empty"),
    )
    rest = Term("reserve", RESERVE + padding, "epilogue operands, compiler's scratch")
    return SharedMemory((*fixed, rest), stage, tile.num_stages, SMEM_PER_CTA)


def fused(recipe: str, how: Numerics, tile: GemmSwapAb, beside: Beside) -> SharedMemory:
    """Of Hopper's `mega_kernel`: the stages of `gemm_swap_ab`, and what a fused launch holds."""
    m, outputs = tile.block_m, 4 * tile.block_n
    has_global = recipe_named(recipe).weights.has_global
    has_factor = has_global or (how.decodes and how.mma == "fp8")
    scratch = SCRATCH + SCRATCH_OF_AN_EXPERT * beside.max_experts
    if beside.num_ranks > 1:
        scratch = max(scratch, RANKS_SCRATCH[m])
    fixed = (
        Term("amax", 2 * WARPGROUPS * m * 4, "one FP32 a token and warpgroup, twice"),
        Term("routing", beside.routing, "experts of all slots, first rows of all experts"),
        Term("rows", (12 + 4 * has_global) * m, "weight, destination and factor of each token"),
        Term("factors", outputs if has_factor else 0, "one FP32 a weight row"),
        Term("bias", outputs if beside.has_bias else 0, "one FP32 a weight row"),
        Term("promotion", PROMOTED_TOKEN * m if how.promotion else 0, "sums in other layouts"),
        Term("reserve", scratch, "work items, barriers, compiler's scratch"),
    )
    return replace(gemm_swap_ab(recipe, how, tile), fixed=fixed)


def gemm(recipe: str, tile: Gemm) -> SharedMemory:
    """Of `gemm_kernel`; `num_image_stages` more of FP4 images where it decodes."""
    is_fp4 = recipe_named(recipe).weights.element.bits == 4
    block = block_bytes("e4m3_image")
    image = 256 // SLAB * block
    if tile.decode_ahead:
        image = (tile.decode_chunk or 4) * block + 64
    fixed = (
        Term("amax", 4 * tile.block_m * 4, "one FP32 a token and warpgroup, twice"),
        Term("transpose", WARPGROUPS * SLAB * 64 * 2, "rows, transposed before they are stored"),
        Term(
            "FP4 images",
            tile.num_image_stages * image if is_fp4 else 0,
            f"{tile.num_image_stages} stages",
        ),
        Term("decode jobs", DECODE_JOBS if tile.decode_ahead else 0, "decoding once per wave"),
        Term("reserve", RESERVE, "epilogue operands, compiler's scratch"),
    )
    stage = (
        Term("weights", tile.block_n * K_BLOCK, "E4M3"),
        Term("tokens", tile.block_m * K_BLOCK, "E4M3"),
        Term("token scales", 4 * tile.block_m, "FP32"),
        Term("barriers", 16, "full and empty"),
    )
    return SharedMemory(fixed, stage, tile.num_stages, SMEM_PER_CTA)
