"""Launcher of the fused layer. Configurations come from the plan; nothing is chosen here."""

from __future__ import annotations

import functools

from torch import Tensor

from megamoe.kernels.gluon.mega.arguments import (
    ONE_RANK,
    Experts,
    Inbox,
    State,
    Tokens,
    World,
    inbox_of,
)
from megamoe.kernels.gluon.pool import Pool
from megamoe.kernels.hopper.launch import (
    Arithmetic,
    factor_shape,
    or_unused,
    scale_descriptor,
    token_descriptor,
    weight_descriptors,
)
from megamoe.kernels.hopper.mega.kernel import mega_kernel
from megamoe.kernels.hopper.weights.operands import WEIGHTS
from megamoe.kernels.portable.acts import CODES, PLAIN
from megamoe.planner.launches import Launch, Mega
from megamoe.problem import Options


def fused(
    tokens: Tokens, pool: Pool, acts: Pool, experts: Experts, step: Launch, arithmetic: Arithmetic,
    options: Options, state: State, *, world: World = ONE_RANK, timeout_s: float = 10.0,
    trace: Tensor | None = None, is_compiled_only: bool = False,
) -> None:  # fmt: skip
    """One launch: tokens -> tokens.y, over the world's ranks."""
    w13, w2, num_experts, num_shared, b13, b2, acts_factor = experts
    config, unused = step.config, state.report
    assert isinstance(config, Mega)
    tile = config.tile
    num_tokens, hidden = tokens.x.shape
    top_k = tokens.idx.shape[1] + num_shared
    slots = world.num * num_tokens * top_k
    assert num_shared == 0 or world.num == 1
    assert pool.data.numel() < 2**31, "a place in the pool has 32 bits"
    linears = {}
    for name, x, w, bias in (("l1", pool, w13, b13), ("l2", acts, w2, b2)):
        data, scale = weight_descriptors(w, tile.k_blocks, tile.block_n)
        factor_rows, factor_cols = factor_shape(w)
        linear = {
            "w": data, "w_scale": scale, "x": token_descriptor(x.data, tile.block_m),
            "x_scale": scale_descriptor(x.scale, tile.block_m) if arithmetic.is_promoted else data,
            "factor": or_unused(w.factor, unused), "bias": or_unused(bias, unused),
            "steps": x.data.shape[1] // tile.block_k,
            "outputs": acts.data.shape[1] if w.is_gated else w.num_outputs,
            "num_bias": w.num_outputs, "factor_rows": factor_rows, "factor_cols": factor_cols,
        }  # fmt: skip
        linears |= {f"{name}_{key}": value for key, value in linear.items()}
    g = tokens.g
    run = mega_kernel[step.grid]
    if is_compiled_only:
        run = functools.partial(mega_kernel.warmup, grid=step.grid)
    run(
        x=tokens.x, x_stride=tokens.x.stride(0), g=or_unused(g, unused),
        g_stride=0 if g is None or g.ndim == 0 else 1, topk_idx=tokens.idx,
        topk_weights=tokens.weights, num_valid=or_unused(tokens.num_valid, unused),
        error=tokens.error, stats=or_unused(tokens.stats, unused), y=tokens.y, pool=pool.data,
        pool_scale=pool.scale, row_dest=pool.dest, row_weight=pool.weight, row_factor=pool.factor,
        acts=acts.data, acts_scale=acts.scale, rows=tokens.rows, tile_lists=state.private,
        counters=state.counters, signals=or_unused(world.signals, unused),
        peers=or_unused(world.peers, unused), **inbox_of(world, pool.data.dtype),
        report=state.report, trace=or_unused(trace, unused),
        bound_ns=int(timeout_s * 1e9), weights_ahead=config.weights_ahead, absent_rank=world.absent,
        first_rank=world.first, first_slot=tokens.first * tokens.idx.shape[1], num_slots=slots,
        tokens_per_rank=num_tokens, num_experts=num_experts,
        rows_per_rank=pool.data.shape[0] // world.local, pool_rows=pool.data.shape[0],
        wave_rows=config.wave_rows, tile_list_stride=state.private.stride(0),
        num_counters=state.counters.shape[0], hidden=hidden, width=pool.data.shape[1],
        clamp=float(options.limit), acts_factor=or_unused(acts_factor, unused), **linears,
        WEIGHTS=WEIGHTS[w13.kind], ACTS=arithmetic.acts, L2_ACTS=PLAIN,
        PROMOTED=arithmetic.is_promoted, FACTOR=w13.factor_is, HAS_BIAS=b13 is not None,
        WEIGHTED=options.weight_at == "l1", ACTIVATION=options.activation,
        HAS_COUNT=tokens.num_valid is not None, HAS_STATS=tokens.stats is not None,
        RANKS=world.num, LOCAL=world.local, TOP_K=top_k, SHARED=num_shared,
        TRACE=trace is not None,
        ROWS_AS=CODES["fp8_combine"] if options.combine == "fp8" else PLAIN,
        **config.constants(),
    )  # fmt: skip


__all__ = ["Experts", "Inbox", "State", "Tokens", "World", "fused"]
