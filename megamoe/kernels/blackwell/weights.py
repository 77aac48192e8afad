"""Weights as the GEMM reads them: as checkpoints have them, scales placed.

Bytes are copied only where a matrix is no whole number of blocks of 128 rows and 128 columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.formats.quantized import Quantized
from megamoe.layout.regions import align_up, ceil_div

ROW_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Placed:
    """One linear's weights of all experts.

    data    [matrices * blocks * 128, columns as bytes hold them]; L1 has two matrices an expert
    scale   [1, matrices * blocks, groups / 4, 2, 256] placed bytes; None where there are none
    factor  FP32 [matrices * blocks, 128-blocks of K] (w8a8), [matrices] (nvfp4) or None
    """

    data: Tensor
    scale: Tensor | None
    factor: Tensor | None
    num_outputs: int
    num_blocks: int  # of 128 rows of a matrix
    is_gated: bool


def place_scales(scale: Tensor) -> Tensor:
    """Bytes [blocks, 128, groups] -> [1, blocks, groups / 4, 2, 256]: `layout.tiles.placed_scales`.

    Groups beyond the last multiple of four are zero.
    """
    blocks, rows, groups = scale.shape
    assert rows == ROW_BLOCK
    padded = torch.nn.functional.pad(scale, (0, -groups % 4))
    parts = padded.view(blocks, 4, 32, -1, 4).permute(0, 3, 2, 1, 4)
    return parts.reshape(1, blocks, -1, 2, 256).contiguous()


def _blocks(t: Tensor, rows: int, columns: int) -> Tensor:
    """[matrices, rows, columns], padded with zeros, as [matrices * blocks, 128, columns]."""
    extra = align_up(rows, ROW_BLOCK) - rows, columns - t.shape[-1]
    if any(extra):
        t = torch.nn.functional.pad(t, (0, extra[1], 0, extra[0]))
    return t.reshape(-1, ROW_BLOCK, columns)


def place(w: Quantized) -> Placed:
    """Weights [E, 2, rows, K] of L1 or [E, rows, K] of L2."""
    *lead, rows, width = w.shape
    is_gated = len(lead) == 2
    bits = w.spec.element.bits
    wide = align_up(width, ROW_BLOCK)
    data = w.data.view(torch.uint8) if bits == 8 else w.data
    data = _blocks(data.flatten(0, -3), rows, wide * min(bits, 8) // 8).flatten(0, 1)
    if bits == 8:
        data = data.view(torch.float8_e4m3fn)
    num_blocks, scale, factor = ceil_div(rows, ROW_BLOCK), None, None
    if bits == 4:
        assert w.scale is not None
        group = w.spec.block[1]
        flat = w.scale.view(torch.uint8).flatten(0, -3)
        scale = place_scales(_blocks(flat, rows, wide // group)).view(w.scale.dtype)
        factor = w.global_scale
        if factor is not None:
            factor = factor.expand(w.shape[0]) if factor.ndim == 0 else factor
            factor = factor[:, None].expand(-1, 2) if is_gated and factor.ndim == 1 else factor
            factor = factor.contiguous()
    elif bits == 8:
        assert w.scale is not None
        factor = w.scale.reshape(-1, w.scale.shape[-1]).contiguous()
    return Placed(data, scale, factor, rows, num_blocks, is_gated)


def place_into(placed: Placed, w: Quantized) -> None:
    """Write what `place` makes of weights to where it placed those before them; what shares their
    memory is there already. Bytes that are copied are copied expert by expert."""
    num = len(w)
    step = num if placed.data.data_ptr() == w.data.data_ptr() else 1
    for first in range(0, num, step):
        new = place(w[first : first + step])
        for name in ("data", "scale", "factor"):
            if (old := getattr(placed, name)) is None:
                continue
            old, one = (t[0] if t.ndim == 5 else t for t in (old, getattr(new, name)))
            rows = old[first * (len(old) // num) :][: len(one)]
            if rows.data_ptr() != one.data_ptr():
                rows.copy_(one)
