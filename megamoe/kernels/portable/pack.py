"""BF16 rows to FP4 bytes: what `dispatch` does for these formats, in half the instructions.

At 4 bits arithmetic, not memory, is the limit. Values come as words of two, so that no layout
changes on the way to a byte, and a thread loads whole blocks in pieces of 16 bytes, so that it
finds the scale alone and once. The bytes are those of `store_acts`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.kernels.device.compat import INTERPRETED
from megamoe.kernels.device.numbers import INF_BITS, Kind, abs_bits, e2m1_low_bits, pow2


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, tl.PropagateNan.ALL)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _pair(word):
    """The two BF16 values of a word, the even column in its low half."""
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _amax(piece):
    """Words [r, b, 4] -> the largest |value| of each piece; NaN stays."""
    low, high = _pair(piece)
    return tl.reduce(_larger(tl.abs(low), tl.abs(high)), 2, _larger)


@triton.jit
def _ratio(x, step, inverse, HOW: tl.constexpr):
    """|x / step|, at most 6, as IEEE rounds it.

    "shift": step is a power of two, and nothing exceeds 6; "correct": see `compat.quotient`, where
    an overflow gives NaN, which `minimum` drops; "divide": any step.
    """
    if HOW == "shift":
        return tl.abs(x * inverse)
    elif HOW == "correct":
        first = x * inverse
        return tl.minimum(tl.abs(tl.fma(tl.fma(first, -step, x), inverse, first)), 6.0)
    else:
        return tl.minimum(tl.abs(tl.div_rn(x, tl.broadcast_to(step, x.shape))), 6.0)


@triton.jit
def _codes(piece, step, inverse, HOW: tl.constexpr):
    """Words of two values [r, b, 4] -> words of eight codes [r, b]; signs are those of x."""
    R: tl.constexpr = piece.shape[0]
    B: tl.constexpr = piece.shape[1]
    low, high = _pair(piece)
    first = e2m1_low_bits(_ratio(low, step, inverse, HOW))
    second = e2m1_low_bits(_ratio(high, step, inverse, HOW))
    two = ((piece >> 12) & 0x00080008) | (first & 7) | ((second << 16) & 0x00070000)
    shift = (tl.arange(0, 2) * 8)[None, None, None, :]
    four = tl.reduce(tl.reshape(two, (R, B, 2, 2)) << shift, 3, _either)
    half = (four | (four >> 12)) & 0xFFFF
    return tl.reduce(half << (tl.arange(0, 2) * 16)[None, None, :], 2, _either)


@triton.jit
def _long(low, high):
    return (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)


@triton.jit
def _half(a, b, step, inverse, HOW: tl.constexpr):
    """Sixteen values of every block as one number."""
    wide, inverse = step[:, :, None], inverse[:, :, None]
    return _long(_codes(a, wide, inverse, HOW), _codes(b, wide, inverse, HOW))


@triton.jit
def _pack_kernel(
    x, x_stride, g, out, out_scale, num_rows, num_blocks,
    ACTS: tl.constexpr, HAS_G: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """x in words of two values, out in numbers of sixteen codes: [ROWS, BLOCKS] blocks."""
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    block = (tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS))[None, :]
    inside = (row < num_rows) & (block < num_blocks)
    mask = inside[:, :, None]
    IS_WIDE: tl.constexpr = ACTS.GROUP == 32
    at = x + (row * x_stride + block * (ACTS.GROUP // 2))[:, :, None]
    at += tl.arange(0, 4)[None, None, :]
    a = tl.load(at, mask=mask, other=0)
    b = tl.load(at + 4, mask=mask, other=0)
    amax = _larger(_amax(a), _amax(b))
    if IS_WIDE:
        c = tl.load(at + 8, mask=mask, other=0)
        d = tl.load(at + 12, mask=mask, other=0)
        amax = _larger(amax, _larger(_amax(c), _amax(d)))
    factor = tl.load(g) if HAS_G else 1.0
    stored, _, step = ACTS.scale(abs_bits(amax), factor, ACTS.EXPONENT, ACTS.MANTISSA)
    dead = (step == 0.0) | (abs_bits(step) >= INF_BITS)
    place = row * num_blocks + block
    tl.store(out_scale + place, stored.to(out_scale.dtype.element_ty), mask=inside)
    if IS_WIDE:
        inverse = pow2(254 - ((step.to(tl.int32, bitcast=True) >> 23) & 0xFF))
        lower = tl.where(dead, 0, _half(a, b, step, inverse, "shift"))
        upper = tl.where(dead, 0, _half(c, d, step, inverse, "shift"))
        both = place[:, :, None] * 2 + tl.arange(0, 2)[None, None, :]
        tl.store(out + both, tl.join(lower, upper), mask=mask)
    else:
        step = tl.where(dead, 1.0, step)
        if INTERPRETED or (factor < 1e-18) or (factor > 1e18):
            codes = _half(a, b, step, step, "divide")
        else:
            inverse = tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)
            codes = _half(a, b, step, inverse, "correct")
        tl.store(out + place, tl.where(dead, 0, codes), mask=inside)


def can_pack(x: Tensor, acts: Kind) -> bool:
    """Whether rows of this tensor can be read as words and packed here."""
    if acts.HOLD.value != "codes" or acts.BITS.value != 4:
        return False
    pairs = x.stride(0) % 2 == 0 and x.storage_offset() % 2 == 0
    return x.dtype == torch.bfloat16 and pairs and x.shape[1] % acts.GROUP.value == 0


def pack(
    x: Tensor,
    out: Tensor,
    out_scale: Tensor,
    acts: Kind,
    *,
    g: Tensor | None,
    block: tuple[int, int],
    num_warps: int,
) -> None:
    """bf16 [T, k] -> FP4 bytes [T, k / 2] and their scales; `block` counts values."""
    num_rows, width = x.shape
    num_blocks = width // acts.GROUP.value
    rows, blocks = block[0], block[1] // acts.GROUP.value
    words = x.view(torch.int32)
    _pack_kernel[(triton.cdiv(num_blocks, blocks), triton.cdiv(num_rows, rows))](
        words, words.stride(0), x if g is None else g, out.view(torch.int64), out_scale,
        num_rows, num_blocks, ACTS=acts, HAS_G=g is not None, ROWS=rows, BLOCKS=blocks,
        num_warps=num_warps,
    )  # fmt: skip
