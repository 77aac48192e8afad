"""Portable's launches: dispatch, sort, both linears and combine, in plain Triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megamoe.errors import NotAvailable, RangeError, require
from megamoe.layout.regions import ceil_div
from megamoe.planner import copies
from megamoe.planner.call import CallSpec
from megamoe.planner.choice import Value
from megamoe.planner.launches import (
    Combine,
    Count,
    Launch,
    Pass,
    PortableGemm,
    Quantize,
    Scan,
    Sort,
    next_power_of_2,
)
from megamoe.planner.numerics import Numerics, numerics
from megamoe.planner.tables import portable as tables
from megamoe.routing.spec import max_tiles

GRID_AXIS = 65_535  # programs that CUDA lets every axis but the first have
TILE_OVERRIDES = ("block_m", "block_n", "block_k", "num_warps", "num_stages", "group_m")


def pick(
    recipe: str, rows_per_expert: float, *, is_native: bool = False
) -> tuple[PortableGemm, PortableGemm, str]:
    """(tile of L1, tile of L2, why). is_native: the MMA takes codes and scales of both operands."""
    if is_native:
        return next(row[1:] for row in tables.NATIVE_TILES if rows_per_expert <= row[0])
    return next(
        (l1, l2, why)
        for recipes, edge, l1, l2, why in tables.TILES
        if recipe in recipes and rows_per_expert <= edge
    )


def row_grid(row_tiles: int, col_tiles: int) -> tuple[int, int, int]:
    """The grid of so many tiles; the third axis has what the second lacks.

    >>> row_grid(100, 7), row_grid(65_536, 7)
    ((7, 100, 1), (7, 65535, 2))
    """
    return col_tiles, min(row_tiles, GRID_AXIS), ceil_div(row_tiles, GRID_AXIS)


def quantize_rows(
    name: str, num_rows: int, width: int, kind: str, *, is_bf16: bool = True
) -> Launch:
    """Rows [num_rows, width] into the activations `kind`; width 1 checks the routing alone.

    is_bf16  as tokens are: FP4 is packed from words of two values
    """
    (rows, cols), warps = tables.QUANTIZE_AS.get(kind, tables.QUANTIZE)
    cols = min(cols, next_power_of_2(width, 128))
    tiles = ceil_div(num_rows, rows)
    group = tables.PACKED.get(kind, 0) if is_bf16 else 0
    group = group if group and width % group == 0 else 0
    config = Quantize(rows, cols, warps, tiles > GRID_AXIS, group)
    why = "block of a sweep over formats"
    kernel = "_pack_kernel" if group else "_dispatch_kernel"
    return Launch(name, kernel, row_grid(tiles, ceil_div(width, cols)), config, why)


def combine(num_tokens: int, hidden: int) -> Launch:
    """The rows of each token added up."""
    cols = min(next_power_of_2(hidden), tables.COMBINE_COLS)
    config = Combine(cols, tables.COMBINE_WARPS, is_deep=num_tokens > GRID_AXIS)
    grid = row_grid(num_tokens, ceil_div(hidden, cols))
    return Launch("combine", "_combine_kernel", grid, config, "slots in ascending order")


def tiles_for(
    recipe: str, how: Numerics, load: float, chosen: Mapping[str, Value]
) -> tuple[PortableGemm, PortableGemm, str]:
    """(tile of L1, tile of L2, why) with what was given in place of the table's, checked."""
    l1, l2, why = pick(recipe, load, is_native=how.is_native)
    overrides = {name: chosen[name] for name in TILE_OVERRIDES if name in chosen}
    for name in ("kernel", "schedule", "decode_ahead"):
        require(
            name not in chosen,
            "portable has one kernel a linear, which the compiler pipelines",
            got=f"{name} {chosen.get(name)}",
            kind=NotAvailable,
        )
    if overrides:
        l1, l2 = (replace(tile, **overrides) for tile in (l1, l2))  # type: ignore[arg-type]
        why = "given: " + ", ".join(f"{name} {value}" for name, value in overrides.items())
    for tile, is_l1 in ((l1, True), (l2, False)):
        check(recipe, how, tile, is_l1=is_l1)
    return l1, l2, why


def check(recipe: str, how: Numerics, tile: PortableGemm, *, is_l1: bool) -> None:
    """Refuse what the kernels cannot do."""
    is_fp4 = how.decodes

    def refuse(when: bool, what: str, got: str) -> None:
        require(not when, what, got=got, kind=NotAvailable)

    for name in ("block_m", "block_n", "block_k"):
        value = getattr(tile, name)
        require(
            value >= 16 and value & (value - 1) == 0,
            f"{name} must be a power of two from 16 on",
            got=f"{name} {value}",
            kind=RangeError,
        )
    refuse(
        how.promotion > 0 and tile.block_k != 128,
        "one step of K must be one 1x128 scale",
        f"block_k {tile.block_k}",
    )
    refuse(
        is_fp4 and tile.block_k % 128 != 0,
        "FP4 weights are multiplied in whole blocks of 128",
        f"block_k {tile.block_k}",
    )
    refuse(
        is_l1 and how.acts in ("codes", "scaled") and tile.block_n != 128,
        "L1 writes blocks of 128 columns that share a scale: block_n must be 128",
        f"block_n {tile.block_n}",
    )
    refuse(
        is_l1 and is_fp4 and 128 % tile.block_n != 0,
        "L1 writes blocks of 128 columns: block_n must divide 128",
        f"block_n {tile.block_n}",
    )
    refuse(
        not is_l1 and tile.block_n % 128 != 0,
        "L2 must write whole blocks of 128 columns: one scale of FP8 combine",
        f"block_n {tile.block_n}",
    )


