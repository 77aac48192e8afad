"""The tiles that the Hopper backend ships, for its tests."""

from megamoe.planner.hopper import as_fused, pick
from megamoe.planner.launches import Gemm
from megamoe.planner.tables import hopper as tables


def shipped(recipe, *, fits=True):
    """The tiles that `recipe` takes, few rows first; `fits`: whether its weights fit E4M3."""
    edges = [edge for recipes, edge, *_ in tables.TILES if recipe in recipes]
    if not fits:
        edges = [edge for edge, *_ in tables.WIDE_RANGE]
    found = (pick(recipe, min(e, 1e9), fits_e4m3=fits)[0] for e in edges)
    return list(dict.fromkeys(found))


def shipped_fused(recipe, *, fits=True):
    """The tiles of `recipe` that a fused launch takes."""
    return [tile for tile in shipped(recipe, fits=fits) if as_fused(tile)]


def tile_name(tile):
    if isinstance(tile, Gemm):
        ahead = f"-ahead{tile.decode_ahead}" if tile.decode_ahead else ""
        return f"gemm-{tile.schedule}{ahead}"
    return f"swap_ab{tile.block_m}"
