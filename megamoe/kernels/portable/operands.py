"""Operands of the grouped GEMM: how a tile of weights or tokens comes in, and how they multiply.

Weights are always the MMA's M operand and tokens its N operand, so that narrow and wide token tiles
use the same instruction and give the same bits. A `Kind` of WEIGHTS loads a tile [n, k] through a
tensor descriptor over all experts' rows and multiplies it with tokens; a `Kind` of TOKENS loads
[m, k] and says whether partial sums are promoted, that is scaled in FP32 every 128 of K. Both are
codes with scales where the GPU's MMA takes these (the `_codes` kinds, on Blackwell).

Rows past an expert's end are another expert's, and rows past a tile's limit hold anything: their
sums are never stored, and no sum mixes with another.
"""

import triton
import triton.language as tl

from megamoe.kernels.common.compat import INTERPRETED, dot
from megamoe.kernels.common.numbers import (
    Kind,
    e2m1_to_bf16,
    e2m1_words,
    e4m3_twice,
    e4m3_value,
    e8m0_twice,
    e8m0_value,
)
from megamoe.kernels.portable.k_order import stored_cols, tile_in_order


@triton.jit
def _plain_weights(w, w_scale, first_row, row, used, scale_row, k0, K, BLOCK_K: tl.constexpr):
    return w.load([first_row, k0]), 0, 1.0


