"""Launch: what every role of one call on one rank knows; and the data that the protocol moves.

`Payload` is the one thing that differs between the explorer, where a row is a tag that says who it
is, and `LocalWorld`, where it is a tensor. The protocol itself never looks inside a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

from megamoe.studies.deep_gemm.blocks import Block
from megamoe.studies.deep_gemm.peeling import Source, sources
from megamoe.studies.deep_gemm.protocol.words import Shape, Words
from megamoe.studies.deep_gemm.walk import Walk

NO_BUGS: frozenset[str] = frozenset()

Routing = Sequence[Sequence[int]]  # [tokens][top_k]: expert of each slot of one rank, -1 is masked


class Payload(Protocol):
    """Rows, tiles and what is done to them. `call` counts the calls on one workspace."""

    def token(self, call: int, rank: int, token: int) -> Any:
        """A row of `rank` as its host puts it into the workspace."""

    def weight(self, call: int, rank: int, token: int, slot: int) -> Any:
        """The weight of a slot, put beside it."""

    def tile(self, call: int, rank: int, block: Block) -> Any:
        """The weights that a block reads."""

    def l1(
        self, call: int, rank: int, block: Block, rows: Sequence[Any], weights: Sequence[Any],
        tile: Any,
    ) -> Any:  # fmt: skip
        """One L1 block of the valid rows: a tile of activations."""

    def l2(
        self, call: int, rank: int, block: Block, acts: Sequence[Any], tile: Any
    ) -> Sequence[Any]:
        """One L2 block from the activations of all L1 blocks of its rows: a piece of each row."""

    def combine(
        self, call: int, rank: int, token: int, rows: Sequence[tuple[int, Sequence[Any]]]
    ) -> None:
        """Add a token's rows, (slot, pieces) in ascending order of slots."""


class Launch:
    """One call on one rank. `bugs` are the planted ones: the explorer must find each of them."""

    def __init__(
        self,
        words: Words,
        payload: Payload,
        rank: int,
        call: int,
        num_tokens: int,
        bugs: frozenset[str] = NO_BUGS,
    ) -> None:
        self.words, self.payload, self.bugs = words, payload, bugs
        self.rank, self.call, self.num_tokens = rank, call, num_tokens
        shape = words.shape
        self.shape, self.grid = shape, shape.grid
        self.num_ranks, self.num_sms = shape.num_ranks, shape.num_sms
        self.num_local, self.top_k = shape.num_local, shape.top_k

    def at(self, name: str, i: int = 0) -> int:
        """A cell of this rank."""
        return self.words.at(name, self.rank, i)

    def blocks(self, sm: int, rows: Sequence[int]) -> tuple[Block, ...]:
        """The blocks that every role of an SM walks, given the rows of each expert (A034)."""
        return _walk(self.shape, tuple(rows), sm)

    def pool_offsets(self, rows: Sequence[int]) -> tuple[int, ...]:
        """First pool block of each expert."""
        return self.grid.pool_offsets(rows)

    def ring_slot(self, pool_block: int) -> int:
        """Where the wide rows of a pool block lie."""
        return pool_block % self.words.ring_blocks


@lru_cache(maxsize=4096)
def _walk(shape: Shape, rows: tuple[int, ...], sm: int) -> tuple[Block, ...]:
    return tuple(
        Walk(
            shape.grid,
            rows,
            experts_per_wave=shape.experts_per_wave,
            sm=sm,
            num_sms=shape.num_sms,
            ring_rows=shape.ring_rows,
            lag=shape.lag,
        )
    )


@lru_cache(maxsize=4096)
def peel(counts: tuple[int, ...]) -> tuple[Source, ...]:
    """Min-peeling order of one expert's rows."""
    return tuple(sources(counts))
