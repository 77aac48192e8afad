"""Split: dispatch and L1 on one part of the SMs, L2 on the other, side by side, then combine.

    count, scan, place       the row of every slot                    all SMs
    window, permute          a window of the rows: tiles, tokens      all SMs; later windows l1's
    l1                       waits for nobody                         l1's
    l2                       follows L1 tile by tile                  l2's
    (rows_to_fp8,) combine                                            all SMs

Both parts end before what follows, so one CUDA graph holds the call. With `pool_rows` the pool is a
ring of two halves: L1 of a window begins when L2 of the one before the last has left its half, and
L2 of a window runs while L1 writes the next. Over ranks the launches are those of the chain
(`planner/chain.py`), pull and L1 on one part, L2 on the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megamoe.errors import CapacityError, require
from megamoe.layout.regions import align_up, ceil_div
from megamoe.planner import hopper
from megamoe.planner.call import CallSpec
from megamoe.planner.choice import Value
from megamoe.planner.launches import (
    Gemm,
    Launch,
    Pass,
    Permute,
    Place,
    Tile,
    Window,
    next_power_of_2,
)
from megamoe.planner.tables import hopper as tables
from megamoe.planner.tables import split as split_tables

WINDOWS = 2  # halves of a ring


class Parts(NamedTuple):
    """SMs of the two partitions that are used, and why as many."""

    l1: int
    l2: int
    why: str


def parts(num_sms: int, overrides: Mapping[str, Value]) -> Parts:
    """How the SMs of a GPU are parted."""
    reserve, unit = overrides.get("reserve_sms") or 0, split_tables.SMS_UNIT
    asked = overrides.get("l1_sms")
    assert isinstance(reserve, int) and (asked is None or isinstance(asked, int))
    sms = num_sms - reserve
    require(
        sms >= 2 * unit,
        f"split needs {2 * unit} of the GPU's {num_sms} SMs at least",
        got=f"reserve_sms {reserve}",
        fix="reserve fewer",
        kind=CapacityError,
    )
    if asked is None:
        legal = range(unit, sms - unit + 1, unit)
        l1 = min(
            legal, key=lambda n: max(split_tables.L1_WORK / n, split_tables.L2_WORK / (sms - n))
        )
        return Parts(l1, sms - l1, split_tables.WHY_PARTED)
    require(
        asked % unit == 0 and unit <= asked <= sms - unit,
        f"l1_sms must be a multiple of {unit} that leaves {unit} of {sms} SMs to L2",
        got=asked,
        fix=f"take {unit} to {(sms - unit) // unit * unit}",
        kind=CapacityError,
    )
    return Parts(asked, sms - asked, "of dispatch and L1")


def publishes(tile: Tile) -> bool:
    """Whether L1 counts its tiles in words of their own, and not in the tile list."""
    return not (isinstance(tile, Gemm) and tile.is_dynamic)


def tile_for(call: CallSpec, on: Parts, overrides: Mapping[str, Value]) -> tuple[Tile, str]:
    """The tile of staged launches, unless a part has too few SMs to decode for a wave."""
    p = call.problem
    load = p.num_tokens * p.num_ranks * p.top_k / p.num_experts
    tile, why = hopper.tile_for(call, load, overrides)
    if isinstance(tile, Gemm) and tile.decode_ahead and "decode_ahead" not in overrides:
        l1 = hopper.decodes_per_wave(p.hidden, on.l1)
        if not (l1 and hopper.decodes_per_wave(p.intermediate, on.l2)):
            tile, asked = hopper.tile_for(call, tables.PER_TILE_ROWS, overrides)
            few = f"{on.l1} and {on.l2} SMs are too few to decode weights once per wave"
            why = f"{few}; {asked}"
    return tile, why


def windows(num_rows: int, overrides: Mapping[str, Value]) -> tuple[int, int]:
    """(rows of a window, windows) of a call with up to `num_rows` rows.

    >>> windows(1000, {}), windows(1000, {"pool_rows": 512}), windows(1000, {"pool_rows": 2000})
    ((1000, 1), (256, 4), (1000, 1))
    """
    wanted = overrides.get("pool_rows")
    assert wanted is None or isinstance(wanted, int)
    if wanted is None or wanted >= num_rows:
        return num_rows, 1
    rows = wanted // (WINDOWS * tables.ROW_ALIGN) * tables.ROW_ALIGN
    num = ceil_div(num_rows, max(rows, 1))
    least = align_up(ceil_div(num_rows, tables.MAX_WAVES), tables.ROW_ALIGN)
    require(
        rows > 0 and num <= tables.MAX_WAVES,
        f"the pool of a call of up to {num_rows} rows must have {WINDOWS * least} at least",
        got=f"pool_rows {wanted}",
        fix=f"there are {tables.MAX_WAVES} windows at most, two of them in the pool",
        kind=CapacityError,
    )
    return rows, num


def passes(call: CallSpec, num_sms: int, overrides: Mapping[str, Value]) -> tuple[Pass, ...]:
    """A pass for each window of the routed experts' rows; the shared ones' where they are apart."""
    p, extra, on = call.problem, call.joined, parts(num_sms, overrides)
    tile, why = tile_for(call, on, overrides)
    sizes = hopper.Sizes(
        p.num_tokens, p.top_k + extra, p.num_experts + extra, extra, p.hidden, p.intermediate
    )
    rows, num = windows(hopper.num_rows(sizes.num_slots, sizes.num_experts), overrides)
    what = "routed and shared" if extra else "routed"
    halves = []
    for number in range(num):
        launches = [] if number else _rows_of_slots(sizes, tile)
        launches += _window(sizes, tile, on, rows, number, num, why)
        halves.append(Pass(what, sizes.num_slots, sizes.num_experts, tuple(launches)))
    if call.shared is not None and call.shared.apart:
        halves.append(hopper.shared_pass(call, num_sms))
    return tuple(halves)


def _rows_of_slots(sizes: hopper.Sizes, tile: Tile) -> list[Launch]:
    """The row of every slot, of all windows."""
    chunks, max_experts = (
        ceil_div(sizes.num_slots, tables.CHUNK),
        next_power_of_2(sizes.num_experts, 2),
    )
    place = Place(
        block_m=tile.block_m, chunk=tables.CHUNK, count_chunk=tables.COUNT_CHUNK, is_counted=True,
        max_experts=max_experts, max_ctas=0, is_dynamic=False,
        num_warps=tables.PLACE_WARPS[sizes.num_shared > 0], row_align=tables.ROW_ALIGN,
    )  # fmt: skip
    return [
        *hopper.count_and_scan(chunks, sizes.num_experts, tables.CHUNK, max_experts),
        Launch("place", "_place_kernel", (chunks + 1,), place, "counts are known to `window` too"),
    ]


def _window(
    sizes: hopper.Sizes, tile: Tile, on: Parts, rows: int, number: int, num: int, why: str
) -> list[Launch]:
    """The launches of window number `number` of `num`."""
    max_experts, is_whole = next_power_of_2(sizes.num_experts, 2), num == 1
    has_items = tile.has_items
    inside = sizes._replace(num_tokens=min(sizes.num_slots, rows), top_k=1)
    waves = (0, 0)
    if has_items:
        waves = hopper.waves_of(inside, tile, on.l1)[0], hopper.waves_of(inside, tile, on.l2)[1]
    chunks = ceil_div(sizes.num_slots, split_tables.CHUNK)
    window = Window(
        block_m=tile.block_m, chunk=split_tables.CHUNK, chunks=chunks, max_experts=max_experts,
        first_row=number * rows, num_rows=rows, is_whole=is_whole, waves=waves,
        max_ctas=next_power_of_2(max(on.l1, on.l2)) if has_items else 0,
        is_dynamic=tile.is_dynamic,
    )  # fmt: skip
    cols, warps = tables.PERMUTE_COLS[False]
    permute = Permute(
        is_small=False, block_m=tile.block_m, cols=cols, num_warps=warps, max_slots=16,
        max_experts=max_experts, max_top_k=next_power_of_2(sizes.top_k),
        row_align=tables.ROW_ALIGN,
    )  # fmt: skip
    grid = (sizes.num_tokens, ceil_div(align_up(sizes.hidden, tables.WIDTH), cols))
    side = "l1" if number else ""  # the first window's tokens: before there are two parts
    l1 = hopper.gemm_launch("l1", tile, sizes.hidden, on.l1, why)
    l2 = hopper.gemm_launch("l2", tile, sizes.intermediate, on.l2, f"{why}; follows L1 by tile")
    at = "tiles of both linears, items each for its own grid"
    return [
        Launch("window", "_window_kernel", (1 + chunks + sum(waves),), window, at, side),
        Launch("permute", "_pool_kernel", grid, permute, "rows are placed", side),
        Launch(l1.name, l1.kernel, l1.grid, l1.config, l1.why, "l1"),
        Launch(l2.name, l2.kernel, l2.grid, l2.config, l2.why, "l2"),
    ]
