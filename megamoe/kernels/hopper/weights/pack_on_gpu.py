"""Images of FP4 written by a kernel, for many experts in one launch; the bytes of `pack.write`.

A program has two K blocks of one slab of 64 rows of one expert. Rows of a slab are taken in the
order in which its words are stored: [upper, warp, g], row = warp * 16 + upper * 8 + g.

| tensor      | of a slab and K block           | out of                                           |
| ----------- | ------------------------------- | ------------------------------------------------ |
| words       | 1024: [64 rows, t, step]        | [64 rows, 32 columns, 8 columns], 64 bytes a row |
| scales      | [64 rows, groups], bytes        | as they are, + 126 (placed), or two rows a byte  |
| zero groups | counted: images lose the scales | out of the words: 4 a group                      |

Images that decode to E4M3 need the largest scale of a row first: the launch that finds what forbids
an image finds it too (`facts_on_gpu`). Floats are quantised on the way, straight into the image.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.formats.quantized import Quantized
from megamoe.kernels.common.compat import to_fp32
from megamoe.kernels.common.finite import cdiv, is_a_run, new_flags
from megamoe.kernels.hopper.weights import facts_on_gpu
from megamoe.kernels.hopper.weights.facts_on_gpu import Matrix, pair_of, source_row, with_powers
from megamoe.kernels.hopper.weights.pack import MIN_RELATIVE, PLACED_BY, Packed
from megamoe.kernels.portable.acts import CODES, quantise_blocks
from megamoe.kernels.portable.quantise_weights import global_scale
from megamoe.layout.tiles import word_bit
from megamoe.planner.tables.hopper import PACK_WARPS

LOWEST, PLACED_CODE = tl.constexpr(MIN_RELATIVE), tl.constexpr(PLACED_BY)
FLOAT_WARPS, FLOAT_NV_WARPS = 8, 16  # of a program that quantises what it packs


class Source(NamedTuple):
    """A `Matrix`, and NVFP4's factors, or the bits of largest values that they are made of."""

    source: Tensor
    scales: Tensor
    powers: Tensor
    num_rows: int
    num_outputs: int
    row_words: int
    num_groups: int
    globals: Tensor


class Image(NamedTuple):
    """An image as the kernel writes it; factors are FP32."""

    image: Tensor
    scales: Tensor
    factors: Tensor


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


@triton.jit
def _read_codes(
    m, pair, which, row, is_row, GATED: tl.constexpr, PER_BLOCK: tl.constexpr
):  # fmt: skip
    """[64, 8, 4] words of two K blocks of a slab, and the codes of their scales."""
    num_groups = m.row_words // (16 // PER_BLOCK)
    first = which * (2 if GATED else 1) * m.num_outputs
    four, eight = tl.arange(0, 4)[None, None, :], tl.arange(0, 8)[None, :, None]
    word = pair * 32 + 4 * eight + four
    there = is_row[:, None, None] & (word < m.row_words)
    source = m.source + first * m.row_words
    values = tl.load(source + row[:, None, None] * m.row_words + word, mask=there, other=0)
    group = pair * 2 * PER_BLOCK + tl.arange(0, 2 * PER_BLOCK)[None, :]
    is_group = is_row[:, None] & (group < num_groups)
    scales = m.scales + first * num_groups
    code = tl.load(scales + row[:, None] * num_groups + group, mask=is_group, other=0)
    return values.to(tl.uint32, bitcast=True), code.to(tl.int32)


