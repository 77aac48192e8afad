"""quantize and dequantize: every format by one algorithm, driven by its row of the table.

The rule, for a block of values x that share a scale:
  amax   = max |x|
  scale  = E8M0: 2**ceil(log2(amax / max));  FP32: amax / max;  E4M3: E4M3(amax / (max * g))
  step   = scale (times g where there is a global scale), in FP32
  stored = element(x / step), IEEE division, nearest even, saturating
with max 448 for E4M3 and 6 for E2M1. A zero block has scale 1. A block that holds NaN or Inf has
scale NaN and stores zeros, so that it dequantises to NaN throughout. A block whose step rounds to 0
stores zeros.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megamoe.errors import DTypeError, RangeError, ShapeError, require
from megamoe.formats import elements
from megamoe.formats.quantized import (
    DATA_DTYPE,
    SCALE_DTYPE,
    Quantized,
    check_shape,
    data_shape,
    scale_shape,
)
from megamoe.formats.spec import NVFP4, Format, Scale, format_named

CHUNK = 1 << 20  # values in flight at a time: bounds the temporaries to a few tens of megabytes
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def quantize(x: Tensor, format: str, *, global_scale: Tensor | float | None = None) -> Quantized:
    """Round `x` to a format, by the rules of docs/numerics.md.

    x             [..., k] float32, bfloat16 or float16; k a multiple of 32 (NVFP4: 16)
    format        "bf16", "mxfp8", "mxfp4", "nvfp4", "fp8_1x128", "fp8_128x128" or "fp8_combine"
    global_scale  NVFP4 only: positive, finite, its shape a prefix of x's; None is 1, so that a
                  token never depends on its neighbours. Weights use `weight_global_scale`.

    >>> dequantize(quantize(torch.full((1, 32), 3.0), "mxfp4"))[0, 0].item()
    3.0
    """
    fmt = format_named(format)
    check_source(x, fmt)
    shape = tuple(x.shape)
    factor = _global_scale(global_scale, x, fmt)
    if fmt.scale is Scale.NONE:
        return Quantized(x.to(torch.bfloat16), None, fmt.name, shape)
    data = torch.empty(data_shape(shape, fmt), dtype=DATA_DTYPE[fmt.element.name], device=x.device)
    scale = torch.empty(scale_shape(shape, fmt), dtype=SCALE_DTYPE[fmt.scale], device=x.device)
    result = Quantized(data, scale, fmt.name, shape, factor)
    quantize_into(x, result)
    return result


def quantize_into(x: Tensor, out: Quantized) -> None:
    """Quantise `x` into the tensors of `out`, chunk by chunk; `out.global_scale` is given."""
    fmt = out.spec
    require(
        tuple(x.shape) == out.shape,
        f"x must have shape {out.shape}",
        got=tuple(x.shape),
        kind=ShapeError,
    )
    if fmt.scale is Scale.NONE:
        out.data.copy_(x)
    if fmt.scale is Scale.NONE or x.numel() == 0:
        return
    assert out.scale is not None
    block_rows = fmt.block[0]
    k = x.shape[-1]
    # A slab is a run of rows whose blocks do not reach outside it.
    slab_rows = x.shape[-2] if block_rows > 1 else math.prod(x.shape[:-1])
    xs = x.reshape(-1, slab_rows, k)
    datas = out.data.view(xs.shape[0], slab_rows, -1)
    scales = out.scale.view(xs.shape[0], -(-slab_rows // block_rows), -1)
    factors = _per_row(out, xs.shape[0], slab_rows)
    step = max(CHUNK // k // block_rows, 1) * block_rows
    for slab in range(xs.shape[0]):
        for first in range(0, slab_rows, step):
            rows = slice(first, min(first + step, slab_rows))
            blocks = slice(first // block_rows, -(-rows.stop // block_rows))
            g = None if factors is None else factors[slab, rows, None]
            values, stored = _quantize_chunk(xs[slab, rows].float(), fmt, g)
            datas[slab, rows] = values
            scales[slab, blocks] = stored


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of `q`: element * scale (* global scale), rounded once to `dtype`.

    q      values in any format
    dtype  torch.float32 or torch.float64
    FP32 is exact but for the last rounding; float64 is exact for every format.
    """
    require(
        dtype in (torch.float32, torch.float64),
        "dequantize gives float32 or float64",
        got=dtype,
        fix="cast the float32 result",
        kind=DTypeError,
    )
    fmt = q.spec
    if fmt.element.bits == 4:
        values = elements.packed_e2m1_to_float(q.data, dtype)
    else:
        values = q.data.to(dtype)
    if q.scale is None:
        return values
    is_e8m0 = fmt.scale is Scale.E8M0
    scale = elements.e8m0_to_float(q.scale, dtype) if is_e8m0 else q.scale.to(dtype)
    values = values * _spread(scale, fmt, q.shape)
    if q.global_scale is not None:
        spare = len(q.shape) - q.global_scale.ndim
        values = values * q.global_scale.to(dtype).reshape(*q.global_scale.shape, *[1] * spare)
    return values


