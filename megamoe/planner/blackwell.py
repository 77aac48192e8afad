"""Blackwell's launches: the tile of a load, and every launch of a staged call.

Emulated and compiled, not yet run on the hardware: `auto` takes this backend only where a machine
has proven it (`CallSpec.is_certified`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megamoe.errors import CapacityError, NotAvailable, RangeError, require
from megamoe.formats.spec import recipe_named
from megamoe.hardware import SMEM_PER_CTA
from megamoe.layout.regions import align_up, ceil_div
from megamoe.planner.call import CallSpec
from megamoe.planner.choice import SharedMemory, Term, Value
from megamoe.planner.hopper import Sizes, count_and_scan, finish, max_tiles
from megamoe.planner.launches import GemmTmem, Launch, Pass, Permute, Place, next_power_of_2
from megamoe.planner.numerics import numerics
from megamoe.planner.overrides import TILE, word
from megamoe.planner.tables import blackwell as tables
from megamoe.planner.tables import hopper as permute_tables
from megamoe.planner.tables.blackwell import Shape

RESERVE = 1024  # barriers, the rest of the compiler's scratch
SCALE_BLOCK = 512  # bytes of 128 rows x 4 scales
DECODED_STAGES = 2  # w4a16: stages whose decoded weights stand in tensor memory
SCHEDULES = tuple(tables.SCHEDULES)
TMA_ROWS = 32  # FP32 scales of so many tokens at least: TMA alignment


# -- tokens between ranks -------------------------------------------------------------------------


def token_bytes(recipe: str, width: int) -> tuple[int, int]:
    """Bytes of a quantised token of `width` values, and of its scales, as ranks send it.

    >>> token_bytes("w4a8", 7168), token_bytes("nvfp4", 7168), token_bytes("w8a8", 7168)
    ((7168, 224), (3584, 448), (7168, 224))
    """
    acts, how = recipe_named(recipe).acts, numerics("blackwell", recipe)
    scales = {"placed": width // acts.block[1], "codes": 4 * width // 128, "plain": 0}[how.acts]
    return width * acts.element.bits // 8, scales


# -- memory of a CTA -----------------------------------------------------------------------------


def scale_vector(recipe: str) -> int:
    """Values under one scale of the weights, where the MMA or the decoder takes it; else 0."""
    weights = recipe_named(recipe).weights
    return weights.block[1] if weights.element.bits == 4 else 0


def shared_memory(recipe: str, tile: GemmTmem) -> SharedMemory:
    """Of `gemm_tmem_kernel`, as a named sum."""
    row, how = recipe_named(recipe), numerics("blackwell", recipe)
    m, k = tile.block_m, tile.block_k
    w_bits, x_bits = row.weights.element.bits, row.acts.element.bits
    padded = 8 if w_bits == 4 and x_bits == 8 else w_bits
    vec = scale_vector(recipe)
    blocks = k // (4 * vec) if vec else 0
    own = {"placed": blocks * SCALE_BLOCK, "codes": 4 * max(m, TMA_ROWS), "plain": 0}[how.acts]
    # The epilogue turns its outputs in the compiler's scratch.
    turned = tile.chunk if how.promotion == 0 else m
    scratch = 2 * tile.block_rows * turned
    fixed = (
        Term("transpose", scratch, "outputs being transposed, in the compiler's scratch"),
        Term("reserve", RESERVE, "barriers, the rest of the compiler's scratch"),
    )
    about = "FP4 padded to a byte a value" if padded != w_bits else "as the MMA reads them"
    stage = (
        Term("weights", tile.block_n * k * padded // 8, about),
        Term("weight scales", tile.num_halves * blocks * SCALE_BLOCK, "128 rows x 4 in 512 bytes"),
        Term("tokens", m * k * x_bits // (8 * tile.num_ctas), "as the MMA reads them"),
        Term("token scales", own, "128 rows however few tokens; FP32 where sums are promoted"),
        Term("barriers", 16, "full and empty"),
    )
    return SharedMemory(fixed, stage, tile.num_stages, SMEM_PER_CTA)


def tmem_columns(recipe: str, tile: GemmTmem) -> int:
    """Columns of tensor memory that `gemm_tmem_kernel` uses, of 512.

    >>> tmem_columns("w4a8", GemmTmem(64, 128, 5, 2, 32))
    316
    """
    how, vec = numerics("blackwell", recipe), scale_vector(recipe)
    used = tile.num_sums * tile.num_halves * tile.block_m
    if recipe == "w4a16":
        return used + DECODED_STAGES * tile.num_halves * tile.block_k // 2
    if vec:
        used += tile.num_stages * (tile.num_halves + 1) * tile.block_k // vec
        used += 0 if how.acts == "placed" else tile.block_k // vec  # ones
    return used


# -- tiles ---------------------------------------------------------------------------------------


def pick(recipe: str, rows_per_expert: float) -> tuple[GemmTmem, str]:
    """(the table's tile of both linears, why)."""
    return next(
        (tile_of(recipe, shape), why)
        for recipes, edge, shape, why in tables.TILES
        if recipe in recipes and rows_per_expert <= edge
    )


def tile_of(recipe: str, shape: Shape, num_ctas: int = 1) -> GemmTmem:
    """An entry of the table as a tile, with as many stages as fit."""
    chunk = min(shape.block_m, tables.CHUNK)
    tile = GemmTmem(
        shape.block_m, shape.block_k, 0, shape.num_sums, chunk, shape.num_warps, shape.group_m,
        num_ctas=num_ctas,
    )  # fmt: skip
    return replace(tile, num_stages=max_stages(recipe, tile))


def max_stages(recipe: str, tile: GemmTmem) -> int:
    """Stages that fit into shared memory, and their scales into tensor memory."""
    sums = shared_memory(recipe, tile)
    stages = min((sums.limit - sums.fixed_bytes) // sums.stage_bytes, tables.MAX_STAGES)
    while stages and tmem_columns(recipe, replace(tile, num_stages=stages)) > tables.TMEM_COLUMNS:
        stages -= 1
    return stages


def shipped(recipe: str) -> list[GemmTmem]:
    """The tiles that a recipe takes, few rows first."""
    edges = [edge for recipes, edge, *_ in tables.TILES if recipe in recipes]
    return list(dict.fromkeys(pick(recipe, min(edge, 1e9))[0] for edge in edges))


def narrowed(recipe: str, tile: GemmTmem) -> GemmTmem:
    """The tile with 128 weight rows, half of them: its sums stand twice where there is room."""
    one = replace(tile, num_halves=1, num_stages=0)
    twice = replace(one, num_sums=max(one.num_sums, 2))
    tiles = [replace(t, num_stages=max_stages(recipe, t)) for t in (twice, one)]
    return max(tiles, key=lambda t: t.num_stages)


def _asked_shape(recipe: str, tile: GemmTmem, asked: Mapping[str, Value]) -> tuple[Shape, int]:
    """(the table's shape with what was asked of block_m and block_k, CTAs that share it)."""
    how = numerics("blackwell", recipe)
    widths = tables.block_ms(recipe, how.promotion > 0)
    m = asked.get("block_m", tile.block_m)
    require(
        m in widths,
        f"block_m must be {' or '.join(map(str, widths))}: the MMA's N",
        got=m,
        kind=RangeError,
    )
    assert isinstance(m, int)
    base = next(
        shape for recipes, _, shape, _ in tables.TILES if recipe in recipes and shape.block_m >= m
    )
    k = asked.get("block_k", base.block_k)
    legal_k = (128,) if how.promotion or recipe == "w4a16" else (64, 128, 256)
    if how.mma == "fp4":
        legal_k = (128, 256, 512)
    vec = scale_vector(recipe)
    require(
        k in legal_k and (not vec or int(k or 0) % (4 * vec) == 0),
        f"block_k of {recipe} must be {' or '.join(map(str, legal_k))}, four scales or more",
        got=k,
        kind=RangeError,
    )
    assert isinstance(k, int)
    num_ctas = 2 if asked.get("cta_pair") else 1
    require(
        num_ctas == 1 or (recipe in tables.PAIRED and m >= tables.LEAST_PAIRED),
        f"a pair of CTAs multiplies {', '.join(tables.PAIRED)} in tiles of {tables.LEAST_PAIRED} "
        "tokens or more",
        got=f"{recipe}, block_m {m}",
        kind=NotAvailable,
    )
    return base._replace(block_m=m, block_k=k), num_ctas


def overridden(
    recipe: str, tile: GemmTmem, overrides: Mapping[str, Value], *, is_gated: bool = True
) -> tuple[GemmTmem, str]:
    """The tile with what was given in place of the table's, or a refusal with the reason.

    is_gated  L1 has gate and up in a tile, so that no other block_n is legal
    """
    asked = {name: overrides[name] for name in TILE if name in overrides}
    if not asked:
        return tile, ""
    legal = {"block_m", "block_k", "num_stages", "group_m", "schedule", "cta_pair"}
    legal |= set() if is_gated else {"block_n"}
    unknown = sorted(asked.keys() - legal)
    require(
        not unknown,
        f"a tile of the blackwell backend is given by {', '.join(sorted(legal))}",
        got=", ".join(unknown),
        kind=NotAvailable,
    )
    shape, num_ctas = _asked_shape(recipe, tile, asked)
    changed = tile_of(recipe, shape, num_ctas)
    changed = replace(
        changed,
        group_m=int(asked.get("group_m", shape.group_m) or 1),
        schedule=word(asked, "schedule", SCHEDULES) or tile.schedule,
    )
    n = asked.get("block_n", tile.block_n)
    require(
        n in (128, 256),
        "block_n must be 128 or 256: one or two MMAs of 128 weight rows",
        got=n,
        kind=RangeError,
    )
    require(
        num_ctas == 1 or (n == 256 and not changed.is_dynamic),
        "a pair of CTAs takes tiles of 256 weight rows in each, in a fixed order",
        got=f"block_n {n}, schedule {changed.schedule}",
        kind=NotAvailable,
    )
    if n == tables.BLOCK_ROWS:
        changed = narrowed(recipe, changed)
    stages = int(asked.get("num_stages", changed.num_stages) or 0)
    require(
        2 <= stages <= changed.num_stages,
        f"num_stages must lie between 2 and the {changed.num_stages} that fit",
        got=stages,
        kind=CapacityError,
    )
    why = "given: " + ", ".join(f"{name} {value}" for name, value in asked.items())
    return replace(changed, num_stages=stages), why


# -- launches ------------------------------------------------------------------------------------


def num_rows(slots: int, experts: int, block_m: int) -> int:
    """Rows of a pool that any routing fits: every expert begins with a tile."""
    return align_up(slots + min(slots, experts) * (block_m - 1), block_m)


def staged_pass(sizes: Sizes, tile: GemmTmem, num_sms: int, why: str, experts: str) -> Pass:
    """Permute, L1 and L2 of the slots of one set of experts."""
    slots, max_experts = sizes.num_slots, next_power_of_2(sizes.num_experts, 2)
    is_small = slots <= permute_tables.SMALL_SLOTS
    is_counted = slots > permute_tables.MIDDLE_SLOTS
    launches: list[Launch] = []
    chunks = ceil_div(slots, permute_tables.CHUNK)
    if not is_small:
        if is_counted:
            launches += count_and_scan(chunks, sizes.num_experts, permute_tables.CHUNK, max_experts)
        place = Place(
            block_m=tile.block_m, chunk=permute_tables.CHUNK,
            count_chunk=permute_tables.COUNT_CHUNK, is_counted=is_counted,
            max_experts=max_experts, max_ctas=0, is_dynamic=False,
            num_warps=permute_tables.PLACE_WARPS[sizes.num_shared > 0], row_align=tile.block_m,
            is_sorted=tile.schedule == "sorted",
        )  # fmt: skip
        what = "uses the counts of each chunk" if is_counted else "every program counts all slots"
        launches.append(Launch("place", "_place_kernel", (chunks + 1,), place, what))
    cols, warps = permute_tables.PERMUTE_COLS[is_small]
    permute = Permute(
        is_small=is_small, block_m=tile.block_m, cols=cols, num_warps=warps,
        max_slots=next_power_of_2(slots, 16) if is_small else 16, max_experts=max_experts,
        max_top_k=next_power_of_2(sizes.top_k), row_align=tile.block_m,
        is_sorted=tile.schedule == "sorted",
    )  # fmt: skip
    width = align_up(sizes.hidden, tables.WIDTH)
    small = "rows are placed"
    if is_small:
        small = f"up to {permute_tables.SMALL_SLOTS} slots in one launch"
    grid = (sizes.num_tokens, ceil_div(width, cols))
    launches.append(Launch("permute", "_pool_kernel", grid, permute, small))
    for name in ("l1", "l2"):
        num = max(num_sms // tile.num_ctas, 1)  # CTAs, or clusters of two
        launches.append(Launch(name, "gemm_tmem_kernel", (num,), tile, why))
    return Pass(experts, slots, sizes.num_experts, tuple(launches))


def staged_passes(call: CallSpec, num_sms: int, overrides: Mapping[str, Value]) -> tuple[Pass, ...]:
    """The routed experts' pass, and the shared ones'."""
    p = call.problem
    tile, why = pick(p.recipe, p.num_tokens * p.top_k / p.num_experts)
    changed, asked = overridden(p.recipe, tile, overrides)
    sizes = Sizes(p.num_tokens, p.top_k, p.num_experts, 0, p.hidden, p.intermediate)
    passes = [staged_pass(sizes, changed, num_sms, asked or why, "routed")]
    if call.shared is not None:
        passes.append(shared_pass(call, num_sms))
    return tuple(passes)


def shared_pass(call: CallSpec, num_sms: int) -> Pass:
    """Shared experts in launches of their own: each sees every token."""
    p, shared = call.problem, call.shared
    assert shared is not None
    tile, why = pick(shared.recipe, float(p.num_tokens))
    sizes = Sizes(p.num_tokens, shared.num, shared.num, 0, p.hidden, shared.intermediate)
    return staged_pass(sizes, tile, num_sms, why, "shared")


def rows_pass(call: CallSpec, rows: int, num_sms: int, overrides: Mapping[str, Value]) -> Pass:
    """The rows that a rank received for its experts, one slot each."""
    p = call.problem
    tile, why = pick(p.recipe, rows / p.num_local_experts)
    changed, asked = overridden(p.recipe, tile, overrides)
    sizes = Sizes(rows, 1, p.num_local_experts, 0, p.hidden, p.intermediate)
    return staged_pass(sizes, changed, num_sms, asked or why, "routed")


__all__ = ["finish", "max_tiles", "num_rows", "pick", "rows_pass", "shared_pass", "staged_passes"]
