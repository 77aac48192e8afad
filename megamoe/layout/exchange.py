"""What a rank shares with its peers in fused calls: the same regions in every rank's memory."""

from __future__ import annotations

from megamoe.layout.regions import Segment, Workspace, chain

SIGNALS = 32  # words: by rank, the call that it has begun; the last one is the rank's own count


def exchange(
    num_tokens: int, hidden: int, top_k: int, num_counters: int, num_passes: int = 1
) -> Workspace:
    """Room for calls of up to `num_tokens` tokens a rank, in so many launches.

    Owners of experts read tokens and routing where they lie, and write each row to the combine slot
    of its (token, slot). Pools of rows are no part of it: each rank has its own.
    """
    slots = (num_tokens, top_k)
    return chain(
        (
            Segment("signals", "i32", (SIGNALS,), "control", "who has begun which call"),
            Segment("counters", "i32", (num_counters,), "control", "of the launch", True),
            Segment(
                "num_valid", "i32", (num_passes,), "control", "tokens of each launch; then padding"
            ),
            Segment("topk_idx", "i64", slots, "data", "experts over all ranks"),
            Segment("topk_weights", "f32", slots, "data"),
            Segment("tokens", "bf16", (num_tokens, hidden), "data", "as they come"),
            Segment("rows", "bf16", (num_tokens * top_k, hidden), "data", "what combine adds"),
        )
    )
