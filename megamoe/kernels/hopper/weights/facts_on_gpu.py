"""What decides which image an expert of MXFP4 can be, and the powers of its rows, for the experts
of one or two matrices in one launch.

Nearly always the scales say it. Where they do not (wide exponents, or odd scales that groups of
zeros may have), a program looks at the codes of its rows too. Of floats, the scales are those that
they will be quantised to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.formats.quantized import Quantized
from megamoe.kernels.common.compat import to_fp32
from megamoe.kernels.common.finite import BAD, cdiv
from megamoe.kernels.common.numbers import INF_BITS, abs_bits
from megamoe.kernels.hopper.weights.pack import MAX_PLACED, MAX_RELATIVE, MIN_RELATIVE, Facts
from megamoe.kernels.portable.acts import CODES
from megamoe.layout.regions import align_up
from megamoe.planner.tables.hopper import WIDTH

NOT_E4M3, NOT_BF16, NOT_PLACED = 2, 4, 8  # bits of a flag, beside BAD
FORBIDDEN = {  # what no image of a kind holds
    "e4m3_image": BAD | NOT_E4M3, "placed_image": BAD | NOT_PLACED, "mx_image": BAD | NOT_BF16,
}  # fmt: skip
ROWS, GROUPS, WARPS = 64, 64, 4  # of a program: scales that are looked at together
FEW = tl.constexpr(8)  # groups, where codes are looked at too
FLOAT_ROWS, FLOAT_COLS = 16, 256  # floats that are looked at together: 8 KB of BF16
_SPREAD, _LARGEST = tl.constexpr(MAX_RELATIVE - MIN_RELATIVE), tl.constexpr(MAX_PLACED)
_BAD, _E4M3 = tl.constexpr(BAD), tl.constexpr(NOT_E4M3)
_BF16, _PLACED = tl.constexpr(NOT_BF16), tl.constexpr(NOT_PLACED)
_TOP = tl.constexpr(MAX_RELATIVE)


class Matrix(NamedTuple):
    """Experts [n, ...] of one matrix, as kernels see them.

    source       words of codes, or floats
    scales       bytes; of floats any tensor
    powers       int32 [n, num_rows]: of each row of the image, the E8M0 code of its factor
    num_rows     of the image; 0: there is no such matrix
    num_outputs  canonical rows, of gate where there is a gate
    row_words    words of codes of a row
    num_groups   groups of 32 of a row: as a number of its own, Triton knows by what it divides
    """

    source: Tensor
    scales: Tensor
    powers: Tensor
    num_rows: int
    num_outputs: int
    row_words: int
    num_groups: int


@triton.jit
def source_row(row, num_outputs, GATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The given row of a row of the image, and whether there is one."""
    if GATED:  # eight of gate, eight of up
        within, half = row // 16 * 8 + row % 8, row // 8 % 2
        if INTERLEAVED:
            return 2 * within + half, within < num_outputs
        else:
            return half * num_outputs + within, within < num_outputs
    else:
        return row, row < num_outputs


@triton.jit
def _facts(high, low, nan):
    """Bits of a flag, from the scales of rows: the largest and least of groups that are not zero
    (-1 and 255 where there is none), and the largest of all."""
    is_wide = (high - low > _SPREAD) | (high == 255)
    facts = tl.where(tl.max(is_wide.to(tl.int32), 0) > 0, _E4M3, 0)
    facts |= tl.where(tl.max(nan, 0) == 255, _BAD, 0)
    facts |= tl.where(tl.min(low, 0) == 0, _BF16, 0)
    return facts | tl.where(tl.max(high, 0) > _LARGEST, _PLACED, 0)


