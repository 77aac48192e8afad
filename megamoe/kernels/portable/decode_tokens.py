"""Activations that come quantised, as the GEMM loads them: exactly the same values."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.formats.quantized import Quantized
from megamoe.kernels.common.compat import to_bf16
from megamoe.kernels.common.numbers import Kind, e2m1_to_bf16, e4m3_value, e8m0_value
from megamoe.kernels.portable.k_order import position_of, stored_cols, stored_width
from megamoe.kernels.portable.launch import Activations, Arithmetic, as_bytes
from megamoe.planner.launches import Launch


@triton.jit
def _e8m0(code):
    return e8m0_value(code.to(tl.int32))


@triton.jit
def _store_pairs(out, col, code, factor, mask):
    """Bytes of two E2M1 values."""
    low = e2m1_to_bf16((code & 15).to(tl.int16)).to(tl.float32)
    high = e2m1_to_bf16((code >> 4).to(tl.int16)).to(tl.float32)
    tl.store(out + position_of(2 * col), to_bf16(low * factor), mask=mask)
    tl.store(out + position_of(2 * col + 1), to_bf16(high * factor), mask=mask)


@triton.jit
def _store_bytes(out, col, code, factor, mask):
    tl.store(out + position_of(col), to_bf16(e4m3_value(code) * factor), mask=mask)


@triton.jit
def _store_plain(out, col, value, factor, mask):
    tl.store(out + position_of(col), value, mask=mask)


# BF16 of code * scale; FP8 1x128 has its scales apart, so that any block will do.
TOKEN_FORMATS = {
    "mxfp4": Kind("mxfp4", SCALED=True, GROUP=32, UNITS=16, scale=_e8m0, store=_store_pairs),
    "nvfp4": Kind("nvfp4", SCALED=True, GROUP=16, UNITS=8, scale=e4m3_value, store=_store_pairs),
    "mxfp8": Kind("mxfp8", SCALED=True, GROUP=32, UNITS=32, scale=_e8m0, store=_store_bytes),
    "fp8_1x128": Kind("fp8_1x128", SCALED=False, GROUP=32, UNITS=32, store=_store_bytes),
    "bf16": Kind("bf16", SCALED=False, GROUP=32, UNITS=32, store=_store_plain),
}


@triton.jit
def decode_blocks(
    data, scale, out, program, num_blocks, width, FORMAT: tl.constexpr, VALUES: tl.constexpr
):
    """The program's share of the blocks of contiguous rows, into BF16 rows in K order."""
    COUNT: tl.constexpr = VALUES // FORMAT.GROUP
    block = program.to(tl.int64) * COUNT + tl.arange(0, COUNT)
    inside = block < num_blocks
    unit = tl.arange(0, FORMAT.UNITS)[None, :]
    code = tl.load(data + block[:, None] * FORMAT.UNITS + unit, mask=inside[:, None], other=0)
    factor = 1.0
    if FORMAT.SCALED:
        factor = FORMAT.scale(tl.load(scale + block, mask=inside, other=0))[:, None]
    per_row = width // FORMAT.GROUP
    first = (block // per_row * stored_cols(width))[:, None]
    col = (block % per_row)[:, None] * FORMAT.UNITS + unit
    FORMAT.store(out + first, col, code, factor, inside[:, None])


@triton.jit
def _decode_kernel(data, scale, out, num_blocks, width, FORMAT: tl.constexpr, VALUES: tl.constexpr):
    decode_blocks(data, scale, out, tl.program_id(0), num_blocks, width, FORMAT, VALUES)


class Decoding(NamedTuple):
    """What is left to do before `activations` have the values of all rows: nothing, or blocks."""

    activations: Activations
    format: Kind | None
    data: Tensor
    scale: Tensor
    out: Tensor
    num_blocks: int


def decoding(x: Quantized, how: Arithmetic) -> Decoding:
    """Room for rows [T, k], and what must be decoded into it."""
    data, scale = x.data.contiguous(), x.scale
    if not how.is_ordered:
        scale = None if scale is None else scale.contiguous()
        return Decoding(Activations(data, scale), None, data, data, data, 0)
    kind, scale = TOKEN_FORMATS[x.format], data if scale is None else scale.contiguous()
    empty = torch.zeros if x.shape[1] % 128 else torch.empty
    out = empty(x.shape[0], stored_width(x.shape[1]), dtype=torch.bfloat16, device=x.device)
    return Decoding(
        Activations(out, scale if how.has_scale else None), kind, as_bytes(data), as_bytes(scale),
        out, math.prod(x.shape) // kind.GROUP.value,
    )  # fmt: skip


def decode_tokens(x: Quantized, how: Arithmetic, step: Launch | None) -> Activations:
    """Rows [T, k] as the GEMM loads them; NVFP4's global scale is left to the sums.

    step  the planned launch; None where the GEMM takes the format itself
    """
    todo = decoding(x, how)
    assert (step is None) == (todo.format is None), "the plan decodes what the GEMM cannot take"
    if step is not None and todo.num_blocks:
        _decode_kernel[step.grid](
            data=todo.data, scale=todo.scale, out=todo.out, num_blocks=todo.num_blocks,
            width=x.shape[1], FORMAT=todo.format, **step.config.constants(),
        )  # fmt: skip
    return todo.activations
