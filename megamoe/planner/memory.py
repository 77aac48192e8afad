"""Memory of a rank: weights, what a call allocates, and what ranks share. Every buffer in bytes.

Bytes are those that are asked for; the caching allocator rounds each up to 512. What torch's own
small operators allocate on the way (copies of ids, a dequantised tensor) is not listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megamoe.formats.spec import Scale, recipe_named
from megamoe.layout.images import image_bytes
from megamoe.layout.regions import align_up, ceil_div
from megamoe.planner import blackwell, chain, fused, hopper, split
from megamoe.planner.buckets import group_modes, quantized_mode
from megamoe.planner.call import CallSpec
from megamoe.planner.floor import weight_bytes
from megamoe.planner.launches import (
    Gemm,
    GemmTmem,
    Launch,
    Mega,
    Pass,
    Place,
    PortableGemm,
    Window,
)
from megamoe.planner.numerics import Numerics, image_of, numerics
from megamoe.planner.portable import is_ordered
from megamoe.planner.tables.blackwell import WIDTH as BLACKWELL_WIDTH
from megamoe.planner.tables.hopper import ROW_ALIGN, WIDTH
from megamoe.routing.spec import max_tiles as portable_tiles

if TYPE_CHECKING:
    from megamoe.planner.plan import Plan

ITEM_BYTES, TILE_BYTES, COUNTERS_BYTES = 32, 16, 16  # of a work item, of a tile list, beside it
WAVE_BYTES = 256  # after each CTA's tile list in a fused launch
RING_BLOCK = 256 * 128  # bytes of a K block of decoded weights


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory of a rank: what it holds, and who sees it."""

    name: str
    num_bytes: int
    kind: str  # "weights", "local" (of a call, from the caching allocator) or "symmetric"
    about: str
    times: int = 1  # local: allocated anew so often in a call, one after the other


def buffers(plan: Plan) -> tuple[Buffer, ...]:
    """What a rank holds: weights, the memory of one call, and what it shares with its peers."""
    return (*_weights(plan), *_local(plan), *_symmetric(plan))


# -- weights --------------------------------------------------------------------------------------


def _weights(plan: Plan) -> Iterator[Buffer]:
    call, p = plan.call, plan.problem
    local = p.num_experts // p.num_ranks * call.local_ranks
    each, about = weight_bytes(p), "as the checkpoint has them"
    if plan.backend == "hopper" and recipe_named(p.recipe).weights.element.bits == 4:
        each, about = _image_bytes(call), "as images, and in no other form"
    yield Buffer("experts", local * each, "weights", f"{local} routed experts {about}")


def _image_bytes(call: CallSpec) -> int:
    """Bytes of one expert of FP4 as Hopper's kernels read it: padded to whole tiles."""
    p, kind = call.problem, image_of(call.problem.recipe, fits_e4m3=call.fits_e4m3)
    hidden, wide = align_up(p.hidden, WIDTH), align_up(p.intermediate, WIDTH)
    return image_bytes(kind, 2 * wide, hidden, 2) + image_bytes(kind, hidden, wide, 1)


# -- of a call ------------------------------------------------------------------------------------


def _local(plan: Plan) -> list[Buffer]:
    """What a call allocates on its way, in order."""
    if plan.mega is not None:
        return _fused(plan)
    if not plan.launches:
        return []
    if plan.is_chained:
        return _chained(plan)
    if plan.call.is_group:
        return _over_group(plan)
    return _one_rank(plan)


def _one(name: str, num_bytes: int, about: str, times: int = 1) -> Buffer:
    return Buffer(name, num_bytes, "local", about, times)


def _result(plan: Plan) -> Buffer:
    return _one("result", plan.problem.num_tokens * plan.problem.hidden * 2, "BF16 [T, H]")


def _checked(num_slots: int) -> Buffer:
    return _one("routing", 8 * num_slots, "ids and weights as they were checked")


def _rows(name: str, num_rows: int, hidden: int) -> Buffer:
    return _one(name, num_rows * hidden * 2, "BF16, a row a slot")


def _fp8_rows(name: str, num_rows: int, hidden: int) -> Buffer:
    num_bytes = num_rows * (hidden + ceil_div(hidden, 128))
    return _one(name, num_bytes, "FP8, a row a slot, and its scales")


