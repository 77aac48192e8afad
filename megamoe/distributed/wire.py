"""Rows as they travel: the stored bytes of a Quantized, its scales beside them, one run per row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megamoe.formats.quantized import (
    DATA_DTYPE,
    SCALE_DTYPE,
    Quantized,
    data_shape,
    scale_shape,
)
from megamoe.formats.spec import Scale, format_named

WORD = torch.int32  # what every transport carries
ALIGN = 16  # bytes


class Wire(NamedTuple):
    """Rows of one format and width."""

    format: str
    width: int

    def _parts(self) -> list[tuple[str, torch.dtype, int]]:
        """Field, dtype and number of elements of each part of a row."""
        fmt = format_named(self.format)
        shape = (1, self.width)
        parts = [("data", DATA_DTYPE[fmt.element.name], data_shape(shape, fmt)[1])]
        if fmt.scale is not Scale.NONE:
            parts.append(("scale", SCALE_DTYPE[fmt.scale], scale_shape(shape, fmt)[1]))
        if fmt.has_global:
            parts.append(("global_scale", torch.float32, 1))
        return parts

    @property
    def row_bytes(self) -> int:
        """Bytes of a row on the wire."""
        used = sum(num * dtype.itemsize for _, dtype, num in self._parts())
        return -(-used // ALIGN) * ALIGN

    def pack(self, q: Quantized) -> Tensor:
        """int32 [T, row_bytes / 4]: data, scales, global scale, and zeros up to whole 16 bytes."""
        rows = len(q)
        parts = []
        for name, _, num in self._parts():
            t = getattr(q, name)
            if name == "global_scale":
                t = t.reshape(-1, 1).expand(rows, 1)
            parts.append(t.reshape(rows, num).contiguous().view(torch.uint8))
        spare = self.row_bytes - sum(t.shape[1] for t in parts)
        parts.append(torch.zeros(rows, spare, dtype=torch.uint8, device=q.device))
        return torch.cat(parts, 1).view(WORD)

    def unpack(self, words: Tensor) -> Quantized:
        """The inverse of `pack`."""
        rows, raw = len(words), words.contiguous().view(torch.uint8)
        parts: dict[str, Tensor] = {}
        first = 0
        for name, dtype, num in self._parts():
            last = first + num * dtype.itemsize
            parts[name] = raw[:, first:last].clone().view(dtype)  # a copy: aligned for dtype
            first = last
        g = parts.get("global_scale")
        return Quantized(
            parts["data"],
            parts.get("scale"),
            self.format,
            (rows, self.width),
            None if g is None else g.reshape(rows),
        )
