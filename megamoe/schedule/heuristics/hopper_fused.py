"""Hopper's fused launch: which calls it takes, by recipe and load, and which `auto` gives it."""

from __future__ import annotations

from bisect import bisect
from dataclasses import replace

from megamoe.layout.regions import ceil_div
from megamoe.schedule.heuristics.hopper_tiles import INF, Swapped, Tile, tiles

MOST_SLOTS = 4096  # of all ranks: every CTA reads the whole routing
MOST_RANKS = 8  # of one call
COUNTERS = 192 + MOST_SLOTS  # words of a rank: six lines, and one for each tile of tokens
MOST_WAVES = 32  # of a pool that is a ring
MATH_REGS, LOAD_REGS = 216, 72  # roles that wait and draw tickets need more than loaders alone
ROUTING_BYTES = 4096  # of routing that find room in shared memory beside all stages of any tile

# fmt: off
# (slots of a call up to, mode, why): what mode="auto" takes on one rank. The first row wins.
MODES: tuple[tuple[float, str, str], ...] = (
    (1024, "fused", "decode: flash at 8 and 64 tokens 97 and 119 us, 109 and 126 staged; 1024 slots over 48 experts 242, staged 261"),
    (INF, "staged", "more rows an expert want wider tiles; of 64 tokens, 256 over 48 experts, a fused launch takes 322 us, staged ones 323"),
)
# fmt: on


def passes(
    recipe: str,
    num_tokens: int,
    slots_per_token: int,
    num_experts: int,
    *,
    fits_e4m3: bool = True,
) -> tuple[int, int]:
    """(launches of a call over a group, tokens of a rank in each): as few as a launch's limits let.

    slots_per_token  of all ranks, for each token of a rank
    """

    def is_too_many(tokens: int) -> bool:
        rows = tokens * slots_per_token / num_experts
        return as_fused(tiles(recipe, rows, fits_e4m3=fits_e4m3)[0]) is None

    most = min(num_tokens, MOST_SLOTS // slots_per_token)
    each = bisect(range(1, most + 1), False, key=is_too_many)
    num = ceil_div(num_tokens, max(each, 1))
    return num, ceil_div(num_tokens, num)


def auto_mode(num_slots: int, tile: Tile) -> tuple[str, str]:
    """(mode, why) of a call with so many slots, whose staged launches take `tile`."""
    mode, why = next((mode, why) for edge, mode, why in MODES if num_slots <= edge)
    if mode == "fused" and as_fused(tile) is None:
        return "staged", f"{tile}: only launches of their own hold this tile"
    return mode, why


def weights_ahead(tile: Swapped) -> int:
    """Stages of a CTA's first weights that come before all tokens are in the pool: half a ring.

    48 experts at 32 tokens, stages of one K block: 233.2 us with 6 of 11, 234.7 with none, 233.5
    with all. Fewer leave memory idle, more hold up the tokens.
    """
    return tile.stages // 2


def as_fused(tile: Tile, routing_bytes: int = 0) -> Swapped | None:
    """The tile of a fused launch; None where only launches of their own hold it.

    A stage makes room for a routing of more than ROUTING_BYTES. Tiles of 64 tokens would spill
    beside what a fused launch holds, and gain nothing: 322 us, 323 in launches of their own.
    """
    if not isinstance(tile, Swapped) or tile.slabs != 2 or tile.span != 1 or tile.tokens >= 64:
        return None
    stages = tile.stages - (routing_bytes > ROUTING_BYTES)
    return replace(tile, stages=stages, math_regs=MATH_REGS, load_regs=LOAD_REGS)
