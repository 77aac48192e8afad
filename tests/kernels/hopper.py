"""The tiles that the Hopper backend ships, for its tests."""

from megamoe.schedule.heuristics import hopper_tiles
from megamoe.schedule.heuristics.hopper_fused import as_fused
from megamoe.schedule.heuristics.hopper_tiles import Straight


def shipped(recipe, *, fits=True):
    """The tiles that `recipe` takes, few rows first; `fits`: whether its weights fit E4M3."""
    edges = [edge for recipes, edge, *_ in hopper_tiles.TILES if recipe in recipes]
    if not fits:
        edges = [edge for edge, *_ in hopper_tiles.WIDE_RANGE]
    found = (hopper_tiles.tiles(recipe, min(e, 1e9), fits_e4m3=fits)[0] for e in edges)
    return list(dict.fromkeys(found))


def shipped_fused(recipe, *, fits=True):
    """The tiles of `recipe` that a fused launch takes."""
    return [tile for tile in shipped(recipe, fits=fits) if as_fused(tile)]


def tile_name(tile):
    if isinstance(tile, Straight):
        how = "-static" * tile.is_dealt + "-dynamic" * tile.is_drawn
        return "plain" + how + (f"-per_wave{tile.ahead}" if tile.ahead else "")
    return f"swap_ab{tile.tokens}"
