"""Host time of calls: eager on a CPU, and beside replays on a GPU."""

import pytest

from megamoe.bench.calls import measure
from megamoe.bench.cells import cells_named
from megamoe.errors import RangeError


def test_a_cpu_has_eager_calls_alone():
    (row,) = measure(cells_named(["tiny/2"]), "w8a8", device="cpu", rounds=2)
    assert row.how == "eager" and row.backend == "reference" and row.has_same_bits
    assert 0 < row.low_us <= row.host_us <= row.wall_us and "torch" in row.provenance
    with pytest.raises(RangeError, match="round"):
        measure(cells_named(["tiny/2"]), "w8a8", device="cpu", rounds=0)


@pytest.mark.gpu
def test_a_replay_costs_the_host_less_than_an_eager_call():
    rows = measure(cells_named(["tiny/8", "tiny/40"]), "w8a8", device="cuda", rounds=5)
    eager, graph, own = rows[:3]
    assert [r.how for r in rows[:3]] == ["eager", "graph", "graph, own output"] and len(rows) == 8
    assert all(r.has_same_bits for r in rows)
    assert max(own.host_us, graph.host_us) < eager.host_us
