"""Blackwell: the tiers of the published kernels (A020-A027, C009-C010, D004-D009).

Pairs of CTAs share a tile: each loads half of its tokens (A065), weights are the MMA's rows.
Nothing here was measured by us.
"""

from __future__ import annotations

from typing import NamedTuple

from megamoe.errors import ShapeError, require
from megamoe.formats.spec import Scale, recipe_named
from megamoe.hardware import Hardware
from megamoe.layout.regions import align_up, ceil_div
from megamoe.planner.choice import Term
from megamoe.planner.numerics import narrowest_mma
from megamoe.problem import Problem
from megamoe.studies.deep_gemm import tcgen05
from megamoe.studies.deep_gemm.choice import Picked, Role, Tiles

BLOCK_MS = (16, 32, 64, 96, 128, 192)
BLOCK_NS = (128, 256)
BLOCK_KS = (128, 256)
SCALE_ALIGN = tcgen05.SCALE_ROWS
WAVE_RULE = ("tail", "the later published search: waves need not divide the experts")
DEAL = ("static", "block-cyclic, as published: no atomics between blocks")

CLUSTER = 2  # A020: CTAs that share a tile
NUM_DISPATCH_WARPS = 4
NUM_EPILOGUE_STAGES = 2
NUM_STORE_STAGES = 2
MAX_PULL_BYTES = 4096
SMEM_ALIGN = 1024


class Tier(NamedTuple):
    """One band of load."""

    edge: float  # mean rows per expert up to
    block_m: int
    store_block_m: int  # rows that the epilogue stores at once
    epilogue_groups: int
    why: str


# fmt: off
# A020: the mean rows per expert choose the tile. Read top to bottom; the first that fits wins.
TIERS = (
    Tier(8.5,          16,  8,  2, "long tail of a rollout: most experts see a handful of rows"),
    Tier(16.5,         32,  16, 2, "decode, one node, small batch"),
    Tier(32.5,         64,  32, 1, "decode, one node, middle batch; one epilogue group suffices"),
    Tier(64.5,         96,  16, 2, "decode, one node, large batch"),
    Tier(96.5,         128, 32, 2, "decode over several nodes"),
    Tier(float("inf"), 192, 32, 2, "prefill, or decode over many ranks"),
)

MMA_BITS = {"bf16": 16, "fp8": 8, "fp4": 4}
# fmt: on


def tier(problem: Problem) -> Tier:
    """The band of the mean load."""
    return next(row for row in TIERS if problem.tokens_per_expert <= row.edge)


def store_of(block_m: int) -> tuple[int, int]:
    """(store_block_m, epilogue warpgroups) of a tile, from the tier that uses it."""
    return next((t.store_block_m, t.epilogue_groups) for t in TIERS if t.block_m == block_m)


def mma(problem: Problem) -> tuple[str, str]:
    """(operand type, why)."""
    return narrowest_mma(problem.recipe), "the narrowest type that holds both operands"


def block_m(problem: Problem) -> Picked:
    """The token tile; packed FP4 needs 32 rows, so that half a tile fills 1024 bytes (D009)."""
    row = tier(problem)
    wide = tcgen05.padded_block_m(mma(problem)[0], row.block_m)
    if wide != row.block_m:
        why = f"{row.block_m} raised to {wide}: half a packed FP4 tile must fill 1024 B"
        return Picked(wide, why)
    return Picked(row.block_m, f"{row.why}")


def block_n(problem: Problem, hw: Hardware, num_sms: int, block_m: int) -> Picked:
    """128 rows of weights a CTA: fixed in the fused kernel (A021)."""
    return Picked(128, "fixed; a pair of CTAs covers 256 weight rows")


def block_k(problem: Problem, block_m: int) -> Picked:
    """The depth of a stage."""
    return Picked(*tcgen05.block_k(mma(problem)[0], block_m))