def _one_rank(plan: Plan) -> list[Buffer]:
    """Staged and split."""
    call, p = plan.call, plan.problem
    slots = p.num_tokens * (p.top_k + call.num_shared)
    is_fp8 = call.combine == "fp8"
    listed = [_result(plan), _checked(p.num_tokens * p.top_k)]
    is_portable = plan.backend == "portable"
    rows = _fp8_rows if is_portable and is_fp8 else _rows
    listed.append(rows("combine rows", slots, p.hidden))
    routed = [one for one in plan.passes if one.experts != "shared"]
    if plan.mode == "split":
        listed += _windows(plan, routed)
    else:
        listed += _pass(plan, routed[0])
    for one in plan.passes[len(routed) :]:
        listed += _shared(plan, one)
    if is_fp8 and not is_portable:
        listed.append(_fp8_rows("FP8 rows", slots, p.hidden))
    return listed


def _over_group(plan: Plan) -> list[Buffer]:
    """Staged over a group, under even routing: what this rank computes between the all-to-alls."""
    call, p = plan.call, plan.problem
    is_portable, is_fp8 = plan.backend == "portable", call.combine == "fp8"
    rows = _fp8_rows if is_portable and is_fp8 else _rows
    (routed,) = plan.passes
    listed: list[Buffer] = []
    if plan.before:
        num_bytes = p.num_tokens * _row_bytes(recipe_named(p.recipe).acts.name, p.hidden)
        listed.append(_one("tokens as sent", num_bytes, "in the recipe's format"))
    listed.append(rows("rows for peers", routed.num_slots, p.hidden))
    if not is_portable:
        listed.append(_checked(routed.num_slots))
    listed += _pass(plan, routed)
    if is_fp8 and not is_portable:
        listed.append(_fp8_rows("FP8 rows for peers", routed.num_slots, p.hidden))
    listed.append(_result(plan))
    home = _fp8_rows if is_fp8 else _rows
    listed.append(home("combine rows", p.num_tokens * (p.top_k + call.num_shared), p.hidden))
    if call.shared is not None:
        slots = p.num_tokens * call.num_shared
        if is_fp8 and not is_portable:
            listed.append(_rows("shared rows", slots, p.hidden))
        listed += _shared(plan, Pass("shared", slots, call.num_shared, plan.rest))
        if is_fp8 and not is_portable:
            listed.append(_fp8_rows("FP8 shared rows", slots, p.hidden))
    return listed


def _row_bytes(name: str, width: int) -> int:
    """Bytes of a row in a format, with its scales as checkpoints have them."""
    from megamoe.formats.spec import format_named

    fmt = format_named(name)
    each = 4 if fmt.scale is Scale.FP32 else 1
    return width * fmt.element.bits // 8 + each * ceil_div(width, fmt.block[1])


def _shared(plan: Plan, one: Pass) -> list[Buffer]:
    """The shared experts' pass, in launches of their own."""
    shared = plan.call.shared
    assert shared is not None
    problem = replace(plan.problem, recipe=shared.recipe, intermediate=shared.intermediate)
    call = replace(plan.call, problem=problem, fits_e4m3=shared.fits_e4m3)
    how = numerics(plan.backend, shared.recipe, arch=plan.hardware.arch, fits_e4m3=shared.fits_e4m3)
    routing = [] if plan.backend == "portable" else [_checked(one.num_slots)]
    listed = [*routing, *_pass(replace(plan, call=call, numerics=how), one)]
    return [replace(b, name=f"shared experts' {b.name}") for b in listed]


def _pass(plan: Plan, one: Pass) -> list[Buffer]:
    """Tokens by expert, activations, lists and decoded weights of one set of experts."""
    if plan.backend == "portable":
        return list(_portable_pass(plan, one))
    tile = one["l1"].config
    block_m = tile.block_m  # type: ignore[attr-defined]
    if isinstance(tile, GemmTmem):
        rows = blackwell.num_rows(one.num_slots, one.num_experts, block_m)
    else:
        rows = hopper.num_rows(one.num_slots, one.num_experts)
    lists = _lists(rows, hopper.max_tiles(one.num_slots, one.num_experts, block_m))
    waves = 0
    place = one.find("place")
    if place is not None:
        lists += _sorted(one)
        chunks = ceil_div(one.num_slots, place.config.chunk)  # type: ignore[attr-defined]
        waves = place.grid[0] - chunks - 1
    return [
        *_pools(plan, rows, block_m),
        _one("lists", lists, "rows of slots, rows and tiles of experts"),
        *_items(waves * one["l1"].grid[0]),
        *_decoded(one["l1"], one["l2"]),
    ]


