"""Images of FP4 written by a kernel, for many experts in one launch; the bytes of `pack.write`.

A program has one slab of 64 rows of one expert, along all K blocks. Rows of a slab are taken in the
order in which its words are stored: [upper, warp, g], row = warp * 16 + upper * 8 + g.

| tensor      | of a slab and K block           | out of                                           |
| ----------- | ------------------------------- | ------------------------------------------------ |
| words       | 1024: [64 rows, t, step]        | [64 rows, 32 columns, 8 columns], 64 bytes a row |
| scales      | [64 rows, groups], bytes        | as they are, + 126 (placed), or two rows a byte  |
| zero groups | counted: images lose the scales | out of the words: 4 a group                      |

Images that decode to E4M3 need the largest scale of a row first: their slab is read twice.
"""

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

TOP, LOWEST = tl.constexpr(MAX_RELATIVE), tl.constexpr(MIN_RELATIVE)
PLACED_CODE = tl.constexpr(PLACED_BY)


@triton.jit
def _source_rows(slab, num_outputs, GATED: tl.constexpr):
    """[64] rows of the canonical matrix in stored order, and which of them there are."""
    at = tl.arange(0, 64)
    row = slab * 64 + (at // 8 % 4) * 16 + (at // 32) * 8 + at % 8
    if GATED:  # eight of gate, eight of up
        within = row // 16 * 8 + row % 8
        return (row // 8 % 2) * num_outputs + within, within < num_outputs
    else:
        return row, row < num_outputs


@triton.jit
def _load(codes, row, is_row, row_words, block):
    """[64, 4, 4] words of eight values of a K block: four of each 32 columns."""
    word = block * 16 + 4 * tl.arange(0, 4)[None, :, None] + tl.arange(0, 4)[None, None, :]
    there = is_row[:, None, None] & (word < row_words)
    return tl.load(codes + row[:, None, None] * row_words + word, mask=there, other=0)


@triton.jit
def _placed(byte, j: tl.constexpr, BITS: tl.constexpr):
    """Both values of byte j of a stored word, where they stand in it."""
    low = (byte & 7) << BITS[4 * j] | (byte >> 3 & 1) << BITS[4 * j + 1]
    return low | (byte >> 4 & 7) << BITS[4 * j + 2] | (byte >> 7 & 1) << BITS[4 * j + 3]


@triton.jit
def _store_words(image, values, E4M3: tl.constexpr, BITS: tl.constexpr):
    """The 1024 words of a K block, [64 rows, t, step], out of canonical ones."""
    at = 16 * tl.arange(0, 64)
    if E4M3:  # a word holds eight columns
        word = tl.zeros_like(values)
        for j in tl.static_range(4):
            word |= _placed(values >> (8 * j), j, BITS)
        four = tl.arange(0, 4)
        tl.store(image + at[:, None, None] + 4 * four[None, :, None] + four[None, None, :], word)
    else:  # a byte of each of four words of 32 columns
        even, odd = tl.split(tl.reshape(values, [64, 4, 2, 2]))  # pairs of a half
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
        for t in tl.static_range(4):
            word = _placed(w0 >> (8 * t), 0, BITS) | _placed(w1 >> (8 * t), 1, BITS)
            word |= _placed(w2 >> (8 * t), 2, BITS) | _placed(w3 >> (8 * t), 3, BITS)
            tl.store(image + at[:, None] + 4 * t + tl.arange(0, 4)[None, :], word)


@triton.jit
def _pack_experts_kernel(
    codes, scales, image, image_scales, factors, zero_groups, experts,
    num_rows, num_outputs, row_words,
    GATED: tl.constexpr, E4M3: tl.constexpr, PLACED: tl.constexpr, PER_BLOCK: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """One slab of one expert: words, scales, factors of rows, and how many groups are zero."""
    which, slab = tl.program_id(0), tl.program_id(1)
    expert = tl.load(experts + which)
    num_slabs = num_rows // 64
    halves: tl.constexpr = 2 if GATED else 1
    num_groups = row_words // (16 // PER_BLOCK)
    codes += which.to(tl.int64) * halves * num_outputs * row_words
    scales += which.to(tl.int64) * halves * num_outputs * num_groups
    num_blocks = (row_words + 31) // 32 * 2
    first = (expert * num_slabs + slab) * num_blocks  # int64, as experts are
    row, is_row = _source_rows(slab, num_outputs, GATED)
    column = tl.arange(0, PER_BLOCK)
    top = tl.full([64], -1, tl.int32)
    if E4M3:
        for block in range(num_blocks):
            values = _load(codes, row, is_row, row_words, block)
            zero = tl.max(values & 0x77777777, 2) == 0
            group = block * PER_BLOCK + column
            there = is_row[:, None] & (group[None, :] < num_groups)
            code = tl.load(scales + row[:, None] * num_groups + group[None, :], mask=there, other=0)
            top = tl.maximum(top, tl.max(tl.where(zero, -1, code.to(tl.int32)), 1))
        place = tl.arange(0, 64)
        stored = slab * 64 + (place // 8 % 4) * 16 + (place // 32) * 8 + place % 8
        power = tl.where(top < 0, 127, top - TOP)  # of the row, as an E8M0 code
        bits = tl.where(power > 0, power << 23, 0x400000 >> -tl.minimum(power, 0))
        value = bits.to(tl.float32, bitcast=True)
        tl.store(factors + expert * num_rows + stored, value)
    count = tl.zeros([64], tl.int32)
    for block in range(num_blocks):
        values = _load(codes, row, is_row, row_words, block)
        _store_words(image + (first + block) * 1024, values, E4M3, BITS)
        group = block * PER_BLOCK + column
        is_col = group[None, :] < num_groups
        there = is_row[:, None] & is_col
        code = tl.load(scales + row[:, None] * num_groups + group[None, :], mask=there, other=0)
        code = code.to(tl.int32)
        if PER_BLOCK == 4 and not PLACED and not E4M3:
            code = tl.where(is_col, code, 127)
        if PLACED or E4M3:
            zero = tl.max(values & 0x77777777, 2) == 0
            count += tl.sum((there & zero).to(tl.int32), 1)
            if PLACED:
                code = tl.where(zero, 1, code) + PLACED_CODE
            else:
                code = tl.where(zero, 0, code - top[:, None] + TOP) - LOWEST
        if E4M3:  # rows g and g + 8 in a byte
            upper = tl.arange(0, 2)[:, None, None]
            both = tl.sum(tl.reshape(code, [2, 32, PER_BLOCK]) << (4 * upper), 0)
            to = (first + block) * 128 + tl.arange(0, 32)[:, None] * PER_BLOCK + column[None, :]
            tl.store(image_scales + to, both.to(tl.uint8))
        else:
            to = tl.arange(0, 64)[:, None] * PER_BLOCK + column[None, :]
            to += (first + block) * (64 * PER_BLOCK)
            tl.store(image_scales + to, code.to(tl.uint8))
    tl.store(zero_groups + which * num_slabs + slab, tl.sum(count, 0))


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


def launch(out: Packed, experts: Sequence[int], w: Quantized) -> Tensor:
    """Write experts `w` [n, ...] at places of an image; int32 [n]: how many groups are zero.

    Counts are of kinds that lose the scales of such groups, else 0.
    """
    kind, device = out.kind, out.data.device
    assert w.scale is not None and out.scale is not None
    num_rows = align_up(out.num_outputs, WIDTH) * (2 if out.is_gated else 1)
    counts = torch.zeros(len(w), num_rows // 64, dtype=torch.int32, device=device)
    places = torch.tensor(list(experts), dtype=torch.int64, device=device)
    factor = out.factor if kind == "e4m3_image" and out.factor is not None else counts
    _pack_experts_kernel[(len(w), num_rows // 64)](
        codes=_words(w.data),
        scales=w.scale.view(torch.uint8).contiguous(),
        image=out.data, image_scales=out.scale.view(torch.uint8), factors=factor,
        zero_groups=counts, experts=places, num_rows=num_rows, num_outputs=out.num_outputs,
        row_words=out.width // 8, GATED=out.is_gated, E4M3=kind == "e4m3_image",
        PLACED=kind == "placed_image", PER_BLOCK=8 if kind == "nv_image" else 4,
        BITS=shifts(kind), num_warps=PACK_WARPS,
    )  # fmt: skip
    if kind == "nv_image" and out.factor is not None and w.global_scale is not None:
        g = w.global_scale
        g = g.reshape(len(w), -1).expand(len(w), out.factor[0].numel())
        out.factor[places] = g.reshape(len(w), *out.factor.shape[1:])
    return counts.sum(1, dtype=torch.int32)


def _words(codes: Tensor) -> Tensor:
    """Bytes as int32; those that begin inside a word of their memory are copied."""
    codes = codes.contiguous()
    return (codes.clone() if codes.storage_offset() % 4 else codes).view(torch.int32)
