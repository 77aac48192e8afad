"""Hopper's launches: the tile of a load, which calls are fused, and every launch of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from functools import lru_cache
from typing import NamedTuple

from megamoe.errors import CapacityError, NotAvailable, RangeError, require
from megamoe.formats.spec import recipe_named
from megamoe.layout.regions import Workspace, align_up, ceil_div
from megamoe.planner import fused, smem
from megamoe.planner.call import CallSpec
from megamoe.planner.choice import SharedMemory, Value
from megamoe.planner.launches import (
    SCHEDULES,
    Count,
    Gemm,
    GemmSwapAb,
    Launch,
    Pass,
    Permute,
    Place,
    Scan,
    Tile,
    next_power_of_2,
)
from megamoe.planner.numerics import Numerics, decodes_to_e4m3, numerics
from megamoe.planner.overrides import TILE, word
from megamoe.planner.portable import combine, quantize_rows
from megamoe.planner.tables import hopper as tables
from megamoe.planner.tables.hopper import Shape
from megamoe.problem import MAX_TOP_K

KERNELS = ("swap_ab", "gemm")
BLOCK_MS = (8, 16, 32, 64, 128)


# -- tiles ----------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def pick(recipe: str, rows_per_expert: float, *, fits_e4m3: bool = True) -> tuple[Tile, str]:
    """(the table's tile of both linears, why); the table is read once for each load."""
    shape: Shape | Gemm
    if decodes_to_e4m3(recipe) and not fits_e4m3:
        shape, why = next((t, w) for edge, t, w in tables.WIDE_RANGE if rows_per_expert <= edge)
    else:
        shape, why = next(
            (shape, why)
            for recipes, edge, shape, why, _ in tables.TILES
            if recipe in recipes and rows_per_expert <= edge
        )
    return tile_of(recipe, shape, fits_e4m3=fits_e4m3), why


def tile_of(recipe: str, shape: Shape | Gemm, *, fits_e4m3: bool = True) -> Tile:
    """An entry of the tables as a tile, with as many stages as shared memory holds."""
    if isinstance(shape, Gemm):
        return shape
    how = numerics("hopper", recipe, fits_e4m3=fits_e4m3)
    is_first_out = shape.block_m < 64 if shape.evict_first is None else bool(shape.evict_first)
    # Where FP4 becomes BF16 math is the limit and wants the whole ring.
    decodes = recipe_named(recipe).weights.element.bits == 4 and how.mma == "bf16"
    tile = GemmSwapAb(
        shape.block_m, shape.slabs, shape.k_blocks, 0, shape.group_m, is_first_out,
        0 if decodes else tables.MAX_IN_FLIGHT,
    )  # fmt: skip
    return replace(tile, num_stages=max_stages(smem.gemm_swap_ab(recipe, how, tile)))


def max_stages(sums: SharedMemory) -> int:
    """Stages that fit beside what is fixed."""
    return min((sums.limit - sums.fixed_bytes) // sums.stage_bytes, tables.MAX_STAGES)


def candidates(recipe: str, picked: Tile, *, fits_e4m3: bool = True) -> tuple[Tile, ...]:
    """`picked` first; then others as wide, the next narrower and the next wider."""
    others = [
        tile_of(recipe, shape, fits_e4m3=fits_e4m3)
        for recipes, shape in tables.CANDIDATES
        if recipe in recipes and (fits_e4m3 or not isinstance(shape, Gemm))
    ]
    widths = sorted({tile.block_m for tile in (picked, *others)})
    at = widths.index(picked.block_m)
    near = widths[max(at - 1, 0) : at + 2]
    fitting = (t for t in others if t.block_m in near and t.num_stages >= 2)
    return tuple(dict.fromkeys((picked, *fitting)))


def label(tile: Tile) -> str:
    """A tile's name: what it is, its tokens, and every field that is not as by default.

    >>> label(Gemm(4, group_m=16))
    'gemm128-num_stages4-group_m16'
    """
    kind = "gemm" if isinstance(tile, Gemm) else "swap_ab"
    values = {f.name: (getattr(tile, f.name), f.default) for f in fields(tile)}
    block_m, _ = values.pop("block_m")
    parts = (f"{n}{v}" for n, (v, usual) in values.items() if usual is MISSING or v != usual)
    return "-".join((f"{kind}{block_m}", *parts))


def overridden(
    recipe: str, how: Numerics, tile: Tile, chosen: Mapping[str, Value]
) -> tuple[Tile, str]:
    """The tile with what was given in place of the table's, or a refusal with the reason."""
    overrides = {name: chosen[name] for name in TILE if name in chosen}
    if not overrides:
        return tile, ""
    _refuse("num_warps" in overrides, "Hopper kernels have fixed roles", "num_warps")
    kernel = word(chosen, "kernel", KERNELS) or _kernel_for(how, tile, overrides)
    if kernel == "gemm":
        changed: Tile = _gemm(recipe, how, tile, overrides)
    else:
        changed = _swap_ab(recipe, how, tile, overrides)
    return changed, "given: " + ", ".join(f"{name} {value}" for name, value in overrides.items())


def _kernel_for(how: Numerics, tile: Tile, overrides: Mapping[str, Value]) -> str:
    if "schedule" in overrides or "decode_ahead" in overrides:
        return "gemm"
    if "block_m" in overrides and how.mma == "fp8":
        return "gemm" if overrides["block_m"] == 128 else "swap_ab"
    return "gemm" if isinstance(tile, Gemm) else "swap_ab"


def _int(overrides: Mapping[str, Value], name: str, otherwise: int) -> int:
    value = overrides.get(name, otherwise)
    assert isinstance(value, int)
    return value


def _refuse(when: bool, why: str, got: object, fix: str = "") -> None:
    require(not when, why, got=got, fix=fix, kind=NotAvailable)


def _one_of(overrides: Mapping[str, Value], name: str, legal: tuple[int, ...], why: str) -> None:
    value = overrides.get(name)
    require(
        value is None or value in legal,
        f"{name} must be {' or '.join(map(str, legal))}: {why}",
        got=value,
        kind=RangeError,
    )


def _swap_ab(recipe: str, how: Numerics, tile: Tile, overrides: Mapping[str, Value]) -> GemmSwapAb:
    """A swap-AB tile that a kernel can have."""
    _one_of(overrides, "block_m", BLOCK_MS, "wgmma's N")
    _one_of(overrides, "block_n", (128, 256), "one or two slabs of 64 rows a warpgroup")
    _one_of(overrides, "block_k", (128, 256), "one or two blocks of 128 a stage")
    for name in ("schedule", "decode_ahead"):
        _refuse(name in overrides, "swap_ab strides over its tiles", name, "kernel='gemm'")
    base = tile if isinstance(tile, GemmSwapAb) else None
    m = _int(overrides, "block_m", base.block_m if base else 64)
    widest = 64 if how.promotion else 32
    n = _int(overrides, "block_n", 256 if how.promotion or m <= widest else 128)
    _refuse(
        how.promotion > 0 and n != 256,
        "with activation scales per 128 columns block_n must be 256: 128 outputs share a scale",
        f"block_n {n}",
    )
    _refuse(
        n == 256 and m > widest,
        f"with block_n 256 block_m must be at most {widest}: more accumulators spill",
        f"block_m {m}",
    )
    k = _int(overrides, "block_k", base.block_k if base and base.block_m == m else 128)
    shape = Shape(m, n // 128, k // 128, _int(overrides, "group_m", base.group_m if base else 1))
    changed = tile_of(recipe, shape, fits_e4m3=how.mma == "fp8" or not decodes_to_e4m3(recipe))
    assert isinstance(changed, GemmSwapAb)
    if base is not None and base.block_m == m:
        changed = replace(changed, evict_first=base.evict_first)
    return replace(changed, num_stages=_stages(overrides, changed.num_stages))


def _gemm(recipe: str, how: Numerics, tile: Tile, overrides: Mapping[str, Value]) -> Gemm:
    """A tokens-first tile that a kernel can have."""
    _refuse(how.mma != "fp8", "the gemm kernel multiplies FP8", f"{how.mma} ({recipe})")
    _one_of(overrides, "block_m", (128,), "two halves of 64 tokens")
    _one_of(overrides, "block_n", (256,), "128 rows for each of two warpgroups")
    _one_of(overrides, "block_k", (128,), "one activation scale a stage")
    is_fp4 = how.decodes
    own = tables.PER_TILE if is_fp4 else Gemm(4)
    base = tile if isinstance(tile, Gemm) else own
    schedule = word(overrides, "schedule", SCHEDULES) or base.schedule
    ahead = _int(overrides, "decode_ahead", base.decode_ahead)
    _refuse(
        "decode_ahead" in overrides and not is_fp4,
        "only FP4 weights are decoded ahead",
        recipe,
    )
    _refuse(
        "decode_ahead" in overrides and (ahead % 4 != 0 or ahead > 64),
        "decode_ahead must be a multiple of 4, at most 64",
        ahead,
    )
    _refuse(
        is_fp4 and schedule == "dynamic",
        "CTAs take their items from a counter only with FP8 weights",
        "schedule dynamic with w4a8_block",
    )
    if "schedule" in overrides and "decode_ahead" not in overrides and schedule != base.schedule:
        ahead = 0
    return replace(
        base,
        schedule=schedule,
        decode_ahead=ahead,
        group_m=_int(overrides, "group_m", base.group_m),
        num_stages=_stages(overrides, own.num_stages),
    )


def _stages(overrides: Mapping[str, Value], max_stages: int) -> int:
    stages = _int(overrides, "num_stages", max_stages)
    require(
        2 <= stages <= max_stages,
        f"num_stages must lie between 2 and the {max_stages} that fit in shared memory",
        got=stages,
        fix="leave it out to fill shared memory, or take a smaller tile",
        kind=CapacityError,
    )
    return stages


# -- which calls are fused ------------------------------------------------------------------------


def as_fused(tile: Tile) -> GemmSwapAb | None:
    """The tile as fused launches have it; None where only launches of their own hold it.

    Tiles of 64 tokens would spill beside what a fused launch holds, and gain nothing: 322 us, 323
    in launches of their own.
    """
    if not isinstance(tile, GemmSwapAb) or tile.slabs != 2 or tile.group_m != 1:
        return None
    if tile.block_m >= 64:
        return None
    return replace(tile, math_regs=tables.MATH_REGS, load_regs=tables.LOAD_REGS)


def fused_stages(recipe: str, how: Numerics, tile: GemmSwapAb, beside: smem.Beside) -> int:
    """Stages that the table wants of a fused launch: no more than staged ones have, or than fit.

    One fewer with a routing of more than ROUTING_BYTES, even where all would fit.
    """
    fitting = max_stages(smem.fused(recipe, how, tile, beside))
    return min(fitting, tile.num_stages - (beside.routing > tables.ROUTING_BYTES))


def fused_tile(
    call: CallSpec, each: int, overrides: Mapping[str, Value]
) -> tuple[GemmSwapAb | None, str]:
    """(the tile of a launch with `each` tokens of a rank, why), or (None, why there is none)."""
    p = call.problem
    load = each * p.num_ranks * p.top_k / p.num_experts
    wide, why = tile_for(call, load, overrides)
    tile = as_fused(wide)
    if tile is None:
        rows = f"{load:.1f} rows an expert need the tile {wide}"
        return None, f"{rows}, which a fused launch cannot hold"
    how, beside = numerics("hopper", p.recipe, fits_e4m3=call.fits_e4m3), _beside(call, each)
    if "num_stages" not in overrides:
        tile = replace(tile, num_stages=fused_stages(p.recipe, how, tile, beside))
    fitting = max_stages(smem.fused(p.recipe, how, tile, beside))
    if not 2 <= tile.num_stages <= fitting:
        return None, fused.why_stages(tile.num_stages, fitting, beside.routing)
    return tile, why


def _beside(call: CallSpec, each: int) -> smem.Beside:
    """What a CTA of a launch with `each` tokens of a rank holds beside its stages."""
    ranks, experts = call.problem.num_ranks, fused.num_local_experts(call)
    routing = fused.routing_bytes(fused.num_slots(call, each), experts, ranks)
    return smem.Beside(routing, next_power_of_2(experts, 32), ranks, call.has_bias)


def fused_shared_memory(call: CallSpec, tile: GemmSwapAb) -> SharedMemory:
    """The sum of a CTA of the fused launch."""
    how = numerics("hopper", call.problem.recipe, fits_e4m3=call.fits_e4m3)
    _, each = passes_of(call)
    return smem.fused(call.problem.recipe, how, tile, _beside(call, each))


def _fits(recipe: str, fits_e4m3: bool) -> fused.Fits:
    return lambda rows: as_fused(pick(recipe, rows, fits_e4m3=fits_e4m3)[0]) is not None


def tokens_of_a_launch(
    recipe: str,
    num_tokens: int,
    slots_per_token: int,
    num_experts: int,
    *,
    fits_e4m3: bool = True,
) -> int:
    """As `fused.tokens_of_a_launch`."""
    fits = _fits(recipe, fits_e4m3)
    return fused.tokens_of_a_launch(fits, num_tokens, slots_per_token, num_experts)


def passes_of(call: CallSpec) -> tuple[int, int]:
    """(fused launches of a call, tokens of a rank in each)."""
    return fused.passes_of(call, _fits(call.problem.recipe, call.fits_e4m3))


def why_not_fused(call: CallSpec, overrides: Mapping[str, Value]) -> fused.Refusal | None:
    """Why no fused launch takes this call on Hopper; None where one does."""
    p = call.problem
    refusal = fused.why_never(call)
    if refusal is not None:
        return refusal
    if call.shared is not None:
        if call.shared.apart:
            why = "shared experts of a fused launch must be like the routed ones, in FP4 with E8M0 "
            return fused.Refusal(f"{why}scales, without bias; got {call.shared.apart}")
        if p.top_k + call.num_shared > MAX_TOP_K:
            return fused.Refusal(
                f"combine takes {MAX_TOP_K} slots of a token at most", CapacityError
            )
    _, each = passes_of(call)
    refusal = fused.why_too_many(call, fused.num_slots(call, each))
    if refusal is not None:
        return refusal
    tile, why = fused_tile(call, each, overrides)
    return fused.Refusal(why, CapacityError) if tile is None else None


def max_fused_tokens(call: CallSpec) -> int:
    """Tokens of the largest call of one rank that a fused launch takes."""
    return fused.max_tokens(call, _fits(call.problem.recipe, call.fits_e4m3))


def tile_for(call: CallSpec, load: float, chosen: Mapping[str, Value]) -> tuple[Tile, str]:
    """(the tile of routed experts with so many rows each, why)."""
    recipe = call.problem.recipe
    how = numerics("hopper", recipe, fits_e4m3=call.fits_e4m3)
    tile, why = pick(recipe, load, fits_e4m3=call.fits_e4m3)
    changed, overrides = overridden(recipe, how, tile, chosen)
    return (changed, overrides) if overrides else (tile, why)


# -- launches -------------------------------------------------------------------------------------


def num_rows(slots: int, experts: int) -> int:
    """Rows of a pool that any routing fits, gaps before experts included."""
    align = tables.ROW_ALIGN
    return align_up(slots + min(slots, experts) * (align - 1), align)


def max_tiles(slots: int, experts: int, block_m: int) -> int:
    """Tiles of `block_m` rows that any routing can ask for."""
    return max(min(slots, slots // block_m + experts), 1)


def exchange_of(call: CallSpec) -> Workspace:
    """The memory that a rank shares with its peers in fused calls."""
    p = call.problem
    num_passes, each = passes_of(call)
    how = numerics("hopper", p.recipe, fits_e4m3=call.fits_e4m3)
    width = align_up(p.hidden, tables.WIDTH)
    token_bytes = width * (1 if how.mma == "fp8" else 2)
    scale_bytes = 16 * ceil_div(width, 512) if how.promotion else 0
    return fused.workspace(call, num_passes, each, token_bytes, scale_bytes)


def fused_launch(call: CallSpec, num_sms: int, overrides: Mapping[str, Value]) -> Launch:
    """The launch of a fused call, or of each of its passes over a group."""
    _, each = passes_of(call)
    tile, why = fused_tile(call, each, overrides)
    assert tile is not None, "why_not_fused would have refused it"
    rows = num_rows(fused.num_slots(call, each), fused.num_local_experts(call))
    return fused.launch("mega_kernel", call, each, tile, why, rows, num_sms, overrides)


class Sizes(NamedTuple):
    """What one pass goes through: rows of tokens, their slots, experts and widths."""

    num_tokens: int
    top_k: int  # slots of a token, shared ones included
    num_experts: int  # shared ones included
    num_shared: int
    hidden: int
    intermediate: int

    @property
    def num_slots(self) -> int:
        """Slots of all tokens."""
        return self.num_tokens * self.top_k


def staged_pass(sizes: Sizes, tile: Tile, num_sms: int, why: str, experts: str) -> Pass:
    """Permute, L1 and L2 of the slots of one set of experts."""
    slots, max_experts = sizes.num_slots, next_power_of_2(sizes.num_experts, 2)
    has_items = tile.has_items
    is_small = slots <= tables.SMALL_SLOTS and not has_items
    is_counted = slots > tables.MIDDLE_SLOTS
    launches: list[Launch] = []
    chunks = ceil_div(slots, tables.CHUNK)
    if not is_small:
        if is_counted:
            launches += count_and_scan(chunks, sizes.num_experts, tables.CHUNK, max_experts)
        place = Place(
            block_m=tile.block_m,
            chunk=tables.CHUNK,
            count_chunk=tables.COUNT_CHUNK,
            is_counted=is_counted,
            max_experts=max_experts,
            max_ctas=next_power_of_2(num_sms) if has_items else 0,
            is_dynamic=tile.is_dynamic,
            num_warps=tables.PLACE_WARPS[sizes.num_shared > 0],
            row_align=tables.ROW_ALIGN,
        )
        waves = sum(waves_of(sizes, tile, num_sms)) if has_items else 0
        what = "uses the counts of each chunk" if is_counted else "every program counts all slots"
        launches.append(Launch("place", "_place_kernel", (chunks + 1 + waves,), place, what))
    cols, warps = tables.PERMUTE_COLS[is_small]
    permute = Permute(
        is_small=is_small,
        block_m=tile.block_m,
        cols=cols,
        num_warps=warps,
        max_slots=next_power_of_2(slots, 16) if is_small else 16,
        max_experts=max_experts,
        max_top_k=next_power_of_2(sizes.top_k),
        row_align=tables.ROW_ALIGN,
    )
    width = align_up(sizes.hidden, tables.WIDTH)
    grid = (sizes.num_tokens, ceil_div(width, cols))
    small = f"up to {tables.SMALL_SLOTS} slots in one launch" if is_small else "rows from place"
    launches.append(Launch("permute", "_pool_kernel", grid, permute, small))
    for name, depth in (("l1", sizes.hidden), ("l2", sizes.intermediate)):
        launches.append(gemm_launch(name, tile, depth, num_sms, why))
    return Pass(experts, slots, sizes.num_experts, tuple(launches))


def gemm_launch(name: str, tile: Tile, depth: int, num_sms: int, why: str) -> Launch:
    """One linear over K of `depth` columns: a persistent launch on all SMs."""
    if isinstance(tile, GemmSwapAb):
        return Launch(name, "gemm_swap_ab_kernel", (num_sms,), tile, why)
    if tile.decode_ahead:
        require(
            decodes_per_wave(depth, num_sms),
            f"decode_ahead needs K of fewer chunks of {128 * decode_chunk(depth)} columns than "
            f"there are CTAs, {num_sms}",
            got=f"{depth} columns",
            fix="leave decode_ahead out",
            kind=CapacityError,
        )
        tile = replace(tile, decode_chunk=decode_chunk(depth))
    return Launch(name, "gemm_kernel", (num_sms,), tile, why)


def decode_chunk(depth: int) -> int:
    """K blocks of a job of FP4 that is decoded per wave."""
    return 2 if align_up(depth, tables.WIDTH) % 512 else 4


def decodes_per_wave(depth: int, num_sms: int) -> bool:
    """Whether so many CTAs have a counter for every chunk of K, and one for giving up."""
    return align_up(depth, tables.WIDTH) // (128 * decode_chunk(depth)) < num_sms


def waves_of(sizes: Sizes, tile: Tile, num_sms: int) -> tuple[int, int]:
    """Waves of one work item a CTA, of L1 and of L2."""
    tiles = max_tiles(sizes.num_slots, sizes.num_experts, tile.block_m)
    l1 = 2 * align_up(sizes.intermediate, tables.WIDTH) // 256
    l2 = ceil_div(sizes.hidden, 256)
    return ceil_div(tiles * l1, num_sms), ceil_div(tiles * l2, num_sms)


def count_and_scan(chunks: int, experts: int, chunk: int, max_experts: int) -> list[Launch]:
    """Two launches that count the slots of each expert chunk by chunk."""
    return [
        Launch("count", "_count_kernel", (chunks,), Count(chunk, max_experts), "chunk by chunk"),
        Launch(
            "scan", "_scan_kernel", (experts,), Scan(next_power_of_2(chunks, 2)), "running sums"
        ),
    ]


def staged_passes(call: CallSpec, num_sms: int, overrides: Mapping[str, Value]) -> tuple[Pass, ...]:
    """The routed experts' pass, and the shared ones' where they are apart."""
    p = call.problem
    load = p.num_tokens * p.top_k / p.num_experts
    tile, why = tile_for(call, load, overrides)
    extra = call.joined
    sizes = Sizes(
        p.num_tokens, p.top_k + extra, p.num_experts + extra, extra, p.hidden, p.intermediate
    )
    passes = [staged_pass(sizes, tile, num_sms, why, "routed and shared" if extra else "routed")]
    if call.shared is not None and call.shared.apart:
        passes.append(shared_pass(call, num_sms))
    return tuple(passes)


def shared_pass(call: CallSpec, num_sms: int) -> Pass:
    """Shared experts in launches of their own: each sees every token."""
    p, shared = call.problem, call.shared
    assert shared is not None
    tile, why = pick(shared.recipe, float(p.num_tokens), fits_e4m3=shared.fits_e4m3)
    sizes = Sizes(p.num_tokens, shared.num, shared.num, 0, p.hidden, shared.intermediate)
    return staged_pass(sizes, tile, num_sms, why, "shared")


def rows_pass(call: CallSpec, num_rows: int, num_sms: int, overrides: Mapping[str, Value]) -> Pass:
    """The rows that a rank received for its experts, one slot each."""
    p = call.problem
    local = p.num_local_experts
    tile, why = tile_for(call, num_rows / local, overrides)
    sizes = Sizes(num_rows, 1, local, 0, p.hidden, p.intermediate)
    return staged_pass(sizes, tile, num_sms, why, "routed")


def finish(call: CallSpec, num_tokens: int) -> list[Launch]:
    """Rows to FP8, where combine wants that, and combine."""
    p, slots = call.problem, call.problem.top_k + call.num_shared
    launches = []
    if call.combine == "fp8":
        launches.append(
            quantize_rows("rows_to_fp8", num_tokens * slots, p.hidden, "codes-fp8_combine")
        )
    launches.append(combine(num_tokens, p.hidden))
    return launches


def shared_memory(call: CallSpec, tile: Tile) -> SharedMemory:
    """The sum of a CTA of the routed experts' GEMMs."""
    recipe = call.problem.recipe
    if isinstance(tile, Gemm):
        return smem.gemm(recipe, tile)
    how = numerics("hopper", recipe, fits_e4m3=call.fits_e4m3)
    return smem.gemm_swap_ab(recipe, how, tile)
