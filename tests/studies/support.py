"""Random ranks for the study's property tests, and what an order of blocks must keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st

from megamoe.studies.deep_gemm.blocks import L1, Block, Grid
from megamoe.studies.deep_gemm.capacity import Wave, waves

TILES = (8, 16, 32, 64, 96, 128, 192)  # of the published kernel: its pool holds any of them
SETTINGS = settings(deadline=None, derandomize=True, max_examples=60, database=None)


class Case(NamedTuple):
    """One rank's counts and the plan's integers."""

    grid: Grid
    rows: list[int]
    experts_per_wave: int
    ring_blocks: int | None
    lag: int | None
    num_sms: int

    @property
    def ring_rows(self) -> int | None:
        return None if self.ring_blocks is None else self.ring_blocks * self.grid.block_m

    @property
    def waves(self) -> tuple[Wave, ...]:
        return waves(
            self.rows,
            block_m=self.grid.block_m,
            experts_per_wave=self.experts_per_wave,
            ring_rows=self.ring_rows,
        )


CASES = st.builds(
    Case,
    st.builds(Grid, st.sampled_from([1, 4, 16]), st.integers(1, 5), st.integers(1, 5)),
    st.lists(st.one_of(st.just(0), st.integers(0, 40)), min_size=1, max_size=10),
    st.integers(1, 10),
    st.one_of(st.none(), st.integers(1, 6)),
    st.one_of(st.none(), st.integers(0, 7)),
    st.integers(1, 9),
)


def all_blocks(grid: Grid, rows: Sequence[int]) -> set[tuple[str, int, int, int]]:
    """Every (phase, expert, m, n) that must run, straight from the counts."""
    return {
        (phase, e, m, n)
        for e, count in enumerate(rows)
        for m in range(-(-count // grid.block_m))
        for phase in ("l1", "l2")
        for n in range(grid.num_n(phase))
    }


def run(hands: Sequence[Sequence[Block]], case: Case) -> bool:
    """Let SMs run their hands side by side, each block only when what it needs is there.

    An L2 block needs all L1 blocks of its row block; the first use of a ring slot by a row block
    needs all L2 blocks of the slot's last owner. True if everything finishes.
    """
    grid, offsets = case.grid, case.grid.pool_offsets(case.rows)
    done = {L1: [0] * offsets[-1], "l2": [0] * offsets[-1]}
    ring = offsets[-1] + 1 if case.ring_blocks is None else case.ring_blocks
    places = [0] * len(hands)
    moved = True
    while moved:
        moved = False
        for sm, hand in enumerate(hands):
            if places[sm] == len(hand):
                continue
            block = hand[places[sm]]
            pool = offsets[block.expert] + block.m
            if block.phase == L1:
                ready = pool < ring or done["l2"][pool - ring] == grid.num_l2_n
            else:
                ready = done[L1][pool] == grid.num_l1_n
            if ready:
                done[block.phase][pool] += 1
                places[sm] += 1
                moved = True
    return all(place == len(hand) for place, hand in zip(places, hands, strict=True))
