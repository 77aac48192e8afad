"""Blackwell's fused launch: which calls it takes, its tile, and the memory of a CTA.

Emulated and compiled, not yet run on the hardware. What a launch over slots, ranks and pool waves
needs is Hopper's (`planner.hopper`): the kernels share those parts.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping
from dataclasses import replace

from megamoe.errors import CapacityError, NotAvailable, require
from megamoe.formats.spec import recipe_named
from megamoe.layout.exchange import InboxSizes, exchange
from megamoe.layout.regions import Workspace, align_up, ceil_div
from megamoe.planner import blackwell, hopper
from megamoe.planner.call import CallSpec
from megamoe.planner.choice import SharedMemory, Term, Value
from megamoe.planner.hopper import Refusal, routing_bytes, slot_size
from megamoe.planner.launches import GemmTmem, Launch, Mega, next_power_of_2
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
    held = tables.FUSED[recipe]
    if tile.block_m > held.most:
        return None, f"up to {held.most} tokens a tile: {held.why}"
    made = replace(
        tile,
        num_sums=tile.num_sums if numerics("blackwell", recipe).promotion else GROUPS,
        chunk=min(tile.chunk, held.chunk),
        num_warps=4,
        group_m=1,
        num_stages=0,
        math_regs=held.math_regs,
        load_regs=held.load_regs,
        decode_regs=held.decode_regs,
    )
    memory = shared_memory(recipe, made, max(routing, limits.ROUTING_BYTES))
    stages = min((memory.limit - memory.fixed_bytes) // memory.stage_bytes, tables.MAX_STAGES)
    while stages and blackwell.tmem_columns(recipe, replace(made, num_stages=stages)) > 512:
        stages -= 1
    if stages < 2:
        return None, "fewer than two stages fit"
    asked = tile.num_stages if tile.num_stages >= 2 else stages
    return replace(made, num_stages=min(stages, asked)), ""


def tile_for(call: CallSpec, load: float, given: Mapping[str, Value]) -> tuple[GemmTmem, str]:
    """(the staged tile of routed experts with so many rows each, why)."""
    recipe = call.problem.recipe
    tile, why = blackwell.pick(recipe, load)
    made, asked = blackwell.overridden(recipe, tile, given)
    return made, asked or why


# -- which calls are fused -------------------------------------------------------------------------


def _most_tokens(recipe: str, slots_per_token: int, num_experts: int, most: int) -> int:
    """The most tokens, up to `most`, whose rows an expert a fused tile takes."""

    def is_too_many(tokens: int) -> bool:
        tile, _ = blackwell.pick(recipe, tokens * slots_per_token / num_experts)
        return as_fused(recipe, tile)[0] is None

    return max(bisect(range(1, most + 1), False, key=is_too_many), 1)


def passes_of(call: CallSpec) -> tuple[int, int]:
    """(fused launches of a call, tokens of a rank in each): as few as a launch's limits let."""
    p = call.problem
    if not call.is_group:
        return 1, p.num_tokens
    tokens, slots = max(call.fused_tokens, 1), p.num_ranks * p.top_k
    most = min(tokens, limits.MAX_GROUP_SLOTS // slots)
    num = ceil_div(tokens, _most_tokens(p.recipe, slots, p.num_experts, most))
    return num, ceil_div(tokens, num)


def max_fused_tokens(call: CallSpec) -> int:
    """Tokens of the largest call of one rank that a fused launch takes."""
    p = call.problem
    return _most_tokens(p.recipe, p.top_k, p.num_experts, max(limits.MAX_SLOTS // p.top_k, 1))


def why_not_fused(call: CallSpec, given: Mapping[str, Value]) -> Refusal | None:
    """Why no fused launch takes this call on Blackwell; None where one does."""
    p = call.problem
    refusal = hopper.why_never_fused(call)
    if refusal is not None:
        return refusal
    if call.shared is not None:
        return Refusal("fused calls on Blackwell have no shared experts: those have own launches")
    if given.get("schedule", "strided") != "strided":
        return Refusal("a fused launch draws tiles by tickets of its own, whatever the schedule")
    _, each = passes_of(call)
    slots = p.num_ranks * each * p.top_k
    limit = limits.MAX_SLOTS if p.num_ranks == 1 else limits.MAX_GROUP_SLOTS
    if slots > limit:
        return Refusal(f"a fused launch takes {limit} slots at most; got {slots}", CapacityError)
    load = slots / p.num_experts
    tile, _ = tile_for(call, load, given)
    made, why = as_fused(p.recipe, tile)
    if made is None:
        why = f"a fused launch of {p.recipe} takes {why}; {load:.1f} rows an expert want {tile}"
        return Refusal(why, CapacityError)
    return None


def mode_of(call: CallSpec, given: Mapping[str, Value], asked: str) -> tuple[str, str]:
    """(mode, why); refuses `fused` with the reason where no launch takes the call."""
    p = call.problem
    if asked == "staged":
        return "staged", "asked for"
    refusal = why_not_fused(call, given)
    if asked == "fused":
        require(
            refusal is None,
            "mode fused must fit the call",
            got=refusal.why if refusal else "",
            fix="use mode='auto' or 'staged'",
            kind=refusal.kind if refusal else NotAvailable,
        )
        return "fused", "asked for; emulated and compiled, not yet run on the hardware"
    if refusal is not None:
        return "staged", refusal.why
    slots = p.num_tokens * p.top_k * p.num_ranks
    return next((mode, why) for edge, mode, why in tables.MODES if slots <= edge)


# -- launches --------------------------------------------------------------------------------------


def exchange_of(call: CallSpec) -> Workspace:
    """The memory that a rank shares with its peers in fused calls."""
    p = call.problem
    num_passes, each = passes_of(call)
    acts, how = recipe_named(p.recipe).acts, numerics("blackwell", p.recipe)
    width = align_up(p.hidden, tables.WIDTH)
    scales = {"placed": width // acts.block[1], "codes": 4 * width // 128, "plain": 0}[how.acts]
    inbox = InboxSizes(
        num_ranks=p.num_ranks,
        num_tokens=each,
        token_bytes=width * acts.element.bits // 8,
        scale_bytes=align_up(scales, 16),
        max_top_k=next_power_of_2(p.top_k),
        max_experts=next_power_of_2(p.num_experts // p.num_ranks, 32),
    )
    return exchange(num_passes * each, p.hidden, p.top_k, limits.COUNTERS, num_passes, inbox)


def fused_launch(call: CallSpec, num_sms: int, given: Mapping[str, Value]) -> Launch:
    """The launch of a fused call, or of each of its passes over a group."""
    p = call.problem
    _, each = passes_of(call)
    slots, experts = p.num_ranks * each * p.top_k, p.num_experts // p.num_ranks
    wide, why = tile_for(call, slots / p.num_experts, given)
    tile, _ = as_fused(p.recipe, wide, routing_bytes(slots, experts, p.num_ranks))
    assert tile is not None, "why_not_fused would have refused it"
    reserve, pool_rows = given.get("reserve_sms", 0), given.get("pool_rows")
    assert isinstance(reserve, int) and (pool_rows is None or isinstance(pool_rows, int))
    hopper.check_grid(num_sms, reserve, call.local_ranks)
    most = blackwell.num_rows(slots, experts, tile.block_m)
    rows, wave_rows = hopper.ring(most, pool_rows, tile.block_m, tile.block_m)
    config = Mega(
        tile=tile,
        max_slots=slot_size(slots) if p.num_ranks == 1 else 0,
        max_experts=next_power_of_2(experts, 32),
        max_top_k=next_power_of_2(p.top_k),
        weights_ahead=tile.num_stages // 2,
        pool_rows=rows,
        wave_rows=wave_rows,
    )
    grid = ((num_sms - reserve) // call.local_ranks * call.local_ranks,)
    return Launch("mega", "mega_tmem_kernel", grid, config, why)