def weight_global_scale(w: Tensor) -> Tensor:
    """NVFP4 global scale of each expert: [E, ...] -> FP32 [E], amax / (6 * 448); 1 where that is 0.

    Values that are not finite do not count: they spoil their own block only.
    """
    amax = torch.zeros(w.shape[0], dtype=torch.float32, device=w.device)
    for expert, rows in enumerate(w):
        for part in rows.reshape(-1).split(CHUNK) if rows.numel() else ():
            size = part.float().abs()
            amax[expert] = torch.maximum(amax[expert], size.where(size.isfinite(), 0.0).amax())
    g = amax / torch.full_like(amax, NVFP4.element.max * 448.0)
    return g.where(g > 0, 1.0)


def check_source(x: object, fmt: Format) -> None:
    """Require a float tensor whose shape `fmt` can store."""
    require(isinstance(x, Tensor), "x must be a tensor", got=type(x).__name__, kind=DTypeError)
    assert isinstance(x, Tensor)
    require(
        x.dtype in FLOATS,
        "x must be float32, bfloat16 or float16",
        got=x.dtype,
        kind=DTypeError,
    )
    check_shape(tuple(x.shape), fmt)


def _quantize_chunk(x: Tensor, fmt: Format, g: Tensor | None) -> tuple[Tensor, Tensor]:
    """Stored elements and scales of FP32 rows [m, k]; `g` is the global scale per row, [m, 1]."""
    rows, cols = fmt.block
    m, k = x.shape
    pad = (0, -k % cols, 0, -m % rows)
    if any(pad):
        x = torch.nn.functional.pad(x, pad)
    blocks = x.unflatten(1, (-1, cols)).unflatten(0, (-1, rows))  # [mb, rows, kb, cols]
    amax = blocks.abs().amax(dim=(1, 3))  # NaN and Inf stay
    stored, step = _scale_and_step(amax, fmt, g)
    dead = (step == 0) | ~torch.isfinite(step)
    quotient = (blocks / step.where(~dead, 1.0)[:, None, :, None]).masked_fill_(
        dead[:, None, :, None], 0.0
    )
    quotient = quotient.flatten(2).flatten(0, 1)[:m, :k]
    if fmt.element.bits == 4:
        return elements.pack_e2m1(elements.e2m1_from_float(quotient)), stored
    return elements.e4m3_from_float(quotient), stored


def _scale_and_step(amax: Tensor, fmt: Format, g: Tensor | None) -> tuple[Tensor, Tensor]:
    """The scale as stored, and what values are divided by, for each block's FP32 amax."""
    if fmt.scale is Scale.E8M0:
        code = elements.e8m0_from_amax(amax, fmt.element)
        return code, elements.e8m0_to_float(code)
    # Divide by a tensor: on CUDA torch turns `/ 448.0` into a multiplication by the reciprocal.
    limit = torch.full_like(amax, fmt.element.max)
    one, nan = torch.ones_like(amax), torch.full_like(amax, math.nan)
    if fmt.scale is Scale.FP32:
        scale = torch.where(amax == 0, one, amax / limit).where(amax.isfinite(), nan)
        return scale, scale
    assert g is not None
    scale = torch.where(amax == 0, one, amax / (limit * g)).where(amax.isfinite(), nan)
    stored = elements.e4m3_from_float(scale)
    return stored, stored.float() * g


def _spread(scale: Tensor, fmt: Format, shape: tuple[int, ...]) -> Tensor:
    """One scale per value: repeat over the block, then cut a short last block."""
    rows, cols = fmt.block
    scale = scale.repeat_interleave(cols, dim=-1)[..., : shape[-1]]
    if rows > 1:
        scale = scale.repeat_interleave(rows, dim=-2)[..., : shape[-2], :]
    return scale


def _global_scale(scale: Tensor | float | None, x: Tensor, fmt: Format) -> Tensor | None:
    """The global scale as an FP32 tensor on x's device, or None where the format has none."""
    if not fmt.has_global:
        require(
            scale is None,
            f"{fmt.name} has no global scale",
            got=scale,
            fix="leave it out",
            kind=RangeError,
        )
        return None
    scale = 1.0 if scale is None else scale
    require(
        isinstance(scale, (Tensor, float, int)),
        "the global scale must be a number or a tensor",
        got=type(scale).__name__,
        kind=DTypeError,
    )
    factor = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    require(
        bool((factor > 0).all() and factor.isfinite().all()),
        "the global scale must be positive and finite",
        got=factor.tolist(),
        kind=RangeError,
    )
    return factor


def _per_row(q: Quantized, num_slabs: int, slab_rows: int) -> Tensor | None:
    """The global scale of every row, [num_slabs, slab_rows], or None where the format has none."""
    if q.global_scale is None:
        return None
    g = q.global_scale
    g = g.reshape((*g.shape, *[1] * (len(q.shape) - 1 - g.ndim))).expand(q.shape[:-1])
    return g.reshape(num_slabs, slab_rows)
