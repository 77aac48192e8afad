"""Blocks of the reference system: the order in which a rank's blocks are claimed.

A block is (phase, expert, m, n): `block_m` rows of one expert times `block_n` rows of its weights,
in L1 or L2. The order is wave, then phase, then expert, then m, then n (A030, A031). Any order
in which each L2 block stands behind the L1 blocks it reads, dealt so that every SM walks its share
forwards, cannot deadlock: the first unfinished block of the order never waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megamoe.errors import ShapeError, require
from megamoe.simulator.blocks import L1, L2, PHASES, Block, num_m_blocks, pool_offsets, valid_m
from megamoe.studies.deep_gemm.capacity import Wave

__all__ = ["L1", "L2", "Block", "Grid", "arrival_masks", "blocks", "num_m_blocks", "valid_m"]


def block_mn(idx: int, num_n: int) -> tuple[int, int]:
    """Row and column block of block `idx` of one expert: n runs fastest (A031)."""
    return idx // num_n, idx % num_n


def interleaved(
    idx: int, num_m: int, num_l1_n: int, num_l2_n: int, lag: int
) -> tuple[int, int, int]:
    """Block `idx` of a wave whose L2 follows L1 at a distance of `lag` row blocks.

    Returns (is_l2, row block within the wave, n). Step i emits the L1 blocks of row block i, then
    the L2 blocks of row block i - lag. Three zones: L1 alone, both, L2 alone; 0 <= lag <= num_m.
    """
    head = lag * num_l1_n
    both = num_l1_n + num_l2_n
    body = (num_m - lag) * both
    is_l2 = 0
    if idx < head:
        m = idx // num_l1_n
        n = idx % num_l1_n
    elif idx < head + body:
        m = (idx - head) // both
        n = (idx - head) % both
        if n < num_l1_n:
            m += lag
        else:
            is_l2 = 1
            n -= num_l1_n
    else:
        is_l2 = 1
        m = num_m - lag + (idx - head - body) // num_l2_n
        n = (idx - head - body) % num_l2_n
    return is_l2, m, n


def arrival_mask(num_bits: int) -> int:
    """A word with `num_bits` low bits set, 0 .. 64, by two shifts that stay defined at 64 (A045).

    >>> hex(arrival_mask(64)), arrival_mask(5)
    ('0xffffffffffffffff', 31)
    """
    half = num_bits // 2
    return (((1 << half) << (num_bits - half)) - 1) & 0xFFFFFFFFFFFFFFFF


def arrival_masks(num_l1_n: int) -> tuple[int, ...]:
    """The words of `l2_arrival_mask` when all L1 blocks of a row block are done."""
    return tuple(arrival_mask(min(64, num_l1_n - at)) for at in range(0, num_l1_n, 64))


@dataclass(frozen=True, slots=True)
class Grid:
    """The tile grid of one plan: rows per block, and weight blocks per linear."""

    block_m: int
    num_l1_n: int  # ceil(2 * intermediate / block_n)
    num_l2_n: int  # ceil(hidden / block_n)

    def __post_init__(self) -> None:
        require(
            min(self.block_m, self.num_l1_n, self.num_l2_n) >= 1,
            "a grid needs at least one row and one block in each linear",
            got=self,
            kind=ShapeError,
        )

    def num_n(self, phase: str) -> int:
        """Weight blocks of one phase."""
        return self.num_l1_n if phase == L1 else self.num_l2_n

    def pool_offsets(self, rows: Sequence[int]) -> tuple[int, ...]:
        """First pool block of each expert, and at the end the number of pool blocks (A037)."""
        return pool_offsets(rows, self.block_m)

    def num_blocks(self, rows: Sequence[int]) -> int:
        """Blocks of both phases."""
        return self.pool_offsets(rows)[-1] * (self.num_l1_n + self.num_l2_n)


def blocks(grid: Grid, waves: Sequence[Wave], *, lag: int | None = None) -> Iterator[Block]:
    """Every block of one rank once, in the order of claims.

    `waves` come from `capacity.waves`. Without `lag` a wave runs all of L1, then all of L2
    (A033). With it, L2 follows `lag` row blocks behind within the wave (A049, F001): 0 runs the
    L2 blocks of a row block right behind its L1 blocks.
    """
    for index, wave in enumerate(waves):
        if lag is None:
            yield from _by_phase(grid, index, wave)
        else:
            yield from _by_lag(grid, index, wave, lag)


def _by_phase(grid: Grid, index: int, wave: Wave) -> Iterator[Block]:
    for phase in PHASES:
        for part in wave:
            for m in range(part.first_m, part.first_m + part.num_m):
                for n in range(grid.num_n(phase)):
                    yield Block(index, phase, part.expert, m, n)


def _by_lag(grid: Grid, index: int, wave: Wave, lag: int) -> Iterator[Block]:
    places = [(p.expert, m) for p in wave for m in range(p.first_m, p.first_m + p.num_m)]
    lag = min(lag, len(places))
    for step in range(len(places) + lag):
        if step < len(places):
            for n in range(grid.num_l1_n):
                yield Block(index, L1, *places[step], n)
        if step >= lag:
            for n in range(grid.num_l2_n):
                yield Block(index, L2, *places[step - lag], n)
