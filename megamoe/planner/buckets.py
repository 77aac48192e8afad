"""Buckets of token counts: calls of about one size share a plan, its kernels and a graph."""

from __future__ import annotations

from collections.abc import Sequence

from megamoe.layout.regions import align_up
from megamoe.planner.hopper import UpTo

STEP = 256  # buckets above this are its multiples


def bucket_of(num_tokens: int, most: int) -> int:
    """The tokens of the bucket of a call: a power of two up to STEP, then its multiples.

    >>> [bucket_of(num, 2048) for num in (0, 1, 3, 8, 9, 200, 257)], bucket_of(65, most=100)
    ([1, 1, 4, 8, 16, 256, 512], 100)
    """
    is_small = num_tokens <= STEP
    bucket = 1 << (max(num_tokens, 1) - 1).bit_length() if is_small else align_up(num_tokens, STEP)
    return min(bucket, most)


def planned_bound(modes: Sequence[UpTo], max_tokens: int) -> int:
    """The bound that a call over a group is planned for, where its ranks pass `max_tokens`."""
    edge = next((one.tokens for one in modes if max_tokens <= one.tokens), modes[-1].tokens)
    return bucket_of(max_tokens, edge)
