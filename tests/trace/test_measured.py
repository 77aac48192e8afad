"""Stamps of a launch -> a timeline and its figures, with stamps made on the CPU."""

import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest

from megamoe.errors import FileError, RangeError
from megamoe.layout import stamps as numbers
from megamoe.layout.stamps import (
    COMBINE,
    END,
    FILL,
    L1,
    L2,
    LOAD_TOKENS,
    LOAD_WEIGHTS,
    MATH,
    PUBLISH,
    ROUTE,
    WAIT,
)
from megamoe.planner import hopper
from megamoe.planner.tables.hopper import Shape
from megamoe.problem import Problem
from megamoe.simulator.timeline import Span, Timeline
from megamoe.trace import measured, stamps
from megamoe.trace.beside import MAX_OVERHEAD, Pair, timelines_json
from megamoe.trace.measured import figures, timeline
from megamoe.trace.perfetto import perfetto
from megamoe.trace.stamps import Recording, events_of
from tests.trace.support import NEAR_WRAP, buffer, launch

US = 1000


@pytest.fixture(scope="module")
def found():
    return launch(plain_us=100.0, traced_us=104.0, provenance="made up")


def small(events, num_ctas=2, rows=(10, 3), block_m=8, ranks=1, **more):
    """A recording of one token each for `rows` rows of experts; times of events in us."""
    num = len(rows)
    problem = Problem(max(sum(rows), 1), 256, 128, num, 1, ranks, "w4a8_block")
    counts = tuple(tuple(rows) if r == 0 else (0,) * num for r in range(ranks))
    made = [(c, r, k, t, NEAR_WRAP + US * a, NEAR_WRAP + US * b) for c, r, k, t, a, b in events]
    return Recording(
        "small", problem, counts, block_m, 256, 128, (2, 1), num_ctas,
        events_of(buffer(num_ctas, made)), **more,
    )  # fmt: skip


def test_the_numbers_are_those_of_the_kernel():
    kernel = pytest.importorskip("megamoe.kernels.gluon.mega.events")
    for name in (
        "MATH", "LOAD_WEIGHTS", "LOAD_TOKENS", "PUBLISH", "ROUTE", "FILL", "L1", "L2",
        "END", "COMBINE", "WAIT",
    ):  # fmt: skip
        assert getattr(numbers, name) == getattr(kernel, name).value, name
    assert (kernel.EVENTS.value, kernel.ROLES.value) == (numbers.EVENTS, numbers.ROLES)


