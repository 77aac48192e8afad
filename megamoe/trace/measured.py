"""Stamps of a fused launch -> a Timeline, and the figures of any timeline, measured or simulated.

A line of the timeline is a CTA. Math's gaps between blocks become waits, named after what the other
roles did meanwhile; the weight copies of a CTA run beside its math, as spans of role `load`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megamoe.layout.stamps import (
    COMBINE,
    END,
    FILL,
    L1,
    L2,
    LOAD_TOKENS,
    LOAD_WEIGHTS,
    MATH,
    POOL,
    PUBLISH,
    ROUTE,
    WAIT,
)
from megamoe.simulator.events import SHORT_US
from megamoe.simulator.timeline import Span, Timeline
from megamoe.trace.stamps import Event, Recording, Tile, first_ns, since

Interval = tuple[float, float]


def timeline(recording: Recording) -> Timeline:
    """The launch as a timeline: microseconds from the first stamp."""
    num_ranks, first = recording.problem.num_ranks, first_ns(recording.events)
    by_cta: dict[int, list[Event]] = defaultdict(list)
    for event in recording.events:
        by_cta[event.cta].append(event)
    tiles = [recording.tiles(rank) for rank in range(num_ranks)]
    done = max((_us(e, first)[1] for e in recording.events if _is_block(e)), default=0.0)
    spans: list[Span] = []
    for cta, events in sorted(by_cta.items()):
        rank, sm = divmod(cta, recording.ctas_per_rank)
        spans += _Cta(rank, sm, tiles[rank], recording.num_n_tiles, first, done).spans(events)
    p = recording.problem
    name = f"{recording.name}, {p.recipe}, {p.num_tokens} tokens"
    name += f", one launch of {recording.num_ctas} CTAs"
    return Timeline(name, num_ranks, recording.ctas_per_rank, tuple(spans), source="measured")


def _is_block(event: Event) -> bool:
    return event.role == MATH and event.kind in (L1, L2)


def _us(event: Event, first: int) -> Interval:
    begin = since(event.begin, first) / 1e3
    return begin, max(begin, since(event.end, first) / 1e3)


class _Cta(NamedTuple):
    """One CTA: where it stands, and how its tickets are read."""

    rank: int
    sm: int
    tiles: tuple[Tile, ...]
    num_n_tiles: tuple[int, int]
    first: int  # ns of the launch's first stamp
    done: float  # us, end of the launch's last block

    def spans(self, events: Sequence[Event]) -> list[Span]:
        """Everything that it did, in order."""
        roles: dict[int, list[Event]] = defaultdict(list)
        for event in events:
            roles[event.role].append(event)
        waits = {e.ticket: _us(e, self.first) for e in roles[LOAD_TOKENS] if e.kind == WAIT}
        spans = [self._span("route", e, "dispatch") for e in events if e.kind == ROUTE]
        spans += [self._span("stage", e, "fill") for e in roles[PUBLISH] if e.kind == FILL]
        spans += self._math(sorted(roles[MATH], key=lambda e: since(e.begin, self.first)), waits)
        spans += self._loads(roles[LOAD_WEIGHTS], waits)
        return sorted(spans, key=lambda s: (s.role == "load", s.start_us))

    def _math(self, events: Sequence[Event], waits: dict[int, Interval]) -> Iterator[Span]:
        """What math did and, between its blocks, what it waited for."""
        free = -1.0  # end of what came before; unknown at first
        for event in events:
            begin, end = _us(event, self.first)
            if _is_block(event):
                if free >= 0.0:
                    yield from self._gap((free, begin), event, waits)
                yield self._block("math", event)
            elif event.kind == FILL:
                yield self._span("stage", event, "fill")
            elif event.kind == END:
                middle = min(max(begin, self.done), end)
                for start, stop, phase in ((begin, middle, "ranks"), (middle, end, "barrier")):
                    if stop > start:
                        yield Span(self.rank, self.sm, "wait", start, stop, phase)
            elif event.kind == COMBINE:
                yield self._span("combine", event)
            free = max(free, end)

    def _loads(self, events: Sequence[Event], waits: dict[int, Interval]) -> Iterator[Span]:
        """Copies of weights. Those before all tokens are pooled fill half the ring and then stop.

        No stamp tells when: they count as nothing but the moment of the first.
        """
        pool = waits.get(POOL, (0.0, 0.0))[1]
        for number, event in enumerate(e for e in events if e.kind in (L1, L2)):
            span = self._block("load", event)
            if number == 0 and span.start_us < pool < span.end_us:
                yield span._replace(end_us=span.start_us)
                span = span._replace(start_us=pool)
            yield span

    def _gap(self, gap: Interval, event: Event, waits: dict[int, Interval]) -> Iterator[Span]:
        """Time before a block: its tokens were not there, or else its weights."""
        begin, end = gap
        what = "l1" if event.kind == L2 else "tokens"
        from_us, to_us = waits.get(event.ticket if what == "l1" else POOL, (begin, begin))
        from_us, to_us = min(max(from_us, begin), end), min(max(to_us, begin), end)
        expert, m, _ = self._place(event)
        for phase, start, stop in (
            ("weights", begin, from_us),
            (what, from_us, to_us),
            ("weights", to_us, end),
        ):
            if stop - start > SHORT_US:
                yield Span(
                    rank=self.rank,
                    sm=self.sm,
                    role="wait",
                    start_us=start,
                    end_us=stop,
                    phase=phase,
                    wave=0,
                    expert=expert,
                    m=m,
                )

    def _span(self, role: str, event: Event, phase: str = "") -> Span:
        return Span(self.rank, self.sm, role, *_us(event, self.first), phase)

    def _block(self, role: str, event: Event) -> Span:
        phase = "l1" if event.kind == L1 else "l2"
        us = _us(event, self.first)
        return Span(self.rank, self.sm, role, *us, phase, 0, *self._place(event))

    def _place(self, event: Event) -> tuple[int, int, int]:
        """(expert, row block, weight block) of a ticket: all of L1 comes before all of L2."""
        which = int(event.kind == L2)
        number = event.ticket - which * len(self.tiles) * self.num_n_tiles[0]
        tile, n = divmod(number, self.num_n_tiles[which])
        if not 0 <= tile < len(self.tiles):
            return -1, -1, -1
        return *self.tiles[tile], n


class Loads(NamedTuple):
    """Weight copies. They are issued from begin to end of a span, and land a little later."""

    first_us: float
    last_us: float
    any_share: float  # of first to last: some SM issues copies
    sm_share: float  # of an SM's own first to last: it does, mean over SMs


class Figures(NamedTuple):
    """What is asked of one launch; times in microseconds."""

    total: float
    start: float  # the first block begins
    overlap: float  # some SM is in L1 while another is in L2
    tail: float  # from the first SM without blocks to the last
    barrier: float  # from the last block until all SMs know of it
    combine: float  # from the first SM that adds up to the last that is done
    pool: float | None  # the last SM learns that all tokens are in the pool
    loads: Loads | None


def figures(line: Timeline) -> Figures:
    """The figures of a timeline, from its spans alone."""
    blocks = [s for s in line.spans if s.role == "math"]
    ends: dict[tuple[int, int], float] = {}
    for span in blocks:
        at = span.rank, span.sm
        ends[at] = max(ends.get(at, 0.0), span.end_us)
    last = max(ends.values(), default=0.0)
    l1, l2 = (joined((s.start_us, s.end_us) for s in blocks if s.phase == p) for p in ("l1", "l2"))
    waits = [s for s in line.spans if s.role == "wait"]
    barrier = max((s.end_us for s in waits if s.phase == "barrier"), default=last)
    adds = [s for s in line.spans if s.role == "combine"]
    return Figures(
        total=line.total_us,
        start=min((s.start_us for s in blocks), default=0.0),
        overlap=length(l1) + length(l2) - length(joined([*l1, *l2])),
        tail=last - min(ends.values(), default=0.0),
        barrier=max(barrier - last, 0.0),
        combine=max((s.end_us for s in adds), default=0.0)
        - min((s.start_us for s in adds), default=0.0),
        pool=max((s.end_us for s in waits if s.phase == "tokens"), default=None),
        loads=_loads(line),
    )


def _loads(line: Timeline) -> Loads | None:
    by_sm: dict[tuple[int, int], list[Interval]] = defaultdict(list)
    for s in line.spans:
        if s.role == "load":
            by_sm[s.rank, s.sm].append((s.start_us, s.end_us))
    if not by_sm:
        return None
    every = joined(one for spans in by_sm.values() for one in spans)
    shares = [_share(joined(spans)) for spans in by_sm.values()]
    return Loads(every[0][0], every[-1][1], _share(every), sum(shares) / len(shares))


def _share(intervals: Sequence[Interval]) -> float:
    whole = intervals[-1][1] - intervals[0][0]
    return length(intervals) / whole if whole else 1.0


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """The union, in order.

    >>> joined([(2.0, 3.0), (0.0, 1.0), (0.5, 2.0), (4.0, 5.0)])
    [(0.0, 3.0), (4.0, 5.0)]
    """
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
