"""The tile sweep: what it tries, how it ranks, what it forgives; its layer is the reference."""

import pytest
import torch

from megamoe import reference
from megamoe.bench import sweep as sweeping
from megamoe.bench.cells import SHARES, cells_named
from megamoe.bench.layer import Settings
from megamoe.bench.record import ABSENT, FAILED, OK, WRONG
from megamoe.bench.sweep import sweep, tiles_at
from megamoe.errors import NotAvailable, RangeError
from megamoe.planner.hopper import candidates, label, pick
from megamoe.planner.launches import Gemm
from megamoe.planner.numerics import HOPPER_RECIPES as RECIPES

CELLS = cells_named(["tiny/8", "tiny/100"])
QUICK = Settings(recipes=("w8a8",), repeats=2, rounds=1)


@pytest.fixture
def layers(monkeypatch):
    """Tiles by label, each with what its layer does instead of computing."""
    odd = {}

    def call(inputs, weights, options, tile):
        spoil = odd.get(label(tile), lambda y: y)
        return lambda: spoil(reference.moe(*inputs, weights, options))

    monkeypatch.setattr(sweeping.backends, "resolve", lambda *wanted: None)
    monkeypatch.setattr(sweeping, "layer_call", call)
    return odd


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_candidates_stand_around_the_tables_tile(recipe, fits):
    for load in (0.5, 5, 12, 20, 30, 100, 5000):
        picked, _ = pick(recipe, load, fits_e4m3=fits)
        found = candidates(recipe, picked, fits_e4m3=fits)
        assert found[0] == picked and len(set(found)) == len(found) >= 4
        assert len({label(tile) for tile in found}) == len(found)
        assert all(tile.num_stages >= 2 and picked.block_m / 4 <= tile.block_m for tile in found)
        assert fits or recipe == "w8a8" or not any(isinstance(t, Gemm) for t in found)


def test_the_fastest_comes_first_and_the_tables_is_marked(layers):
    found = sweep(CELLS, "w8a8", QUICK, workers=0)
    assert found.exit_code == 0 and [c.cell for c in found.choices] == ["tiny/8", "tiny/100"]
    for choice, cell in zip(found.choices, CELLS, strict=True):
        assert choice.rows_per_expert == cell.num_tokens * 2 / 8
        assert choice.picked == label(pick("w8a8", choice.rows_per_expert)[0])
        assert len(choice.timed) == len(tiles_at(cell, "w8a8"))
        times = [row.us for row in choice.timed]
        assert times == sorted(times)
        mine = next(row.us for row in choice.timed if row.contestant == choice.picked)
        assert choice.worse_by == pytest.approx(mine / times[0] - 1)
    made = found.as_dict()
    assert made["recipe"] == "w8a8" and made["choices"][1]["us"][choice.picked] == mine
    assert made["choices"][1]["why"] == choice.why and made["rows"]


def test_a_tile_that_does_not_compile_is_said_and_a_wrong_one_is_wrong(layers):
    names = [label(tile) for tile in tiles_at(CELLS[0], "w8a8")]

    def fails(y):
        raise RuntimeError("out of resource: shared memory")

    layers[names[1]] = fails
    found = sweep(CELLS[:1], "w8a8", QUICK, workers=0)
    rows = {row.contestant: row for row in found.report.rows}
    assert rows[names[1]].status == FAILED and "shared memory" in rows[names[1]].note
    assert found.exit_code == 0 and len(found.choices[0].timed) == len(names) - 1
    layers[names[0]] = lambda y: y * 2
    found = sweep(CELLS[:1], "w8a8", QUICK, workers=0)
    assert found.report.rows[0].status == WRONG and found.exit_code == 1
    assert found.choices[0].worse_by is None


def test_nothing_is_begun_after_the_budget(layers):
    found = sweep(CELLS[:1], "w8a8", QUICK, workers=0, budget_s=1e-9)
    assert all(row.status == ABSENT and "budget" in row.note for row in found.report.rows)
    assert found.exit_code == 3
    with pytest.raises(RangeError, match="budget"):
        sweep(CELLS[:1], "w8a8", QUICK, budget_s=0)


def test_workers_that_fail_stop_nothing(layers):
    """Another process knows nothing of this file's layers: Hopper's kernels do not run there."""
    done = []
    found = sweep(
        CELLS[:1], "w8a8", QUICK, workers=1, budget_s=200,
        progress=lambda step, at, of: done.append((step, at == of)),
    )  # fmt: skip
    assert ("compile", True) in done and found.report.rows[0].status == OK


def test_without_a_hopper_there_is_no_sweep():
    with pytest.raises(NotAvailable, match="hopper"):
        sweep(CELLS, "w8a8", QUICK)


@pytest.mark.gpu
def test_a_sweep_on_a_hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs an sm_90 GPU; this is another")
    settings = Settings(device="cuda", recipes=("w4a8_block",), repeats=3, rounds=1)
    # A real shape: of 2048 activations, as `tiny` has, few flipped codes are above the tolerance.
    found = sweep(cells_named(["flash-ep8/8"]), "w4a8_block", settings, workers=4)
    assert found.exit_code == 0, [r.note for r in found.report.rows]
    assert found.choices[0].worse_by is not None and len(found.choices[0].timed) >= 4


def test_the_fifteen_cells_have_few_candidates():
    for recipe in ("w4a8_block", "w8a8"):
        assert all(len(tiles_at(c, recipe)) <= 16 for c in cells_named(list(SHARES)))
