"""Fused launches of any GPU: which calls they take, in how many passes, and their memory.

The kernels of Hopper and Blackwell share what a launch over slots, ranks and pool waves needs. What
differs is the tile: `planner.hopper` and `planner.blackwell_fused` say how many rows of an expert
it takes.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Mapping
from typing import NamedTuple

from megamoe.errors import CapacityError, DTypeError, MegaMoEError, NotAvailable, require
from megamoe.layout.exchange import InboxSizes, exchange
from megamoe.layout.regions import Workspace, align_up, ceil_div
from megamoe.planner.call import CallSpec
from megamoe.planner.choice import Value
from megamoe.planner.launches import GemmSwapAb, GemmTmem, Launch, Mega, next_power_of_2
from megamoe.planner.tables import hopper as tables

Fits = Callable[[float], bool]  # rows of an expert -> whether a fused launch holds their tile


class Refusal(NamedTuple):
    """Why a call does not run in a mode."""

    why: str
    kind: type[MegaMoEError] = NotAvailable


def require_mode(mode: str, refusal: Refusal | None) -> None:
    """Refuse a mode that was asked for and does not take the call."""
    require(
        refusal is None,
        f"mode {mode} must fit the call",
        got=refusal.why if refusal else "",
        fix="use mode='auto' or 'staged'",
        kind=refusal.kind if refusal else NotAvailable,
    )


# -- which calls are fused -------------------------------------------------------------------------


def why_never(call: CallSpec) -> Refusal | None:
    """Why no fused launch of any GPU takes this call, whatever its size."""
    if call.is_quantized:
        return Refusal("a fused launch takes BF16 tokens; these come quantised", DTypeError)
    if call.is_captured:
        return Refusal("a graph around mm.moe has no counters of its own; MoE has them")
    if call.is_group:
        if call.shared is not None:
            return Refusal("fused calls over a group have no shared experts")
        if call.is_placed:
            return Refusal("fused calls over a group need contiguous experts, each once")
        if call.problem.num_ranks > tables.MAX_RANKS:
            return Refusal(f"fused calls take {tables.MAX_RANKS} ranks at most")
        if not call.max_tokens:
            why = "fused calls over a group need max_tokens_per_rank: memory is shared up front"
            return Refusal(why, CapacityError)
    return None


def num_slots(call: CallSpec, num_tokens: int) -> int:
    """Slots of a launch with so many tokens of each rank, those of shared experts included."""
    p = call.problem
    return p.num_ranks * num_tokens * (p.top_k + call.joined)


def why_too_many(call: CallSpec, slots: int) -> Refusal | None:
    """Why no fused launch takes so many slots; None where one does."""
    limit = tables.MAX_SLOTS if call.problem.num_ranks == 1 else tables.MAX_GROUP_SLOTS
    if slots <= limit:
        return None
    return Refusal(f"a fused launch takes {limit} slots at most; got {slots}", CapacityError)


def why_stages(asked: int, fitting: int, routing: int) -> str:
    """Why no fused launch has so many stages beside its routing."""
    if fitting < 2:
        return f"fewer than two stages fit beside {routing} bytes of routing"
    return f"from 2 to {fitting} stages fit beside {routing} bytes of routing; got {asked}"


def tokens_of_a_launch(fits: Fits, num_tokens: int, slots_per_token: int, num_experts: int) -> int:
    """Tokens of a rank, up to `num_tokens`, that one launch takes; arguments as `passes`."""

    def is_too_many(tokens: int) -> bool:
        return not fits(tokens * slots_per_token / num_experts)

    max_tokens = min(num_tokens, tables.MAX_GROUP_SLOTS // slots_per_token)
    return bisect(range(1, max_tokens + 1), False, key=is_too_many)


def passes(fits: Fits, num_tokens: int, slots_per_token: int, num_experts: int) -> tuple[int, int]:
    """(launches of a call over a group, tokens of a rank in each): as few as a launch's limits let.

    slots_per_token  of all ranks, for each token of a rank
    """
    each = tokens_of_a_launch(fits, num_tokens, slots_per_token, num_experts)
    num = ceil_div(num_tokens, max(each, 1))
    return num, ceil_div(num_tokens, num)


def passes_of(call: CallSpec, fits: Fits) -> tuple[int, int]:
    """(fused launches of a call, tokens of a rank in each)."""
    p = call.problem
    if not call.is_group:
        return 1, p.num_tokens
    return passes(fits, max(call.fused_tokens, 1), p.num_ranks * p.top_k, p.num_experts)


def max_tokens(call: CallSpec, fits: Fits) -> int:
    """Tokens of the largest call of one rank that a fused launch takes."""
    p = call.problem
    limit = max(tables.MAX_SLOTS // (p.top_k + call.joined), 1)
    return max(tokens_of_a_launch(fits, limit, p.top_k, p.num_experts), 1)


# -- memory ----------------------------------------------------------------------------------------


def slot_size(num_slots: int) -> int:
    """Slots to the next size that the fused kernels are compiled for."""
    return next(size for size in tables.SLOT_SIZES if num_slots <= size)


def routing_bytes(num_slots: int, num_experts: int, num_ranks: int = 1) -> int:
    """Shared memory of the experts of all slots and the counts of one rank's experts.

    Over several ranks sources count slots themselves: the counts of each.
    """
    counts = 4 * next_power_of_2(num_experts, 32)
    return 2 * slot_size(num_slots) + counts if num_ranks == 1 else tables.MAX_RANKS * counts


def ring(
    max_rows: int, pool_rows: int | None, block_m: int, align: int = tables.ROW_ALIGN
) -> tuple[int, int]:
    """(rows of the pool, those of a wave or 0) of a call with up to `max_rows` rows.

    align  rows at whose multiples experts begin

    >>> ring(100, None, 8), ring(100, 104, 8), ring(1000, 500, 8)
    ((100, 0), (100, 0), (496, 240))
    """
    if pool_rows is None or pool_rows >= max_rows:
        return max_rows, 0
    waves = tables.MAX_WAVES
    half = pool_rows // (2 * align) * align
    wave_rows = half - block_m
    least = 2 * (max(align_up(ceil_div(max_rows, waves), align), block_m) + block_m)
    require(  # waves of less than a tile could be empty
        wave_rows >= block_m and ceil_div(max_rows, wave_rows) <= waves,
        f"the pool of a call with up to {max_rows} rows must have {least} at least",
        got=f"pool_rows {pool_rows}",
        fix=f"there are {waves} waves at most, each of at least a tile of {block_m} rows",
        kind=CapacityError,
    )
    return 2 * half, wave_rows


def workspace(
    call: CallSpec, num_passes: int, each: int, token_bytes: int, scale_bytes: int
) -> Workspace:
    """The memory that a rank shares with its peers: passes with so many tokens of a rank in each.

    token_bytes  of a token's elements as a rank pushes them; `scale_bytes` of its scales
    """
    p = call.problem
    inbox = InboxSizes(
        num_ranks=p.num_ranks,
        num_tokens=each,
        token_bytes=token_bytes,
        scale_bytes=scale_bytes,
        max_top_k=next_power_of_2(p.top_k),
        max_experts=next_power_of_2(p.num_experts // p.num_ranks, 32),
    )
    return exchange(num_passes * each, p.hidden, p.top_k, tables.COUNTERS, num_passes, inbox)


# -- the launch ------------------------------------------------------------------------------------


def check_grid(num_sms: int, reserve_sms: int, ranks: int) -> None:
    """Require an SM for every rank of a launch."""
    require(
        num_sms - reserve_sms >= ranks,
        f"a fused launch needs {ranks} of the GPU's {num_sms} SMs at least",
        got=f"reserve_sms {reserve_sms}",
        fix="reserve fewer",
        kind=CapacityError,
    )


def weights_ahead(tile: GemmSwapAb | GemmTmem) -> int:
    """Stages of a CTA's first weights that come before all tokens are in the pool: half a ring.

    48 experts at 32 tokens, stages of one K block: 233.2 us with 6 of 11, 234.7 with none, 233.5
    with all. Fewer leave memory idle, more hold up the tokens.
    """
    return tile.num_stages // 2


def num_local_experts(call: CallSpec) -> int:
    """Experts of a rank's launch, shared ones that join it included."""
    return call.problem.num_experts // call.problem.num_ranks + call.joined


