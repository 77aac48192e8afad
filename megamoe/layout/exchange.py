"""What a rank shares with its peers in fused calls: the same regions in every rank's memory."""

from __future__ import annotations

from typing import NamedTuple

from megamoe.layout.regions import Segment, Workspace, chain

SIGNALS = 32  # words: by rank, the calls begun and ended; the last one is the rank's own count


class InboxSizes(NamedTuple):
    """What peers push to a rank in one launch (`kernels/gluon/mega/push.py`)."""

    num_ranks: int
    num_tokens: int  # of a rank in a launch
    token_bytes: int  # of a pooled token
    scale_bytes: int  # of its scales, to whole 16 bytes; 0: it has none
    max_top_k: int  # a power of two
    max_experts: int  # of a rank, a power of two


def exchange(
    num_tokens: int,
    hidden: int,
    top_k: int,
    num_counters: int,
    num_passes: int,
    inbox: InboxSizes,
) -> Workspace:
    """Memory for calls of up to `num_tokens` tokens a rank, in so many launches.

    A rank pushes its tokens and their slots to the inboxes of the owners of their experts, who
    write each row to the combine slot of its (token, slot). Pools of rows are no part of it: each
    rank has its own.
    """
    per_token = (inbox.num_ranks, inbox.num_tokens)
    scales = (*per_token, inbox.scale_bytes // 4) if inbox.scale_bytes else (4,)
    slots = (num_tokens, top_k)
    return chain(
        (
            Segment("signals", "i32", (SIGNALS,), "control", "who has begun and ended which call"),
            Segment("counters", "i32", (num_counters,), "control", "of the launch", True),
            Segment(
                "num_valid", "i32", (num_passes,), "control", "tokens of each launch; then padding"
            ),
            Segment("topk_idx", "i64", slots, "data", "experts over all ranks"),
            Segment("topk_weights", "f32", slots, "data"),
            Segment("tokens", "bf16", (num_tokens, hidden), "data", "as they come"),
            Segment("rows", "bf16", (num_tokens * top_k, hidden), "data", "what combine adds"),
            Segment(
                "inbox_tokens",
                "u8",
                (*per_token, inbox.token_bytes),
                "data",
                "by source, in the format of the pool",
            ),
            Segment("inbox_scale", "f32", scales, "data"),
            Segment(
                "inbox_slots",
                "i32",
                (*per_token, inbox.max_top_k),
                "data",
                "local expert, and earlier slots of it",
            ),
            Segment("inbox_weights", "f32", (*per_token, inbox.max_top_k), "data"),
            Segment(
                "inbox_counts",
                "i32",
                (inbox.num_ranks, inbox.max_experts + 4),
                "data",
                "slots of each expert, then tokens, and those that the launch is planned for",
            ),
        )
    )
