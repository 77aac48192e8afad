"""Timeline -> the JSON that chrome://tracing and the Perfetto viewer open.

A rank is a process, a lane or an SM is a thread, a span is a complete event ("X").
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megamoe.schedule.timeline import LANES, Span, Timeline
from megamoe.trace.kinds import KINDS, kind_of

FIRST_SM = 10  # thread ids of lanes come first: they sort above the SMs


def perfetto(timeline: Timeline) -> str:
    """The whole file as text."""
    document = {
        "traceEvents": [*_names(timeline), *map(_event, timeline.spans)],
        "displayTimeUnit": "ns",
        "otherData": {"name": timeline.name, "source": timeline.source},
    }
    return json.dumps(document, separators=(",", ":"))


def _thread(sm: int) -> int:
    return -sm if sm < 0 else FIRST_SM + sm


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank in range(timeline.num_ranks):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        places = {**LANES, **{sm: f"SM {sm}" for sm in range(timeline.num_sms)}}
        for sm, name in places.items():
            where = {"ph": "M", "pid": rank, "tid": _thread(sm)}
            yield {**where, "name": "thread_name", "args": {"name": name}}
            yield {**where, "name": "thread_sort_index", "args": {"sort_index": _thread(sm)}}


def _event(span: Span) -> dict[str, Any]:
    kind = KINDS[kind_of(span)].name
    event: dict[str, Any] = {
        "ph": "X",
        "name": kind if span.expert < 0 else f"{kind} expert {span.expert}",
        "cat": span.role,
        "ts": round(span.start_us, 3),
        "dur": round(span.time_us, 3),
        "pid": span.rank,
        "tid": _thread(span.sm),
    }
    args = {name: getattr(span, name) for name in ("wave", "expert", "m", "n")}
    known = {name: value for name, value in args.items() if value >= 0}
    if span.phase:
        known["phase"] = span.phase
    if known:
        event["args"] = known
    return event
