"""Timelines: figures come from the spans alone, and impossible spans are refused."""

import pytest

from megamoe.errors import RangeError
from megamoe.simulator.timeline import RESULTS_OUT, ROLES, ROWS_IN, WAITS, Span, Timeline, merged

# Two ranks of two SMs, ten us. Rank 0 works 8 + 6, rank 1 works 4 + 4 and waits for the network.
SPANS = (
    Span(0, ROWS_IN, "pull", 0.0, 5.0, "dispatch", 0),
    Span(0, 0, "math", 0.0, 8.0, "l1", 0, 3, 0, 1),
    Span(0, 1, "math", 1.0, 7.0, "l2", 1, 3, 0, 1),
    Span(1, 0, "wait", 0.0, 2.0, "rows"),
    Span(1, 0, "math", 2.0, 6.0, "l1", 0, 0, 0, 0),
    Span(1, 1, "math", 2.0, 6.0, "l1", 0, 0, 0, 1),
    Span(1, 1, "wait", 6.0, 8.0, "results"),
    Span(1, 1, "wait", 8.0, 9.0, "barrier"),
    Span(1, RESULTS_OUT, "scatter", 6.0, 8.0, "l2", 1),
    Span(1, 0, "combine", 9.0, 10.0, "combine"),
)


def test_every_figure_comes_from_the_spans():
    found = Timeline("by hand", 2, 2, SPANS, "measured").summary()
    busy = dict(found.busy)
    assert found.total_us == 10.0
    assert busy["math"] == pytest.approx((8 + 6 + 4 + 4) / 40)
    assert busy["pull"] == pytest.approx(5 / 20) and busy["scatter"] == pytest.approx(2 / 20)
    assert found.exposed_us == pytest.approx((2 + 2) / 4), "barriers are not communication"
    assert found.tail_us == pytest.approx(8 - 7.5)
    assert found.imbalance == pytest.approx(14 / 11)


def test_a_timeline_prints_its_summary_and_counts_waves():
    line = Timeline("by hand", 2, 2, SPANS, "measured")
    text = str(line)
    assert line.num_waves == 2
    for words in ("by hand (measured)", "10.0 us", "exposed", "tail", "imbalance", "math 55.0%"):
        assert words in text


def test_an_empty_timeline_has_no_figures_but_is_legal():
    found = Timeline("nothing", 1, 1, ()).summary()
    assert (found.total_us, found.exposed_us, found.tail_us, found.imbalance) == (0, 0, 0, 1)


@pytest.mark.parametrize(
    "span",
    [
        Span(2, 0, "math", 0.0, 1.0),
        Span(0, 2, "math", 0.0, 1.0),
        Span(0, -3, "pull", 0.0, 1.0),
        Span(0, 0, "sleep", 0.0, 1.0),
        Span(0, 0, "math", 2.0, 1.0),
        Span(0, 0, "math", -1.0, 1.0),
        Span(0, 0, "math", float("nan"), 1.0),
    ],
    ids=("rank", "sm", "lane", "role", "backwards", "negative", "nan"),
)
def test_an_impossible_span_is_refused(span):
    with pytest.raises(RangeError, match="a span must have a role"):
        Timeline("bad", 2, 2, (span,))


def test_a_timeline_needs_a_rank():
    with pytest.raises(RangeError, match="at least one rank"):
        Timeline("none", 0, 1, ())


def test_intervals_of_one_wave_are_joined_and_lose_nothing():
    assert merged([], 1.0) == []
    assert merged([(0, 1, 0), (5, 6, 0), (6.5, 7, 0)], 1.0) == [(0, 1, 0), (5, 7, 0)]
    assert merged([(0, 4, 0), (1, 2, 0), (2, 3, 1)], 1.0) == [(0, 4, 0), (2, 3, 1)]


def test_every_role_and_wait_is_explained():
    assert all(about for about in (*ROLES.values(), *WAITS.values()))
