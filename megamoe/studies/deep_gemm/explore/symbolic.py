"""Symbolic rows: each says who it is, so that every read can be held against what it should be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megamoe.studies.deep_gemm.blocks import L1, Block, num_m_blocks, valid_m
from megamoe.studies.deep_gemm.explore.case import Case
from megamoe.studies.deep_gemm.peeling import sources
from megamoe.studies.deep_gemm.protocol.ops import Violation


def _expect(ok: bool, what: str, got: object) -> None:
    if not ok:
        raise Violation(f"{what}; got {got}")


class Symbolic:
    """The payload of the explorer.

    token        (call, rank, token)
    weight       (call, rank, token, slot)
    tile         (rank, phase, expert, n)
    activations  (call, rank, expert, m, n, ((rank, token, slot), ...))
    piece        (call, owner, expert, n, (rank, token, slot))
    """

    def __init__(self, case: Case) -> None:
        self.case, self.shape = case, case.shape
        self.blocks: set[tuple[int, int, str, int, int, int]] = set()
        self.rows: dict[tuple[int, int, int, int], tuple[Any, ...]] = {}  # of (call, rank, e, m)
        self.combined: set[tuple[int, int, int]] = set()
        self.counts = [[self._counts(call, e) for e in range(self.shape.num_experts)]
                       for call in range(len(case.calls))]  # fmt: skip
        self.orders = [[[s.rank for s in sources(c)] for c in call] for call in self.counts]

    def _counts(self, call: int, expert: int) -> list[int]:
        ranks = self.case.calls[call]
        return [sum(row.count(expert) for row in rank) for rank in ranks]

    # -- the payload ---------------------------------------------------------------------------

    def token(self, call: int, rank: int, token: int) -> Any:
        return (call, rank, token)

    def weight(self, call: int, rank: int, token: int, slot: int) -> Any:
        return (call, rank, token, slot)

    def tile(self, call: int, rank: int, block: Block) -> Any:
        return (rank, block.phase, block.expert, block.n)

    def l1(
        self, call: int, rank: int, block: Block, rows: Sequence[Any], weights: Sequence[Any],
        tile: Any,
    ) -> Any:  # fmt: skip
        """Each row is of this call, for this expert, beside its weight, in min-peeling order."""
        self._once(call, rank, block, tile)
        expert = rank * self.shape.num_local + block.expert
        order = self.orders[call][expert]
        first = block.m * self.shape.grid.block_m
        where = f"call {call} rank {rank} {block}"
        _expect(len(rows) == valid_m(len(order), block.m, self.shape.grid.block_m),
                f"{where}: wrong number of rows", len(rows))  # fmt: skip
        found = []
        for i, (row, weight) in enumerate(zip(rows, weights, strict=True)):
            _expect(type(row) is tuple and row[0] == call, f"{where}: early read of row {i}", row)
            _expect(type(weight) is tuple and weight[:3] == row,
                    f"{where}: weight of row {i} is not that of {row}", weight)  # fmt: skip
            _expect(row[1] == order[first + i], f"{where}: row {i} comes from the wrong rank", row)
            _, source, token, slot = weight
            _expect(self.case.calls[call][source][token][slot] == expert,
                    f"{where}: row {i} belongs to another expert", weight)  # fmt: skip
            found.append((source, token, slot))
        kept = self.rows.setdefault((call, rank, block.expert, block.m), tuple(found))
        _expect(kept == tuple(found), f"{where}: L1 blocks of one row block saw other rows", found)
        return (call, rank, block.expert, block.m, block.n, tuple(found))

    def l2(
        self, call: int, rank: int, block: Block, acts: Sequence[Any], tile: Any
    ) -> Sequence[Any]:
        """All activations are of this call and this row block."""
        self._once(call, rank, block, tile)
        rows = self.rows.get((call, rank, block.expert, block.m), ())
        for n, act in enumerate(acts):
            wanted = (call, rank, block.expert, block.m, n, rows)
            _expect(act == wanted, f"early read: {block} of rank {rank} wants {wanted}", act)
        return [(call, rank, block.expert, block.n, row) for row in rows]

    def combine(
        self, call: int, rank: int, token: int, rows: Sequence[tuple[int, Sequence[Any]]]
    ) -> None:
        """Each slot holds the pieces of its own row, from the owner of its expert."""
        _expect((call, rank, token) not in self.combined, "combined twice", (call, rank, token))
        self.combined.add((call, rank, token))
        for slot, pieces in rows:
            expert = self.case.calls[call][rank][token][slot]
            owner, local = divmod(expert, self.shape.num_local)
            for n, piece in enumerate(pieces):
                wanted = (call, owner, local, n, (rank, token, slot))
                _expect(piece == wanted, f"combine of rank {rank} wants {wanted}", piece)

    def _once(self, call: int, rank: int, block: Block, tile: Any) -> None:
        _expect(tile == self.tile(call, rank, block), f"wrong weights for {block}", tile)
        key = (call, rank, *block[1:])
        _expect(key not in self.blocks, "block computed twice", key)
        self.blocks.add(key)

    # -- at the end ----------------------------------------------------------------------------

    def check_call(self, call: int) -> None:
        """Every block ran, every row was computed once, every token was combined."""
        shape, grid = self.shape, self.shape.grid
        for rank, rows in enumerate(self.received(call)):
            wanted = {
                (call, rank, phase, e, m, n)
                for e, count in enumerate(rows)
                for m in range(num_m_blocks(count, grid.block_m))
                for phase in (L1, "l2")
                for n in range(grid.num_n(phase))
            }
            ran = {key for key in self.blocks if key[:2] == (call, rank)}
            _expect(ran == wanted, f"blocks of call {call} on rank {rank}", sorted(ran ^ wanted))
        for rank, tokens in enumerate(self.case.calls[call]):
            done = {key[2] for key in self.combined if key[:2] == (call, rank)}
            _expect(done == set(range(len(tokens))), f"tokens combined on rank {rank}", done)
        rows_seen = [row for key, rows in self.rows.items() if key[0] == call for row in rows]
        _expect(len(rows_seen) == len(set(rows_seen)), "a row was pulled twice", rows_seen)
        assert shape.num_ranks == len(self.case.calls[call])

    def received(self, call: int) -> list[list[int]]:
        """[ranks][local experts]: rows that each expert receives."""
        totals = [sum(counts) for counts in self.counts[call]]
        local = self.shape.num_local
        return [totals[r * local : (r + 1) * local] for r in range(self.shape.num_ranks)]
