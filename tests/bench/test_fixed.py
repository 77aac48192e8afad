"""The fixed cost of a call: routing to exactly so many experts, and the line through the times."""

import csv
import json
from dataclasses import replace

import pytest
import torch

from megamoe.bench import plots
from megamoe.bench.cells import SHAPES, cells_named, touching
from megamoe.bench.contestants import Contestant, ours
from megamoe.bench.floors import Ceilings
from megamoe.bench.inputs import Weights, make_job
from megamoe.bench.layer import Settings, measure
from megamoe.bench.record import OK, WRONG, Report, Row, read, write
from megamoe.bench.stats import line_through
from megamoe.errors import RangeError, ShapeError
from megamoe.routing.permute import expert_counts
from megamoe.routing.samplers import even_routing

CPU = torch.device("cpu")
QUICK = Settings(backends=("reference",), recipes=("w8a8",), repeats=2, rounds=1)
(TINY,) = cells_named(["tiny/32"])


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(32, 48, 8), (8, 48, 8), (32, 32, 6), (5, 7, 3), (1, 9, 9)]
)
def test_routing_touches_exactly_so_many_experts_evenly(tokens, experts, top_k):
    for num in range(top_k, min(experts, tokens * top_k) + 1):
        idx, weights = even_routing(tokens, experts, top_k, num, seed=num)
        counts = expert_counts(idx, experts)
        used = counts[counts > 0]
        assert len(used) == num and used.max() - used.min() <= 1
        assert int(counts.sum()) == tokens * top_k == idx.numel()
        assert all(len(set(row)) == top_k for row in idx.tolist())
        assert (weights > 0).all() and torch.allclose(weights.sum(1), torch.ones(tokens))


def test_the_seed_picks_the_experts_and_more_of_them_keep_the_fewer():
    few, many = (set(even_routing(8, 48, 8, n, seed=1)[0].unique().tolist()) for n in (20, 30))
    assert few < many and few != set(even_routing(8, 48, 8, 20, seed=2)[0].unique().tolist())
    assert torch.equal(*(even_routing(8, 48, 8, 20, seed=1)[0] for _ in range(2)))


@pytest.mark.parametrize(
    ("sizes", "num", "kind"),
    [
        ((32, 48, 8), 7, RangeError),  # a token has eight
        ((32, 48, 8), 49, RangeError),
        ((4, 48, 8), 33, RangeError),  # 32 slots
        ((32, 4, 8), 4, ShapeError),
    ],
    ids=str,
)
def test_numbers_that_no_routing_touches_are_refused(sizes, num, kind):
    with pytest.raises(kind, match="must lie between"):
        even_routing(*sizes, num)


def test_a_cell_may_say_how_many_experts_it_touches():
    (cell,) = cells_named(["public-48/8@34"])
    assert (cell.name, cell.num_tokens, cell.num_touched) == ("public-48/8@34", 8, 34)
    (tiny,) = cells_named(["tiny/32@5"])
    assert make_job(tiny, Weights(tiny.shape, CPU, 0), 0).touched == 5
    for name, words in (("tiny/32@9", "between top_k"), ("tiny/32@", "workload/tokens@experts")):
        with pytest.raises(RangeError, match=words):
            cells_named([name])


def test_six_numbers_from_top_k_to_all_that_the_tokens_reach():
    for name, shape in SHAPES.items():
        (cell,) = cells_named([f"{name}/32"])
        numbers = [one.num_touched for one in touching(cell)]
        assert numbers[0] == shape.top_k and numbers == sorted(set(numbers)) and len(numbers) == 6
        assert numbers[-1] == min(shape.num_experts, 32 * shape.top_k)
    assert [one.name for one in touching(TINY, [8, 2, 5, 2])] == [
        "tiny/32@2", "tiny/32@5", "tiny/32@8",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("counts", "words"),
    [([2, 8], "at least 3"), ([1, 4, 8], "got 1"), ([2, 4, 9], "got 9"), ([], "got none")],
    ids=str,
)
def test_points_that_make_no_line_are_refused(counts, words):
    with pytest.raises(RangeError, match=words):
        touching(TINY, counts)


def test_one_token_has_no_line():
    with pytest.raises(RangeError, match="more tokens"):
        touching(replace(TINY, num_tokens=1))


