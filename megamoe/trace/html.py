"""Timeline -> one page that needs nothing else: no network, no second file.

The spans travel as compressed columns of integers; the page's script draws them on a canvas.
"""

from __future__ import annotations

import base64
import html
import json
import sys
import zlib
from array import array
from collections.abc import Sequence
from importlib.resources import files

from megamoe.errors import RangeError, require
from megamoe.schedule.timeline import LANES, Span, Timeline
from megamoe.trace.kinds import KINDS, LANE_KINDS, kind_of

MAX_BYTES = 4_500_000  # of the spans in a page; more ranks than fit are left out, and it says so

Fact = tuple[str, str, str]  # figure, its name, one line about it


def page(timeline: Timeline, *, title: str, facts: Sequence[Fact] = (), note: str = "") -> str:
    """The page as text. `facts` stand at its head; `note` is one sentence below them."""
    require(len(timeline.spans) > 0, "a page needs spans", got="none", kind=RangeError)
    num_ranks, packed = timeline.num_ranks, pack(timeline, timeline.num_ranks)
    while len(packed) > MAX_BYTES and num_ranks > 1:
        num_ranks //= 2
        packed = pack(timeline, num_ranks)
    meta = {
        "ranks": num_ranks,
        "left_out": timeline.num_ranks - num_ranks,
        "sms": timeline.num_sms,
        "lanes": [LANES[-1], LANES[-2]],
        "total_ns": round(timeline.total_us * 1000),
        "kinds": [
            {"key": key, "name": k.name, "colour": k.colour, "about": k.about}
            for key, k in KINDS.items()
        ],
        "lane_kinds": LANE_KINDS,
    }
    parts = {
        "TITLE": html.escape(title),
        "NAME": html.escape(f"{timeline.name} · {timeline.source}"),
        "FACTS": "\n".join(_fact(*fact) for fact in facts),
        "NOTE": html.escape(note),
        "STYLE": _file("page.css"),
        "META": json.dumps(meta).replace("</", "<\\/"),
        "SPANS": packed.decode(),
        "SCRIPT": _file("page.js"),
    }
    text = _file("page.html")
    for name, value in parts.items():
        text = text.replace(f"@@{name}@@", value)
    return text


def _file(name: str) -> str:
    return (files("megamoe.trace") / "page" / name).read_text(encoding="utf-8")


def _fact(figure: str, name: str, about: str) -> str:
    shown = (html.escape(part) for part in (figure, name, about))
    return "<div class=fact><b>{}</b><span>{}</span><small>{}</small></div>".format(*shown)


def pack(timeline: Timeline, num_ranks: int) -> bytes:
    """The spans of the first ranks as base64 of deflated columns, little-endian.

    Rows are the two lanes, then the SMs, of rank after rank. Columns: first span of each row (and
    the end), gap to the span before in ns, time in ns (all u32), wave, expert, m, n (u16, 65535 is
    none), kind (u8). Gaps are mostly zero and times mostly alike, which deflates well.
    """
    per_rank = len(LANES) + timeline.num_sms
    rows: list[list[Span]] = [[] for _ in range(num_ranks * per_rank)]
    for span in timeline.spans:
        if span.rank < num_ranks:
            rows[span.rank * per_rank + _row(span.sm)].append(span)
    kinds = {key: at for at, key in enumerate(KINDS)}
    wide = {name: array("I") for name in ("first", "gap", "time")}
    narrow = {name: array("H") for name in ("wave", "expert", "m", "n")}
    kind = array("B")
    for row in rows:
        wide["first"].append(len(kind))
        last = 0
        for span in sorted(row, key=lambda s: s.start_us):
            start, end = round(span.start_us * 1000), round(span.end_us * 1000)
            start = max(start, last)
            end = max(start, end)
            wide["gap"].append(start - last)
            wide["time"].append(end - start)
            for name, column in narrow.items():
                column.append(getattr(span, name) & 0xFFFF)
            kind.append(kinds[kind_of(span)])
            last = end
    wide["first"].append(len(kind))
    columns = [*wide.values(), *narrow.values(), kind]
    return base64.b64encode(zlib.compress(b"".join(_little(c) for c in columns), 9))


def _row(sm: int) -> int:
    return -sm - 1 if sm < 0 else len(LANES) + sm


def _little(column: array[int]) -> bytes:
    if sys.byteorder == "big":
        column = array(column.typecode, column)
        column.byteswap()
    return column.tobytes()