@triton.jit
def _of_codes(
    m, block, which, GATED: tl.constexpr, POWERS: tl.constexpr, ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """What some rows of one expert forbid; their powers are stored."""
    stored = block * ROWS + tl.arange(0, ROWS)
    row, is_row = source_row(stored, m.num_outputs, GATED, False)
    num_groups = m.num_groups
    first_scale = which * (2 if GATED else 1) * m.num_outputs * num_groups
    first_scale += (row * num_groups)[:, None]
    high, low = tl.zeros((ROWS,), tl.int32), tl.full((ROWS,), 255, tl.int32)
    best = tl.zeros((ROWS,), tl.int32)  # a group that has the largest
    for start in range(0, num_groups, GROUPS):
        group = start + tl.arange(0, GROUPS)[None, :]
        there = is_row[:, None] & (group < num_groups)
        scale = tl.load(m.scales + first_scale + group, mask=there, other=0).to(tl.int32)
        top = tl.max(scale << 16 | group, 1)
        best = tl.where(top >> 16 > high, top & 0xFFFF, best)
        high = tl.maximum(high, top >> 16)
        low = tl.minimum(low, tl.min(tl.where(there, scale, 255), 1))
    is_odd = (high - low > _SPREAD) | (low == 0) | (high > _LARGEST)
    if POWERS:
        word = (first_scale + best[:, None]) * 4 + tl.arange(0, 4)[None, :]
        of_best = tl.load(m.source + word, mask=is_row[:, None], other=0) & 0x77777777
        is_odd |= is_row & (tl.max(of_best, 1) == 0)
    facts = tl.zeros((), tl.int32)
    if tl.max(is_odd.to(tl.int32), 0) > 0:
        high, low = tl.full((ROWS,), -1, tl.int32), tl.full((ROWS,), 255, tl.int32)
        nan = tl.zeros((ROWS,), tl.int32)
        for start in range(0, num_groups, FEW):
            some_group = start + tl.arange(0, FEW)[None, :]
            is_group = is_row[:, None] & (some_group < num_groups)
            at = first_scale + some_group
            code = tl.load(m.scales + at, mask=is_group, other=0).to(tl.int32)
            magnitudes = tl.zeros((ROWS, FEW), tl.int32)
            for j in tl.static_range(4):
                magnitudes |= tl.load(m.source + 4 * at + j, mask=is_group, other=0) & 0x77777777
            nan = tl.maximum(nan, tl.max(code, 1))
            high = tl.maximum(high, tl.max(tl.where(magnitudes != 0, code, -1), 1))
            low = tl.minimum(low, tl.min(tl.where(magnitudes != 0, code, 255), 1))
        facts = _facts(high, low, nan)
    if POWERS:
        power = tl.where(is_row & (high >= 0), high - _TOP, 127)
        tl.store(m.powers + which * m.num_rows + stored, power, mask=stored < m.num_rows)
    return facts


@triton.jit
def _of_floats(
    m, block, which, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, POWERS: tl.constexpr,
    ACTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The same of floats, as they will be quantised."""
    stored = block * ROWS + tl.arange(0, ROWS)
    row, is_row = source_row(stored, m.num_outputs, GATED, INTERLEAVED)
    width = m.row_words * 8
    first = (which * (2 if GATED else 1) * m.num_outputs + row)[:, None] * width
    high, low = tl.full((ROWS,), -1, tl.int32), tl.full((ROWS,), 255, tl.int32)
    nan = tl.zeros((ROWS,), tl.int32)
    for start in range(0, width, COLS):
        col = start + tl.arange(0, COLS)[None, :]
        there = is_row[:, None] & (col < width)
        x = to_fp32(tl.load(m.source + first + col, mask=there, other=0.0))
        amax = tl.max(tl.reshape(abs_bits(x), (ROWS, COLS // 32, 32)), 2)
        code, step, _ = ACTS.scale(amax, 1.0, ACTS.EXPONENT, ACTS.MANTISSA)
        is_dead = (step == 0.0) | (amax >= INF_BITS)
        value = tl.where(is_dead, 0.0, amax.to(tl.float32, bitcast=True))
        largest = ACTS.code(ACTS.divide(value, tl.where(is_dead, 1.0, step)))
        code, magnitudes = code.to(tl.int32), largest.to(tl.int32) & 7
        nan = tl.maximum(nan, tl.max(code, 1))
        high = tl.maximum(high, tl.max(tl.where(magnitudes != 0, code, -1), 1))
        low = tl.minimum(low, tl.min(tl.where(magnitudes != 0, code, 255), 1))
    if POWERS:
        power = tl.where(is_row & (high >= 0), high - _TOP, 127)
        tl.store(m.powers + which * m.num_rows + stored, power, mask=stored < m.num_rows)
    return _facts(high, low, nan)


@triton.jit(do_not_specialize=["num_experts", "forbidden"])
def _facts_kernel(
    matrices, flags, num_experts, forbidden, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    POWERS: tl.constexpr, ACTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Some rows of one expert; bits of its flag are set for what they forbid, and the first flag
    for what is forbidden.

    ACTS  of floats, what they will be; None: codes and scales
    COLS  floats or groups
    """
    block, which = tl.program_id(0), tl.program_id(1).to(tl.int64)
    for i in tl.static_range(len(GATED)):
        m = matrices[i]
        num = tl.cdiv(m.num_rows, ROWS)
        if (block >= 0) & (block < num):
            if ACTS is None:
                facts = _of_codes(m, block, which, GATED[i], POWERS, ROWS, COLS)
            else:
                facts = _of_floats(m, block, which, GATED[i], INTERLEAVED, POWERS, ACTS, ROWS, COLS)
            if facts > 0:
                tl.atomic_or(flags + 1 + i * num_experts + which, facts)
            if (facts & forbidden) != 0:
                tl.atomic_or(flags, 1)
        block -= num


def pair_of(
    sources: Sequence[Quantized | Tensor | None], flags: Tensor
) -> tuple[tuple[Matrix, Matrix], int]:
    """Up to two matrices as kernels see them, the gated one first, and how many experts they are.

    sources  canonical experts, or floats [n, 2I, H] and [n, H, I], or None: no such matrix
    """
    nothing, num, pair = flags[:0], 0, []
    for t, is_gated in zip(sources, (True, False), strict=True):
        if t is None:
            pair.append(None)
            continue
        num = len(t)
        if isinstance(t, Quantized):
            assert t.scale is not None
            source, scales = _words(t.data), t.scale.view(torch.uint8)
            outputs, width = t.shape[-2:]
        else:
            source, scales = t, nothing.view(torch.uint8)
            outputs, width = t.shape[1] // (2 if is_gated else 1), t.shape[2]
        num_rows = align_up(outputs, WIDTH) * (2 if is_gated else 1)
        pair.append(Matrix(source, scales, nothing, num_rows, outputs, width // 8, width // 32))
    there = next(one for one in pair if one is not None)
    none = there._replace(num_rows=0, num_outputs=0, row_words=0, num_groups=0)
    first, second = (none if one is None else one for one in pair)
    return (first, second), num


def by_gate(w: Quantized) -> tuple[Quantized | None, Quantized | None]:
    """One matrix alone, where `pair_of` has it."""
    return (w, None) if len(w.shape) == 4 else (None, w)


def with_powers(
    pair: tuple[Matrix, Matrix], num: int, device: torch.device
) -> tuple[Matrix, Matrix]:
    """The same with memory for powers of rows."""
    powers = torch.empty(num * sum(m.num_rows for m in pair), dtype=torch.int32, device=device)
    first = num * pair[0].num_rows
    return pair[0]._replace(powers=powers[:first]), pair[1]._replace(powers=powers[first:])


def launch(
    pair: tuple[Matrix, Matrix], num: int, flags: Tensor, forbidden: int, *,
    has_powers: bool = False, is_interleaved: bool = False,
) -> None:  # fmt: skip
    """Or what forbids images of `num` experts of MXFP4 into their flags (`common.finite`), and 1
    into the first if that has bits of `forbidden`; with `has_powers` find those of rows too."""
    is_float = pair[0].source.is_floating_point()
    rows = FLOAT_ROWS if is_float else ROWS
    _facts_kernel[(sum(cdiv(m.num_rows, rows) for m in pair), num)](
        matrices=pair, flags=flags, num_experts=num, forbidden=forbidden, GATED=(True, False),
        INTERLEAVED=is_interleaved, POWERS=has_powers, ACTS=CODES["mxfp4"] if is_float else None,
        ROWS=rows, COLS=FLOAT_COLS if is_float else GROUPS, num_warps=WARPS,
    )  # fmt: skip


def facts_of_flag(flag: int) -> Facts:
    """What a flag says of an expert that is finite."""
    return Facts(not flag & NOT_E4M3, not flag & NOT_BF16, not flag & NOT_PLACED)


def _words(codes: Tensor) -> Tensor:
    """Bytes as int32; those that begin inside a word of their memory are copied."""
    codes = codes.contiguous()
    return (codes.clone() if codes.storage_offset() % 4 else codes).view(torch.int32)
