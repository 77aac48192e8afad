"""Bytes of one row of activations as it is stored: values, and the words of its scales."""

from __future__ import annotations

from megamoe.formats.spec import Format, Scale
from megamoe.layout.regions import TMA_ALIGN, align_up, ceil_div

_SCALE_BYTES = {Scale.NONE: 0, Scale.E8M0: 1, Scale.E4M3: 1, Scale.FP32: 4}


def row_bytes(width: int, fmt: Format) -> int:
    """Bytes of one stored row of values, a multiple of 16 so that TMA may copy it (A055).

    >>> from megamoe.formats.spec import BF16
    >>> row_bytes(100, BF16)
    208
    """
    return align_up(ceil_div(width * fmt.element.bits, 8), TMA_ALIGN)


def scale_words(width: int, fmt: Format) -> int:
    """32-bit words of one row's scales: four E8M0 or E4M3 bytes, or one FP32, a word.

    >>> from megamoe.formats.spec import BF16, FP8_1X128, MXFP8, NVFP4
    >>> [scale_words(7168, f) for f in (MXFP8, NVFP4, FP8_1X128, BF16)]
    [56, 112, 56, 0]
    """
    return ceil_div(ceil_div(width, fmt.block[1]) * _SCALE_BYTES[fmt.scale], 4)


def stored_bytes(width: int, fmt: Format) -> int:
    """Bytes of one row with its scales."""
    return row_bytes(width, fmt) + 4 * scale_words(width, fmt)
