"""Fused mode of the Hopper backend: the layer as one launch, bit for bit what staged gives."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from megamoe.engine import faults
from megamoe.engine.hopper import (
    can_be_e4m3,
    can_join,
    check_activation,
    num_of,
    prepared,
    with_shared,
)
from megamoe.engine.manner import AUTO, Manner, bound_s
from megamoe.engine.rooms import Room
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import CapacityError, require
from megamoe.formats.quantized import Quantized
from megamoe.kernels.hopper import deal, launch, mega_launch
from megamoe.kernels.hopper.pool import max_tiles, num_rows
from megamoe.kernels.hopper.waves import TABLE
from megamoe.layout.regions import align_up
from megamoe.problem import MAX_TOP_K, Options
from megamoe.schedule.heuristics.hopper_fused import (
    MOST_SLOTS,
    MOST_WAVES,
    as_fused,
    auto_mode,
    weights_ahead,
)
from megamoe.schedule.heuristics.hopper_tiles import Swapped, tiles

ALIGN = deal.ALIGN.value  # rows of the pool at which an expert begins


def tile_of(
    x: Tensor | Quantized,
    topk_idx: Tensor,
    weights: ExpertWeights,
    options: Options,
    shared: ExpertWeights | None,
    mode: str,
) -> Swapped | None:
    """The tile of a call in `mode`; None where it runs staged."""
    if mode == "staged" or not isinstance(x, Tensor):
        return None
    if shared is None:
        return tile_for(weights, topk_idx.numel(), mode)
    if topk_idx.shape[1] + shared.num_experts > MAX_TOP_K or not can_join(weights, shared):
        return None  # combine has a bit for each slot of a token
    extra = shared.num_experts, len(x) * shared.num_experts
    return tile_for(weights, topk_idx.numel(), mode, extra=extra)


def tile_for(
    weights: ExpertWeights, num_slots: int, mode: str = "fused", *, ranks: int = 1, local: int = 1,
    extra: tuple[int, int] = (0, 0),
) -> Swapped | None:  # fmt: skip
    """The tile of a call with so many slots over all ranks; None where it runs staged.

    `weights` are the experts of `local` of the ranks, `extra` the shared ones and their slots.
    """
    experts = weights.num_experts // local * ranks
    return _tile(weights.recipe, fits_e4m3(weights), num_slots, experts, mode, ranks, extra)


def fits_e4m3(weights: ExpertWeights) -> bool:
    """Whether the layer multiplies in FP8, where its recipe does."""
    return weights.recipe != "w4a8_block" or can_be_e4m3(weights)


@functools.lru_cache(maxsize=4096)
def _tile(
    recipe: str, fits_e4m3: bool, num_slots: int, num_experts: int, mode: str, ranks: int,
    extra: tuple[int, int],
) -> Swapped | None:  # fmt: skip
    if not 0 < num_slots + extra[1] <= MOST_SLOTS:
        return None
    tile, _ = tiles(recipe, num_slots / num_experts, fits_e4m3=fits_e4m3)
    if mode == "auto" and auto_mode(num_slots, tile)[0] != "fused":
        return None
    return as_fused(tile, routing_bytes(num_slots + extra[1], num_experts // ranks + extra[0]))


def routing_bytes(num_slots: int, num_experts: int) -> int:
    """Shared memory of the experts of all slots and the counts of one rank's experts."""
    experts = 1 << (max(num_experts, 32) - 1).bit_length()
    return 2 * mega_launch.num_slots(num_slots) + 4 * experts


def moe(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    weights: ExpertWeights,
    options: Options,
    error: Tensor,
    stats: Tensor | None = None,
    num_valid: Tensor | None = None,
    *,
    tile: Swapped,
    shared: ExpertWeights | None = None,
    found: faults.Faults | None = None,
    manner: Manner = AUTO,
    trace: Tensor | None = None,
    absent: int = -1,
) -> Tensor:
    """bf16 [T, H] -> bf16 [T, H].

    error      int32 [1], as in staged mode
    shared     experts that see every token with weight 1, if `can_join` finds them alike
    num_valid  int32 [1] on the device: tokens from there on are padding
    found      whose counters and report the launch uses; None: those of the stream
    trace      room for stamps (`kernels/hopper/stamps.py`)
    absent     a rank that never says it is done, for tests of the bound
    """
    found = faults.of_stream(weights.device) if found is None else found
    rows, y = (
        torch.empty(num, x.shape[1], dtype=torch.bfloat16, device=weights.device)
        for num in (topk_idx.numel() + len(x) * num_of(shared), len(x))
    )
    tokens = mega_launch.Tokens(
        x, topk_idx, topk_weights, num_valid, weights.x_global, rows, y, error, stats
    )
    return _run(
        tokens, found.counters, weights, options, mega_launch.ONE, shared, tile=tile, found=found,
        manner=manner, trace=trace, absent=absent,
    )  # fmt: skip