@triton.jit
def _read_floats(
    m, pair, which, row, is_row, g, GATED: tl.constexpr, PER_BLOCK: tl.constexpr,
    ACTS: tl.constexpr,
):  # fmt: skip
    """The same of floats, which are quantised."""
    width = m.row_words * 8
    col = pair * 256 + tl.arange(0, 256)[None, :]
    source = m.source + which * (2 if GATED else 1) * m.num_outputs * width
    there = is_row[:, None] & (col < width)
    x = to_fp32(tl.load(source + row[:, None] * width + col, mask=there, other=0.0))
    groups: tl.constexpr = 2 * PER_BLOCK
    ratio, code, _ = quantise_blocks(tl.reshape(x, (64, groups, 256 // groups)), g, ACTS)
    values = tl.reshape(ACTS.code(ratio).to(tl.int32), (64, 32, 8))
    values = tl.sum(values << (4 * tl.arange(0, 8)[None, None, :]), 2)
    group = pair * groups + tl.arange(0, groups)[None, :]
    code = tl.where(is_row[:, None] & (group < width // (256 // groups)), code.to(tl.int32), 0)
    return tl.reshape(values, (64, 8, 4)).to(tl.uint32, bitcast=True), code


@triton.jit
def _write_scales(
    image, code, zero, power, first, group, num_groups, is_allowed,
    E4M3: tl.constexpr, PLACED: tl.constexpr, PER_BLOCK: tl.constexpr,
):  # fmt: skip
    """Scales [64, groups] of two K blocks, the first of which has this number."""
    at = tl.arange(0, 64)
    column = tl.arange(0, 2 * PER_BLOCK)[None, :]
    block, within = column // PER_BLOCK, column % PER_BLOCK
    if E4M3:  # rows g and g + 8 in a byte
        code = tl.where(zero, 0, code - power[:, None]) - LOWEST
        upper = tl.arange(0, 2)[:, None, None]
        both = tl.sum(tl.reshape(code, (2, 32, 2 * PER_BLOCK)) << (4 * upper), 0)
        to = block * 128 + tl.arange(0, 32)[:, None] * PER_BLOCK + within
        tl.store(image + first * 128 + to, both.to(tl.uint8), mask=is_allowed)
    else:
        if PLACED:
            code = tl.where(zero, 1, code) + PLACED_CODE
        elif PER_BLOCK == 4:
            code = tl.where(group < num_groups, code, 127)
        to = block * (64 * PER_BLOCK) + at[:, None] * PER_BLOCK + within
        tl.store(image + first * (64 * PER_BLOCK) + to, code.to(tl.uint8), mask=is_allowed)


@triton.jit
def _factor_of(m, which, half, GLOBALS: tl.constexpr, FROM_LARGEST: tl.constexpr):
    """NVFP4: the factor of an expert's half, given or from the bits of its largest value."""
    if FROM_LARGEST:
        return global_scale(tl.load(m.globals + which))
    else:
        return tl.load(m.globals + which * GLOBALS + tl.minimum(half, GLOBALS - 1))


@triton.jit
def _pack_pair(
    m, into, at, which, expert, is_allowed, KIND: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, GLOBALS: tl.constexpr, MOVES: tl.constexpr, ACTS: tl.constexpr,
):  # fmt: skip
    """Two K blocks of a slab -> how many groups are zero and have another scale than 1."""
    E4M3: tl.constexpr = KIND == "e4m3_image"
    PLACED: tl.constexpr = KIND == "placed_image"
    PER_BLOCK: tl.constexpr = 8 if KIND == "nv_image" else 4
    pairs = tl.cdiv(m.row_words, 32)
    pair, slab = at % pairs, at // pairs
    num_groups = m.row_words // (16 // PER_BLOCK)
    first = (expert * (m.num_rows // 64) + slab) * (2 * pairs) + 2 * pair  # int64
    lane = tl.arange(0, 64)
    stored = slab * 64 + (lane // 8 % 4) * 16 + (lane // 32) * 8 + lane % 8
    row, is_row = source_row(stored, m.num_outputs, GATED, INTERLEAVED)

    g, power = 1.0, lane
    if KIND == "nv_image" and ACTS is not None:
        g = _factor_of(m, which, 0, 1, True)
    if ACTS is None:
        values, code = _read_codes(m, pair, which, row, is_row, GATED, PER_BLOCK)
    else:
        values, code = _read_floats(m, pair, which, row, is_row, g, GATED, PER_BLOCK, ACTS)
    if E4M3:  # all is asked for before anything is written: loads do not pass stores
        power = tl.load(m.powers + which * m.num_rows + stored)
    words = _image_words(values, E4M3, PLACED, MOVES).to(tl.int32, bitcast=True)
    four, eight = tl.arange(0, 4)[None, None, :], tl.arange(0, 8)[None, :, None]
    to = (eight // 4) * 1024 + 16 * lane[:, None, None] + 4 * (eight % 4) + four
    tl.store(into.image + first * 1024 + to, words, mask=is_allowed)

    group = pair * 2 * PER_BLOCK + tl.arange(0, 2 * PER_BLOCK)[None, :]
    zero, count = group < 0, 0
    if PLACED or E4M3:
        zero = tl.max((values & 0x77777777).to(tl.int32, bitcast=True), 2) == 0
        is_lost = is_row[:, None] & (group < num_groups) & zero & (code != 127)
        count = tl.sum(tl.sum(is_lost.to(tl.int32), 1), 0)
    _write_scales(
        into.scales, code, zero, power, first, group, num_groups, is_allowed, E4M3, PLACED,
        PER_BLOCK,
    )  # fmt: skip
    if E4M3:  # noqa: SIM102  known at compile time
        if pair == 0:
            bits = tl.where(power > 0, power << 23, 0x400000 >> -tl.minimum(power, 0))
            factor = bits.to(tl.float32, bitcast=True)
            tl.store(into.factors + expert * m.num_rows + stored, factor, mask=is_allowed)
    if KIND == "nv_image" and GLOBALS > 0:  # noqa: SIM102  known at compile time
        if at == 0:
            halves: tl.constexpr = 2 if GATED else 1
            half = tl.arange(0, halves)
            factor = _factor_of(m, which, half, GLOBALS, ACTS is not None)
            factor += tl.zeros((halves,), tl.float32)
            tl.store(into.factors + expert * halves + half, factor, mask=is_allowed)
    return count


@triton.jit(do_not_specialize=["first_expert", "num_experts"])
def _pack_experts_kernel(
    matrices, images, flags, experts, first_expert, num_experts,
    KIND: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, GLOBALS: tl.constexpr,
    MOVES: tl.constexpr, LISTED: tl.constexpr, ACTS: tl.constexpr,
):  # fmt: skip
    """Two K blocks of a slab of one expert: words, scales, factors, and how many groups of zeros
    lose their scale. Nothing but that is written where the first flag is not 0.

    experts  where they stand, where they do not follow `first_expert`
    ACTS     of floats, what they are quantised to; None: codes and scales
    """
    at, which = tl.program_id(0), tl.program_id(1).to(tl.int64)
    expert = first_expert + which
    if LISTED:
        expert = tl.load(experts + which)
    is_allowed = tl.load(flags) == 0
    for i in tl.static_range(len(GATED)):
        m = matrices[i]
        num = tl.cdiv(m.row_words, 32) * (m.num_rows // 64)
        if (at >= 0) & (at < num):
            count = _pack_pair(
                m, images[i], at, which, expert, is_allowed, KIND, GATED[i], INTERLEAVED,
                GLOBALS[i], MOVES, ACTS,
            )  # fmt: skip
            if count > 0:
                tl.atomic_add(flags + 3 + (2 + i) * num_experts + which, count)
        at -= num


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
    """The same, grouped by shift distance: one shift and mask for all bits that move equally far.

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
    out: Packed, experts: Sequence[int], w: Quantized, *, wants_facts: bool = False
) -> Tensor:  # fmt: skip
    """Write experts `w` [n, ...] at places of an image; the flags of what was launched
    (`common.finite`).

    wants_facts  of MXFP4: find what forbids images too
    """
    flags = new_flags(len(w), w.device)
    gated = out.is_gated
    sources, images = ((w, None), (out, None)) if gated else ((None, w), (None, out))
    pair, num = pair_of(sources, flags)
    has_powers = out.kind == "e4m3_image"
    if has_powers:
        pair = with_powers(pair, num, w.device)
    if has_powers or (wants_facts and out.kind != "nv_image"):
        facts_on_gpu.launch(pair, num, flags, 0, has_powers=has_powers)
    launch_both(images, experts, pair, flags, factors_of(sources))
    return flags


def factors_of(sources: Sequence[Quantized | Tensor | None]) -> list[Tensor | None]:
    """Global scales of NVFP4's experts, one or two for each of them."""
    factors: list[Tensor | None] = []
    for w in sources:
        g = w.global_scale if isinstance(w, Quantized) else None
        is_one = g is not None and g.ndim == 0
        factors.append(g.expand(len(w)).contiguous() if is_one and g is not None else g)  # type: ignore[arg-type]
    return factors


def launch_both(
    images: Sequence[Packed | None], experts: Sequence[int], pair: tuple[Matrix, Matrix],
    flags: Tensor, factors: Sequence[Tensor | None] = (None, None), *,
    is_interleaved: bool = False,
) -> None:  # fmt: skip
    """Write experts of one or two matrices at places of images of one kind, if the first flag is 0.

    pair     them, with the powers of rows where the kind has them
    factors  NVFP4: of each, its global scales, or of floats the bits of its largest value
    """
    outs = [one for one in images if one is not None]
    kind, num = outs[0].kind, len(experts)
    assert all(one.kind == kind for one in outs)
    is_float = pair[0].source.is_floating_point()
    is_run = is_a_run(experts)
    places = flags if is_run else _listed(experts, flags.device)
    into, counts = [], []
    sources = []
    for m, one, g in zip(pair, images, factors, strict=True):
        image = outs[0] if one is None else one
        assert image.scale is not None
        into.append(Image(image.data, image.scale.view(torch.uint8), or_of(image.factor, flags)))
        has_factor = g is not None and one is not None and one.factor is not None
        counts.append(g.numel() // num if has_factor and g is not None else 0)
        known = next((f for f in factors if f is not None), flags) if g is None else g
        sources.append(Source(*m, known))
    acts = CODES["nvfp4" if kind == "nv_image" else "mxfp4"] if is_float else None
    blocks = [cdiv(m.row_words, 32) * (m.num_rows // 64) for m in pair]
    _pack_experts_kernel[(sum(blocks), num)](
        matrices=tuple(sources), images=tuple(into), flags=flags, experts=places,
        first_expert=experts[0], num_experts=num, KIND=kind, GATED=(True, False),
        INTERLEAVED=is_interleaved, GLOBALS=tuple(counts), MOVES=moves(kind), LISTED=not is_run,
        ACTS=acts, num_warps=warps(kind, is_float=is_float),
    )  # fmt: skip


def warps(kind: str, *, is_float: bool) -> int:
    """Of a program. NVFP4's division takes registers: more threads have fewer values each."""
    if not is_float:
        return PACK_WARPS
    return FLOAT_NV_WARPS if kind == "nv_image" else FLOAT_WARPS


def or_of(t: Tensor | None, other: Tensor) -> Tensor:
    """`t`, or any tensor where the kernel does not look."""
    return other if t is None else t


def _listed(experts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(experts), dtype=torch.int64, device=device)
