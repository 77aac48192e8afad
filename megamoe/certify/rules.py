"""The layer's rules in numpy's float64, token by token, written apart from the oracle.

Formats by searching an element's grid, sums in float64, every rounding by itself. Slow and short:
it says whether the oracle of this installation follows the rules (docs/numerics.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megamoe.engine.weights import ExpertWeights
from megamoe.formats.quantized import Quantized
from megamoe.formats.spec import Format, Scale, recipe_named

Array = Any  # numpy arrays of float64, unless said otherwise

_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
)
GRIDS = {"e2m1": _E2M1, "e4m3": _E4M3}


def bf16(x: Array) -> Array:
    """To BF16's nearest value, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    high = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return high.astype(np.uint32).view(np.float32).astype(np.float64)


def nearest(x: Array, grid: Array) -> Array:
    """To the grid's nearest value, ties to the even index, saturating; signs are kept."""
    middle, size = (grid[1:] + grid[:-1]) / 2, np.abs(x)
    idx = np.searchsorted(middle, size, side="left")
    tie = (idx < len(middle)) & (middle[np.minimum(idx, len(middle) - 1)] == size)
    return np.copysign(grid[idx + (tie & (idx % 2 == 1))], x)


def rounded(x: Array, fmt: Format, factor: float = 1.0) -> Array:
    """Rows [r, k], to a format and back; `factor` is NVFP4's global scale."""
    if fmt.scale is Scale.NONE:
        return bf16(x)
    out, grid, (rows, columns) = np.zeros_like(x), GRIDS[fmt.element.name], fmt.block
    for top in range(0, x.shape[0], rows):
        for left in range(0, x.shape[1], columns):
            at = np.s_[top : top + rows, left : left + columns]
            step = _step(np.abs(x[at]).max(), fmt, factor)
            if step:
                divided = (x[at].astype(np.float32) / np.float32(step)).astype(np.float64)
                out[at] = nearest(divided, grid) * step
    return out


def _step(amax: float, fmt: Format, factor: float) -> float:
    """What the values of a block are divided by, an FP32 value."""
    if amax == 0:
        return float(np.float32(factor))
    if fmt.scale is Scale.E8M0:
        power = -127
        while fmt.element.max * 2.0**power < amax:
            power += 1
        return float(2.0**power)
    top = np.float32(fmt.element.max)
    if fmt.scale is Scale.FP32:
        return float(np.float32(amax) / top)
    scale = nearest(np.float64(np.float32(amax) / (top * np.float32(factor))), _E4M3)
    return float(np.float32(scale) * np.float32(factor))


def decoded(q: Quantized) -> Array:
    """Stored weights as float64, from their bytes."""
    fmt, data = q.spec, q.data.cpu()
    if fmt.scale is Scale.NONE:
        return data.float().numpy().astype(np.float64)
    import torch

    raw = data.view(torch.uint8).numpy()
    if fmt.element.bits == 4:
        codes = np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-1], -1)
        values = np.where(codes & 8, -1.0, 1.0) * _E2M1[codes & 7]
    else:
        values = np.where(raw & 128, -1.0, 1.0) * _E4M3[np.minimum(raw & 127, len(_E4M3) - 1)]
    assert q.scale is not None
    stored = q.scale.cpu()
    if fmt.scale is Scale.E8M0:
        scale = 2.0 ** (stored.view(torch.uint8).numpy().astype(np.float64) - 127)
    else:
        scale = stored.float().numpy().astype(np.float64)
    for axis, size in ((-2, fmt.block[0]), (-1, fmt.block[1])):
        scale = np.repeat(scale, size, axis=axis)
    values = values * scale[..., : values.shape[-2], : values.shape[-1]]
    if q.global_scale is not None:
        factor = q.global_scale.cpu().numpy().astype(np.float64)
        values = values * factor.reshape(factor.shape + (1,) * (values.ndim - factor.ndim))
    return values


def layer(x: Array, topk_idx: Array, topk_weights: Array, weights: ExpertWeights) -> Array:
    """The layer with SwiGLU and weights in L1: [T, H], [T, k], [T, k] -> BF16 values [T, H]."""
    w13, w2 = decoded(weights.w13), decoded(weights.w2)
    acts_as = recipe_named(weights.recipe).acts
    y = np.zeros((len(x), weights.hidden))
    for token in range(len(x)):
        row = rounded(x[token : token + 1], acts_as)[0]
        total = np.zeros(weights.hidden, np.float32)
        for expert, weight in zip(topk_idx[token], topk_weights[token], strict=True):
            if expert < 0:
                continue
            gate, up = (bf16(half @ row) for half in w13[expert])
            acts = gate / (1 + np.exp(-gate)) * up * np.float64(np.float32(weight))
            stored = rounded(acts.astype(np.float32).astype(np.float64)[None], acts_as)[0]
            slot = bf16(w2[expert] @ stored)
            total += slot.astype(np.float32)
        y[token] = bf16(total)
    return y