def sort(num_slots: int, num_experts: int, block_m: int) -> list[Launch]:
    """Count, scan and place the slots."""
    experts, chunk = next_power_of_2(num_experts, 2), tables.CHUNK
    chunks = ceil_div(num_slots, chunk)
    tiles = max(max_tiles(num_slots, num_experts, block_m), 1)
    return [
        Launch("count", "_count_kernel", (chunks,), Count(chunk, experts), "chunk by chunk"),
        Launch("scan", "_scan_kernel", (num_experts,), Scan(next_power_of_2(chunks, 2)), "sums"),
        Launch(
            "place",
            "_place_kernel",
            (chunks + ceil_div(tiles, chunk),),
            Sort(block_m, chunk, experts),
            "rows of slots, maps of tiles",
        ),
    ]


def grouped(
    tile: PortableGemm, num_rows: int, num_groups: int, num_cols: int, num_sms: int | None
) -> Launch:
    """One linear over rows sorted by group; with `num_sms` programs take tiles from a counter."""
    tiles = max(max_tiles(num_rows, num_groups, tile.block_m), 1)
    grid = tiles * ceil_div(num_cols, tile.block_n)
    why = "one program a tile"
    if num_sms is not None:
        grid, why = (
            min(grid, tables.PROGRAMS_PER_SM * num_sms),
            "programs take tiles from a counter",
        )
    return Launch("linear", "_linear_kernel", (grid,), tile, why)


def staged_pass(
    recipe: str,
    how: Numerics,
    sizes: tuple[int, int, int, int, int],
    overrides: Mapping[str, Value],
    experts: str,
    *,
    quantizes: bool,
    has_routing: bool,
) -> Pass:
    """Dispatch, sort, L1 and L2 of the slots of one set of experts.

    sizes  tokens, slots of a token, experts, hidden, intermediate
    """
    num_tokens, top_k, num_experts, hidden, intermediate = sizes
    slots = num_tokens * top_k
    l1, l2, why = tiles_for(recipe, how, slots / num_experts, overrides)
    launches = []
    if not quantizes and is_ordered(recipe, how):
        launches.append(copies.decode(num_tokens, hidden))
    if quantizes or has_routing:
        width = hidden if quantizes else 1
        launches.append(quantize_rows("dispatch", num_tokens, width, acts_kind(recipe, how)))
    launches += sort(slots, num_experts, l1.block_m)
    tiles = max(max_tiles(slots, num_experts, l1.block_m), 1)
    cols = ceil_div(intermediate, 128) * 128 if is_ordered(recipe, how) else intermediate
    for name, kernel, tile, width in (
        ("l1", "_gated_kernel", l1, cols),
        ("l2", "_linear_kernel", l2, hidden),
    ):
        grid = (tiles * ceil_div(width, tile.block_n),)
        launches.append(Launch(name, kernel, grid, tile, why))
    return Pass(experts, slots, num_experts, tuple(launches))


def is_ordered(recipe: str, how: Numerics) -> bool:
    """Whether activations are BF16 in the order of K that FP4 weights want, however they come."""
    return how.decodes


def acts_kind(recipe: str, how: Numerics) -> str:
    """The name of the activations' kind in the kernels."""
    from megamoe.formats.spec import recipe_named

    return f"{how.acts}-{recipe_named(recipe).acts.name}"


def staged_passes(call: CallSpec, arch: str, overrides: Mapping[str, Value]) -> tuple[Pass, ...]:
    """The routed experts' pass, and the shared ones'."""
    p = call.problem
    how = numerics("portable", p.recipe, arch=arch)
    sizes = (p.num_tokens, p.top_k, p.num_experts, p.hidden, p.intermediate)
    passes = [
        staged_pass(
            p.recipe, how, sizes, overrides, "routed", quantizes=not call.is_quantized,
            has_routing=True,
        )
    ]  # fmt: skip
    if call.shared is not None:
        passes.append(shared_pass(call, arch))
    return tuple(passes)


def shared_pass(call: CallSpec, arch: str) -> Pass:
    """Shared experts: each sees every token."""
    p, shared = call.problem, call.shared
    assert shared is not None
    how = numerics("portable", shared.recipe, arch=arch)
    sizes = (p.num_tokens, shared.num, shared.num, p.hidden, shared.intermediate)
    return staged_pass(
        shared.recipe, how, sizes, {}, "shared", quantizes=not call.is_quantized, has_routing=False
    )


def rows_pass(call: CallSpec, num_rows: int, arch: str, overrides: Mapping[str, Value]) -> Pass:
    """The rows that a rank received for its experts, one slot each, as they came."""
    p = call.problem
    how = numerics("portable", p.recipe, arch=arch)
    sizes = (num_rows, 1, p.num_local_experts, p.hidden, p.intermediate)
    is_plain = p.recipe in ("bf16", "w4a16", "nvfp4a16")
    return staged_pass(
        p.recipe, how, sizes, overrides, "routed", quantizes=is_plain, has_routing=False
    )
