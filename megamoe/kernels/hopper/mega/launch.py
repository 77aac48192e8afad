"""Launcher of the fused layer. Configurations come from the plan; nothing is chosen here."""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

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
from megamoe.kernels.hopper.weights.pack import Packed
from megamoe.kernels.portable.acts import CODES, PLAIN
from megamoe.planner.launches import Launch, Mega
from megamoe.problem import Options


class State(NamedTuple):
    """Counters that CTAs share (`sync`), and the tile list of each."""

    counters: Tensor  # int32 [words]: zero before a launch, and again after it
    private: Tensor  # int32 [CTAs, words]: the list of tiles of each CTA
    report: Tensor  # int32 [8]: zero, or what a wait past its bound left


class Inbox(NamedTuple):
    """What peers push into a rank's memory, by source (`kernels/gluon/mega/push.py`)."""

    tokens: Tensor  # [ranks, tokens, width] in the pool's format
    scale: Tensor  # FP32, where the pool has scales
    slots: Tensor  # int32 [ranks, tokens, top_k to the next power of two]
    weights: Tensor  # FP32, likewise
    counts: Tensor  # int32 [ranks, experts to the next power of two + 4]


class World(NamedTuple):
    """The ranks. Pointers (x, idx, weights, num_valid, rows, counters, signals, inbox) are those of
    rank `first`; rank r has the same tensors peers[r] bytes away. Every rank has memory for as many
    tokens, of which its num_valid are real."""

    num: int = 1
    local: int = 1  # ranks of this launch, from `first` on; CTAs are split over them in equal parts
    first: int = 0
    peers: Tensor | None = None  # int64 [num]
    signals: Tensor | None = None  # int32 [32]: zero in the beginning
    inbox: Inbox | None = None
    absent: int = -1  # a rank that never says it is done, for tests of the bound


ONE = World()


class Tokens(NamedTuple):
    """The tokens of the launch's first rank as they come, and where results go."""

    x: Tensor
    idx: Tensor  # int32 or int64
    weights: Tensor
    num_valid: Tensor | None  # int32 [1] on the device: so many tokens, then padding
    g: Tensor | None
    rows: Tensor  # BF16 [slots, hidden]
    y: Tensor  # [tokens of all ranks of the launch, hidden]
    error: Tensor  # int32 [ranks of the launch]
    stats: Tensor | None  # int64 [experts of the launch]
    first: int = 0  # number of the first token, to report a bad slot


class Experts(NamedTuple):
    """The experts of the launch's ranks, `num` on each."""

    w13: Packed
    w2: Packed
    num: int
    num_shared: int = 0  # the last of them see every token; then there is one rank
    b13: Tensor | None = None
    b2: Tensor | None = None
    acts_factor: Tensor | None = None


def fused(
    tokens: Tokens, pool: Pool, acts: Pool, experts: Experts, step: Launch, how: Arithmetic,
    options: Options, state: State, *, world: World = ONE, timeout_s: float = 10.0,
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
            "x_scale": scale_descriptor(x.scale, tile.block_m) if how.is_promoted else data,
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
        peers=or_unused(world.peers, unused), **_inbox(world, pool), report=state.report,
        trace=or_unused(trace, unused),
        bound_ns=int(timeout_s * 1e9), early_steps=config.weights_ahead, absent_rank=world.absent,
        first_rank=world.first, first_slot=tokens.first * tokens.idx.shape[1], num_slots=slots,
        tokens_per_rank=num_tokens, num_experts=num_experts,
        rows_per_rank=pool.data.shape[0] // world.local, pool_rows=pool.data.shape[0],
        wave_rows=config.wave_rows, tile_list_stride=state.private.stride(0),
        num_counters=state.counters.shape[0], hidden=hidden, width=pool.data.shape[1],
        clamp=float(options.limit), acts_factor=or_unused(acts_factor, unused), **linears,
        WEIGHTS=WEIGHTS[w13.kind], ACTS=how.acts, L2_ACTS=PLAIN, PROMOTED=how.is_promoted,
        FACTOR=w13.factor_is, HAS_BIAS=b13 is not None,
        WEIGHTED=options.weight_at == "l1", ACTIVATION=options.activation,
        HAS_COUNT=tokens.num_valid is not None, HAS_STATS=tokens.stats is not None,
        RANKS=world.num, LOCAL=world.local, TOP_K=top_k, SHARED=num_shared,
        TRACE=trace is not None,
        ROWS_AS=CODES["fp8_combine"] if options.combine == "fp8" else PLAIN,
        **config.constants(),
    )  # fmt: skip


def _inbox(world: World, pool: Pool) -> dict[str, Tensor | None]:
    """Its arguments; one rank has none."""
    if world.num == 1:
        return dict.fromkeys(("inbox", *(f"inbox_{name}" for name in Inbox._fields[1:])))
    assert world.inbox is not None
    tokens, *rest = world.inbox
    given = zip(Inbox._fields[1:], rest, strict=True)
    return {"inbox": tokens.view(pool.data.dtype)} | {f"inbox_{name}": t for name, t in given}
