"""Blackwell's fused launch: which calls it takes, its tile, and the memory of a CTA.

Emulated and compiled, not yet run on the hardware. What a launch over slots, ranks and pool waves
needs is Hopper's (`planner.hopper`): the kernels share those parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megamoe.errors import CapacityError
from megamoe.layout.regions import Workspace, align_up
from megamoe.planner import blackwell, fused
from megamoe.planner.call import CallSpec
from megamoe.planner.choice import SharedMemory, Term, Value
from megamoe.planner.launches import GemmTmem, Launch
from megamoe.planner.numerics import numerics
from megamoe.planner.tables import blackwell as tables
from megamoe.planner.tables import hopper as limits

GROUPS = 2  # warpgroups that take tiles in turn


# -- the tile --------------------------------------------------------------------------------------


def shared_memory(recipe: str, tile: GemmTmem, routing: int) -> SharedMemory:
    """Of `mega_tmem_kernel`, as a named sum: the staged GEMM's, and what a fused launch adds."""
    fixed = (
        Term("scratch", tables.FUSED_SCRATCH, "tokens and outputs on their way, the compiler's"),
        Term("routing", routing, "experts of all slots, first rows of all experts"),
        Term("reserve", tables.FUSED_RESERVE, "work items, barriers"),
    )
    return replace(blackwell.shared_memory(recipe, tile), fixed=fixed)


def as_fused(recipe: str, tile: GemmTmem, routing: int = 0) -> tuple[GemmTmem | None, str]:
    """(the tile of a fused launch, "") or (None, why only launches of their own hold it)."""
    limit = tables.FUSED[recipe]
    if tile.block_m > limit.block_m:
        return None, f"up to {limit.block_m} tokens a tile: {limit.why}"
    fitted = replace(
        tile,
        num_sums=tile.num_sums if numerics("blackwell", recipe).promotion else GROUPS,
        chunk=min(tile.chunk, limit.chunk),
        num_warps=4,
        group_m=1,
        num_stages=0,
        math_regs=limit.math_regs,
        load_regs=limit.load_regs,
        decode_regs=limit.decode_regs,
    )
    memory = shared_memory(recipe, fitted, max(routing, limits.ROUTING_BYTES))
    stages = min((memory.limit - memory.fixed_bytes) // memory.stage_bytes, tables.MAX_STAGES)
    while stages and blackwell.tmem_columns(recipe, replace(fitted, num_stages=stages)) > 512:
        stages -= 1
    if stages < 2:
        return None, fused.why_stages(2, stages, routing)
    table = tile.num_stages if tile.num_stages >= 2 else stages
    return replace(fitted, num_stages=min(stages, table)), ""


def fused_tile(
    call: CallSpec, each: int, overrides: Mapping[str, Value]
) -> tuple[GemmTmem | None, str]:
    """(the tile of a launch with `each` tokens of a rank, why), or (None, why there is none)."""
    p = call.problem
    slots, experts = fused.num_slots(call, each), fused.num_local_experts(call)
    load, routing = slots / p.num_experts, fused.routing_bytes(slots, experts, p.num_ranks)
    wide, why = tile_for(call, load, overrides)
    tile, refusal = as_fused(p.recipe, wide, routing)
    if tile is None:
        rows = f"{load:.1f} rows an expert want {wide}"
        return None, f"a fused launch of {p.recipe} takes {refusal}; {rows}"
    if overrides.get("num_stages") not in (None, tile.num_stages):
        return None, fused.why_stages(wide.num_stages, tile.num_stages, routing)
    return tile, why


def tile_for(call: CallSpec, load: float, overrides: Mapping[str, Value]) -> tuple[GemmTmem, str]:
    """(the staged tile of routed experts with so many rows each, why)."""
    recipe = call.problem.recipe
    tile, why = blackwell.pick(recipe, load)
    changed, asked = blackwell.overridden(recipe, tile, overrides)
    return changed, asked or why


# -- which calls are fused -------------------------------------------------------------------------


def _fits(recipe: str) -> fused.Fits:
    return lambda rows: as_fused(recipe, blackwell.pick(recipe, rows)[0])[0] is not None


def passes_of(call: CallSpec) -> tuple[int, int]:
    """(fused launches of a call, tokens of a rank in each): as few as a launch's limits let."""
    return fused.passes_of(call, _fits(call.problem.recipe))


def max_fused_tokens(call: CallSpec) -> int:
    """Tokens of the largest call of one rank that a fused launch takes."""
    return fused.max_tokens(call, _fits(call.problem.recipe))


def why_not_fused(call: CallSpec, overrides: Mapping[str, Value]) -> fused.Refusal | None:
    """Why no fused launch takes this call on Blackwell; None where one does."""
    refusal = fused.why_never(call)
    if refusal is not None:
        return refusal
    if call.shared is not None:
        return fused.Refusal(
            "fused calls on Blackwell have no shared experts: those have own launches"
        )
    if overrides.get("schedule", "strided") != "strided":
        return fused.Refusal(
            "a fused launch takes tiles from a counter of its own, whatever the schedule"
        )
    _, each = passes_of(call)
    slots = fused.num_slots(call, each)
    refusal = fused.why_too_many(call, slots)
    if refusal is not None:
        return refusal
    tile, why = fused_tile(call, each, overrides)
    return fused.Refusal(why, CapacityError) if tile is None else None


# -- launches --------------------------------------------------------------------------------------


def exchange_of(call: CallSpec) -> Workspace:
    """The memory that a rank shares with its peers in fused calls."""
    p = call.problem
    num_passes, each = passes_of(call)
    token, scales = blackwell.token_bytes(p.recipe, align_up(p.hidden, tables.WIDTH))
    return fused.workspace(call, num_passes, each, token, align_up(scales, 16))


def fused_launch(call: CallSpec, num_sms: int, overrides: Mapping[str, Value]) -> Launch:
    """The launch of a fused call, or of each of its passes over a group."""
    _, each = passes_of(call)
    slots, experts = fused.num_slots(call, each), fused.num_local_experts(call)
    tile, why = fused_tile(call, each, overrides)
    assert tile is not None, "why_not_fused would have refused it"
    rows, align = blackwell.num_rows(slots, experts, tile.block_m), tile.block_m
    return fused.launch(
        kernel="mega_tmem_kernel",
        call=call,
        each=each,
        tile=tile,
        why=why,
        max_rows=rows,
        num_sms=num_sms,
        overrides=overrides,
        align=align,
    )
