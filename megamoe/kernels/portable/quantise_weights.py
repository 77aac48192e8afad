"""Weights quantised by a kernel: the bytes of `formats.quantize_into`, in one launch a matrix."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.formats.quantized import Quantized, empty
from megamoe.formats.spec import NVFP4, Format
from megamoe.kernels.common.compat import div_rn, to_fp32
from megamoe.kernels.common.numbers import INF_BITS, abs_bits, e4m3_code
from megamoe.kernels.portable.acts import CODES, store_acts

ROWS, COLS, WARPS = 8, 256, 4  # of a program whose scales are of a row
BLOCK, BLOCK_WARPS = 128, 8  # rows and columns that share a scale
VALUES = 8192  # of a program that looks for the largest


@triton.jit
def _quantise_rows_kernel(
    x, data, scale, factor, num_rows, width,
    ACTS: tl.constexpr, HAS_FACTOR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Some columns of rows whose scales are their own."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    first_col = tl.program_id(0) * COLS
    col = first_col + tl.arange(0, COLS)
    is_row = row < num_rows
    at = row.to(tl.int64)[:, None] * width + col[None, :]
    values = to_fp32(tl.load(x + at, mask=is_row[:, None] & (col < width)[None, :], other=0.0))
    g = 1.0
    if HAS_FACTOR:
        g = tl.load(factor)
    store_acts(values, g, data, scale, row, is_row, first_col, width, ACTS, ROWS, COLS)


@triton.jit
def _quantise_blocks_kernel(x, data, scale, num_rows, width, BLOCK: tl.constexpr):
    """One block of E4M3 values that share an FP32 scale."""
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = (row < num_rows) & (col < width)
    at = matrix * num_rows * width + row * width + col
    values = to_fp32(tl.load(x + at, mask=there, other=0.0))
    bits = tl.max(tl.max(abs_bits(values), 1, keep_dims=True), 0, keep_dims=True)  # [1, 1]
    amax = bits.to(tl.float32, bitcast=True)
    one = tl.where(bits == 0, 1.0, div_rn(amax, tl.full((1, 1), 448.0, tl.float32)))
    one = tl.where(bits >= INF_BITS, float("nan"), one)
    is_dead = (one == 0.0) | (bits >= INF_BITS)
    step = tl.broadcast_to(tl.where(is_dead, 1.0, one), (BLOCK, BLOCK))
    code = e4m3_code(tl.where(is_dead, 0.0, div_rn(values, step)))
    tl.store(data + at, code, mask=there)
    block = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    to = scale + matrix * tl.num_programs(0) * tl.num_programs(1) + block
    tl.store(to + tl.zeros((1, 1), tl.int32), one)


@triton.jit
def _largest_kernel(x, out, num, VALUES: tl.constexpr):
    """The largest finite size of some values, as bits."""
    at = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    bits = abs_bits(to_fp32(tl.load(x + at, mask=at < num, other=0.0)))
    tl.atomic_max(out, tl.max(tl.where(bits >= INF_BITS, 0, bits), 0))


def can(fmt: Format) -> bool:
    """Whether there is a kernel for a format."""
    return fmt.name in CODES or fmt.name == "fp8_128x128"


def quantised(x: Tensor, fmt: Format) -> Quantized:
    """Floats [1, ..., k] of one expert in a format that `can` be made here."""
    x = x.contiguous()
    out = empty(tuple(x.shape), fmt, x.device)
    assert out.scale is not None
    width, data = x.shape[-1], out.data.view(torch.uint8)
    if fmt.name == "fp8_128x128":
        num_rows = x.shape[-2]
        blocks = triton.cdiv(width, BLOCK), triton.cdiv(num_rows, BLOCK)
        grid = *blocks, x.numel() // num_rows // width
        _quantise_blocks_kernel[grid](
            x=x,
            data=data,
            scale=out.scale,
            num_rows=num_rows,
            width=width,
            BLOCK=BLOCK,
            num_warps=BLOCK_WARPS,
        )
        return out
    if out.global_scale is not None:
        out.global_scale.copy_(_global_scale(x))
    num_rows = x.numel() // width
    _quantise_rows_kernel[(triton.cdiv(width, COLS), triton.cdiv(num_rows, ROWS))](
        x=x, data=data, scale=out.scale.view(torch.uint8), factor=out.global_scale,
        num_rows=num_rows, width=width,
        ACTS=CODES[fmt.name], HAS_FACTOR=out.global_scale is not None, ROWS=ROWS, COLS=COLS,
        num_warps=WARPS,
    )  # fmt: skip
    return out


def _global_scale(x: Tensor) -> Tensor:
    """FP32 [1], that of `weight_global_scale`."""
    bits = torch.zeros(1, dtype=torch.int32, device=x.device)
    _largest_kernel[(triton.cdiv(x.numel(), VALUES),)](x=x, out=bits, num=x.numel(), VALUES=VALUES)
    amax = bits.view(torch.float32)
    g = amax / torch.full_like(amax, NVFP4.element.max * 448.0)
    return g.where(g > 0, 1.0)
