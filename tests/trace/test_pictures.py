"""Pictures of a timeline: valid JSON, a page that needs nothing else, charts that add up."""

import base64
import json
import re
import xml.etree.ElementTree as ET
import zlib
from array import array

import pytest

from megamoe.errors import RangeError
from megamoe.planner.plan import plan
from megamoe.problem import Problem
from megamoe.simulator.simulate import simulate
from megamoe.simulator.timeline import ROLES, WAITS, Span, Timeline
from megamoe.studies.deep_gemm.plan import plan as study_plan
from megamoe.studies.deep_gemm.schedule import schedule_of
from megamoe.trace import html
from megamoe.trace.html import page
from megamoe.trace.kinds import KINDS, LANE_KINDS, SM_KINDS, kind_of
from megamoe.trace.perfetto import perfetto
from megamoe.trace.plot import Bar, exposed_plot
from megamoe.trace.predicted import facts, note, prediction_page
from megamoe.trace.text import gantt, shares


@pytest.fixture(scope="module")
def found():
    return simulate(plan(Problem(256, 2048, 1024, 32, 4, 4, "w4a8"), "h200", mode="staged"))


@pytest.fixture(scope="module")
def large():
    """EP8 prefill: the page with the size bar."""
    return simulate(plan(Problem(8192, 7168, 3072, 384, 6, 8, "w4a8_block"), "h200"))


def test_every_span_becomes_one_complete_event(found):
    trace = json.loads(perfetto(found.timeline))
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(events) == len(found.timeline.spans)
    assert {e["pid"] for e in events} == {0, 1, 2, 3}
    assert all(e["dur"] >= 0 and e["ts"] >= 0 and e["cat"] in ROLES for e in events)
    block = next(e for e in events if e["cat"] == "math")
    assert set(block["args"]) == {"wave", "expert", "m", "n", "phase"}
    end = max(e["ts"] + e["dur"] for e in events)
    assert end == pytest.approx(found.time_us, abs=0.01)


