"""Hopper's second linear alone, as a contestant of `megamoe bench gemm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megamoe.bench.cells import GemmShape
from megamoe.bench.gemm_inputs import GemmEntry, GemmInputs
from megamoe.engine import backends
from megamoe.engine.planning import hardware_of
from megamoe.formats.quantize import dequantize
from megamoe.formats.spec import recipe_named
from megamoe.layout.regions import align_up
from megamoe.planner.hopper import candidates, gemm_launch, label, tile_of
from megamoe.planner.launches import Launch, Tile
from megamoe.planner.numerics import narrowest_mma
from megamoe.planner.tables.hopper import ROW_ALIGN, TILES
from megamoe.problem import Options

if TYPE_CHECKING:
    from megamoe.kernels.gluon.pool import Pool
    from megamoe.kernels.hopper.launch import Arithmetic


def tile_for(recipe: str, shape: GemmShape) -> Tile:
    """The narrowest of the table's tiles that holds the largest group, or the widest.

    A layer's table leaves room for busy experts; here the rows of each are known.
    """
    shipped = [tile_of(recipe, tile) for recipes, _, tile, *_ in TILES if recipe in recipes]
    wide = [tile for tile in shipped if tile.block_m >= max(shape.rows)] or shipped[-1:]
    width = min(tile.block_m for tile in wide)
    return [tile for tile in wide if tile.block_m == width][-1]


def tiles_by_label(recipe: str, shape: GemmShape) -> dict[str, Tile]:
    """What a sweep tries at a shape, the table's choice first."""
    return {label(tile): tile for tile in candidates(recipe, tile_for(recipe, shape))}


def hopper(inputs: GemmInputs, recipe: str, tile: Tile | None = None) -> GemmEntry:
    """L2 of the staged layer on rows that wait in its pool; `tile` is the table's unless given."""
    backends.resolve("hopper", "auto", inputs.device)
    from megamoe.kernels.gluon.tile_scheduler import schedule
    from megamoe.kernels.hopper import launch
    from megamoe.kernels.hopper.weights.pack import can_be_placed, pack

    row, shape = recipe_named(recipe), inputs.shape
    chosen = tile or tile_for(recipe, shape)
    how, options = launch.arithmetic(recipe), Options()
    weights = inputs.weights_as(row.weights.name)
    w = pack(weights, to_e4m3=how.to_e4m3, is_placed=can_be_placed(weights))
    x = pooled(inputs, recipe, chosen, how)
    is_global = row.acts.has_global
    ones = (
        torch.ones(shape.num_groups, dtype=torch.float32, device=inputs.device)
        if is_global
        else None
    )
    counts = torch.tensor(shape.rows, dtype=torch.int32, device=inputs.device)
    step = l2_launch(chosen, shape.k, hardware_of(inputs.device).num_sms)
    work = launch.work_items(x, (w,), step)
    if work is not None and work.is_dynamic:
        schedule(work, counts)  # once, like the list of tiles: nothing writes to them

    def run() -> Tensor:
        y = torch.empty(sum(shape.rows), shape.n, dtype=torch.bfloat16, device=inputs.device)
        if work is not None and not work.is_dynamic:
            schedule(work, counts)  # CTAs count in them
        items = None if work is None else work.items
        launch.linear(x, w, y, step, how, options, items=items, acts_factor=ones)
        return y

    return GemmEntry(
        run=run,
        check=inputs.check(recipe, row.tolerance),
        weight_bytes=sum(t.nbytes for t in (w.data, w.scale, w.factor) if t is not None),
        row_bytes=inputs.rows_as(row.acts.name).nbytes,
        mma=narrowest_mma(recipe),
        recipe=recipe,
        ours=True,
        note=label(chosen),
    )


def l2_launch(tile: Tile, depth: int, num_sms: int) -> Launch:
    """The launch of one linear with this tile over K of `depth` columns."""
    return gemm_launch("l2", tile, depth, num_sms, "given")


def pooled(inputs: GemmInputs, recipe: str, tile: Tile, how: Arithmetic) -> Pool:
    """The rows as `route` would leave them: sorted by group, row i of the result at place i."""
    from megamoe.kernels.common.columns import by_group
    from megamoe.kernels.hopper import launch

    rows, k, device = inputs.shape.rows, inputs.shape.k, inputs.device
    x = inputs.rows_as(recipe_named(recipe).acts.name)
    data = x.data if how.is_promoted else dequantize(x).to(torch.bfloat16)
    if how.to_e4m3:
        data = by_group(data.view(torch.uint8)).view(data.dtype)
    pool = launch.pool(how, sum(rows), k, len(rows), tile.block_m, device)
    places: list[int] = []
    table: list[tuple[int, int, int, int]] = []
    first = 0
    for group, count in enumerate(rows):
        end = first + count
        places += range(first, end)
        starts = range(first, end, tile.block_m)
        table += [(group, at, min(at + tile.block_m, end), 0) for at in starts]
        first += align_up(count, ROW_ALIGN)
    at = torch.tensor(places, device=device)
    for t in pool:
        t.view(torch.uint8).zero_()
    pool.data.view(torch.uint8)[at, : k * data.element_size()] = data.view(torch.uint8)
    if how.is_promoted:
        assert x.scale is not None
        pool.scale[: x.scale.shape[1], at] = x.scale.T
    pool.dest[at] = torch.arange(len(places), dtype=torch.int32, device=device)
    pool.weight.fill_(1.0)
    pool.tiles[: len(table)] = torch.tensor(table, dtype=torch.int32, device=device)
    pool.num_tiles[:1].fill_(len(table))
    return pool
