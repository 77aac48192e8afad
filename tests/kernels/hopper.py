"""The tiles that the Hopper backend ships, for its tests."""

from megamoe.schedule.heuristics import hopper_fused, hopper_tiles
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
    edges = [edge for recipes, edge, *_ in hopper_tiles.TILES if recipe in recipes]
    edges += [edge for edge, *_ in hopper_tiles.WIDE_RANGE] * (not fits)
    edges += [edge for edge, *_ in hopper_fused.W4A8_BLOCK]
    found = (hopper_fused.fused_tile(recipe, e, fits_e4m3=fits) for e in sorted(set(edges)))
    return [tile for tile in dict.fromkeys(found) if hopper_fused.as_fused(tile)]


def tile_name(tile):
    if isinstance(tile, Straight):
        how = "-dealt" * tile.is_dealt + "-drawn" * tile.is_drawn
        return "straight" + how + (f"-ahead{tile.ahead}" if tile.ahead else "")
    return f"swapped{tile.tokens}" + (f"or{tile.narrow}" if tile.narrow else "")