def test_every_place_has_a_name_in_the_trace(found):
    events = json.loads(perfetto(found.timeline))["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} <= set(named)
    assert {"rows in", "results out", "SM 0", "SM 131"} <= set(named.values())


def unpacked(text):
    """The columns of a page, as its script reads them."""
    meta = json.loads(re.search(r'id="meta">(.*?)</script>', text, re.S).group(1))
    packed = re.search(r'id="spans">(.*?)</script>', text, re.S).group(1)
    raw = zlib.decompress(base64.b64decode(packed))
    num_rows = meta["ranks"] * (meta["sms"] + len(meta["lanes"]))
    first = array("I", raw[: 4 * (num_rows + 1)])
    num, at, columns = first[-1], 4 * (num_rows + 1), {}
    for name, code, size in (
        ("gap", "I", 4), ("time", "I", 4), ("wave", "H", 2), ("expert", "H", 2), ("m", "H", 2),
        ("n", "H", 2), ("kind", "B", 1),
    ):  # fmt: skip
        columns[name] = array(code, raw[at : at + num * size])
        at += num * size
    assert at == len(raw)
    return meta, first, columns


def test_the_page_holds_every_span_to_the_nanosecond(found):
    meta, first, columns = unpacked(prediction_page(found, "a call"))
    kinds = [kind["key"] for kind in meta["kinds"]]
    seen = []
    for row in range(len(first) - 1):
        rank, place = divmod(row, meta["sms"] + 2)
        sm, now = place - 2 if place >= 2 else -place - 1, 0
        for i in range(first[row], first[row + 1]):
            start = now + columns["gap"][i]
            now = start + columns["time"][i]
            seen.append((rank, sm, start, now, kinds[columns["kind"][i]], columns["n"][i]))
    wanted = [
        (s.rank, s.sm, round(s.start_us * 1000), round(s.end_us * 1000), kind_of(s), s.n & 0xFFFF)
        for s in found.timeline.spans
    ]
    assert sorted(seen) == sorted(wanted)
    assert meta["total_ns"] == round(found.time_us * 1000)


def test_the_page_is_alone_in_the_world(found):
    text = prediction_page(found, "a call")
    assert not re.search(r"https?://|//cdn|@import|<link|<img|<iframe|src\s*=|url\(", text)
    assert not re.search(r"\bfetch\(|XMLHttpRequest|WebSocket|import\(|sendBeacon", text)
    assert "@@" not in text, "every blank is filled"
    assert text.startswith("<!doctype html>") and text.count("<script") == text.count("</script>")


def test_the_page_explains_what_it_shows_and_nothing_else(found):
    assert found.timeline.num_waves == 1
    text = prediction_page(found, "a call")
    assert "Where communication shows" in text and "thin bands" in text
    assert "What a wave is" not in text
    alone = simulate(plan(Problem(8, 2048, 1024, 32, 4, 1, "w4a8"), "h200"))
    text = prediction_page(alone, "a call")
    assert "communication shows" not in text and "thin bands" not in text
    ring = plan(Problem(64, 2048, 1024, 32, 4, 1, "w4a8"), "h200", pool_rows=200)
    assert "What a wave is" in prediction_page(simulate(ring), "a call")


def test_a_study_says_so_in_every_picture(found):
    other = simulate(schedule_of(study_plan(found.schedule.problem, "h200")))
    says = "study: not a launch of this library (deep_gemm)"
    assert f'<p class="badge">{says}</p>' in prediction_page(other, "a call")
    assert 'class="badge"' not in prediction_page(found, "a call")
    assert gantt(other.timeline).startswith(says) and says not in gantt(found.timeline)
    trace = json.loads(perfetto(other.timeline))
    assert trace["otherData"]["study"] == says
    assert "study" not in json.loads(perfetto(found.timeline))["otherData"]
    assert says in exposed_plot([Bar.of(other)], "a call", other.timeline.study)


def test_the_page_of_eight_ranks_is_small(large):
    text = prediction_page(large, "DeepSeek-V4-Pro, EP8, prefill")
    assert len(text.encode()) < 5_000_000
    assert unpacked(text)[0]["left_out"] == 0


def test_ranks_that_do_not_fit_are_left_out_and_said_so(found, monkeypatch):
    monkeypatch.setattr(html, "MAX_BYTES", 100)
    meta, _, _ = unpacked(prediction_page(found, "a call"))
    assert (meta["ranks"], meta["left_out"]) == (1, 3)


def test_titles_and_names_cannot_break_the_page():
    line = Timeline("</script><b>", 1, 1, (Span(0, 0, "math", 0.0, 1.0, "l1"),))
    text = page(line, title="<i>", facts=[("<1>", "&", '"')], note="</p>")
    assert "<i>" not in text and "</script><b>" not in text and "&lt;1&gt;" in text
    with pytest.raises(RangeError, match="a page needs spans"):
        page(Timeline("none", 1, 1, ()), title="none")


def test_facts_say_time_floor_and_exposure(found):
    text = " ".join(" ".join(fact) for fact in facts(found))
    assert f"{found.time_us:,.0f} us" in text and f"{found.floor.time_us:,.0f} us" in text
    assert f"{found.exposed_share:.1%}" in text
    assert "FLOP per byte" in note(found) and "L1" in note(found)


def test_the_text_chart_fills_each_column_once(found):
    for rank in range(4):
        rows = shares(found.timeline, rank, 60)
        for at in range(60):
            assert sum(rows[kind][at] for kind in SM_KINDS) <= 1.0 + 1e-9
            assert all(rows[kind][at] <= 1.0 + 1e-9 for kind in LANE_KINDS)
    whole = sum(sum(shares(found.timeline, 0, 60)[kind]) for kind in ("l1", "l2")) / 60
    math = sum(s.time_us for s in found.timeline.spans if s.rank == 0 and s.role == "math")
    assert whole == pytest.approx(math / 132 / found.time_us)


def test_the_text_chart_names_what_it_shows(found):
    text = gantt(found.timeline, rank=1, width=50)
    for words in ("rank 1", "rows in", "L1", "L2", "results out", "combine", "rank 3"):
        assert words in text
    assert max(map(len, text.splitlines()[:8])) <= 21 + 50
    with pytest.raises(RangeError, match=r"rank must lie in 0 \.\. 3; got 4"):
        gantt(found.timeline, rank=4)
    with pytest.raises(RangeError, match="at least 10 columns"):
        gantt(found.timeline, width=3)


def test_every_role_and_wait_has_a_kind():
    for role in ROLES:
        assert kind_of(Span(0, 0, role, 0.0, 1.0, "l1")) in KINDS
    for phase in WAITS:
        assert kind_of(Span(0, 0, "wait", 0.0, 1.0, phase)) in KINDS
    assert len({kind.colour for kind in KINDS.values()}) == len(KINDS)


def test_the_plot_is_an_svg_with_bars_for_every_number_of_ranks():
    bars = [
        Bar("fused", 1, 100.0, 0.0), Bar("staged", 1, 130.0, 0.0),
        Bar("fused", 2, 120.0, 12.0), Bar("staged", 2, 160.0, 40.0),
        Bar("fused", 8, 90.0, 45.0),
    ]  # fmt: skip
    text = exposed_plot(bars, "a layer <here>")
    root = ET.fromstring(text)
    labels = [e.text for e in root.iter() if e.tag.endswith("text")]
    assert root.tag.endswith("svg")
    wanted = {"0.0%", "10.0%", "25.0%", "50.0%", "1", "2", "8", "fused", "staged", "a layer <here>"}
    assert wanted <= set(labels)
    with pytest.raises(RangeError, match="at least one bar"):
        exposed_plot([], "none")