def _lists(rows: int, tiles: int, *, is_far: bool = False) -> int:
    """Destination, weight and factor of each row, and the list of tiles."""
    return rows * (16 if is_far else 12) + tiles * TILE_BYTES + COUNTERS_BYTES


def _sorted(one: Pass, *, has_counts: bool = True) -> int:
    """The row of each slot; slots of each expert, in all and by chunk, where they are counted."""
    count = one.find("count")
    num = 0 if count is None else (count.grid[0] + has_counts) * one.num_experts
    return 4 * (one.num_slots + num)


def _items(num: int) -> Iterable[Buffer]:
    if num:
        yield _one("work items", num * ITEM_BYTES, "of both linears")


def _decoded(l1: Launch, l2: Launch, times: int = 1) -> Iterator[Buffer]:
    """Rings of FP8 that FP4 weights are decoded into once for many tiles."""
    for step in (l1, l2):
        if isinstance(step.config, Gemm) and step.config.decode_ahead:
            blocks = step.num_ctas * step.config.decode_ahead
            about = f"{step.config.decode_ahead} blocks of 256 x 128 a CTA, E4M3"
            yield _one(f"decoded weights, {step.name}", blocks * RING_BLOCK, about, times)


def _pools(plan: Plan, rows: int, block_m: int) -> tuple[Buffer, Buffer]:
    """Tokens sorted by expert, and activations between the linears."""
    p = plan.problem
    tokens, acts = (_stored(plan, rows, block_m, width) for width in (p.hidden, p.intermediate))
    about = f"{rows} rows and their scales"
    return _one("tokens", tokens, about), _one("activations", acts, about)


def _stored(plan: Plan, rows: int, block_m: int, width: int) -> int:
    """Bytes of rows in a pool; without scales there is one word in their place."""
    recipe, how = plan.problem.recipe, plan.numerics
    if plan.backend == "hopper":
        wide = align_up(width, WIDTH)
        data, scales = wide * (1 if how.mma == "fp8" else 2), wide // 128 * 4
        return rows * data + (rows * scales if how.promotion else 4)
    data, scales = blackwell.token_bytes(recipe, align_up(width, BLACKWELL_WIDTH))
    if how.acts == "placed":  # 128 rows however few tokens a tile has
        return rows * data + rows // block_m * 128 * scales
    return rows * data + (rows * scales or 4)


# -- portable -------------------------------------------------------------------------------------


def _portable_pass(plan: Plan, one: Pass) -> Iterator[Buffer]:
    p, how, tile = plan.problem, plan.numerics, one["l1"].config
    assert isinstance(tile, PortableGemm)
    is_wire = plan.call.is_group and one.experts == "routed"  # rows that came as they were sent
    has_codes = plan.call.is_quantized or (is_wire and recipe_named(p.recipe).acts.name != "bf16")
    num = one.num_slots if is_wire else p.num_tokens
    if not has_codes:
        num_bytes = _portable_rows(p.recipe, how, num, p.hidden)
        yield _one("tokens", num_bytes, f"{num} rows and their scales")
    elif is_ordered(p.recipe, how):
        yield _one("tokens", num * align_up(p.hidden, 128) * 2, f"{num} rows, decoded")
    tiles = max(portable_tiles(one.num_slots, one.num_experts, tile.block_m), 1)
    rows = tiles * tile.block_m
    lists = one.num_experts * (1 + one["count"].grid[0]) + rows + 2 * tiles + 1
    yield _one("lists", 4 * lists, "slots of experts, rows, tiles")
    num_bytes = _portable_rows(p.recipe, how, rows, p.intermediate)
    yield _one("activations", num_bytes, f"{rows} rows and their scales")


