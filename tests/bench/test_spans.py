"""bench/spans: streams of a trace are ranks, launches are lines, and what they overlap."""

import pytest

from megamoe.bench import spans
from megamoe.errors import MegaMoEError

LAUNCHES = [  # stream, kernel, start, us
    (7, "_quantize_kernel", 100.0, 5.0), (7, "exchange_kernel", 106.0, 10.0),
    (9, "_quantize_kernel", 101.0, 5.0), (9, "exchange_kernel", 107.0, 9.0),
    (7, "_rows_kernel", 116.0, 4.0), (7, "pull_kernel", 120.0, 60.0),
    (7, "gemm_kernel", 122.0, 100.0), (7, "gemm_kernel", 210.0, 60.0),
    (9, "pull_kernel", 121.0, 50.0), (9, "gemm_swap_ab_kernel", 123.0, 80.0),
    (7, "finish_kernel", 271.0, 3.0), (7, "_combine_kernel", 275.0, 9.0),
]  # fmt: skip


def trace(launches=LAUNCHES):
    events = [
        {"ph": "X", "cat": "kernel", "name": name, "ts": at, "dur": us, "args": {"stream": stream}}
        for stream, name, at, us in launches
    ]
    other = {"cat": "kernel", "name": "vectorized_add", "ts": 0.0, "dur": 1.0, "args": {}}
    others = [other, {**other, "cat": "cpu_op", "name": "gemm_kernel"}]
    return {"traceEvents": [*others, *reversed(events)]}


def test_streams_are_ranks_and_the_second_gemm_is_l2():
    found = spans.launches_of(trace())
    assert [(x.rank, x.line, x.start_us) for x in found if x.rank == 0] == [
        (0, "tokens and slots", 0.0), (0, "exchange", 6.0), (0, "exchange", 16.0),
        (0, "pull", 20.0), (0, "L1", 22.0), (0, "L2", 110.0), (0, "finish", 171.0),
        (0, "combine", 175.0),
    ]  # fmt: skip
    assert [x.line for x in found if x.rank == 1][-1] == "L1"
    assert spans.overlap_us(found, "pull", "L1") == 58.0
    assert spans.overlap_us(found, "L1", "L2") == 12.0
    assert spans.overlap_us(found, "pull", "L2") == 0.0


def test_a_trace_without_a_chain_is_refused():
    with pytest.raises(MegaMoEError, match="must hold a chain's launches"):
        spans.launches_of(trace([]))


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = spans.draw(spans.launches_of(trace()), "two ranks", "made up", tmp_path / "spans.png")
    assert path.stat().st_size > 10_000
