"""Work items of the plain GEMM: each tile once, runs of shared weights whole, half tiles even."""

import random

import pytest
import torch

from megamoe.kernels.gluon.tile_scheduler import ITEM_WORDS, LinearTiles, WorkItems, schedule
from tests.kernels.support import DEVICE, MARKS

pytestmark = MARKS

SLABS = 24  # of an expert's weights
HALF = 64  # rows


def tiles_of(counts):
    """(expert, first row, end row) of each tile of 128; experts start at multiples of 8."""
    first, found = 0, []
    for expert, count in enumerate(counts):
        for row in range(first, first + count, 128):
            found.append((expert, row, min(row + 128, first + count)))
        first += -(-count // 8) * 8
    return found


def scheduled(counts, num_n_tiles, ctas, span):
    """The tiles, and the waves of items."""
    tiles = tiles_of(counts)
    rows = torch.tensor(counts, dtype=torch.int32, device=DEVICE)

    def work_items(*widths):
        made = WorkItems.empty(rows, widths, ctas, span, len(tiles) + 5)
        schedule(made, rows)
        return made.each()

    widths = LinearTiles(num_n_tiles, SLABS), LinearTiles(2 * num_n_tiles, 2 * SLABS)
    items, others = work_items(*widths)
    for both, width in ((items, widths[0]), (others, widths[1])):
        (alone,) = work_items(width)
        assert torch.equal(both[:, :5], alone[:, :5])
    items = items.view(-1, ctas, ITEM_WORDS.value).cpu()
    waves = -(-len(tiles) * num_n_tiles // ctas)
    assert (items[:waves, :, 6:] == 0).all()  # counters
    return tiles, items[:waves].tolist()


def unpacked(item):
    """(run, runs of the wave, place in the wave)."""
    return item[4] & 1023, item[4] >> 10 & 1023, item[4] >> 20


CASES = [
    ([0, 1, 63, 64, 65, 127, 128, 129, 1000], 3, 7, 4),
    ([0, 0, 0], 3, 7, 4),
    ([5], 1, 132, 8),
    ([1280, 0, 300], 5, 132, 4),
    ([40] * 9, 4, 16, 24),
]


@pytest.mark.parametrize(("counts", "num_n_tiles", "ctas", "span"), CASES)
def test_every_tile_is_scheduled_once_and_runs_share_their_weights(counts, num_n_tiles, ctas, span):
    tiles, waves = scheduled(counts, num_n_tiles, ctas, span)
    seen = []
    for number, wave in enumerate(waves):
        used = [item for item in wave if item[0] >= 0]
        assert len(used) == min(ctas, len(tiles) * num_n_tiles - number * ctas)
        used.sort(key=lambda item: unpacked(item)[2])
        places = [unpacked(item) for item in used]
        assert [place for _, _, place in places] == list(range(len(used)))
        runs = [run for run, _, _ in places]
        assert runs == sorted(runs) and set(runs) == set(range(places[0][1]))
        for item, (run, num_runs, _) in zip(used, places, strict=True):
            expert, n_tile_idx = item[0], item[3]
            assert num_runs == places[0][1] and 0 <= n_tile_idx < num_n_tiles
            assert wave[run][5] == expert * SLABS + n_tile_idx * 4
        seen += [tuple(item[:4]) for item in used]
    assert sorted(seen) == sorted((*tile, j) for tile in tiles for j in range(num_n_tiles))


def test_half_tiles_spread_evenly():
    """Every CTA gets as many of the tiles that take half the time, give or take one."""
    picker = random.Random(0)
    counts = [picker.randint(120, 400) for _ in range(16)]
    _, waves = scheduled(counts, 16, 32, 24)
    halves = [0] * 32
    for wave in waves:
        for cta, item in enumerate(wave):
            halves[cta] += item[0] >= 0 and item[2] - item[1] <= HALF
    assert max(halves) - min(halves) <= 1 and sum(halves) > 32


@pytest.mark.parametrize(("counts", "num_n_tiles", "ctas", "span"), CASES)
def test_dynamic_items_keep_their_order_and_name_their_tile(counts, num_n_tiles, ctas, span):
    tiles = tiles_of(counts)
    rows = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    work = WorkItems.empty(
        rows, [LinearTiles(num_n_tiles, SLABS)], ctas, span, len(tiles) + 1, is_dynamic=True
    )
    schedule(work, rows)
    items = work.items[: len(tiles) * num_n_tiles].tolist()
    assert [unpacked(item)[2] for item in items] == [i % ctas for i in range(len(items))]
    assert all(tuple(item[:3]) == tiles[item[6]] for item in items)
    assert len({(item[6], item[3]) for item in items}) == len(items)
    experts = [item[0] for item in items]
    assert experts == sorted(experts)