def _portable_rows(recipe: str, how: Numerics, rows: int, width: int) -> int:
    """Bytes of activations as portable's GEMM loads them."""
    if how.acts == "codes":
        return rows * _row_bytes(recipe_named(recipe).acts.name, width)
    wide = align_up(width, 128) if is_ordered(recipe, how) else width
    return rows * (2 * wide + (4 * ceil_div(width, 128) if how.acts == "scaled" else 0))


# -- fused, split and chain -----------------------------------------------------------------------


def _fused(plan: Plan) -> list[Buffer]:
    """One rank: once; over a group each launch of a call allocates anew."""
    assert plan.mega is not None
    call, p, config, times = plan.call, plan.problem, plan.mega.config, plan.num_passes
    assert isinstance(config, Mega)
    tile, is_far = config.tile, p.num_ranks > 1
    each = plan.fused_tokens
    rows = config.pool_rows * call.local_ranks
    slots, experts = fused.num_slots(call, each), fused.num_local_experts(call)
    tiles = hopper.max_tiles(slots, experts, tile.block_m)
    private = plan.mega.num_ctas * (align_up(16 * tiles, 128) + WAVE_BYTES)
    result = _one("result", call.local_ranks * each * p.hidden * 2, "BF16 [T, H]")
    listed = [] if is_far else [_rows("combine rows", slots, p.hidden)]
    listed += [
        result,
        *_pools(plan, rows, tile.block_m),
        _one("lists", _lists(rows, tiles, is_far=is_far), "rows and tiles of experts"),
        _one("tile lists", private, "of each CTA"),
    ]
    return [replace(b, times=times) for b in listed]


