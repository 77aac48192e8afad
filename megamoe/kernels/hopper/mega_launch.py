"""Launcher of the fused layer. Configurations come from the plan; nothing is chosen here."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megamoe.kernels.hopper.launch import (
    Arithmetic,
    factor_shape,
    or_some,
    scale_descriptor,
    token_descriptor,
    weight_descriptors,
)
from megamoe.kernels.hopper.mega import mega_kernel
from megamoe.kernels.hopper.operands import WEIGHTS
from megamoe.kernels.hopper.pack import Packed
from megamoe.kernels.hopper.pool import Pool
from megamoe.kernels.portable.acts import CODES, PLAIN
from megamoe.planner.launches import Launch, Mega
from megamoe.problem import Options


class State(NamedTuple):
    """Where the CTAs meet (`meet`), and what each keeps for itself."""

    counters: Tensor  # int32 [words]: zero before a launch, and again after it
    private: Tensor  # int32 [CTAs, words]: the list of tiles of each CTA
    report: Tensor  # int32 [8]: zero, or what a wait past its bound left


class World(NamedTuple):
    """The ranks. x, idx, weights, num_valid, rows and counters are those of `first`; each rank has
    as many tokens, of which `num_valid` are real, and the same tensors `peers` bytes away."""

    num: int = 1
    local: int = 1  # ranks of this launch, from `first` on; CTAs are dealt to them in equal parts
    first: int = 0
    peers: Tensor | None = None  # int64 [num]
    signals: Tensor | None = None  # int32 [32]: zero in the beginning


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
    first: int = 0  # number of the first token, for who is told of a bad slot


def fused(
    tokens: Tokens, pool: Pool, acts: Pool, w13: Packed, w2: Packed, step: Launch, how: Arithmetic,
    options: Options, kept: State, *, num_experts: int, num_shared: int = 0, world: World = ONE,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    acts_factor: Tensor | None = None, timeout_s: float = 10.0, trace: Tensor | None = None,
    absent: int = -1,
) -> None:  # fmt: skip
    """One launch: tokens -> tokens.y, over the world's ranks of `num_experts` experts each.

    The last `num_shared` of them see every token; then there is one rank.
    """
    config, some = step.config, kept.report
    assert isinstance(config, Mega)
    tile = config.tile
    num_tokens, hidden = tokens.x.shape
    top_k = tokens.idx.shape[1] + num_shared
    slots = world.num * num_tokens * top_k
    assert num_shared == 0 or world.num == 1
    assert pool.data.numel() < 2**31, "a place in the pool has 32 bits"
    parts = []
    for x, w, bias in ((pool, w13, biases[0]), (acts, w2, biases[1])):
        data, scale = weight_descriptors(w, tile.k_blocks, tile.block_n)
        x_scale = scale_descriptor(x.scale, tile.block_m) if how.is_promoted else data
        outputs = acts.data.shape[1] if w.is_gated else w.num_outputs
        steps = x.data.shape[1] // tile.block_k
        parts += [
            data, scale, token_descriptor(x.data, tile.block_m), x_scale, or_some(w.factor, some),
            or_some(bias, some), steps, outputs, w.num_outputs, *factor_shape(w),
        ]  # fmt: skip
    g = tokens.g
    mega_kernel[step.grid](
        tokens.x, tokens.x.stride(0), or_some(g, some), 0 if g is None or g.ndim == 0 else 1,
        tokens.idx, tokens.weights, or_some(tokens.num_valid, some), tokens.error,
        or_some(tokens.stats, some), tokens.y, pool.data, pool.scale, pool.dest, pool.weight,
        pool.factor, acts.data, acts.scale, tokens.rows, kept.private, kept.counters,
        or_some(world.signals, some), or_some(world.peers, some), kept.report,
        or_some(trace, some), int(timeout_s * 1e9), config.weights_ahead, absent, world.first,
        tokens.first * tokens.idx.shape[1], slots, num_tokens, num_experts,
        pool.data.shape[0] // world.local, pool.data.shape[0], config.wave_rows,
        kept.private.stride(0), kept.counters.shape[0], hidden, pool.data.shape[1],
        float(options.limit), or_some(acts_factor, some), *parts,
        WEIGHTS=WEIGHTS[w13.kind], ACTS=how.acts, LAST=PLAIN, PROMOTED=how.is_promoted,
        FACTOR=w13.factor_is, HAS_BIAS=biases[0] is not None,
        WEIGHTED=options.weight_at == "l1", ACTIVATION=options.activation,
        HAS_COUNT=tokens.num_valid is not None, HAS_STATS=tokens.stats is not None, RANKS=world.num,
        LOCAL=world.local, TOP_K=top_k, SHARED=num_shared, TRACE=trace is not None,
        ROWS_AS=CODES["fp8_combine"] if options.combine == "fp8" else PLAIN,
        **config.constants(),
    )  # fmt: skip