def check(problem: Problem, tiles: Tiles) -> None:
    """Refuse tiles that break the kernel's asserts."""
    half = tiles.block_m // CLUSTER * tiles.block_k * MMA_BITS[tiles.mma] // 8
    require(
        half % SMEM_ALIGN == 0,
        f"half a token tile must fill a multiple of {SMEM_ALIGN} bytes",
        got=f"{half} bytes with block_m {tiles.block_m} and block_k {tiles.block_k}",
        fix="raise block_m or block_k",
        kind=ShapeError,
    )


def pull_bytes(problem: Problem) -> int:
    """Bytes of one pull: the row, halved until it is at most 4096 (A028)."""
    row = ceil_div(problem.hidden * recipe_named(problem.recipe).acts.element.bits, 8)
    while row > MAX_PULL_BYTES:
        row = ceil_div(row, 2)
    return align_up(row, 16)


def fixed_terms(
    num_experts: int, pulled: int, block_n: int, out_bits: int, store_m: int, groups: int
) -> tuple[Term, ...]:
    """Shared memory that does not grow with the stages (A026); `pulled` bytes a dispatch warp."""
    warps = 4 * groups
    l1 = groups * store_m * (block_n // 2) * out_bits // 8 * NUM_STORE_STAGES
    l2 = groups * store_m * block_n * 2
    num_barriers = NUM_DISPATCH_WARPS + 2 * NUM_EPILOGUE_STAGES + 2 * warps
    return (
        Term("expert counts", align_up(4 * num_experts, SMEM_ALIGN), "4 B an expert, to 1 KiB"),
        Term(
            "pulled rows",
            align_up(NUM_DISPATCH_WARPS * pulled, SMEM_ALIGN),
            "one a dispatch warp, to 1 KiB",
        ),
        Term(
            "output tile",
            align_up(max(l1, l2), SMEM_ALIGN),
            "the larger of L1 (two stages) and L2 in BF16",
        ),
        Term("amax", store_m * warps * 4, "one FP32 a row and epilogue warp"),
        Term("barriers", 8 * num_barriers, "dispatch, tensor memory, combine"),
        Term("tensor memory", 4, "where its base address is written"),
    )


def stage_terms(tiles: Tiles, scale_bytes: int) -> tuple[Term, ...]:
    """Shared memory of one stage (A026); `scale_bytes` per row and stage, either operand."""
    bits = MMA_BITS[tiles.mma]
    m, n, k = tiles.block_m, tiles.block_n, tiles.block_k
    return (
        Term("tokens", m // CLUSTER * k * bits // 8, "half a tile: the other CTA loads the rest"),
        Term("weights", n * k * bits // 8, "as the tensor cores read them"),
        Term("token scales", align_up(m, SCALE_ALIGN) * scale_bytes, "padded to 128 rows"),
        Term("weight scales", align_up(n, SCALE_ALIGN) * scale_bytes, "padded to 128 rows"),
        Term("barriers", 16, "full and empty"),
    )


def shared_memory(problem: Problem, tiles: Tiles) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
    """(fixed terms, terms of one stage)."""
    acts = recipe_named(problem.recipe).acts
    store_m, groups = store_of(tiles.block_m)
    per_row = {
        Scale.NONE: 0,
        Scale.E8M0: tiles.block_k // 32,
        Scale.E4M3: tiles.block_k // 16,
        Scale.FP32: 4 * ceil_div(tiles.block_k, 128),
    }
    fixed = fixed_terms(
        problem.num_experts, pull_bytes(problem), tiles.block_n, acts.element.bits, store_m, groups
    )
    return fixed, stage_terms(tiles, per_row[acts.scale])


def roles(problem: Problem, tiles: Tiles) -> tuple[Role, ...]:
    """Warps of a CTA and their registers (A056, A073)."""
    groups = store_of(tiles.block_m)[1]
    return (
        Role("epilogue", 4 * groups, 208, "SwiGLU, amax and combine need many registers"),
        Role("pull_tokens", NUM_DISPATCH_WARPS, 48, "counts, pulls rows, cleans"),
        Role("load_tokens", 1, 40, "waits for arrivals, then copies rows and scales"),
        Role("load_weights", 1, 40, "waits for nothing"),
        Role("issue_mma", 1, 40, "one thread issues for the pair"),
    )
