"""Operands of the grouped GEMM: how a tile of weights or tokens comes in, and how they multiply.

Weights are always the MMA's M operand and tokens its N operand, so that narrow and wide token tiles
use the same instruction and give the same bits. A `Kind` of WEIGHTS loads a tile [n, k] through a
tensor descriptor over all experts' rows and multiplies it with tokens; a `Kind` of TOKENS loads
[m, k] and says whether partial sums are promoted, that is scaled in FP32 every 128 of K.

Rows past an expert's end are another expert's: their sums are never stored.
"""

import triton
import triton.language as tl

from megamoe.kernels.device.compat import INTERPRETED, bf16_mul, dot, to_bf16
from megamoe.kernels.device.numbers import Kind, e2m1_to_bf16, e4m3_value, e8m0_to_bf16


@triton.jit
def _plain_weights(w, w_scale, first_row, row, used, scale_row, k0, K, BLOCK_K: tl.constexpr):
    return w.load([first_row, k0]), 0, 1.0


@triton.jit
def _block_weights(w, w_scale, first_row, row, used, scale_row, k0, K, BLOCK_K: tl.constexpr):
    """E4M3 with one FP32 scale per 128x128; the rows of a tile lie in one block of rows."""
    return w.load([first_row, k0]), 0, tl.load(w_scale + scale_row * tl.cdiv(K, 128) + k0 // 128)


@triton.jit
def _scale_tile(w_scale, row, used, k0, K, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """The scales of a packed tile, [n, BLOCK_K / GROUP]; zero past the end of K."""
    block = k0 // GROUP + tl.arange(0, BLOCK_K // GROUP)
    inside = used[:, None] & (block < K // GROUP)[None, :]
    return tl.load(w_scale + row[:, None] * (K // GROUP) + block[None, :], mask=inside, other=0)


@triton.jit
def _mxfp4_weights(w, w_scale, first_row, row, used, scale_row, k0, K, BLOCK_K: tl.constexpr):
    return w.load([first_row, k0 // 2]), _scale_tile(w_scale, row, used, k0, K, 32, BLOCK_K), 1.0


@triton.jit
def _nvfp4_weights(w, w_scale, first_row, row, used, scale_row, k0, K, BLOCK_K: tl.constexpr):
    """Without the global scale, which multiplies the sums."""
    return w.load([first_row, k0 // 2]), _scale_tile(w_scale, row, used, k0, K, 16, BLOCK_K), 1.0


@triton.jit
def _plain_product(w, scale, tokens, acc):
    return dot(w, tokens, acc)


@triton.jit
def _upcast_product(w, scale, tokens, acc):
    """E4M3 where the GPU has no FP8 MMA: every value is exact in BF16."""
    return dot(w.to(tl.bfloat16), tokens.to(tl.bfloat16), acc)


@triton.jit
def _mxfp4_product(w, scale, tokens, acc):
    """MXFP4 times BF16, exactly. Without such an MMA the compiler decodes to BF16 in registers.

    It takes E8M0 code 0 as zero; 2**-127 times at most 6 is lost there.
    """
    if INTERPRETED:
        return dot(_decode(w, e8m0_to_bf16(scale), 32), tokens, acc)
    else:
        return tl.dot_scaled(w, scale, "e2m1", tokens, None, "bf16", acc)


@triton.jit
def _nvfp4_product(w, scale, tokens, acc):
    """NVFP4 times BF16: a product of E2M1 and E4M3 has six bits, exact in BF16."""
    return dot(_decode(w, to_bf16(e4m3_value(scale)), 16), tokens, acc)


@triton.jit
def _decode(packed, scale, GROUP: tl.constexpr):
    """Bytes [n, k / 2] and BF16 scales [n, k / GROUP] -> BF16 values [n, k]."""
    N: tl.constexpr = packed.shape[0]
    HALF: tl.constexpr = packed.shape[1]
    wide = packed.to(tl.int16)
    blocks: tl.constexpr = (N, 2 * HALF // GROUP, GROUP // 2)
    low = bf16_mul(tl.reshape(e2m1_to_bf16(wide & 15), blocks), scale[:, :, None])
    high = bf16_mul(tl.reshape(e2m1_to_bf16(wide >> 4), blocks), scale[:, :, None])
    return tl.reshape(tl.join(low, high), (N, 2 * HALF))


@triton.jit
def _plain_tokens(x, x_scale, row, valid, k0, K, BLOCK_K: tl.constexpr):
    k = k0 + tl.arange(0, BLOCK_K)
    inside = valid[:, None] & (k < K)[None, :]
    return tl.load(x + row[:, None] * K + k[None, :], mask=inside, other=0.0), 1.0


@triton.jit
def _scaled_tokens(x, x_scale, row, valid, k0, K, BLOCK_K: tl.constexpr):
    """With one FP32 scale per row and 128 columns."""
    k = k0 + tl.arange(0, BLOCK_K)
    inside = valid[:, None] & (k < K)[None, :]
    tile = tl.load(x + row[:, None] * K + k[None, :], mask=inside, other=0.0)
    return tile, tl.load(x_scale + row * tl.cdiv(K, 128) + k0 // 128, mask=valid, other=0.0)


@triton.jit
def add_product(
    acc, w, w_scale, factor, tokens, token_scale, TOKENS: tl.constexpr, WEIGHTS: tl.constexpr
):
    """acc + w @ tokens.T; promoted, the product is scaled in FP32 before it is added."""
    if TOKENS.PROMOTED:
        zero = tl.zeros(acc.shape, tl.float32)
        part = WEIGHTS.product(w, w_scale, tl.trans(tokens), zero)
        return acc + part * (factor * token_scale)[None, :]
    else:
        return WEIGHTS.product(w, w_scale, tl.trans(tokens), acc)


WEIGHTS = {
    "bf16": Kind("bf16", load=_plain_weights, product=_plain_product),
    "fp8_128x128": Kind("fp8_128x128", load=_block_weights, product=_plain_product),
    "upcast": Kind("upcast", load=_block_weights, product=_upcast_product),
    "mxfp4": Kind("mxfp4", load=_mxfp4_weights, product=_mxfp4_product),
    "nvfp4": Kind("nvfp4", load=_nvfp4_weights, product=_nvfp4_product),
}
TOKENS = {
    "plain": Kind("plain", PROMOTED=False, load=_plain_tokens),
    "scaled": Kind("scaled", PROMOTED=True, load=_scaled_tokens),
}
