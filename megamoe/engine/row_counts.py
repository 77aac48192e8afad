"""Numbers of rows that a rank of a group may get."""

from collections.abc import Iterator


def row_counts(expected: int, num_ranks: int) -> Iterator[int]:
    """Numbers of rows that reach every tile and every variant a compiler makes of a size.

    Routing decides how many rows a rank gets, up to all of them: powers of two find the tiles; the
    numbers after them are odd, and compilers treat 1 and multiples of 16 apart.
    """
    most = expected * num_ranks
    powers = [1 << i for i in range(most.bit_length()) if 1 << i <= most]
    yield from sorted({*powers, *(p + 1 for p in powers if p < most), expected} - {0})
