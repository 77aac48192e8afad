"""Timelines -> the JSON that chrome://tracing and the Perfetto viewer open.

A rank is a process, a lane, an SM or an SM's loads are a thread, a span is a complete event ("X").
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megamoe.simulator.timeline import LANES, Span, Timeline
from megamoe.trace.kinds import KINDS, kind_of

FIRST_SM = 10  # thread ids of lanes come first: they sort above the SMs


def perfetto(timeline: Timeline, *others: Timeline) -> str:
    """The whole file as text; ranks of other timelines are processes below."""
    lines, events, first = (timeline, *others), [], 0
    for line in lines:
        events += [*_names(line, first, bool(others)), *(_event(s, first) for s in line.spans)]
        first += line.num_ranks
    document: dict[str, Any] = {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"name": timeline.name, "source": ", ".join(line.source for line in lines)},
    }
    if studies := [line.study for line in lines if line.study]:
        document["otherData"]["study"] = ", ".join(studies)
    if notes := [line.note for line in lines if line.note]:
        document["otherData"]["note"] = ", ".join(notes)
    return json.dumps(document, separators=(",", ":"))


def _thread(sm: int, is_load: bool = False) -> int:
    """Lanes, then each SM with its loads below it."""
    return -sm if sm < 0 else FIRST_SM + 2 * sm + is_load


def _names(line: Timeline, first: int, is_sourced: bool) -> Iterator[dict[str, Any]]:
    places = {_thread(lane): name for lane, name in LANES.items()}
    places |= {_thread(sm): f"SM {sm}" for sm in range(line.num_sms)}
    if any(span.role == "load" for span in line.spans):
        places |= {_thread(sm, True): f"SM {sm} loads" for sm in range(line.num_sms)}
    for rank in range(line.num_ranks):
        name = f"rank {rank}, {line.source}" if is_sourced else f"rank {rank}"
        name += f", {line.study}" if line.study else ""
        yield {"ph": "M", "name": "process_name", "pid": first + rank, "args": {"name": name}}
        for thread, name in places.items():
            where = {"ph": "M", "pid": first + rank, "tid": thread}
            yield {**where, "name": "thread_name", "args": {"name": name}}
            yield {**where, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _event(span: Span, first: int) -> dict[str, Any]:
    kind = KINDS[kind_of(span)].name
    event: dict[str, Any] = {
        "ph": "X",
        "name": kind if span.expert < 0 else f"{kind} expert {span.expert}",
        "cat": span.role,
        "ts": round(span.start_us, 3),
        "dur": round(span.time_us, 3),
        "pid": first + span.rank,
        "tid": _thread(span.sm, span.role == "load"),
    }
    args = {name: getattr(span, name) for name in ("wave", "expert", "m", "n")}
    known = {name: value for name, value in args.items() if value >= 0}
    if span.phase:
        known["phase"] = span.phase
    if known:
        event["args"] = known
    return event
