"""The model against measurements: fitted on one shape, it predicts the others."""

from dataclasses import replace

import pytest

from megamoe.errors import RangeError
from megamoe.planner.plan import plan
from megamoe.problem import Problem
from megamoe.simulator.constants import DEFAULT, FITTED, TABLE
from megamoe.simulator.fit import fit, log_ratios
from megamoe.simulator.sample import sample_counts
from megamoe.simulator.simulate import simulate
from tests.simulator.peer_cells import CELLS, FLASH, OTHERS, OWN, SHAPES

BAR = 0.25


@pytest.mark.every
def test_the_table_holds_what_the_flash_cells_alone_give():
    start = replace(
        DEFAULT, stream_share=0.6, row_share=0.4, start_us=12.0, gap_us=6.0, epilogue_us=3.0
    )
    found = fit(FLASH, start)
    for name in FITTED:
        assert TABLE[name].value == pytest.approx(getattr(found, name), rel=0.01), name
        assert "flash-ep8" in TABLE[name].source


@pytest.mark.every
def test_the_fit_beats_its_neighbours():
    def error(constants):
        return sum(ratio * ratio for ratio in log_ratios(FLASH, constants))

    best = error(DEFAULT)
    for name in FITTED:
        for factor in (0.85, 1.15):
            value = min(getattr(DEFAULT, name) * factor, 1.0 if "share" in name else 1e9)
            assert error(replace(DEFAULT, **{name: value})) > best, name


@pytest.mark.parametrize("cell", OTHERS, ids=lambda cell: cell.name)
def test_cells_that_were_not_fitted_are_predicted_within_a_quarter(cell):
    assert len(OTHERS) == 10
    for name, said, seen in zip(cell.times._fields, cell.predicted(), cell.times, strict=True):
        assert abs(said / seen - 1) <= BAR, name


@pytest.mark.parametrize("cell", FLASH, ids=lambda cell: cell.name)
def test_fitted_cells_are_within_a_tenth(cell):
    for said, seen in zip(cell.predicted(), cell.times, strict=True):
        assert abs(said / seen - 1) <= 0.1


def test_the_steps_of_a_cell_are_the_simulated_call():
    cell = CELLS["flash-ep8 64"]
    whole = simulate(cell.schedule, cell.counts)
    assert whole.time_us == pytest.approx(cell.predicted().full)
    assert "not a launch of this library" in whole.timeline.study


@pytest.mark.parametrize("row", OWN, ids=lambda row: "-".join(map(str, row[:4])))
def test_own_launches_on_h200_come_out(row):
    """The fused ones set `own_share`; pro at 512 tokens and flash at 2048 set the pace of math."""
    mode, recipe, shape, tokens, touched, measured = row
    problem = Problem(tokens, *SHAPES[shape], 1, recipe)
    each, rest = divmod(tokens * problem.top_k, touched)
    counts = [[each + (e < rest) if e < touched else 0 for e in range(problem.num_experts)]]
    if touched == problem.num_experts:
        counts = sample_counts(problem)
    found = simulate(plan(problem, "h200", mode=mode), counts).time_us
    assert abs(found / measured - 1) <= (0.05 if mode == "fused" else 0.12), found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stream_share": 0.0}, "stream_share must be positive; got 0.0"),
        ({"row_share": 1.5}, "row_share must not exceed 1; got 1.5"),
        ({"gap_us": -1.0}, "gap_us must not be negative; got -1.0"),
    ],
)
def test_impossible_constants_are_refused(change, words):
    with pytest.raises(RangeError, match=words):
        replace(DEFAULT, **change)
