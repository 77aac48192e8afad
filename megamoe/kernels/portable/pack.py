"""BF16 rows to FP4 bytes: what `dispatch` does for these formats, in half the instructions.

At 4 bits arithmetic, not memory, is the limit. Values come as words of two, so that no layout
changes on the way to a byte, and a thread loads whole blocks in pieces of 16 bytes, so that it
finds the scale alone and once. The bytes are those of `store_acts`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.kernels.common.compat import HAS_PTX, INTERPRETED, after_previous, overlap
from megamoe.kernels.common.numbers import INF_BITS, Kind, abs_bits, e4m3_code, e4m3_round, pow2
from megamoe.kernels.portable.grid import row_tile
from megamoe.kernels.portable.routing import Routing, check_routing, routing_arguments
from megamoe.planner.launches import Launch, Quantize


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, tl.PropagateNan.ALL)


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
def _inverse(y):
    """1 / y for "correct" below, 1e-30 < y < 1e30.

    A start within an ulp, as PTX promises, made odd, and one step: of all y, all such starts and
    all BF16 x none then has another quotient than IEEE's. Even starts fail where y is all ones.
    """
    if HAS_PTX():
        near = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
        )
        near = (near.to(tl.int32, bitcast=True) | 1).to(tl.float32, bitcast=True)
        return tl.fma(tl.fma(near, -y, 1.0), near, near)
    else:
        return tl.div_rn(tl.full(y.shape, 1.0, tl.float32), y)


@triton.jit
def _ratio(x, step, inverse, CAP: tl.constexpr, HOW: tl.constexpr):
    """|x / step|, at most CAP, as IEEE rounds it.

    "shift": step is a power of two, and nothing exceeds CAP; "correct": see `compat.div_rn`, but
    an overflow gives NaN, which `minimum` drops; "divide": any step.
    """
    if HOW == "shift":
        return tl.abs(x * inverse)
    elif HOW == "correct":
        first = x * inverse
        return tl.minimum(tl.abs(tl.fma(tl.fma(first, -step, x), inverse, first)), CAP)
    else:
        return tl.minimum(tl.abs(tl.div_rn(x, tl.broadcast_to(step, x.shape))), CAP)


@triton.jit
def _code(size):
    """The E2M1 code nearest to `size`, 0..6: the low 16 bits, and others above them.

    As `e2m1_low_bits`, with 65238 steps in place of 6: the exponent's 298 make them 2**16.
    """
    power = tl.maximum(size, 1.0).to(tl.int32, bitcast=True) & INF_BITS
    bits = tl.fma(power.to(tl.float32, bitcast=True), 4226923.0, size).to(tl.int32, bitcast=True)
    return bits + (bits >> 22)


@triton.jit
def _codes(piece, step, inverse, HOW: tl.constexpr):
    """Words of two values [r, b, 4] -> words of eight codes [r, b]; signs are those of x.

    The signs of two words are put at bits 7, 23 and 15, 31; one product moves them to 3, 7, 11, 15.
    """
    R: tl.constexpr = piece.shape[0]
    B: tl.constexpr = piece.shape[1]
    low, high = _pair(piece)
    first = _code(_ratio(low, step, inverse, 6.0, HOW))
    second = _code(_ratio(high, step, inverse, 6.0, HOW))
    even, odd = tl.split(tl.reshape(first + second * 16, (R, B, 2, 2)))
    minus = (piece & -0x7FFF8000).to(tl.uint32, bitcast=True)
    even_minus, odd_minus = tl.split(tl.reshape(minus, (R, B, 2, 2)))
    minus = tl.umulhi((even_minus >> 8) | odd_minus, tl.full((R, B, 2), 0x10010000, tl.uint32))
    left, right = tl.split((even + odd * 256) | minus.to(tl.int32, bitcast=True))
    return (left & 0xFFFF) | (right << 16)


@triton.jit
def _long(low, high):
    return (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)


@triton.jit
def _half(a, b, step, inverse, HOW: tl.constexpr):
    """Sixteen values of every block as one number."""
    wide, inverse = step[:, :, None], inverse[:, :, None]
    return _long(_codes(a, wide, inverse, HOW), _codes(b, wide, inverse, HOW))


@triton.jit
def _nvfp4(a, b, amax, g, HOW: tl.constexpr):
    """Scales as stored, and the sixteen values of every block as one number."""
    limit = tl.full(amax.shape, 6.0, tl.float32) * g
    ratio = _ratio(amax, limit, limit if HOW == "divide" else _inverse(limit), 448.0, HOW)
    ratio = tl.where(amax == 0.0, 1.0, ratio)
    bad = abs_bits(amax) >= INF_BITS
    step = e4m3_round(ratio) * g
    dead = bad | (step == 0.0) | (abs_bits(step) >= INF_BITS)
    step = tl.where(dead, 1.0, step)
    codes = _half(a, b, step, step if HOW == "divide" else _inverse(step), HOW)
    return tl.where(bad, 0x7F, e4m3_code(ratio)), tl.where(dead, 0, codes)


@triton.jit
def _pack_kernel(
    x, x_stride, g, out, out_scale, topk_idx, topk_weights, idx_out, weights_out, num_valid, error,
    num_rows, num_blocks, num_experts,
    ACTS: tl.constexpr, HAS_ROUTING: tl.constexpr, HAS_COUNT: tl.constexpr, HAS_G: tl.constexpr,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    IS_DEEP: tl.constexpr,
):  # fmt: skip
    """x in words of two values, out in numbers of sixteen codes: [ROWS, BLOCKS] blocks."""
    after_previous()
    token = row_tile(IS_DEEP) * ROWS + tl.arange(0, ROWS)
    row = token.to(tl.int64)[:, None]
    block = (tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS))[None, :]
    inside = (row < num_rows) & (block < num_blocks)
    mask = inside[:, :, None]
    IS_WIDE: tl.constexpr = ACTS.GROUP == 32
    at = x + (row * x_stride + block * (ACTS.GROUP // 2))[:, :, None]
    at += tl.arange(0, 4)[None, None, :]
    a = tl.load(at, mask=mask, other=0)
    b = tl.load(at + 4, mask=mask, other=0)
    amax = _larger(_amax(a), _amax(b))
    factor = tl.load(g) if HAS_G else 1.0
    place = row * num_blocks + block
    if IS_WIDE:
        c = tl.load(at + 8, mask=mask, other=0)
        d = tl.load(at + 12, mask=mask, other=0)
        amax = _larger(amax, _larger(_amax(c), _amax(d)))
        stored, _, step = ACTS.scale(abs_bits(amax), factor, ACTS.EXPONENT, ACTS.MANTISSA)
        dead = stored == 255
        inverse = pow2(254 - ((step.to(tl.int32, bitcast=True) >> 23) & 0xFF))
        lower = tl.where(dead, 0, _half(a, b, step, inverse, "shift"))
        upper = tl.where(dead, 0, _half(c, d, step, inverse, "shift"))
        both = place[:, :, None] * 2 + tl.arange(0, 2)[None, None, :]
        tl.store(out + both, tl.join(lower, upper), mask=mask)
    else:
        if INTERPRETED or (factor < 1e-18) or (factor > 1e18):
            stored, codes = _nvfp4(a, b, amax, factor, "divide")
        else:
            stored, codes = _nvfp4(a, b, amax, factor, "correct")
        tl.store(out + place, codes, mask=inside)
    tl.store(out_scale + place, stored.to(out_scale.dtype.element_ty), mask=inside)
    if HAS_ROUTING:
        check_routing(
            topk_idx, topk_weights, idx_out, weights_out, num_valid, error, token,
            token < num_rows, num_experts, HAS_COUNT, TOP_K, SLOTS,
        )  # fmt: skip


def can_pack(x: Tensor, acts: Kind) -> bool:
    """Whether rows of this tensor can be read as words and packed here."""
    if acts.STORED_AS.value != "codes" or acts.BITS.value != 4:
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
    routing: Routing | None,
    num_experts: int,
    step: Launch,
    pdl: bool,
) -> None:
    """bf16 [T, k] -> FP4 bytes [T, k / 2] and their scales; `step` counts values."""
    num_rows, width = x.shape
    num_blocks = width // acts.GROUP.value
    config = step.config
    assert isinstance(config, Quantize)
    words = x.view(torch.int32)
    _pack_kernel[step.grid](
        x=words, x_stride=words.stride(0), g=x if g is None else g, out=out.view(torch.int64),
        out_scale=out_scale, num_rows=num_rows, num_blocks=num_blocks, num_experts=num_experts,
        ACTS=acts, HAS_G=g is not None, **config.constants(),
        **routing_arguments(routing, words), **overlap(pdl),
    )  # fmt: skip
