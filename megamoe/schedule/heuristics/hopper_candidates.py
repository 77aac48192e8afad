"""Hopper's tiles that `megamoe bench sweep` tries beside the one that the table picks."""

from __future__ import annotations

from dataclasses import MISSING, fields

from megamoe.problem import RECIPES
from megamoe.schedule.heuristics.hopper_tiles import Straight, Tile, tile_of

FEWEST_STAGES = 2

_FP8 = ("w4a8_block", "w8a8")
_BF16 = tuple(recipe for recipe in RECIPES if recipe not in _FP8)
# fmt: off
# (recipes, shape as in `hopper_tiles.TILES`). None of them spilled when it was compiled for sm_90a
# (triton 3.6.0, 2026-11-16).
CANDIDATES: tuple[tuple[tuple[str, ...], tuple[int, ...] | Straight], ...] = (
    *((_FP8, (tokens, 2, depth)) for tokens in (8, 16, 32, 64) for depth in (1, 2)),
    *((_FP8, (64, 2, 1, span)) for span in (2, 4)),
    *((("w4a8_block",), (64, 2, 2, span, stream)) for span, stream in ((1, 1), (2, 0))),
    *((("w4a8_block",), Straight(3, 3, span, 216, 56, 24)) for span in (4, 8, 16)),
    (("w4a8_block",), Straight(3, 2, 8, 216, 56, 24)),
    *((("w4a8_block",), Straight(3, 3, 24, 216, 56, 24, ahead=ahead)) for ahead in (16, 32, 64)),
    *((("w8a8",), Straight(stages, span=8)) for stages in (3, 4)),
    *((("w8a8",), Straight(4, span=span, is_dealt=True)) for span in (8, 16)),
    *((("w8a8",), Straight(4, span=span, is_drawn=True)) for span in (8, 16, 24)),
    *((("w8a8",), Straight(4, span=span)) for span in (4, 16)),
    *((_BF16, (tokens, slabs, depth)) for tokens in (8, 16, 32) for slabs in (1, 2) for depth in (1, 2)),
    *((_BF16, (tokens, 1, 1)) for tokens in (64, 128)),
    *((_BF16, (tokens, 1, 1, span)) for tokens in (64, 128) for span in (2, 4, 8)),
)
# fmt: on


def candidates(recipe: str, picked: Tile, *, fits_e4m3: bool = True) -> tuple[Tile, ...]:
    """`picked` first; then others as wide, the next narrower and the next wider."""
    others = [
        tile_of(recipe, shape, fits_e4m3=fits_e4m3)
        for recipes, shape in CANDIDATES
        if recipe in recipes and (fits_e4m3 or not isinstance(shape, Straight))
    ]
    widths = sorted({tile.tokens for tile in (picked, *others)})
    at = widths.index(picked.tokens)
    near = widths[max(at - 1, 0) : at + 2]
    fitting = (t for t in others if t.tokens in near and t.stages >= FEWEST_STAGES)
    return tuple(dict.fromkeys((picked, *fitting)))


def label(tile: Tile) -> str:
    """A tile's name: what it is, its tokens, and every field that is not as by default.

    >>> label(Straight(4, span=16))
    'straight128-stages4-span16'
    """
    kind = "straight" if isinstance(tile, Straight) else "swapped"
    values = {f.name: (getattr(tile, f.name), f.default) for f in fields(tile)}
    tokens, _ = values.pop("tokens")
    parts = (f"{n}{v}" for n, (v, usual) in values.items() if usual is MISSING or v != usual)
    return "-".join((f"{kind}{tokens}", *parts))
