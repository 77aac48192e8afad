"""What a rank of the chain shares with its peers: the same regions in every rank's memory."""

from __future__ import annotations

from typing import NamedTuple

from megamoe.layout.regions import Segment, Workspace, align_up, ceil_div, chain

LIST_ALIGN = 8  # entries of a pushed list at which an expert begins: 32 bytes
RECORD_WORDS = 16  # a token's record is a multiple of 64 bytes
STATE_WORDS = 32  # of a rank
MAX_SOURCES = 32  # words of `begun` and `done`: by rank


class TokenWords(NamedTuple):
    """A token's record in words of 4 bytes: values, scales, factor; and from one to the next."""

    data: int
    scales: int
    factor: int
    pitch: int


def token_words(data_bytes: int, scale_bytes: int, has_factor: bool) -> TokenWords:
    """Where a token's values, scales and factor lie in its record, in words of 4 bytes.

    >>> token_words(7168, 4 * 56, False)
    TokenWords(data=1792, scales=56, factor=0, pitch=1856)
    """
    data, scales = data_bytes // 4, scale_bytes // 4
    factor = int(has_factor)
    return TokenWords(data, scales, factor, align_up(data + scales + factor, RECORD_WORDS))


def pushed_exchange(
    num_tokens: int, slots: int, top_k: int, hidden: int, num_ranks: int, local_experts: int,
    words: TokenWords, fp8_row: int | None = None,
) -> Workspace:  # fmt: skip
    """What a rank of the chain shares: enough for calls of up to `num_tokens` tokens a rank.

    Sources write counts, lists and signals here, owners read tokens and write rows home; nobody
    reads routing out of a peer's memory.

    slots    rows of a token: its experts, then shared ones
    fp8_row  bytes of a row home that is FP8 (`fp8_row_bytes`); None: rows are BF16
    """
    rows = Segment("rows", "bf16", (num_tokens * slots, hidden), "data", "what combine adds")
    if fp8_row is not None:
        about = "what combine adds: E4M3, then E8M0 scales"
        rows = Segment("rows", "u8", (num_tokens * slots, fp8_row), "data", about)
    cap = list_capacity(num_tokens * top_k, local_experts)
    by_source = (num_ranks, cap)
    return chain(
        (
            Segment("begun", "i32", (MAX_SOURCES,), "control", "by rank: call that it pushed"),
            Segment("done", "i32", (MAX_SOURCES,), "control", "by rank: call whose rows are home"),
            Segment("state", "i32", (STATE_WORDS,), "control", "this rank's call; who gave up"),
            Segment(
                "counts_in", "i32", (num_ranks, count_pitch(local_experts)), "data",
                "by source: slots of each expert",
            ),
            Segment("list_in", "i32", by_source, "data", "by source: its slots, by expert"),
            Segment("weight_in", "f32", by_source, "data", "topk weights of those slots"),
            Segment("tokens", "i32", (num_tokens, words.pitch), "data", "in the pool's format"),
            rows,
        )
    )  # fmt: skip


def fp8_row_bytes(hidden: int) -> int:
    """Bytes of a row home in FP8: codes, and a scale for each 128 of them, in whole 16 bytes.

    >>> fp8_row_bytes(4096), fp8_row_bytes(7168)
    (4128, 7232)
    """
    return hidden + align_up(ceil_div(hidden, 128), 16)


def list_capacity(num_slots: int, local_experts: int) -> int:
    """Entries of one source's list: its slots, each expert's from a multiple of LIST_ALIGN on."""
    most = num_slots + min(num_slots, local_experts) * (LIST_ALIGN - 1)
    return align_up(max(most, 1), 16)


def count_pitch(local_experts: int) -> int:
    """Words between the counts of two sources: stores of 16 bytes."""
    return align_up(local_experts, 16)
