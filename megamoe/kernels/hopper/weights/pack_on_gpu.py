"""Images of FP4 written by a kernel, for many experts in one launch; the bytes of `pack.write`.

A program has two K blocks of one slab of 64 rows of one expert. Rows of a slab are taken in the
order in which its words are stored: [upper, warp, g], row = warp * 16 + upper * 8 + g.

| tensor      | of a slab and K block           | out of                                           |
| ----------- | ------------------------------- | ------------------------------------------------ |
| words       | 1024: [64 rows, t, step]        | [64 rows, 32 columns, 8 columns], 64 bytes a row |
| scales      | [64 rows, groups], bytes        | as they are, + 126 (placed), or two rows a byte  |
| zero groups | counted: images lose the scales | out of the words: 4 a group                      |

Images that decode to E4M3 need the largest scale of a row first. A launch before finds it: of the
words it looks at one group a row, and at the others only where that one is zero.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.formats.quantized import Quantized
from megamoe.kernels.hopper.weights.pack import MAX_RELATIVE, MIN_RELATIVE, PLACED_BY, Packed
from megamoe.layout.regions import align_up
from megamoe.layout.tiles import word_bit
from megamoe.planner.tables.hopper import PACK_WARPS, WIDTH

LOWEST, TOP = tl.constexpr(MIN_RELATIVE), tl.constexpr(MAX_RELATIVE)
PLACED_CODE = tl.constexpr(PLACED_BY)
POWER_ROWS, POWER_GROUPS = 32, 64  # of scales that are looked at together for powers of rows


@triton.jit
def _source_row(row, num_outputs, GATED: tl.constexpr):
    """The canonical row of a row of the image, and whether there is one."""
    if GATED:  # eight of gate, eight of up
        within = row // 16 * 8 + row % 8
        return (row // 8 % 2) * num_outputs + within, within < num_outputs
    else:
        return row, row < num_outputs


@triton.jit
def _moved(word, MOVES: tl.constexpr):
    """Bits of words brought to other places: (distance, bits that go so far), ..., one by one."""
    out = tl.zeros_like(word)
    for i in tl.static_range(0, len(MOVES), 2):
        if MOVES[i] >= 0:
            out |= (word << MOVES[i]) & MOVES[i + 1]
        else:
            out |= (word >> -MOVES[i]) & MOVES[i + 1]
    return out


@triton.jit
def _four_of(values, PLACED: tl.constexpr):
    """The four words of 32 columns, of which byte t goes to word t: first byte and so on.

    Placed: words of the lower, then of the upper values of pairs of columns.
    """
    even, odd = tl.split(tl.reshape(values, (values.shape[0], values.shape[1], 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    if PLACED:
        low: tl.constexpr = 0x0F0F0F0F
        high: tl.constexpr = 0xF0F0F0F0
        return (
            (w0 & low) | ((w1 << 4) & high), (w2 & low) | ((w3 << 4) & high),
            ((w0 >> 4) & low) | (w1 & high), ((w2 >> 4) & low) | (w3 & high),
        )  # fmt: skip
    else:
        return w0, w1, w2, w3


@triton.jit
def _transposed(w0, w1, w2, w3):
    """Four words -> word t has their bytes t."""
    odd: tl.constexpr = 0xFF00FF00
    even: tl.constexpr = 0x00FF00FF
    a, b = (w0 & even) | ((w1 << 8) & odd), ((w0 >> 8) & even) | (w1 & odd)  # bytes 0, 2; 1, 3
    c, d = (w2 & even) | ((w3 << 8) & odd), ((w2 >> 8) & even) | (w3 & odd)
    upper: tl.constexpr = 0xFFFF0000
    return (
        (a & 0xFFFF) | (c << 16), (b & 0xFFFF) | (d << 16),
        (a >> 16) | (c & upper), (b >> 16) | (d & upper),
    )  # fmt: skip


@triton.jit
def _image_words(values, E4M3: tl.constexpr, PLACED: tl.constexpr, MOVES: tl.constexpr):
    """[64, 8, 4] canonical words of two K blocks as they are stored, [64, 2 * t, step]."""
    if E4M3:  # a word holds eight columns
        return _moved(values, MOVES)
    else:  # a byte of each of four words of 32 columns
        w0, w1, w2, w3 = _four_of(values, PLACED)
        w0, w1, w2, w3 = _transposed(w0, w1, w2, w3)
        words = tl.join(tl.join(w0, w1), tl.join(w2, w3))  # [64, 2 * step, t % 2, t // 2]
        words = tl.permute(tl.reshape(words, (64, 2, 4, 2, 2)), (0, 1, 4, 3, 2))
        return _moved(tl.reshape(words, (64, 8, 4)), MOVES)


@triton.jit(do_not_specialize=["first_expert"])
def _pack_experts_kernel(
    codes, scales, powers, image, image_scales, zero_groups, experts, first_expert,
    num_rows, num_outputs, row_words,
    GATED: tl.constexpr, E4M3: tl.constexpr, PLACED: tl.constexpr, PER_BLOCK: tl.constexpr,
    MOVES: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Two K blocks of a slab of one expert: words, scales, and how many groups are zero."""
    pair, slab, which = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    expert = first_expert + which
    if LISTED:
        expert = tl.load(experts + which)
    halves: tl.constexpr = 2 if GATED else 1
    num_groups = row_words // (16 // PER_BLOCK)
    codes += which * halves * num_outputs * row_words
    scales += which * halves * num_outputs * num_groups
    num_slabs = num_rows // 64
    first = (expert * num_slabs + slab) * (2 * tl.num_programs(0)) + 2 * pair  # int64
    at = tl.arange(0, 64)
    stored = slab * 64 + (at // 8 % 4) * 16 + (at // 32) * 8 + at % 8
    row, is_row = _source_row(stored, num_outputs, GATED)

    four, eight = tl.arange(0, 4)[None, None, :], tl.arange(0, 8)[None, :, None]
    word = pair * 32 + 4 * eight + four
    there = is_row[:, None, None] & (word < row_words)
    values = tl.load(codes + row[:, None, None] * row_words + word, mask=there, other=0)
    values = values.to(tl.uint32, bitcast=True)
    column = tl.arange(0, 2 * PER_BLOCK)[None, :]
    group = pair * 2 * PER_BLOCK + column
    is_group = is_row[:, None] & (group < num_groups)
    code = tl.load(scales + row[:, None] * num_groups + group, mask=is_group, other=0)
    code = code.to(tl.int32)
    if E4M3:  # all is asked for before anything is written: loads do not pass stores
        power = tl.load(powers + which * num_rows + stored)
    words = _image_words(values, E4M3, PLACED, MOVES).to(tl.int32, bitcast=True)
    to = (eight // 4) * 1024 + 16 * at[:, None, None] + 4 * (eight % 4) + four
    tl.store(image + first * 1024 + to, words)

    block, within = column // PER_BLOCK, column % PER_BLOCK
    if PLACED or E4M3:
        zero = tl.max((values & 0x77777777).to(tl.int32, bitcast=True), 2) == 0
        count = tl.sum(tl.sum((is_group & zero).to(tl.int32), 1), 0)
        if count > 0:
            tl.atomic_add(zero_groups + which, count)
    if E4M3:  # rows g and g + 8 in a byte
        code = tl.where(zero, 0, code - power[:, None]) - LOWEST
        upper = tl.arange(0, 2)[:, None, None]
        both = tl.sum(tl.reshape(code, (2, 32, 2 * PER_BLOCK)) << (4 * upper), 0)
        to = block * 128 + tl.arange(0, 32)[:, None] * PER_BLOCK + within
        tl.store(image_scales + first * 128 + to, both.to(tl.uint8))
    else:
        if PLACED:
            code = tl.where(zero, 1, code) + PLACED_CODE
        elif PER_BLOCK == 4:
            code = tl.where(group < num_groups, code, 127)
        to = block * (64 * PER_BLOCK) + at[:, None] * PER_BLOCK + within
        tl.store(image_scales + first * (64 * PER_BLOCK) + to, code.to(tl.uint8))


@triton.jit(do_not_specialize=["first_expert"])
def _row_powers_kernel(
    codes, scales, powers, factors, experts, first_expert, num_rows, num_outputs, row_words,
    GATED: tl.constexpr, LISTED: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Of rows of an image that decodes to E4M3: the power of two that factors are, as E8M0 codes
    (int32, below 1 of subnormals) and in FP32."""
    which = tl.program_id(1).to(tl.int64)
    expert = first_expert + which
    if LISTED:
        expert = tl.load(experts + which)
    halves: tl.constexpr = 2 if GATED else 1
    num_groups = row_words // 4
    codes += which * halves * num_outputs * row_words
    scales += which * halves * num_outputs * num_groups
    stored = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row, is_row = _source_row(stored, num_outputs, GATED)
    best = tl.zeros((ROWS, GROUPS), tl.int32)  # the largest, and where it is
    for first in range(0, num_groups, GROUPS):
        group = first + tl.arange(0, GROUPS)[None, :]
        there = is_row[:, None] & (group < num_groups)
        scale = tl.load(scales + row[:, None] * num_groups + group, mask=there, other=0)
        best = tl.maximum(best, tl.where(there, scale.to(tl.int32) << 16 | group, 0))
    at_best = tl.max(best, 1)
    top, word = at_best >> 16, row * row_words + 4 * (at_best & 0xFFFF)
    of_best = tl.load(
        codes + word[:, None] + tl.arange(0, 4)[None, :], mask=is_row[:, None], other=0
    )
    is_zero = tl.max(of_best & 0x77777777, 1) == 0
    if tl.max((is_zero & is_row).to(tl.int32), 0) > 0:
        top = tl.full((ROWS,), -1, tl.int32)
        for first in range(0, num_groups, GROUPS):
            group = first + tl.arange(0, GROUPS)[None, :]
            there = is_row[:, None] & (group < num_groups)
            scale = tl.load(scales + row[:, None] * num_groups + group, mask=there, other=0)
            some = tl.zeros((ROWS, GROUPS), tl.int32)
            for j in tl.static_range(4):
                at = row[:, None] * row_words + 4 * group + j
                some |= tl.load(codes + at, mask=there, other=0) & 0x77777777
            top = tl.maximum(top, tl.max(tl.where(some != 0, scale.to(tl.int32), -1), 1))
    power = tl.where(is_row & (top >= 0), top - TOP, 127)
    bits = tl.where(power > 0, power << 23, 0x400000 >> -tl.minimum(power, 0))
    is_there = stored < num_rows
    tl.store(powers + which * num_rows + stored, power, mask=is_there)
    value = bits.to(tl.float32, bitcast=True)
    tl.store(factors + expert * num_rows + stored, value, mask=is_there)


@functools.cache
def shifts(kind: str) -> tuple[int, ...]:
    """Of each byte of a word's eight values: where magnitude and sign of both of its values go."""
    is_placed = kind == "placed_image"
    return tuple(
        word_bit(half, v, bit, is_placed)
        for half in range(2)
        for pair in range(2)
        for v in (2 * pair, 2 * pair + 1)
        for bit in (0, 3)
    )


def moves(kind: str) -> tuple[int, ...]:
    """The same as (distance, bits that go so far), ...: fewer operations, since many go as far.

    Words that are placed come with the lower values of all bytes before the upper ones.
    """
    return _moves(shifts(kind), kind == "placed_image")


@functools.cache
def _moves(places: tuple[int, ...], is_placed: bool) -> tuple[int, ...]:
    bits: dict[int, int] = {}
    for i, to in enumerate(places):
        byte, is_upper, is_sign = i // 4, i // 2 % 2, i % 2
        at = 16 * is_upper + 4 * byte if is_placed else 8 * byte + 4 * is_upper
        at, width = (at + 3, 1) if is_sign else (at, 7)
        bits[to - at] = bits.get(to - at, 0) | width << to & 0xFFFFFFFF
    return tuple(number for pair in sorted(bits.items()) for number in pair)


def launch(
    out: Packed, experts: Sequence[int], w: Quantized, counts: Tensor | None = None
) -> Tensor:
    """Write experts `w` [n, ...] at places of an image; int32 [n]: how many groups are zero.

    counts  zeros to be counted in, or None
    Counts are of kinds that lose the scales of such groups, else 0.
    """
    kind, device, num = out.kind, out.data.device, len(w)
    assert w.scale is not None and out.scale is not None
    num_rows = align_up(out.num_outputs, WIDTH) * (2 if out.is_gated else 1)
    if counts is None:
        counts = torch.zeros(num, dtype=torch.int32, device=device)
    is_run = all(e == experts[0] + i for i, e in enumerate(experts))
    places = counts if is_run else torch.tensor(list(experts), dtype=torch.int64, device=device)
    codes, scales = _words(w.data), w.scale.view(torch.uint8).contiguous()
    rest: dict[str, object] = {
        "experts": places, "first_expert": experts[0], "num_rows": num_rows,
        "num_outputs": out.num_outputs, "row_words": out.width // 8, "GATED": out.is_gated,
        "LISTED": not is_run, "num_warps": PACK_WARPS,
    }  # fmt: skip
    powers = counts
    if kind == "e4m3_image":
        powers = torch.empty(num, num_rows, dtype=torch.int32, device=device)
        _row_powers_kernel[(triton.cdiv(num_rows, POWER_ROWS), num)](
            codes=codes,
            scales=scales,
            powers=powers,
            factors=out.factor,
            ROWS=POWER_ROWS,
            GROUPS=POWER_GROUPS,
            **rest,
        )
    _pack_experts_kernel[(align_up(out.width, WIDTH) // WIDTH, num_rows // 64, num)](
        codes=codes, scales=scales, powers=powers, image=out.data,
        image_scales=out.scale.view(torch.uint8), zero_groups=counts,
        E4M3=kind == "e4m3_image", PLACED=kind == "placed_image",
        PER_BLOCK=8 if kind == "nv_image" else 4, MOVES=moves(kind), **rest,
    )  # fmt: skip
    if kind == "nv_image" and out.factor is not None and w.global_scale is not None:
        g = w.global_scale
        g = g.reshape(num, -1).expand(num, out.factor[0].numel())
        g = g.reshape(num, *out.factor.shape[1:])
        if is_run:
            out.factor[experts[0] : experts[0] + num].copy_(g)
        else:
            out.factor[places] = g
    return counts


def _words(codes: Tensor) -> Tensor:
    """Bytes as int32; those that begin inside a word of their memory are copied."""
    codes = codes.contiguous()
    return (codes.clone() if codes.storage_offset() % 4 else codes).view(torch.int32)
