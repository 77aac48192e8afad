"""Traffic: which rows of which rank lie in each tile of tokens, and what a call must move at least.

Rows of an expert lie rank after rank, or (in a study) come from the ranks in turn, so a tile holds
a known number of rows from every rank. The simulator moves tiles, not single rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.formats.spec import BF16, FP8_COMBINE, recipe_named
from megamoe.layout.rows import stored_bytes
from megamoe.planner.floor import Floor, weight_bytes
from megamoe.simulator.blocks import num_m_blocks, valid_m
from megamoe.simulator.sample import Counts
from megamoe.simulator.schedule import Schedule


def ranked(counts: tuple[int, ...], slots: int) -> list[int]:
    """Rows of each rank among the first `slots` rows of an expert, rank after rank.

    >>> ranked((4, 3, 2, 1), 6)
    [4, 2, 0, 0]
    """
    taken = []
    for count in counts:
        taken.append(min(count, slots))
        slots -= taken[-1]
    return taken


def peeled(counts: tuple[int, ...], slots: int) -> list[int]:
    """Rows of each rank among the first `slots` rows of an expert, in min-peeling order.

    Whole turns give one row to every rank that has any left; of a turn that is cut short the first
    ranks have theirs.

    >>> peeled((4, 3, 2, 1), 6)
    [2, 2, 1, 1]
    """
    turns, used = 0, 0
    while used < slots:
        left = [count - turns for count in counts if count > turns]
        length = min(min(left), (slots - used) // len(left))
        if length == 0:
            break
        turns, used = turns + length, used + length * len(left)
    taken = [min(count, turns) for count in counts]
    for rank, count in enumerate(counts):
        if used == slots:
            break
        if count > turns:
            taken[rank] += 1
            used += 1
    return taken


@dataclass(frozen=True, slots=True)
class RowBlock:
    """A tile of tokens: up to block_m rows of one local expert."""

    expert: int
    m: int
    rows: int
    by_rank: tuple[int, ...]  # how many of them come from, and return to, each rank


def row_blocks(
    counts: Counts, rank: int, num_local: int, block_m: int, *, peels: bool = False
) -> tuple[RowBlock, ...]:
    """The tiles of tokens of one rank in pool order."""
    first = peeled if peels else ranked
    blocks: list[RowBlock] = []
    for expert in range(num_local):
        column = tuple(sent[rank * num_local + expert] for sent in counts)
        total, before = sum(column), [0] * len(column)
        for m in range(num_m_blocks(total, block_m)):
            rows = valid_m(total, m, block_m)
            after = first(column, m * block_m + rows)
            by_rank = tuple(a - b for a, b in zip(after, before, strict=True))
            blocks.append(RowBlock(expert, m, rows, by_rank))
            before = after
    return tuple(blocks)


def local_rows(counts: Counts, rank: int, num_local: int) -> tuple[int, ...]:
    """Rows of each local expert of one rank."""
    first = rank * num_local
    return tuple(sum(sent[first + e] for sent in counts) for e in range(num_local))


@dataclass(frozen=True, slots=True)
class RowBytes:
    """What one row costs at each station of its way."""

    tokens: int  # hidden wide, as the recipe stores activations
    acts: int  # intermediate wide, the same format
    results: int  # hidden wide, on its way home

    @staticmethod
    def of(how: Schedule) -> RowBytes:
        """The widths of a call."""
        p = how.problem
        acts = recipe_named(p.recipe).acts
        out = BF16 if how.combine == "bf16" else FP8_COMBINE
        tokens = stored_bytes(p.hidden, acts)
        return RowBytes(
            tokens=tokens,
            acts=stored_bytes(p.intermediate, acts),
            results=stored_bytes(p.hidden, out),
        )


def floor_of(how: Schedule, counts: Counts) -> Floor:
    """The floor of the rank that these counts load most: `plan.floor` is that of even routing."""
    return max(
        (_rank_floor(how, counts, rank) for rank in range(how.problem.num_ranks)),
        key=lambda floor: floor.time_us,
    )


def _rank_floor(how: Schedule, counts: Counts, rank: int) -> Floor:
    p, hw = how.problem, how.hardware
    local, size = p.num_local_experts, RowBytes.of(how)
    rows = local_rows(counts, rank, local)
    total, touched = sum(rows), sum(count > 0 for count in rows)
    own = sum(counts[rank][rank * local : (rank + 1) * local])
    hbm = (
        ("weights", touched * weight_bytes(p)),
        ("rows in", total * size.tokens),
        ("activation", 2 * total * size.acts),
        ("rows out", total * size.results),
    )
    nvlink = (
        ("dispatch", (total - own) * size.tokens),
        ("combine", (sum(counts[rank]) - own) * size.results),
    )
    flops = 6 * total * p.hidden * p.intermediate
    return Floor(
        flops=flops,
        hbm=hbm,
        nvlink=nvlink,
        tensor_us=flops / (hw.tensor(how.experts.mma).reached.value * 1e6),
        hbm_us=sum(b for _, b in hbm) / (hw.hbm_gbs.reached.value * 1e3),
        nvlink_us=sum(b for _, b in nvlink) / (hw.nvlink_gbs.reached.value * 1e3),
    )