@triton.jit
def _block_weights(w, w_scale, first_row, row, used, scale_row, k0, K, BLOCK_K: tl.constexpr):
    """E4M3 with one FP32 scale per 128x128; the rows of a tile lie in one block of rows."""
    return w.load([first_row, k0]), 0, tl.load(w_scale + scale_row * tl.cdiv(K, 128) + k0 // 128)


@triton.jit
def _scale_tile(w_scale, row, used, k0, K, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """The scale codes of a packed tile as int32 [n, BLOCK_K / GROUP]; zero past the end of K.

    They come as words of four where rows are whole words: single bytes would not be loaded ahead.
    The shifts 0, 8, 16, 24 come from memory too: only what is computed from loads and constants
    moves into the MMA's layout with the weights, instead of moving these through shared memory.
    """
    N: tl.constexpr = row.shape[0]
    BLOCKS: tl.constexpr = BLOCK_K // GROUP
    WORDS: tl.constexpr = w_scale[0].dtype.element_ty == tl.int32
    PER: tl.constexpr = 4 if WORDS else 1
    num = K // (GROUP * PER)
    at = k0 // (GROUP * PER) + tl.arange(0, BLOCKS // PER)
    inside = used[:, None] & (at < num)[None, :]
    codes = tl.load(w_scale[0] + row[:, None] * num + at[None, :], mask=inside, other=0)
    if WORDS:
        shift = tl.load(w_scale[1] + tl.arange(0, 4))
        return tl.reshape((codes[:, :, None] >> shift[None, None, :]) & 255, (N, BLOCKS))
    else:
        return codes.to(tl.int32)


@triton.jit
def _mxfp4_weights(w, w_scale, first_row, row, used, scale_row, k0, K, BLOCK_K: tl.constexpr):
    return w.load([first_row, k0 // 8]), _scale_tile(w_scale, row, used, k0, K, 32, BLOCK_K), 1.0


@triton.jit
def _nvfp4_weights(w, w_scale, first_row, row, used, scale_row, k0, K, BLOCK_K: tl.constexpr):
    """Without the global scale, which multiplies the sums."""
    return w.load([first_row, k0 // 8]), _scale_tile(w_scale, row, used, k0, K, 16, BLOCK_K), 1.0


@triton.jit
def _code_scales(scale, row, used, k0, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """Scale bytes [r, BLOCK_K / GROUP] from a tensor and the length of its rows; zero past it."""
    block = k0 // GROUP + tl.arange(0, BLOCK_K // GROUP)
    inside = used[:, None] & (block < scale[1])[None, :]
    return tl.load(scale[0] + row[:, None] * scale[1] + block[None, :], mask=inside, other=0)


@triton.jit
def _mxfp4_codes(w, w_scale, first_row, row, used, scale_row, k0, K, BLOCK_K: tl.constexpr):
    return w.load([first_row, k0 // 2]), _code_scales(w_scale, row, used, k0, 32, BLOCK_K), 1.0


@triton.jit
def _nvfp4_codes(w, w_scale, first_row, row, used, scale_row, k0, K, BLOCK_K: tl.constexpr):
    return w.load([first_row, k0 // 2]), _code_scales(w_scale, row, used, k0, 16, BLOCK_K), 1.0


@triton.jit
def _plain_product(w, scale, tokens, acc):
    return dot(w, tokens, acc)


@triton.jit
def _upcast_product(w, scale, tokens, acc):
    """E4M3 where the GPU has no FP8 MMA: every value is exact in BF16."""
    return dot(w.to(tl.bfloat16), tokens.to(tl.bfloat16), acc)


@triton.jit
def _mxfp4_product(w, scale, tokens, acc):
    """MXFP4 times BF16, exactly: decoded to BF16 in registers, in the order of k_order.py."""
    return dot(_decode(w, e8m0_twice(scale)), tokens, acc)


@triton.jit
def _nvfp4_product(w, scale, tokens, acc):
    """NVFP4 times BF16: a product of E2M1 and E4M3 has six bits, exact in BF16."""
    return dot(_decode(w, e4m3_twice(scale)), tokens, acc)


@triton.jit
def _decode(words, factor):
    """Words [n, k / 8] of codes and one factor a group -> BF16 values [n, k] in K order."""
    N: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    GROUPS: tl.constexpr = factor.shape[1]
    wide = tl.broadcast_to(factor[:, :, None], (N, GROUPS, W // GROUPS))
    return tile_in_order(e2m1_words(words, tl.reshape(wide, (N, W))))


@triton.jit
def _token_tile(x, row, k0, K, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr):
    """Rows of activations. WHOLE: K is known to be a multiple of BLOCK_K."""
    k = k0 + tl.arange(0, BLOCK_K)
    at = x + row[:, None] * K + k[None, :]
    return tl.load(at) if WHOLE else tl.load(at, mask=(k < K)[None, :], other=0.0)


@triton.jit
def _token_scale(x_scale, row, valid, k0, K):
    """One FP32 scale per row and 128 columns; 32-bit offsets, since every lane holds many."""
    at = row.to(tl.int32) * tl.cdiv(K, 128) + k0 // 128
    return tl.load(x_scale + at, mask=valid, other=0.0)


@triton.jit
def _plain_tokens(x, x_scale, row, valid, k0, K, BLOCK_K: tl.constexpr):
    return _token_tile(x, row, k0, K, BLOCK_K, False), 1.0


@triton.jit
def _scaled_tokens(x, x_scale, row, valid, k0, K, BLOCK_K: tl.constexpr):
    scale = _token_scale(x_scale, row, valid, k0, K)
    return _token_tile(x, row, k0, K, BLOCK_K, False), scale


@triton.jit
def _ordered_tokens(x, x_scale, row, valid, k0, K, BLOCK_K: tl.constexpr):
    """In the order of k_order.py, zero past the end of K."""
    return _token_tile(x, row, k0, stored_cols(K), BLOCK_K, BLOCK_K == 128), 1.0


@triton.jit
def _ordered_scaled_tokens(x, x_scale, row, valid, k0, K, BLOCK_K: tl.constexpr):
    scale = _token_scale(x_scale, row, valid, k0, K)
    return _token_tile(x, row, k0, stored_cols(K), BLOCK_K, BLOCK_K == 128), scale


@triton.jit
def _mxfp8_tokens(x, x_scale, row, valid, k0, K, BLOCK_K: tl.constexpr):
    scale = _code_scales(x_scale, row, valid, k0, 32, BLOCK_K)
    return _token_tile(x, row, k0, K, BLOCK_K, False), scale


@triton.jit
def _mxfp4_tokens(x, x_scale, row, valid, k0, K, BLOCK_K: tl.constexpr):
    scale = _code_scales(x_scale, row, valid, k0, 32, BLOCK_K)
    return _token_tile(x, row, k0 // 2, K // 2, BLOCK_K // 2, False), scale


@triton.jit
def _nvfp4_tokens(x, x_scale, row, valid, k0, K, BLOCK_K: tl.constexpr):
    scale = _code_scales(x_scale, row, valid, k0, 16, BLOCK_K)
    return _token_tile(x, row, k0 // 2, K // 2, BLOCK_K // 2, False), scale


@triton.jit
def _e8m0_scales(code):
    return e8m0_value(code.to(tl.int32)) if INTERPRETED else code


@triton.jit
def _e4m3_scales(code):
    return e4m3_value(code) if INTERPRETED else code.to(tl.float8e4nv, bitcast=True)


@triton.jit
def second_scale(scale, TOKENS: tl.constexpr):
    """The same scale for a second product with the same tokens.

    Of codes it is a copy the compiler does not see through: it would put one in tensor memory, and
    Triton 3.6 fails where two MMAs share that.
    """
    if TOKENS.CODED and not INTERPRETED:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [scale], dtype=scale.dtype, is_pure=False, pack=4
        )
    else:
        return scale


@triton.jit
def _values(code, scale, IS_PACKED: tl.constexpr):
    """FP32 values of codes, for the interpreter, which has no block-scaled product."""
    R: tl.constexpr = scale.shape[0]
    B: tl.constexpr = scale.shape[1]
    if IS_PACKED:
        wide = code.to(tl.int16)
        code = tl.reshape(
            tl.join(e2m1_to_bf16(wide & 15), e2m1_to_bf16(wide >> 4)), (R, 2 * code.shape[1])
        )
    value = tl.reshape(code.to(tl.float32), (R, B, code.shape[1] // B))
    return tl.reshape(value * scale[:, :, None], (R, code.shape[1]))


@triton.jit
def _code_product(w, w_scale, tokens, token_scale, acc, TOKENS: tl.constexpr):
    """Block-scaled codes by the GPU's own MMA."""
    w_scale, token_scale = TOKENS.scales(w_scale), TOKENS.scales(token_scale)
    if INTERPRETED:
        values = _values(tokens, token_scale, TOKENS.ELEMENT == "e2m1")
        return dot(_values(w, w_scale, True), tl.trans(values), acc)
    else:
        return tl.dot_scaled(w, w_scale, "e2m1", tl.trans(tokens), token_scale, TOKENS.ELEMENT, acc)


@triton.jit
def add_product(
    acc, w, w_scale, factor, tokens, token_scale, TOKENS: tl.constexpr, WEIGHTS: tl.constexpr
):
    """acc + w @ tokens.T; promoted, the product is scaled in FP32 before it is added.

    The loop around it must be known to run at least once: where `acc` might stay as it was set, the
    assembler waits for every MMA before the next (its advice C7515).
    """
    if TOKENS.PROMOTED:
        zero = tl.zeros(acc.shape, tl.float32)
        part = WEIGHTS.product(w, w_scale, tl.trans(tokens), zero)
        return acc + part * (factor * token_scale)[None, :]
    elif TOKENS.CODED:
        return WEIGHTS.product(w, w_scale, tokens, token_scale, acc, TOKENS)
    else:
        return WEIGHTS.product(w, w_scale, tl.trans(tokens), acc)


# Weights in WORDS of eight codes go with ORDERED tokens. CODED ones are codes of an ELEMENT.
WEIGHTS = {
    "bf16": Kind("bf16", WORDS=False, load=_plain_weights, product=_plain_product),
    "fp8_128x128": Kind("fp8_128x128", WORDS=False, load=_block_weights, product=_plain_product),
    "upcast": Kind("upcast", WORDS=False, load=_block_weights, product=_upcast_product),
    "mxfp4": Kind("mxfp4", WORDS=True, load=_mxfp4_weights, product=_mxfp4_product),
    "nvfp4": Kind("nvfp4", WORDS=True, load=_nvfp4_weights, product=_nvfp4_product),
    "mxfp4_codes": Kind("mxfp4_codes", WORDS=False, load=_mxfp4_codes, product=_code_product),
    "nvfp4_codes": Kind("nvfp4_codes", WORDS=False, load=_nvfp4_codes, product=_code_product),
}


def _tokens(name: str, *, promoted=False, ordered=False, element="", **methods) -> Kind:
    flags = {"PROMOTED": promoted, "ORDERED": ordered, "CODED": element != "", "ELEMENT": element}
    return Kind(name, **flags, **methods)


TOKENS = {
    "plain": _tokens("plain", load=_plain_tokens),
    "scaled": _tokens("scaled", promoted=True, load=_scaled_tokens),
    "ordered": _tokens("ordered", ordered=True, load=_ordered_tokens),
    "ordered_scaled": _tokens(
        "ordered_scaled", promoted=True, ordered=True, load=_ordered_scaled_tokens
    ),
    "mxfp8": _tokens("mxfp8", element="e4m3", load=_mxfp8_tokens, scales=_e8m0_scales),
    "mxfp4": _tokens("mxfp4", element="e2m1", load=_mxfp4_tokens, scales=_e8m0_scales),
    "nvfp4": _tokens("nvfp4", element="e2m1", load=_nvfp4_tokens, scales=_e4m3_scales),
}
