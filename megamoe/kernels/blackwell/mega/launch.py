"""Launcher of the fused layer on Blackwell. Configurations come from the plan; nothing is chosen.

What the compiler would take in silence is refused by `formats.check_tile`, as in staged launches.
"""

from __future__ import annotations

import functools

from torch import Tensor

from megamoe.kernels.blackwell.launch import (
    Arithmetic,
    as_bytes,
    factor_cols,
    operands,
    or_unused,
)
from megamoe.kernels.blackwell.mega.kernel import mega_tmem_kernel
from megamoe.kernels.gluon.mega.arguments import ONE_RANK, Experts, State, Tokens, World, inbox_of
from megamoe.kernels.gluon.pool import Pool
from megamoe.kernels.portable.acts import CODES, PLAIN
from megamoe.layout.regions import ceil_div
from megamoe.planner.launches import GemmTmem, Launch, Mega
from megamoe.problem import Options


def fused(
    tokens: Tokens, pool: Pool, acts: Pool, experts: Experts, step: Launch, arithmetic: Arithmetic,
    options: Options, state: State, *, world: World = ONE_RANK, timeout_s: float = 10.0,
    trace: Tensor | None = None, is_compiled_only: bool = False,
) -> None:  # fmt: skip
    """One launch: tokens -> tokens.y, over the world's ranks."""
    config, unused = step.config, state.report
    assert isinstance(config, Mega) and isinstance(config.tile, GemmTmem)
    assert experts.num_shared == 0, "shared experts have launches of their own"
    tile = config.tile
    num_tokens, hidden = tokens.x.shape
    top_k = tokens.idx.shape[1]
    assert pool.data.numel() < 2**31, "a place in the pool has 32 bits"
    linears = {}
    for name, x, w, bias in (
        ("l1", pool, experts.w13, experts.b13),
        ("l2", acts, experts.w2, experts.b2),
    ):
        linear = operands(x, w, tile, arithmetic) | {
            "factor": or_unused(w.factor, unused), "bias": or_unused(bias, unused),
            "steps": ceil_div(x.data.shape[1] * arithmetic.pack, tile.block_k),
            "outputs": acts.data.shape[1] * arithmetic.pack if w.is_gated else w.num_outputs,
            "num_bias": w.num_outputs, "num_blocks": w.num_blocks, "factor_cols": factor_cols(w),
        }  # fmt: skip
        linears |= {f"{name}_{key}": value for key, value in linear.items()}
    g = tokens.g
    # Codes that threads pack are bytes; those that the tokens' format has a type for have it.
    codes = as_bytes(pool.data) if arithmetic.acts.STORED_AS.value == "placed" else pool.data
    scale = as_bytes(pool.scale)
    run = mega_tmem_kernel[step.grid]
    if is_compiled_only:
        run = functools.partial(mega_tmem_kernel.warmup, grid=step.grid)
    run(
        x=tokens.x, x_stride=tokens.x.stride(0), g=or_unused(g, unused),
        g_stride=0 if g is None or g.ndim == 0 else 1, topk_idx=tokens.idx,
        topk_weights=tokens.weights, num_valid=or_unused(tokens.num_valid, unused),
        error=tokens.error, stats=or_unused(tokens.stats, unused), y=tokens.y, pool=codes,
        pool_scale=scale, row_dest=pool.dest, row_weight=pool.weight, row_factor=pool.factor,
        acts=as_bytes(acts.data), acts_scale=as_bytes(acts.scale), rows=tokens.rows,
        tile_lists=state.private, counters=state.counters,
        signals=or_unused(world.signals, unused), peers=or_unused(world.peers, unused),
        **inbox_of(world, codes.dtype, scale.dtype), report=state.report,
        trace=or_unused(trace, unused), bound_ns=int(timeout_s * 1e9),
        weights_ahead=config.weights_ahead, absent_rank=world.absent, first_rank=world.first,
        first_slot=tokens.first * top_k, num_slots=world.num * num_tokens * top_k,
        tokens_per_rank=num_tokens, num_experts=experts.num,
        rows_per_rank=pool.data.shape[0] // world.local, pool_rows=pool.data.shape[0],
        wave_rows=config.wave_rows, tile_list_stride=state.private.stride(0),
        num_counters=state.counters.shape[0], hidden=hidden,
        width=pool.data.shape[1] * arithmetic.pack,
        clamp=float(options.limit), acts_factor=or_unused(experts.acts_factor, unused), **linears,
        FORMAT=arithmetic.kind, ACTS=arithmetic.acts, L2_ACTS=PLAIN,
        HAS_BIAS=experts.b13 is not None,
        WEIGHTED=options.weight_at == "l1", ACTIVATION=options.activation,
        HAS_COUNT=tokens.num_valid is not None, HAS_STATS=tokens.stats is not None,
        RANKS=world.num, LOCAL=world.local, TOP_K=top_k, TRACE=trace is not None,
        ROWS_AS=CODES["fp8_combine"] if options.combine == "fp8" else PLAIN,
        **config.constants(),
    )  # fmt: skip