def test_tickets_become_blocks(found):
    """L1: ticket // 16 is the tile, ticket % 16 the weight block; L2 likewise after all of L1."""
    tiles = found.tiles(0)
    rows = found.counts[0]
    assert [t.expert for t in tiles] == [e for e, n in enumerate(rows) for _ in range(-(-n // 8))]
    blocks = [s for s in timeline(found).spans if s.role == "math"]
    seen = [(s.phase, s.expert, s.m, s.n) for s in blocks]
    wanted = [(p, *tile, n) for p in ("l1", "l2") for tile in tiles for n in range(16)]
    assert sorted(seen) == sorted(wanted)
    one = next(e for e in found.events if e.kind == L2 and e.role == MATH)
    number = one.ticket - len(tiles) * 16
    place = next(s for s in blocks if s.sm == one.cta and s.phase == "l2")
    assert (place.expert, place.m, place.n) == (*tiles[number // 16], number % 16)


def test_the_clock_may_wrap_anywhere():
    lines = [timeline(launch(begin_ns=at)) for at in (0, NEAR_WRAP, 2**31 - 5_000, 2**32 - 1)]
    assert all(line == lines[0] for line in lines[1:])
    assert min(s.start_us for s in lines[0].spans) == 0.0 and lines[0].total_us < 200


def test_a_place_does_one_thing_at_a_time_but_for_its_loads(found):
    by_place = {}
    for span in timeline(found).spans:
        by_place.setdefault((span.sm, span.role == "load"), []).append(span)
    assert len(by_place) == 2 * 132
    for spans in by_place.values():
        ordered = sorted(spans, key=lambda s: s.start_us)
        for a, b in pairwise(ordered):
            assert a.end_us <= b.start_us + 1e-9, (a, b)


def test_gaps_are_named_after_what_was_waited_for():
    line = timeline(
        small(
            [
                (0, PUBLISH, ROUTE, 0, 0, 2),
                (0, MATH, FILL, 0, 2, 3),
                (0, LOAD_TOKENS, WAIT, -1, 2, 6),
                (0, MATH, L1, 0, 7, 10),  # 3..6 tokens, 6..7 weights
                (0, LOAD_TOKENS, WAIT, 6, 9, 12),
                (0, MATH, L2, 6, 13, 15),  # 10..12 L1, 12..13 weights
                (0, MATH, END, 0, 15, 20),
                (0, MATH, COMBINE, 0, 20, 21),
                (1, MATH, L1, 1, 8, 18),  # the last block: 15..18 others, 18..20 the barrier
            ]
        )
    )
    spans = [(s.role, s.phase, s.start_us, s.end_us) for s in line.spans if s.sm == 0]
    assert spans == [
        ("route", "dispatch", 0.0, 2.0),
        ("stage", "fill", 2.0, 3.0),
        ("wait", "tokens", 3.0, 6.0),
        ("wait", "weights", 6.0, 7.0),
        ("math", "l1", 7.0, 10.0),
        ("wait", "l1", 10.0, 12.0),
        ("wait", "weights", 12.0, 13.0),
        ("math", "l2", 13.0, 15.0),
        ("wait", "ranks", 15.0, 18.0),
        ("wait", "barrier", 18.0, 20.0),
        ("combine", "", 20.0, 21.0),
    ]
    assert [s.role for s in line.spans if s.sm == 1] == ["math"], "nothing is known of before"


def test_figures_of_a_launch_that_is_easy_to_add_up():
    f = figures(
        timeline(
            small(
                [
                    (0, LOAD_TOKENS, WAIT, -1, 1, 4),
                    (0, MATH, FILL, 0, 1, 2),
                    (0, LOAD_WEIGHTS, L1, 0, 0, 6),
                    (0, LOAD_WEIGHTS, L2, 6, 8, 10),
                    (0, MATH, L1, 0, 5, 9),
                    (0, MATH, L2, 6, 11, 14),
                    (0, MATH, END, 0, 14, 18),
                    (0, MATH, COMBINE, 0, 18, 19),
                    (1, LOAD_WEIGHTS, L1, 1, 2, 7),
                    (1, MATH, L1, 1, 6, 12),
                    (1, MATH, END, 0, 12, 17),
                    (1, MATH, COMBINE, 0, 17, 20),
                ]
            )
        )
    )
    assert (f.total, f.start, f.overlap, f.tail) == (20.0, 5.0, 1.0, 2.0)
    assert (f.barrier, f.combine, f.pool) == (4.0, 3.0, 4.0)
    assert f.loads.first_us == 0.0 and f.loads.last_us == 10.0
    assert f.loads.any_share == pytest.approx(0.7)  # 0..4 is the wait for the pool, 7..8 a gap
    assert f.loads.sm_share == pytest.approx((4 / 10 + 5 / 5) / 2)


def test_the_first_loads_count_from_when_the_pool_is_full():
    line = timeline(
        small(
            [
                (0, LOAD_TOKENS, WAIT, -1, 1, 6),
                (0, LOAD_WEIGHTS, L1, 0, 2, 9),
                (0, LOAD_WEIGHTS, L1, 1, 10, 12),
                (0, MATH, FILL, 0, 0, 1),
            ]
        )
    )
    spans = [(s.start_us, s.end_us, s.n) for s in line.spans if s.role == "load"]
    assert spans == [(2.0, 2.0, 0), (6.0, 9.0, 0), (10.0, 12.0, 1)]
    assert figures(line).loads.first_us == 2.0
    assert figures(line).loads.sm_share == pytest.approx(0.5)


def test_figures_of_nothing_are_zero():
    f = figures(Timeline("none", 1, 1, ()))
    assert f == (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, None, None)
    bare = timeline(small([]))
    assert bare.spans == () and figures(bare).loads is None


def test_simulated_timelines_answer_the_same_questions(found):
    f = figures(Pair.of(found).prediction.timeline)
    assert f.loads is None and 0 < f.start < f.total
    assert f.barrier == pytest.approx(1.2) and f.combine > 0 and f.tail > 0


def test_ranks_have_their_own_tickets_and_ctas():
    problem = Problem(4, 512, 256, 8, 2, 2, "w4a8_block")
    two = launch(problem, num_ctas=8, num_n_tiles=(2, 2))
    assert two.faults() == () and two.ctas_per_rank == 4
    line = timeline(two)
    assert (line.num_ranks, line.num_sms) == (2, 4)
    for rank in range(2):
        blocks = [
            (s.phase, s.expert, s.m, s.n) for s in line.spans if (s.rank, s.role) == (rank, "math")
        ]
        assert len(blocks) == len(set(blocks)) == 4 * len(two.tiles(rank))
        assert {expert for _, expert, _, _ in blocks} <= set(range(4)), "local"


def test_stamps_that_are_not_whole_say_so():
    events = [(0, MATH, L1, t, t, t + 1) for t in (0, 1, 1, 3, 4, 5)]
    odd = small([*events, (1, MATH, L2, 40, 9, 10)])
    text = " ".join(odd.faults())
    assert "4 of 9 tickets have no block" in text and "1 of 9 tickets have more than one" in text
    assert "tickets beyond 9, such as 40" in text
    assert next(s for s in timeline(odd).spans if s.phase == "l2").expert == -1
    assert "NOT WHOLE: rank 0: 4 of 9" in Pair.of(odd).text()


def test_a_recording_survives_its_file(found):
    text = found.to_json()
    assert Recording.from_json(text) == found
    assert len(text) < 100_000, "only used events are kept"
    assert found.faults() == () and found.overhead == pytest.approx(0.04)
    assert launch().overhead is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: "{", "stamps must be readable"),
        (lambda d: "[]", "as its format; got another file"),
        (lambda d: json.dumps({**d, "format": "other"}), "megamoe trace writes one"),
        (lambda d: json.dumps({**d, "events": [[0, 0, 1]]}), "an event is four numbers"),
        (lambda d: json.dumps({**d, "events": [[500, 0, 1, 0, 0, 0]]}), "there are 132 CTAs"),
        (lambda d: json.dumps({**d, "events": 3}), "stamps must be readable"),
        (lambda d: json.dumps({**d, "counts": [[1, 2]]}), "counts must be 1 ranks by 32 experts"),
        (lambda d: json.dumps({**d, "num_ctas": 0}), "evenly over the ranks"),
        (lambda d: json.dumps({**d, "num_n_tiles": [0, 1]}), "at least one row"),
        (lambda d: json.dumps({k: v for k, v in d.items() if k != "name"}), "name"),
        (lambda d: json.dumps({**d, "more": 1}), "more"),
    ],
)
def test_a_bad_file_is_refused(found, change, words):
    with pytest.raises(FileError, match=re.escape(words)):
        Recording.from_json(change(json.loads(found.to_json())))


def test_ctas_that_do_not_divide_are_refused():
    with pytest.raises(RangeError, match="evenly over the ranks"):
        small([], num_ctas=3, ranks=2)


def test_arrays_and_tensors_are_read_alike():
    torch = pytest.importorskip("torch")
    raw = buffer(2, [(1, MATH, L1, 3, 2**32 - 1, 2**32 + 4)])
    tensor = torch.tensor(raw, dtype=torch.int32)
    assert events_of(raw) == events_of(tensor) == events_of(tensor.numpy())
    assert events_of(raw) == ((1, MATH, L1, 3, 2**32 - 1, 4),)
    assert stamps.since(4, 2**32 - 1) == 5 and stamps.since(2**32 - 1, 4) == -5


def test_both_stand_on_one_clock_and_one_page(found):
    pair = Pair.of(found)
    launch_us = pair.prediction.schedule.hardware.launch_us.value
    assert pair.simulated.total_us == pytest.approx(pair.prediction.time_us - launch_us)
    assert pair.prediction.counts == found.counts
    how = pair.prediction.schedule
    assert (how.experts.block_m, how.experts.l1.block_n, how.num_sms) == (8, 256, 132)
    blocks = [sum(s.role == "math" for s in line.spans) for line in (pair.measured, pair.simulated)]
    assert blocks[0] == blocks[1], "the same tiles"
    text = pair.page()
    assert text.count("<canvas>") == 2
    for words in (
        'id="meta"', 'id="spans"', 'id="meta-1"', 'id="spans-1"', "<b>measured</b>",
        "<b>simulated</b>", "Two pictures, one clock", "cost of stamping", '"has_loads": true',
        '"has_loads": false', "made up",
    ):  # fmt: skip
        assert words in text, words
    assert "@@" not in text and len(text) < 200_000


def test_the_simulated_launch_is_the_recordings_own():
    """Its tile, CTAs and stages, whatever a plan would choose for the call today."""
    odd = replace(launch(num_ctas=100, block_m=16), num_stages=3)
    how = Pair.of(odd).prediction.schedule
    assert (how.num_sms, how.experts.block_m, how.study) == (100, 16, "")
    full = Pair.of(replace(odd, num_stages=0)).prediction.schedule
    assert 3 * full.experts.l1.ring_bytes > 5 * how.experts.l1.ring_bytes
    again = Recording.from_json(odd.to_json())
    assert again == odd
    old = json.loads(odd.to_json())
    del old["num_stages"]
    assert Recording.from_json(json.dumps(old)) == replace(odd, num_stages=0)


def test_the_recorded_tile_is_simulated_as_it_stands(found):
    """Also what its sizes do not say: here, how many stages are asked for at once."""
    shape = hopper.tile_of(found.problem.recipe, Shape(8, 2, 1))
    own = replace(shape, max_in_flight=1, num_stages=4)
    recorded = replace(found, tile=own)
    assert Recording.from_json(recorded.to_json()) == recorded
    wide = replace(own, num_stages=3)
    rings = [
        Pair.of(replace(found, tile=tile)).prediction.schedule.experts.l1.ring_bytes
        for tile in (own, wide)
    ]
    assert rings[0] * 3 == rings[1] * 4


def test_the_summary_has_every_figure(found):
    pair = Pair.of(found)
    rows = {row.name: row for row in pair.rows}
    assert rows["call"].measured == 100.0 and rows["stamping"].measured < MAX_OVERHEAD
    assert rows["call"].difference.startswith("-") and rows["pool ready"].difference == "-"
    assert rows["loads, any SM"].measured > 0.9 > rows["loads, an SM"].measured > 0.8
    text = pair.text()
    assert all(name in text for name in rows) and "4.0 %" in text
    assert json.loads(json.dumps(pair.as_dict()))["num_events"] == len(found.events)


def test_perfetto_has_a_process_for_each_and_threads_for_loads(found):
    pair = Pair.of(found)
    events = json.loads(perfetto(pair.measured, pair.simulated))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0, measured", 1: "rank 0, simulated"}
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    loads = [e for e in events if e["ph"] == "X" and e["cat"] == "load"]
    assert {threads[e["pid"], e["tid"]] for e in loads} == {f"SM {sm} loads" for sm in range(132)}
    assert not any(name.endswith("loads") for (pid, _), name in threads.items() if pid == 1)


def test_timelines_are_plain_values_too(found):
    both = json.loads(timelines_json([timeline(found)]))
    assert both[0]["source"] == "measured" and len(both[0]["spans"]) == len(timeline(found).spans)
    again = [Span(*row) for row in both[0]["spans"]]
    assert Timeline(both[0]["name"], 1, 132, tuple(again), "measured") == timeline(found)
    assert measured.length(measured.joined([])) == 0.0
