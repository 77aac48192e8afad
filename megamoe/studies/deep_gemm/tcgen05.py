"""Arithmetic of tcgen05 GEMMs on Blackwell: bytes of a stage, stages, depth and width of tiles.

What published kernels for sm_100 choose, as functions of integers: `tests/studies/test_tcgen05.py`
holds them to the figures of the documents. Nothing here was measured by us, and no launch asks it.
"""

from __future__ import annotations

from typing import NamedTuple

from megamoe.errors import CapacityError, ShapeError, require
from megamoe.hardware import SMEM_PER_CTA
from megamoe.layout.regions import align_up, ceil_div

SCALE_ROWS = 128  # A023: UTCCP copies scales in blocks of 128 rows
BARRIER_BYTES = 16  # of a stage: full and empty
STATIC_BYTES = 3 * 2 * 8 + 4  # C010: three pairs of barriers, and where tensor memory begins
MIN_STAGES, MAX_STAGES = 2, 32  # A026: below two nothing overlaps
DEPTH, DEEP = 128, 256  # of K in a stage
WIDE_N = 4096  # C009: more weight rows than this are "wide"
LOW_M = 96  # C007: rows of a group up to which the epilogue has a short path
CANDIDATES = (8, 16, 32, 64, 96, 128, 192)  # A021: tiles of tokens

# (operand type, block_m) -> (depth, why); 128 where no row stands (A021, D004).
BLOCK_K = {
    ("fp8", 16): (DEEP, "later code; fewer barriers where blocks are tiny"),
    ("fp4", 32): (DEEP, "a packed row of 128 B allows the 128 B swizzle"),
    ("fp4", 64): (DEEP, "a packed row of 128 B allows the 128 B swizzle"),
    ("fp4", 192): (DEEP, "a packed row of 128 B allows the 128 B swizzle"),
}


class Operand(NamedTuple):
    """One side of the products in a stage: rows, bits of a value in shared memory, scale block."""

    rows: int
    bits: int
    values_per_scale: int = 0  # 0: no scales in shared memory
    num_ctas: int = 1  # that load it together, each its part; every one needs all scales

    def num_bytes(self, block_k: int) -> int:
        """Values of one stage."""
        return self.rows // self.num_ctas * block_k * self.bits // 8

    def scale_bytes(self, block_k: int) -> int:
        """Scales of one stage, one byte each, in whole blocks of UTCCP."""
        if not self.values_per_scale:
            return 0
        return align_up(self.rows, SCALE_ROWS) * ceil_div(block_k, self.values_per_scale)


def stage_bytes(tokens: Operand, weights: Operand, block_k: int) -> int:
    """Shared memory of one stage: both operands, their scales, two barriers (A026, C010)."""
    both = (tokens, weights)
    return sum(o.num_bytes(block_k) + o.scale_bytes(block_k) for o in both) + BARRIER_BYTES


def num_stages(fixed_bytes: int, stage: int, limit: int = SMEM_PER_CTA) -> int:
    """As many stages as fit beside what is fixed, at most 32; fewer than two are refused."""
    fit = max(0, limit - fixed_bytes) // stage
    require(
        fit >= MIN_STAGES,
        f"two stages must fit in {limit} bytes of shared memory",
        got=f"{fixed_bytes} fixed bytes and {stage} a stage",
        fix="take a smaller tile or depth",
        kind=CapacityError,
    )
    return min(fit, MAX_STAGES)


def block_k(mma: str, block_m: int) -> tuple[int, str]:
    """(depth of a stage, why) by the type of the products and the band of load."""
    return BLOCK_K.get((mma, block_m), (DEPTH, "the common depth"))


def padded_block_m(mma: str, block_m: int) -> int:
    """Packed FP4 raises 16 to 32: half a tile of 128 deep rows must fill 1024 bytes (D009)."""
    return 32 if mma == "fp4" and block_m == 16 else block_m


class GroupedTile(NamedTuple):
    """The tile of a grouped NVFP4 GEMM of the competition's shapes: rows, weight rows, depth."""

    block_m: int
    block_n: int
    block_k: int

    @property
    def num_stages(self) -> int:
        """The exact number that fits: no presets (C010)."""
        tokens, weights = Operand(self.block_m, 4, 16), Operand(self.block_n, 4, 16)
        return num_stages(STATIC_BYTES, stage_bytes(tokens, weights, self.block_k))

    def num_tiles(self, rows: tuple[int, ...], n: int) -> int:
        """Tiles of groups of these rows, each under all of n."""
        return sum(ceil_div(m, self.block_m) for m in rows) * ceil_div(n, self.block_n)


def grouped_tile(n: int) -> GroupedTile:
    """128 x 256 for wide weights, whose tokens then serve twice the outputs, else 128 x 128."""
    require(n > 0, "a GEMM has weight rows", got=n, kind=ShapeError)
    return GroupedTile(128, 256 if n > WIDE_N else 128, DEEP)


def largest_first(rows: tuple[int, ...]) -> tuple[int, ...]:
    """Groups by descending rows, equal ones in their order: short tiles fill the tail (C010)."""
    return tuple(sorted(range(len(rows)), key=lambda group: -rows[group]))


def kept_in_l2(m: int, n: int) -> str:
    """The operand that stays in L2: the smaller one, which is used more often (C006)."""
    return "weights" if m > n else "tokens"


def pool_rows(num_ranks: int, max_tokens: int, top_k: int, num_local_experts: int) -> int:
    """The documents' pool: every token of every rank, padded per expert, for every tile (A022).

    A token's experts are distinct there. This library's pools allow the same expert twice.
    """
    most = num_ranks * max_tokens * min(top_k, num_local_experts)
    widest, unit = max(CANDIDATES), 384  # the least common multiple of all candidates
    return align_up(most + num_local_experts * (widest - 1), unit)