def _windows(plan: Plan, passes: list[Pass]) -> list[Buffer]:
    """Split on one rank: pool and lists of two windows that take turns, or of one that is whole."""
    first, config = passes[0], passes[0]["window"].config
    assert isinstance(config, Window)
    rows, num = config.num_rows, min(len(passes), split.WINDOWS)
    slots, experts, block = first.num_slots, first.num_experts, config.block_m
    lists = _lists(len(passes) * rows, hopper.max_tiles(slots, experts, block)) + _sorted(first)
    inside = _lists(rows, hopper.max_tiles(min(slots, rows), experts, block))
    lists += num * (inside + 4 * (rows // ROW_ALIGN))
    tokens, acts = _pools(plan, rows, block)
    unused = _stored(plan, rows, block, 1) * (num - 1)  # pools of later windows share tokens
    listed = [
        tokens,
        replace(acts, num_bytes=num * acts.num_bytes, about=f"{num} x {acts.about}"),
        _one("lists", lists, "rows of slots, rows and tiles of experts"),
        *_items(num * _num_items(config.waves, first)),
        *_decoded(first["l1"], first["l2"], len(passes)),
    ]
    if not config.is_whole:
        listed.append(_one("slots of a window", 4 * slots, "their rows", len(passes)))
    return [*listed, *([_one("second pool", unused, "freed at once")] if unused else [])]


def _num_items(waves: tuple[int, int], one: Pass) -> int:
    return waves[0] * one["l1"].num_ctas + waves[1] * one["l2"].num_ctas


def _chained(plan: Plan) -> list[Buffer]:
    """The chain, and split over ranks."""
    call, p = plan.call, plan.problem
    source, *owner = plan.passes
    num, experts = source.num_slots, source.num_experts
    lists = 4 * experts + (0 if num else 16 * 4)
    if num:
        rows = hopper.num_rows(num, experts)
        place = source["place"].config
        assert isinstance(place, Place)
        tiles = hopper.max_tiles(num, experts, place.block_m)
        lists += 8 * rows + tiles * TILE_BYTES + COUNTERS_BYTES + _sorted(source, has_counts=False)
    listed = [_checked(num), _one("own slots", lists, "by expert of all ranks")]
    is_split = plan.mode == "split"
    num_windows = min(len(owner), split.WINDOWS) if is_split else 1
    listed += _window(plan, owner, num_windows, 1 if is_split else len(owner))
    listed += [_result(plan)] if p.num_tokens else [_one("result", 0, "BF16 [T, H]")]
    has_fp8 = chain.has_fp8_rows(call, plan.backend)
    if p.num_tokens == 0:
        return listed
    shared = p.num_tokens * call.num_shared
    if call.shared is not None:
        if has_fp8:
            listed.append(_rows("shared rows", shared, p.hidden))
        listed += _shared(plan, Pass("shared", shared, call.num_shared, plan.rest))
    home = shared if has_fp8 else p.num_tokens * (p.top_k + call.num_shared)
    if call.combine == "fp8" and home:
        listed.append(_fp8_rows("FP8 rows", home, p.hidden))
    return listed


def _window(plan: Plan, owner: list[Pass], num: int, times: int) -> list[Buffer]:
    """Pools and lists of `num` windows of a rank's rows, allocated so often."""
    first, config = owner[0], owner[0]["rows"].config
    assert isinstance(config, chain.Rows)
    rows, block = config.pool_rows, config.block_m
    inside = _lists(rows, hopper.max_tiles(first.num_slots, first.num_experts, block), is_far=True)
    lists = inside + 8 * rows + 2 * (rows // ROW_ALIGN) * 4
    tokens, acts = _pools(plan, rows, block)
    unused = _stored(plan, rows, block, 1) * (num - 1)
    listed = [
        tokens,
        replace(acts, num_bytes=num * acts.num_bytes, about=f"{num} x {acts.about}"),
        _one("lists", num * lists, "rows and tiles of experts, where rows come from"),
        *_items(num * _num_items(config.waves, first)),
    ]
    if unused:
        listed.append(_one("second pool", unused, "freed at once"))
    listed = [replace(b, times=times) for b in listed]
    listed += _decoded(first["l1"], first["l2"], len(owner))
    if first.find("scales") is not None:
        scales = align_up(plan.problem.hidden, WIDTH) // 128 * rows
        listed.append(_one("row scales", scales, "of FP8 rows", len(owner)))
    return listed


# -- shared with peers ----------------------------------------------------------------------------


def _symmetric(plan: Plan) -> list[Buffer]:
    """What a layer shares with its peers: of every mode that its calls may have."""
    call, overrides = plan.call, dict(plan.overrides)
    if not call.is_group:
        has_one = plan.is_chained and plan.routed is not None
        return [_exchange(call, plan.backend, "chain")] if has_one else []
    if plan.backend == "blackwell" and plan.mega is not None:
        about = f"tokens, inbox and combine rows, {plan.num_passes} x {plan.fused_tokens}"
        about = f"fused: {about} tokens a rank"
        return [Buffer("exchange", plan.exchange.num_bytes, "symmetric", about)]
    if overrides.get("mode") == "staged" or not (plan.backend == "hopper" or plan.is_chained):
        return []
    small = replace(call.problem, num_tokens=min(call.problem.num_tokens, 1))
    largest = max(call.shared_tokens or 0, call.max_tokens or 0, call.problem.num_tokens)
    whole = replace(call, problem=small, max_tokens=largest)
    modes: tuple[tuple[int, str], ...] = ((largest, plan.mode),)
    if plan.backend == "hopper" and overrides.get("mode", "auto") == "auto":
        ready = quantized_mode(whole, overrides)
        sizes = [*group_modes(whole, overrides), *(() if ready is None else (ready,))]
        modes = tuple({one.mode: (one.tokens, one.mode) for one in sizes}.values())
    return [
        _exchange(
            replace(whole, max_tokens=tokens),
            plan.backend,
            mode,
            "exchange" if mode == plan.mode else "",
        )
        for tokens, mode in modes
        if mode in ("fused", "chain")
    ]


def _exchange(call: CallSpec, backend: str, mode: str, name: str = "exchange") -> Buffer:
    """The memory of one mode."""
    tokens = chain.bound(call)
    if mode == "chain":
        num = chain.memory(call, backend).num_bytes
        about = f"tokens, lists and combine rows, {tokens}"
    else:
        launches, each = hopper.passes_of(call)
        num = hopper.exchange_of(call).num_bytes
        about = f"tokens, inbox and combine rows, {launches} x {each}"
    name = name or f"exchange, {mode}"
    return Buffer(name, num, "symmetric", f"{mode}: {about} tokens a rank")