def over(
    room: Room,
    num_tokens: int,
    weights: ExpertWeights,
    options: Options,
    world: mega_launch.World,
    error: Tensor,
    stats: Tensor,
    *,
    tile: Swapped,
    found: faults.Faults,
    manner: Manner,
    number: int = 0,
    absent: int = -1,
) -> Tensor:
    """One launch of the world's ranks in it -> bf16 [their tokens, H], rank after rank.

    room        of the first of them; all ranks have put their tokens into theirs
    num_tokens  of a rank, padding included: the same on all ranks
    weights     the experts of these ranks
    number      of the launch among those of a call: it takes the tokens behind the ones before it
    """
    first = number * num_tokens
    end, top_k = first + num_tokens, room.topk_idx.shape[1]
    rows = room.rows[first * top_k : end * top_k]
    y = room.tokens.new_empty(world.local * num_tokens, room.tokens.shape[1])
    tokens = mega_launch.Tokens(
        room.tokens[first:end], room.topk_idx[first:end], room.topk_weights[first:end],
        room.num_valid[number : number + 1], weights.x_global, rows, y, error, stats, first,
    )  # fmt: skip
    return _run(
        tokens, room.counters, weights, options, world, tile=tile, found=found, manner=manner,
        absent=absent,
    )  # fmt: skip


def _run(
    tokens: mega_launch.Tokens,
    counters: Tensor,
    weights: ExpertWeights,
    options: Options,
    world: mega_launch.World,
    shared: ExpertWeights | None = None,
    *,
    tile: Swapped,
    found: faults.Faults,
    manner: Manner,
    trace: Tensor | None = None,
    absent: int = -1,
) -> Tensor:
    check_activation(options)
    device, extra = weights.device, num_of(shared)
    made = prepared(weights) if shared is None else with_shared(weights, shared)
    slots = world.num * (tokens.idx.numel() + len(tokens.x) * extra)
    experts = weights.num_experts // world.local + extra
    rows, wave_rows = ring(num_rows(slots, experts), manner.pool_rows, tile.tokens)
    pool = launch.pool(
        made.how, slots, weights.hidden, experts, tile.tokens, device, ranks=world.local,
        is_far=world.num > 1, rows=rows,
    )  # fmt: skip
    acts = launch.pool(
        made.how, slots, weights.intermediate, experts, tile.tokens, device, pool, world.local,
        rows=rows,
    )  # fmt: skip
    words = align_up(4 * max_tiles(slots, experts, tile.tokens), 32) + TABLE.value
    private = torch.empty(launch.num_sms(device), words, dtype=torch.int32, device=device)
    kept = mega_launch.State(counters, private, found.report)
    if manner.is_poisoned:
        poison(*pool, acts.data, acts.scale, private, tokens.rows, tokens.y)
    found.in_turn()
    mega_launch.fused(
        tokens, pool, acts, made.w13, made.w2, tile, made.how, options, kept, num_experts=experts,
        num_shared=extra, world=world, biases=(weights.b13, weights.b2),
        acts_factor=weights.acts_global, timeout_s=bound_s(manner.timeout_s),
        reserve_sms=manner.reserve_sms, trace=trace, ahead=weights_ahead(tile), absent=absent,
        wave_rows=wave_rows,
    )  # fmt: skip
    return tokens.y


def ring(most_rows: int, pool_rows: int | None, tile_rows: int) -> tuple[int, int]:
    """(rows of the pool, those of a wave or 0) of a call with up to `most_rows` rows.

    >>> ring(100, None, 8), ring(100, 104, 8), ring(1000, 500, 8)
    ((100, 0), (100, 0), (496, 240))
    """
    if pool_rows is None or pool_rows >= most_rows:
        return most_rows, 0
    half = pool_rows // (2 * ALIGN) * ALIGN
    wave_rows = half - tile_rows
    least = 2 * (max(align_up(-(-most_rows // MOST_WAVES), ALIGN), tile_rows) + tile_rows)
    require(  # waves of less than a tile could be empty
        wave_rows >= tile_rows and -(-most_rows // wave_rows) <= MOST_WAVES,
        f"the pool of a call with up to {most_rows} rows must have {least} at least",
        got=f"pool_rows {pool_rows}",
        fix=f"there are {MOST_WAVES} waves at most, each of at least a tile of {tile_rows} rows",
        kind=CapacityError,
    )
    return 2 * half, wave_rows


def poison(*tensors: Tensor) -> None:
    """NaN in every format, -1 in integers: what a launch does not write, it must not use."""
    for t in tensors:
        t.view(torch.uint8).fill_(0xFF)