def test_a_known_line_is_found_again():
    line = line_through([(x, 17.5 + 4.25 * x) for x in (6, 11, 16, 22, 27, 32)])
    assert (line.intercept, line.slope) == (pytest.approx(17.5), pytest.approx(4.25))
    leaning = line_through([(0, 1.0), (1, 0.0), (2, 5.0)])  # by hand: slope 2, mean (1, 2)
    assert (leaning.intercept, leaning.slope) == (pytest.approx(0.0), pytest.approx(2.0))
    with pytest.raises(RangeError, match="two places"):
        line_through([(3, 1.0), (3, 2.0)])


def point(touched, us, **other):
    row = Row(f"public-48/32@{touched}", "one", "mxfp4", True, OK, "", "there", touched)
    return replace(row, us=us, weight_bytes=touched * 20_054_016, **other)


def report_of(*rows):
    return Report("", "there", "so", Ceilings(1, 1, {}, 0, ""), rows)


# Experts touched and us at 32 tokens, and what their author reads off them: 58 us, 3.38 TB/s
# (the document that benchmarks/h200/peers-public-48.json names, section 7.3).
PUBLISHED = ((47, 337.4), (35, 265.6), (23, 194.9))


def test_published_points_give_the_published_cost():
    (cost,) = report_of(*(point(*one) for one in PUBLISHED)).fixed_costs()
    assert cost.cell == "public-48/32" and cost.expert_bytes == 20_054_016
    assert cost.us == pytest.approx(58.15, abs=0.01) and cost.line.slope == pytest.approx(5.9375)
    assert cost.gbs == pytest.approx(3378, abs=1)
    assert cost.worst_us == pytest.approx(265.6 - cost.line.at(35))
    assert cost.worst_us == pytest.approx(-0.367, abs=1e-3) and cost.read is None


def test_a_read_of_the_same_weights_has_a_line_of_its_own():
    rows = [point(touched, us, read_us=12.5 + 4.5 * touched) for touched, us in PUBLISHED]
    (cost,) = report_of(*rows).fixed_costs()
    assert (cost.read.intercept, cost.read.slope) == (pytest.approx(12.5), pytest.approx(4.5))
    (some,) = report_of(*rows[1:], replace(rows[0], read_us=None)).fixed_costs()
    assert some.read is None and some.us == pytest.approx(cost.us)


def test_only_checked_rows_with_experts_named_make_lines():
    rows = [point(*one) for one in PUBLISHED]
    wrong = replace(rows[0], status=WRONG, us=None)
    plain = [replace(row, cell="public-48/32") for row in rows]
    assert report_of(wrong, *rows[1:]).fixed_costs() == () == report_of(*plain).fixed_costs()
    theirs = [replace(row, contestant="two", recipe="w8a8") for row in rows]
    found = report_of(*rows, *theirs, *plain).fixed_costs()
    assert [(c.contestant, c.recipe) for c in found] == [("one", "mxfp4"), ("two", "w8a8")]
    flat = report_of(*(replace(row, us=9.0) for row in rows)).fixed_costs()[0]
    assert (flat.us, flat.worst_us) == (pytest.approx(9.0), pytest.approx(0.0)) and not flat.gbs


def test_a_real_run_is_checked_timed_and_kept(tmp_path):
    report = measure(touching(TINY, [2, 5, 8]), QUICK)
    assert report.exit_code == 0 and [r.touched for r in report.rows] == [2, 5, 8]
    (cost,) = report.fixed_costs()
    assert cost.points == tuple((r.touched, r.us) for r in report.rows)
    assert cost.expert_bytes == report.rows[0].weight_bytes // 2
    assert cost.us == pytest.approx(line_through(cost.points).intercept)
    as_json, as_csv = write(report, tmp_path, "fixed")
    found = json.loads(as_json.read_text())
    assert found["fixed"][0]["line"]["intercept"] == cost.us and "torch" in found["provenance"]
    assert read(as_json) == report
    with as_csv.open() as file:
        assert [line["touched"] for line in csv.DictReader(file)] == ["2", "5", "8"]


def test_a_wrong_result_is_not_timed_and_has_no_line():
    def wrong(job):
        entry = ours("reference", "w8a8")(job)
        return replace(entry, run=lambda: entry.run() * 2)

    report = measure(
        touching(TINY, [2, 5, 8]), QUICK, field=[Contestant("wrong", "w8a8", True, wrong)]
    )
    assert {r.status for r in report.rows} == {WRONG} and report.exit_code == 1
    assert all(r.us is None for r in report.rows) and report.fixed_costs() == ()


def test_the_lines_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [point(touched, us, read_us=5.0 * touched) for touched, us in PUBLISHED]
    made = plots.write(report_of(*rows), tmp_path, "fixed")
    assert [p.name for p in made] == ["fixed-lines.png"] and made[0].stat().st_size > 5000
