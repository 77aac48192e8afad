"""Timelines -> one page that needs nothing else: no network, no second file.

The spans travel as compressed columns of integers; the page's script draws them on canvases that
share one clock.
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
from megamoe.simulator.timeline import LANES, Span, Timeline
from megamoe.trace.kinds import KINDS, LANE_KINDS, LOAD_KINDS, kind_of

MAX_BYTES = 4_500_000  # of the spans in a page; more ranks than fit are left out, and it says so

Fact = tuple[str, str, str]  # figure, its name, one line about it


def page(
    timeline: Timeline,
    *others: Timeline,
    title: str,
    facts: Sequence[Fact] = (),
    note: str = "",
    story: Sequence[tuple[str, str]] = (),
) -> str:
    """The page as text; other timelines stand below the first, on the same clock.

    `facts` stand at its head, `note` is one sentence below them, `story` has headings and texts
    that come before the page's own explanation.
    """
    lines = (timeline, *others)
    for line in lines:
        require(len(line.spans) > 0, "a page needs spans", got="none", kind=RangeError)
    share = MAX_BYTES // len(lines)
    parts = {
        "TITLE": html.escape(title),
        "NAME": html.escape(f"{timeline.name} · {' and '.join(line.source for line in lines)}"),
        "BADGE": "\n".join(_badge(text) for line in lines for text in line.remarks),
        "FACTS": "\n".join(_fact(*fact) for fact in facts),
        "NOTE": html.escape(note),
        "CHARTS": "\n".join(_chart(line, is_named=len(lines) > 1) for line in lines),
        "STORY": "\n".join(
            (*(_section(heading, html.escape(text)) for heading, text in story), *_explained(lines))
        ),
        "STYLE": _file("page.css"),
        "DATA": "\n".join(_data(line, f"-{i}" if i else "", share) for i, line in enumerate(lines)),
        "SCRIPT": _file("page.js"),
    }
    text = _file("page.html")
    for name, value in parts.items():
        text = text.replace(f"@@{name}@@", value)
    return text


def _data(line: Timeline, suffix: str, max_spans: int) -> str:
    """What the script reads: facts of a timeline, and its spans."""
    num_ranks, packed = line.num_ranks, pack(line, line.num_ranks)
    while len(packed) > max_spans and num_ranks > 1:
        num_ranks //= 2
        packed = pack(line, num_ranks)
    meta = {
        "source": line.source,
        "ranks": num_ranks,
        "left_out": line.num_ranks - num_ranks,
        "sms": line.num_sms,
        "has_loads": _has_loads(line),
        "lanes": [LANES[-1], LANES[-2]],
        "total_ns": round(line.total_us * 1000),
        "kinds": [
            {"key": key, "name": k.name, "colour": k.colour, "about": k.about}
            for key, k in KINDS.items()
        ],
        "lane_kinds": LANE_KINDS,
        "load_kinds": LOAD_KINDS,
    }
    meta_json = json.dumps(meta).replace("</", "<\\/")
    return (
        f'<script type="application/json" id="meta{suffix}">{meta_json}</script>\n'
        f'<script type="text/plain" id="spans{suffix}">{packed.decode()}</script>'
    )


def _badge(text: str) -> str:
    return f'<p class="badge">{html.escape(text)}</p>'


def _chart(line: Timeline, *, is_named: bool) -> str:
    name = f"<p class=line><b>{html.escape(line.source)}</b> {html.escape(line.name)}</p>\n"
    stage = "<div class=stage><canvas></canvas><div class=tip hidden></div></div>"
    return (name if is_named else "") + stage


def _explained(lines: Sequence[Timeline]) -> list[str]:
    """What the charts show, of what they have: ranks, waves, links."""
    ranks = max(line.num_ranks for line in lines)
    parts = [("What you are looking at", _CALL_OF_ONE if ranks == 1 else _CALL)]
    if any(line.num_waves > 1 for line in lines):
        parts.append(("What a wave is", _WAVES))
    if ranks > 1:
        parts.append(("Where communication shows", _LINKS))
    return [_section(heading, text) for heading, text in parts]


def _section(heading: str, text: str) -> str:
    return f"<div>\n<h2>{html.escape(heading)}</h2>\n<p>{text}</p>\n</div>"


_BAND = (
    "every line is one SM, one of the GPU's processors, and every coloured dash is one "
    "<em>block</em>: some rows of one expert times some rows of its weights."
)
_CALL_OF_ONE = (
    "One call of a Mixture-of-Experts layer on one GPU. A token goes to a few experts: two matrix "
    'products (<b class="l1">L1</b>, the activation, <b class="l2">L2</b>), and '
    f'<b class="combine">combine</b>, which adds up the results of a token. In the band {_BAND}'
)
_CALL = (
    "One call of a Mixture-of-Experts layer. Each GPU (a <em>rank</em>) holds some of the experts. "
    "A token goes to a few experts, which may live on other ranks: "
    '<b class="pull">rows in</b> over the links between GPUs, two matrix products '
    '(<b class="l1">L1</b>, the activation, <b class="l2">L2</b>), '
    '<b class="scatter">results out</b> to the token\'s rank, and <b class="combine">combine</b>, '
    f"which adds them up. The tall band is one rank: {_BAND} The thin bands are the other ranks; "
    "click one to open it."
)
_WAVES = (
    "An L2 block reads the activation of all L1 blocks of the same rows, so it cannot start before "
    "them. Rows are grouped into <em>waves</em>: later ones use the memory of earlier ones, or let "
    "results leave early. The strip above the tall band numbers them."
)
_LINKS = (
    "The thin lanes under the strip are the links. Traffic that runs beside blocks costs nothing; "
    'what cannot hide shows as <b class="exposed">waiting for network</b>: before rows are there, '
    "and until the last results are back. In staged calls all of it shows: rows cross between "
    "launches."
)


def _file(name: str) -> str:
    return (files("megamoe.trace") / "page" / name).read_text(encoding="utf-8")


def _fact(figure: str, name: str, about: str) -> str:
    shown = (html.escape(part) for part in (figure, name, about))
    return "<div class=fact><b>{}</b><span>{}</span><small>{}</small></div>".format(*shown)


def pack(timeline: Timeline, num_ranks: int) -> bytes:
    """The spans of the first ranks as base64 of deflated columns, little-endian.

    Rows are the two lanes, then the SMs, then the loads of the SMs where there are any, of rank
    after rank. Columns: first span of each row (and the end), gap to the span before in ns, time in
    ns (all u32), wave, expert, m, n (u16, 65535 is none), kind (u8). Gaps are mostly zero and times
    mostly alike, which deflates well.
    """
    num_sms = timeline.num_sms
    per_rank = len(LANES) + num_sms * (1 + _has_loads(timeline))
    rows: list[list[Span]] = [[] for _ in range(num_ranks * per_rank)]
    for span in timeline.spans:
        if span.rank < num_ranks:
            at = _row(span.sm) + (num_sms if span.role == "load" else 0)
            rows[span.rank * per_rank + at].append(span)
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


def _has_loads(line: Timeline) -> bool:
    return any(span.role == "load" for span in line.spans)


def _row(sm: int) -> int:
    return -sm - 1 if sm < 0 else len(LANES) + sm


def _little(column: array[int]) -> bytes:
    if sys.byteorder == "big":
        column = array(column.typecode, column)
        column.byteswap()
    return column.tobytes()
