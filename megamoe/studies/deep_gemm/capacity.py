"""How many rows the pool holds, and how a batch that is larger runs in several waves.

A row is one (token, slot) pair at the expert it goes to. The rows of an expert start at a block
boundary, so capacity is counted in blocks of `block_m` rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

from megamoe.errors import CapacityError, ShapeError, require
from megamoe.layout.regions import align_up, ceil_div

SCALE_ALIGN = 128  # A023: rows of packed scales per block where UTCCP copies them


class Part(NamedTuple):
    """Blocks first_m .. first_m + num_m - 1 of one local expert."""

    expert: int
    first_m: int
    num_m: int


Wave = tuple[Part, ...]  # parts in expert order; experts without rows have none


@dataclass(frozen=True, slots=True)
class Capacity:
    """The sizes that a layer fixes once, for every batch up to `max_tokens` and every tile."""

    max_tokens: int  # per rank
    block_ms: tuple[int, ...]  # the tiles that a call may choose from
    pool_rows: int  # worst case: every row of every rank comes here, padded per expert
    pool_blocks: int  # the same in blocks of the narrowest tile: sizes the arrival words
    ring_rows: int  # rows that really exist; below pool_rows they are reused
    scale_rows: int  # the ring's rows as the packed scales count them

    @property
    def is_ring(self) -> bool:
        """Whether rows are reused within a call."""
        return self.ring_rows < self.pool_rows


def max_blocks(num_rows: int, num_experts: int, block_m: int) -> int:
    """The most blocks that `num_rows` rows can fill in `num_experts` experts; some routing does.

    Each expert that has a row opens a block; after one row each, a block costs block_m rows.
    """
    opened = min(num_rows, num_experts)
    return opened + (num_rows - opened) // block_m


def pool_rows(
    num_ranks: int, max_tokens: int, top_k: int, num_local_experts: int, block_ms: tuple[int, ...]
) -> int:
    """Rows that no batch exceeds with any of these tiles, a multiple of all of them.

    The same expert may stand twice in a token's slots, so every slot of every rank may come to
    this rank: num_ranks * max_tokens * top_k rows, and the padding of `max_blocks`.
    """
    rows = num_ranks * max_tokens * top_k
    worst = max(max_blocks(rows, num_local_experts, m) * m for m in block_ms)
    return align_up(worst, lcm(*block_ms))


def scale_pool_rows(rows: int, block_ms: tuple[int, ...], scale_align: int = SCALE_ALIGN) -> int:
    """Rows of the scale pool (A023): each block of rows is padded to `scale_align` there."""
    return max(rows // m * align_up(m, scale_align) for m in block_ms)


def capacity(
    num_ranks: int,
    max_tokens: int,
    top_k: int,
    num_local_experts: int,
    *,
    block_ms: tuple[int, ...],
    ring_rows: int | None = None,
    scale_align: int = SCALE_ALIGN,
) -> Capacity:
    """The layer's sizes; `ring_rows` None keeps the whole worst case."""
    worst = pool_rows(num_ranks, max_tokens, top_k, num_local_experts, block_ms)
    unit = lcm(*block_ms)
    if ring_rows is not None:
        require(
            ring_rows % unit == 0 and ring_rows > 0,
            f"ring_rows must be a positive multiple of {unit}, which every tile divides",
            got=ring_rows,
            fix=f"take {max(unit, align_up(max(ring_rows, 1), unit))}",
            kind=ShapeError,
        )
    ring = worst if ring_rows is None else min(ring_rows, worst)
    total = num_ranks * max_tokens * top_k
    return Capacity(
        max_tokens=max_tokens,
        block_ms=block_ms,
        pool_rows=worst,
        pool_blocks=max(max_blocks(total, num_local_experts, m) for m in block_ms),
        ring_rows=ring,
        scale_rows=scale_pool_rows(ring, block_ms, scale_align),
    )


def wave_end(
    rows: Sequence[int],
    block_m: int,
    experts_per_wave: int,
    ring_blocks: int,
    expert: int,
    first_m: int,
) -> tuple[int, int]:
    """Where the wave that starts at block `first_m` of `expert` ends: (expert, block), exclusive.

    A wave never leaves its group of `experts_per_wave` experts (A033). If the group does not fit
    in the ring, the wave stops before the first expert that does not fit; an expert that alone
    is larger than the ring is cut at the ring's size and continues in the next wave. Plain
    integers and one scan: a device can follow it.
    """
    stop = min((expert // experts_per_wave + 1) * experts_per_wave, len(rows))
    used = 0
    while expert < stop:
        left = (rows[expert] + block_m - 1) // block_m - first_m
        if used + left > ring_blocks:
            return (expert, first_m + ring_blocks) if used == 0 else (expert, first_m)
        used += left
        expert += 1
        first_m = 0
    return expert, 0


def waves(
    rows: Sequence[int],
    *,
    block_m: int,
    experts_per_wave: int,
    ring_rows: int | None = None,
) -> tuple[Wave, ...]:
    """Cut a rank's batch into waves whose blocks fit in the ring together.

    rows[e] counts the rows of local expert e. Without `ring_rows` every wave is one group of
    experts. A wave may be empty (no expert of the group has a row). Nothing is ever dropped.

    >>> waves([5, 0, 9, 2], block_m=4, experts_per_wave=2)
    ((Part(expert=0, first_m=0, num_m=2),), (Part(expert=2, first_m=0, num_m=3), \
Part(expert=3, first_m=0, num_m=1)))
    """
    num_ring = ring_blocks(rows, block_m, ring_rows)
    require(
        experts_per_wave >= 1,
        "experts_per_wave must be at least 1",
        got=experts_per_wave,
        kind=ShapeError,
    )
    found: list[Wave] = []
    expert, first_m = 0, 0
    while expert < len(rows):
        end = wave_end(rows, block_m, experts_per_wave, num_ring, expert, first_m)
        found.append(tuple(_parts(rows, block_m, (expert, first_m), end)))
        expert, first_m = end
    return tuple(found)


def _parts(
    rows: Sequence[int], block_m: int, start: tuple[int, int], end: tuple[int, int]
) -> Iterator[Part]:
    expert, first = start
    while (expert, first) < end:
        last = end[1] if expert == end[0] else ceil_div(rows[expert], block_m)
        if last > first:
            yield Part(expert, first, last - first)
        expert, first = expert + 1, 0


def ring_blocks(rows: Sequence[int], block_m: int, ring_rows: int | None) -> int:
    """Blocks that the ring holds; without a ring, more than the batch has."""
    require(block_m >= 1, "block_m must be at least 1", got=block_m, kind=ShapeError)
    require(
        all(count >= 0 for count in rows),
        "rows per expert must not be negative",
        got=list(rows),
        kind=ShapeError,
    )
    if ring_rows is None:
        return sum(ceil_div(count, block_m) for count in rows) + 1
    require(
        ring_rows >= block_m,
        f"the ring must hold at least one block of {block_m} rows",
        got=f"{ring_rows} rows for a batch of {sum(rows)} rows",
        fix="give the plan more ring_rows or a narrower block_m",
        kind=CapacityError,
    )
    return ring_rows // block_m