def launch(
    kernel: str,
    call: CallSpec,
    each: int,
    tile: GemmSwapAb | GemmTmem,
    why: str,
    max_rows: int,
    num_sms: int,
    overrides: Mapping[str, Value],
    align: int = tables.ROW_ALIGN,
) -> Launch:
    """The launch of a fused call with `each` tokens of a rank, or of each of its passes.

    max_rows  of the pool, where any routing fits; `align` as `ring`
    """
    p, slots = call.problem, num_slots(call, each)
    reserve, pool_rows = overrides.get("reserve_sms", 0), overrides.get("pool_rows")
    assert isinstance(reserve, int) and (pool_rows is None or isinstance(pool_rows, int))
    check_grid(num_sms, reserve, call.local_ranks)
    rows, wave_rows = ring(max_rows, pool_rows, tile.block_m, align)
    config = Mega(
        tile=tile,
        max_slots=slot_size(slots) if p.num_ranks == 1 else 0,
        max_experts=next_power_of_2(num_local_experts(call), 32),
        max_top_k=next_power_of_2(p.top_k + call.joined),
        weights_ahead=weights_ahead(tile),
        pool_rows=rows,
        wave_rows=wave_rows,
    )
    grid = ((num_sms - reserve) // call.local_ranks * call.local_ranks,)
    return Launch("mega", kernel, grid, config, why)
