"""Min-peeling: from which rank an owner pulls the next row of an expert (A061).

The ranks that still have rows take turns. A round lasts as long as the shortest of them, then
that rank drops out and the others go on. So at any moment the pulls are spread over as many ranks
as have anything left, and no link is asked twice while another idles. Each slot is found from
the counts alone, so any warp can pull any slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megamoe.errors import RangeError, require

LANES = 32


class Source(NamedTuple):
    """Where a row of an expert comes from: row `place` of what `rank` sent to that expert."""

    rank: int
    place: int


def source(slot: int, counts: Sequence[int]) -> Source:
    """The source of row `slot` of an expert that receives counts[r] rows from rank r.

    The arithmetic of one warp: lane l holds the counts of ranks l, l + 32, ... (A062); minima and
    numbers of active ranks are reductions over lanes, and the rank is found group by group of 32
    as the n-th set bit of the ballot.

    >>> [tuple(source(slot, [4, 3, 2, 1])) for slot in range(6)]
    [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1)]
    """
    require(
        0 <= slot < sum(counts),
        f"slot must lie below the expert's {sum(counts)} rows",
        got=slot,
        kind=RangeError,
    )
    remaining = list(counts)
    offset = 0
    while True:
        active = [left for left in remaining if left > 0]
        length = min(active)
        if slot < length * len(active):
            return Source(_nth_active(remaining, slot % len(active)), offset + slot // len(active))
        slot -= length * len(active)
        offset += length
        remaining = [left - min(left, length) for left in remaining]


def _nth_active(remaining: Sequence[int], n: int) -> int:
    seen = 0
    for group in range(0, len(remaining), LANES):
        ballot = [lane for lane, left in enumerate(remaining[group : group + LANES]) if left > 0]
        if n < seen + len(ballot):
            return group + ballot[n - seen]
        seen += len(ballot)
    raise AssertionError("n is below the number of active ranks")


def sources(counts: Sequence[int]) -> Iterator[Source]:
    """All rows of one expert in slot order: what `source` gives for slot 0, 1, ..."""
    for place in range(max(counts, default=0)):
        yield from (Source(rank, place) for rank, count in enumerate(counts) if count > place)
