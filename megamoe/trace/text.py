"""Timeline -> a chart for terminals: one rank in detail, the others as one line each."""

from __future__ import annotations

from collections.abc import Sequence

from megamoe.errors import RangeError, require
from megamoe.simulator.timeline import Timeline
from megamoe.trace.kinds import KINDS, LANE_KINDS, LOAD_KINDS, SM_KINDS, kind_of

LEVELS = " ▁▂▃▄▅▆▇█"
MARGIN = 21

Shares = dict[str, list[float]]  # kind -> share of each column


def shares(timeline: Timeline, rank: int, width: int) -> Shares:
    """How much of each of `width` slices of time each kind fills: of all SMs, or of its lane."""
    scale = width / timeline.total_us if timeline.total_us else 0.0
    by_kind = {kind: [0.0] * width for kind in KINDS}
    for span in timeline.spans:
        if span.rank != rank:
            continue
        kind = kind_of(span)
        part = 1.0 if kind in LANE_KINDS else 1.0 / timeline.num_sms
        row, start, end = by_kind[kind], span.start_us * scale, span.end_us * scale
        first, last = int(start), min(int(end), width - 1)
        for column in range(first, last + 1):
            row[column] += part * (min(end, column + 1) - max(start, column))
    return by_kind


def _bars(row: Sequence[float]) -> str:
    return "".join(LEVELS[min(round(share * 8), 8)] for share in row)


def _letters(shares: Shares) -> str:
    width = len(shares["l1"])
    best = [max(SM_KINDS, key=lambda kind: shares[kind][at]) for at in range(width)]
    return "".join(
        KINDS[kind].letter if shares[kind][at] >= 0.05 else " " for at, kind in enumerate(best)
    )


def gantt(timeline: Timeline, *, rank: int = 0, width: int = 72) -> str:
    """A chart `width` columns wide: height is the share of SMs, or of the lane's time."""
    require(
        0 <= rank < timeline.num_ranks,
        f"rank must lie in 0 .. {timeline.num_ranks - 1}",
        got=rank,
        kind=RangeError,
    )
    require(width >= 10, "width must be at least 10 columns", got=width, kind=RangeError)
    by_rank = [shares(timeline, r, width) for r in range(timeline.num_ranks)]
    end = f"{timeline.total_us:,.0f} us"
    lines = list(timeline.remarks)
    lines.append(f"{'rank ' + str(rank):<{MARGIN}}0{end:>{width - 1}}")
    for kind in (*LANE_KINDS[:1], *SM_KINDS, *LOAD_KINDS, *LANE_KINDS[1:]):
        row = by_rank[rank][kind]
        if max(row) > 0.0:
            lines.append(f"{KINDS[kind].name:<{MARGIN}}{_bars(row)}")
    if timeline.num_ranks > 1:
        lines.append("")
        lines += [
            f"{'rank ' + str(r):<{MARGIN}}{_letters(by_kind)}" for r, by_kind in enumerate(by_rank)
        ]
        used = dict.fromkeys("".join(line[MARGIN:] for line in lines[-timeline.num_ranks :]))
        letters = {KINDS[kind].letter: KINDS[kind].name for kind in reversed(SM_KINDS)}
        letters["."] = "waiting for others"
        legend = ", ".join(f"{letter} {letters[letter]}" for letter in used if letter in letters)
        lines.append(f"{'':<{MARGIN}}what most SMs do: {legend}")
    return "\n".join(lines)
