"""What a fused launch is given, the same for every architecture's launcher."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


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


ONE_RANK = World()


class Tokens(NamedTuple):
    """The tokens of the launch's first rank as they come, and where results go."""

    x: Tensor
    idx: Tensor  # int32 or int64
    weights: Tensor
    num_valid: Tensor | None  # int32 [1] on the device: the rest of x is padding
    g: Tensor | None
    rows: Tensor  # BF16 [slots, hidden]
    y: Tensor  # [tokens of all ranks of the launch, hidden]
    error: Tensor  # int32 [ranks of the launch]
    stats: Tensor | None  # int64 [experts of the launch]
    first: int = 0  # number of the first token, to report a bad slot


class Experts(NamedTuple):
    """The experts of the launch's ranks, `num` on each."""

    w13: Any  # of the backend: `Packed`, or `Placed`
    w2: Any
    num: int
    num_shared: int = 0  # the last of them see every token; then there is one rank
    b13: Tensor | None = None
    b2: Tensor | None = None
    acts_factor: Tensor | None = None


def inbox_of(
    world: World, dtype: torch.dtype, scale_dtype: torch.dtype = torch.float32
) -> dict[str, Tensor | None]:
    """Its arguments, tokens and scales in the pool's types; one rank has none."""
    if world.num == 1:
        return dict.fromkeys(("inbox", *(f"inbox_{name}" for name in Inbox._fields[1:])))
    assert world.inbox is not None
    tokens, scale, *rest = world.inbox
    fields = zip(Inbox._fields[2:], rest, strict=True)
    return {
        "inbox": tokens.view(dtype), "inbox_scale": scale.view(scale_dtype),
    } | {f"inbox_{name}": t for name, t in fields}  # fmt: skip
