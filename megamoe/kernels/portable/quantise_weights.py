"""Weights quantised by a kernel, straight to where experts lie: the bytes of
`formats.quantize_into`, all experts in one launch a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.formats.quantized import Quantized, empty
from megamoe.formats.spec import NVFP4, Format
from megamoe.kernels.common.compat import div_rn, to_fp32
from megamoe.kernels.common.finite import cdiv, is_a_run, new_flags
from megamoe.kernels.common.numbers import INF_BITS, abs_bits, e4m3_code
from megamoe.kernels.portable.acts import CODES, store_acts

ROWS, COLS, WARPS = 8, 256, 4  # of a program whose scales are of a row
BLOCK, BLOCK_WARPS = 128, 8  # rows and columns that share a scale
VALUES = 8192  # of a program that looks at values
MAX_VALUES = 2**31 - VALUES  # of an expert: they are counted in 32 bits
_NV_LARGEST = tl.constexpr(NVFP4.element.max * 448.0)


class Floats(NamedTuple):
    """Experts of one matrix as the kernel that looks sees them.

    largest     int32 [n], zeros: bits of the largest finite size of each
    per_expert  values; 0: there is no such matrix
    """

    x: Tensor
    largest: Tensor
    per_expert: int


@triton.jit
def global_scale(bits):
    """NVFP4's factor of an expert whose largest value has these bits, that of
    `weight_global_scale`."""
    amax = tl.full((1,), 0, tl.int32) + bits
    amax = amax.to(tl.float32, bitcast=True)
    g = div_rn(amax, tl.full((1,), _NV_LARGEST, tl.float32))
    return tl.max(tl.where(g > 0, g, 1.0), 0)


@triton.jit
def _source_row(row, half, num_rows, INTERLEAVED: tl.constexpr):
    """The given row of a row of gate (0) or up (1)."""
    if INTERLEAVED:
        return 2 * row + half
    else:
        return half * num_rows + row


@triton.jit(do_not_specialize=["num_experts"])
def _look_kernel(matrices, flags, num_experts, LARGEST: tl.constexpr, VALUES: tl.constexpr):
    """Some values of one expert: its flag is set where one is NaN or Inf."""
    block, which = tl.program_id(0), tl.program_id(1).to(tl.int64)
    for i in tl.static_range(2):
        m = matrices[i]
        num = tl.cdiv(m.per_expert, VALUES)
        if (block >= 0) & (block < num):
            at = block * VALUES + tl.arange(0, VALUES)
            x = tl.load(m.x + which * m.per_expert + at, mask=at < m.per_expert, other=0.0)
            bits = abs_bits(to_fp32(x))
            if tl.max(bits, 0) >= INF_BITS:
                tl.atomic_or(flags + 1 + i * num_experts + which, 1)
                tl.atomic_or(flags, 1)
            if LARGEST:
                tl.atomic_max(m.largest + which, tl.max(tl.where(bits >= INF_BITS, 0, bits), 0))
        block -= num


@triton.jit(do_not_specialize=["first_expert"])
def _quantise_rows_kernel(
    x, data, scale, factor, largest, flags, experts, first_expert, num_rows, width,
    HALVES: tl.constexpr, INTERLEAVED: tl.constexpr, LISTED: tl.constexpr,
    ACTS: tl.constexpr, FACTORS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Some columns of rows whose scales are their own; nothing is written if the first flag is not
    0.

    FACTORS  of an expert, where the format has a global scale, else 0
    """
    which, half = (tl.program_id(2) // HALVES).to(tl.int64), tl.program_id(2) % HALVES
    expert = first_expert + which
    if LISTED:
        expert = tl.load(experts + which)
    is_allowed = tl.load(flags) == 0
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    first_col = tl.program_id(0) * COLS
    col = first_col + tl.arange(0, COLS)
    is_row = row < num_rows
    source = which * HALVES * num_rows + _source_row(row, half, num_rows, INTERLEAVED)
    at = source[:, None] * width + col[None, :]
    values = to_fp32(tl.load(x + at, mask=is_row[:, None] & (col < width)[None, :], other=0.0))
    g = 1.0
    if FACTORS > 0:
        g = global_scale(tl.load(largest + which))
        is_first = (tl.program_id(0) + tl.program_id(1) == 0) & (half < FACTORS)
        tl.store(factor + expert * FACTORS + half, g, mask=is_first & is_allowed)
    to = (expert * HALVES + half) * num_rows + row
    store_acts(values, g, data, scale, to, is_row & is_allowed, first_col, width, ACTS, ROWS, COLS)


@triton.jit(do_not_specialize=["first_expert"])
def _quantise_blocks_kernel(
    x, data, scale, flags, experts, first_expert, num_rows, width,
    HALVES: tl.constexpr, INTERLEAVED: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of E4M3 values that share an FP32 scale; nothing is written if the first flag is
    not 0."""
    which, half = (tl.program_id(2) // HALVES).to(tl.int64), tl.program_id(2) % HALVES
    expert = first_expert + which
    if LISTED:
        expert = tl.load(experts + which)
    is_allowed = tl.load(flags) == 0
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = (row < num_rows) & (col < width)
    source = which * HALVES * num_rows + _source_row(row, half, num_rows, INTERLEAVED)
    values = to_fp32(tl.load(x + source * width + col, mask=there, other=0.0))
    bits = tl.max(tl.max(abs_bits(values), 1, keep_dims=True), 0, keep_dims=True)  # [1, 1]
    amax = bits.to(tl.float32, bitcast=True)
    one = tl.where(bits == 0, 1.0, div_rn(amax, tl.full((1, 1), 448.0, tl.float32)))
    one = tl.where(bits >= INF_BITS, float("nan"), one)
    is_dead = (one == 0.0) | (bits >= INF_BITS)
    step = tl.broadcast_to(tl.where(is_dead, 1.0, one), (BLOCK, BLOCK))
    code = e4m3_code(tl.where(is_dead, 0.0, div_rn(values, step)))
    matrix = expert * HALVES + half
    to = matrix * num_rows * width + row * width + col
    tl.store(data + to, code, mask=there & is_allowed)
    block = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    to = scale + matrix * tl.num_programs(0) * tl.num_programs(1) + block
    tl.store(to + tl.zeros((1, 1), tl.int32), one, mask=is_allowed)


def can(fmt: Format) -> bool:
    """Whether there is a kernel for a format."""
    return fmt.name in CODES or fmt.name == "fp8_128x128"


def look(sources: Sequence[Tensor | None], flags: Tensor, fmt: Format) -> list[Tensor | None]:
    """Or BAD into the flags (`common.finite`) of experts [n, ...] of up to two matrices that hold
    NaN or Inf; of NVFP4, the bits of the largest value of each."""
    there = [t for t in sources if t is not None]
    num = len(there[0])
    device = flags.device
    bits = torch.zeros(2, num, dtype=torch.int32, device=device) if fmt.has_global else None
    largest = [flags if bits is None else bits[i] for i in range(2)]
    matrices = tuple(
        Floats(there[0] if t is None else t, one, 0 if t is None else t[0].numel())
        for t, one in zip(sources, largest, strict=True)
    )
    _look_kernel[(sum(cdiv(m.per_expert, VALUES) for m in matrices), num)](
        matrices=matrices, flags=flags, num_experts=num, LARGEST=fmt.has_global, VALUES=VALUES
    )
    return [None if t is None or bits is None else bits[i] for i, t in enumerate(sources)]


def write(
    into: Quantized, experts: Sequence[int], x: Tensor, flags: Tensor,
    largest: Tensor | None = None, *, is_interleaved: bool = False,
) -> None:  # fmt: skip
    """Quantise experts `x` [n, ...] into places of canonical ones, if the first flag is 0.

    largest  of each, what `look` found: the format has a global scale
    """
    fmt, (num_rows, width) = into.spec, into.shape[-2:]
    assert into.scale is not None
    halves = into.shape[1] if len(into.shape) == 4 else 1
    is_run = is_a_run(experts)
    places = flags
    if not is_run:
        places = torch.tensor(list(experts), dtype=torch.int64, device=into.device)
    rest: dict[str, object] = {
        "x": x, "data": into.data.view(torch.uint8), "flags": flags, "experts": places,
        "first_expert": experts[0], "num_rows": num_rows, "width": width, "HALVES": halves,
        "INTERLEAVED": is_interleaved and halves == 2, "LISTED": not is_run,
    }  # fmt: skip
    if fmt.name == "fp8_128x128":
        grid = cdiv(width, BLOCK), cdiv(num_rows, BLOCK), len(experts) * halves
        _quantise_blocks_kernel[grid](scale=into.scale, BLOCK=BLOCK, num_warps=BLOCK_WARPS, **rest)
        return
    g = into.global_scale
    grid = cdiv(width, COLS), cdiv(num_rows, ROWS), len(experts) * halves
    _quantise_rows_kernel[grid](
        scale=into.scale.view(torch.uint8), factor=g, largest=largest, ACTS=CODES[fmt.name],
        FACTORS=0 if g is None else g.numel() // len(into), ROWS=ROWS, COLS=COLS,
        num_warps=WARPS, **rest,
    )  # fmt: skip


def quantised(x: Tensor, fmt: Format) -> Quantized:
    """Floats [1, ..., k] of one expert in a format that `can` be made here."""
    x = x.contiguous()
    out = empty(tuple(x.shape), fmt, x.device)
    flags = new_flags(1, x.device)
    largest = look((None, x), flags, fmt)[1] if fmt.has_global else None
    write(out, [0], x, torch.zeros_like(flags), largest)
    return out
