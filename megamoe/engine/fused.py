"""Fused launches of the Hopper and Blackwell backends: bit for bit what staged ones give."""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.engine.call import Call
from megamoe.engine.gluon import Gluon
from megamoe.engine.interface import backend_named
from megamoe.engine.launch_options import bound_s
from megamoe.engine.status import DeviceStatus
from megamoe.engine.symm_buffer import SymmBuffer
from megamoe.engine.weights import ExpertWeights
from megamoe.kernels.gluon.mega.arguments import Experts, State, Tokens, World
from megamoe.kernels.gluon.mega.scheduler import WAVE_TABLE
from megamoe.layout.regions import align_up
from megamoe.planner.hopper import max_tiles
from megamoe.planner.launches import GemmTmem, Launch, Mega
from megamoe.problem import Options


def _backend_of(config: Mega) -> Gluon:
    """The backend whose kernels a configuration is of."""
    one = backend_named("blackwell" if isinstance(config.tile, GemmTmem) else "hopper")
    assert isinstance(one, Gluon)
    return one


def run(call: Call, step: Launch, *, trace: Tensor | None = None, absent: int = -1) -> Tensor:
    """One rank, one launch: bf16 [T, H] -> bf16 [T, H].

    trace   buffer for stamps (`kernels/gluon/mega/events.py`)
    absent  a rank that never says it is done, for tests of the bound
    """
    weights, status = call.weights, call.status
    num = call.topk_idx.numel() + call.num_tokens * call.num_shared
    assert isinstance(call.x, Tensor)
    rows, y = (
        torch.empty(n, weights.hidden, dtype=torch.bfloat16, device=weights.device)
        for n in (num, call.num_tokens)
    )
    tokens = Tokens(
        x=call.x, idx=call.topk_idx, weights=call.topk_weights, num_valid=call.num_valid,
        g=weights.x_global, rows=rows, y=y, error=status.bad_slot, stats=call.stats,
    )  # fmt: skip
    return _run(
        tokens, status.counters, weights, call.options, World(absent=absent),
        call.shared, step=step, status=status, timeout_s=call.timeout_s,
        is_poisoned=call.is_poisoned, trace=trace,
    )  # fmt: skip


def over(
    buffer: SymmBuffer,
    num_tokens: int,
    weights: ExpertWeights,
    options: Options,
    world: World,
    stats: Tensor,
    *,
    step: Launch,
    status: DeviceStatus,
    timeout_s: float,
    is_poisoned: bool = False,
    number: int = 0,
    is_compiled_only: bool = False,
) -> Tensor:
    """One launch of the world's ranks in it -> bf16 [their tokens, H], rank after rank.

    buffer      of the first of them; all ranks have put their tokens into theirs
    num_tokens  of a rank, padding included: the same on all ranks
    weights     the experts of these ranks
    number      of the launch among those of a call: it takes the tokens after the ones before it
    is_compiled_only  compile the launch, and do not make it
    """
    first = number * num_tokens
    end, top_k = first + num_tokens, buffer.topk_idx.shape[1]
    rows = buffer.rows[first * top_k : end * top_k]
    y = buffer.tokens.new_empty(world.local * num_tokens, buffer.tokens.shape[1])
    tokens = Tokens(
        x=buffer.tokens[first:end], idx=buffer.topk_idx[first:end],
        weights=buffer.topk_weights[first:end], num_valid=buffer.num_valid[number : number + 1],
        g=weights.x_global, rows=rows, y=y, error=status.bad_slot, stats=stats, first=first,
    )  # fmt: skip
    return _run(
        tokens, buffer.counters, weights, options, world, step=step, status=status,
        timeout_s=timeout_s, is_poisoned=is_poisoned, is_compiled_only=is_compiled_only,
    )  # fmt: skip


def _run(
    tokens: Tokens,
    counters: Tensor,
    weights: ExpertWeights,
    options: Options,
    world: World,
    shared: ExpertWeights | None = None,
    *,
    step: Launch,
    status: DeviceStatus,
    timeout_s: float,
    is_poisoned: bool,
    trace: Tensor | None = None,
    is_compiled_only: bool = False,
) -> Tensor:
    config, device = step.config, weights.device
    assert isinstance(config, Mega)
    backend, extra = _backend_of(config), 0 if shared is None else shared.num_experts
    backend.check_activation(options)
    packed = backend.prepare(weights, shared)
    slots = world.num * (tokens.idx.numel() + len(tokens.x) * extra)
    experts, block_m = weights.num_experts // world.local + extra, config.tile.block_m
    pool = backend.launch.pool(
        packed.arithmetic, slots, weights.hidden, experts, block_m, device, ranks=world.local,
        is_far=world.num > 1, rows=config.pool_rows,
    )  # fmt: skip
    acts = backend.launch.pool(
        packed.arithmetic, slots, weights.intermediate, experts, block_m, device, pool, world.local,
        rows=config.pool_rows,
    )  # fmt: skip
    words = align_up(4 * max_tiles(slots, experts, block_m), 32) + WAVE_TABLE.value
    private = torch.empty(step.num_ctas, words, dtype=torch.int32, device=device)
    state = State(counters, private, status.report)
    if is_poisoned:
        poison(*pool, acts.data, acts.scale, private, tokens.rows, tokens.y)
    if not is_compiled_only:
        status.order_after_last()
    all_experts = Experts(
        packed.w13, packed.w2, experts, extra, weights.b13, weights.b2, weights.acts_global
    )
    backend.mega.fused(
        tokens, pool, acts, all_experts, step, packed.arithmetic, options, state, world=world,
        timeout_s=bound_s(timeout_s), trace=trace, is_compiled_only=is_compiled_only,
    )  # fmt: skip
    return tokens.y


def poison(*tensors: Tensor) -> None:
    """NaN in every format, -1 in integers: what a launch does not write, it must not use."""
    for t in tensors:
        t.view(torch.uint8).fill_(0xFF)
