"""Blocks: the unit of work, a tile of tokens of one expert times a tile of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

L1, L2 = "l1", "l2"
PHASES = (L1, L2)


class Block(NamedTuple):
    """One tile of work of one rank."""

    wave: int
    phase: str  # "l1" or "l2"
    expert: int  # local
    m: int  # tile of tokens within the expert
    n: int  # tile of weight rows


class Tokens(NamedTuple):
    """One tile of tokens: which of its expert's."""

    expert: int  # local
    m: int


def num_m_blocks(rows: int, block_m: int) -> int:
    """Tiles of one expert along its rows."""
    return (rows + block_m - 1) // block_m


def valid_m(rows: int, m: int, block_m: int) -> int:
    """Rows of tile m that hold a token."""
    return min(rows - m * block_m, block_m)


def token_tiles(rows: Sequence[int], block_m: int) -> tuple[Tokens, ...]:
    """The tiles of tokens of a rank whose local expert e has rows[e] rows, in pool order.

    >>> token_tiles([9, 0, 4], 8)
    (Tokens(expert=0, m=0), Tokens(expert=0, m=1), Tokens(expert=2, m=0))
    """
    return tuple(Tokens(e, m) for e, n in enumerate(rows) for m in range(num_m_blocks(n, block_m)))


def pool_offsets(rows: Sequence[int], block_m: int) -> tuple[int, ...]:
    """First tile of tokens of each expert, and at the end the number of tiles."""
    offsets = [0]
    for count in rows:
        offsets.append(offsets[-1] + num_m_blocks(count, block_m))
    return tuple(offsets)
