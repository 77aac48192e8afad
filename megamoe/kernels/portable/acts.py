"""Activations inside kernels: quantise a tile, and keep it in memory the way the GEMM wants it.

A `Kind` of ACTS says which format the contract asks for and how the tile is stored:
  plain   BF16, no format
  codes   the format's bytes and scales, as `formats` stores them
  values  BF16 values code * scale, where the GPU lacks the format's MMA: exact for E8M0 and E4M3
          scales (NVFP4's global scale is applied to the sums)
  scaled  the codes' values in BF16 beside FP32 scales: exact too
  placed  the format's bytes, and scales where a block-scaled MMA copies them from (`gluon/placed`)
ORDERED ones lie in the order of K that FP4 weights want (k_order.py): `values`, `scaled` and BF16.
"""

import triton
import triton.language as tl

from megamoe.formats.spec import E2M1, E4M3, FORMATS, Scale
from megamoe.kernels.common.compat import div_rn, to_bf16
from megamoe.kernels.common.numbers import (
    INF_BITS,
    Kind,
    abs_bits,
    e2m1_code,
    e2m1_round,
    e4m3_code,
    e4m3_round,
    e4m3_value,
    e8m0_scale,
    e8m0_value,
    pow2,
)
from megamoe.kernels.portable.k_order import stored_cols, tile_in_order, tile_positions


@triton.jit
def _mx_scale(amax_bits, g, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    code = e8m0_scale(amax_bits, EXPONENT, MANTISSA)
    return code, e8m0_value(code), e8m0_value(code)


@triton.jit
def _fp32_scale(amax_bits, g, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    amax = amax_bits.to(tl.float32, bitcast=True)
    scale = tl.where(amax_bits == 0, 1.0, tl.div_rn(amax, tl.full(amax.shape, 448.0, tl.float32)))
    scale = tl.where(amax_bits >= INF_BITS, float("nan"), scale)
    return scale, scale, scale


@triton.jit
def _nv_scale(amax_bits, g, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    amax = amax_bits.to(tl.float32, bitcast=True)
    limit = tl.full(amax.shape, 6.0, tl.float32) * g
    scale = e4m3_round(tl.where(amax_bits == 0, 1.0, tl.div_rn(amax, limit)))
    bad = amax_bits >= INF_BITS
    code = tl.where(bad, 0x7F, e4m3_code(scale).to(tl.int32))
    value = tl.where(bad, float("nan"), scale)
    return code, value, value * g


@triton.jit
def _div_pow2(x, step):
    """x / step where step is a power of two: one exact multiplication."""
    field = (step.to(tl.int32, bitcast=True) >> 23) & 0xFF
    return x * pow2(254 - field)


def _kind(stored_as: str, name: str) -> Kind:
    """The format of that name stored in one of the ways above."""
    fmt = FORMATS[name]
    is_wide = fmt.element is E4M3
    assert is_wide or fmt.element is E2M1
    scale = {Scale.E8M0: _mx_scale, Scale.E4M3: _nv_scale, Scale.FP32: _fp32_scale}[fmt.scale]
    return Kind(
        f"{stored_as}-{name}",
        STORED_AS=stored_as,
        ORDERED=stored_as in ("values", "scaled"),
        BITS=fmt.element.bits,
        GROUP=fmt.block[1],
        EXPONENT=fmt.element.max_exponent,
        MANTISSA=fmt.element.max_mantissa,
        scale=scale,
        divide=_div_pow2 if fmt.scale is Scale.E8M0 else div_rn,
        round=e4m3_round if is_wide else e2m1_round,
        code=e4m3_code if is_wide else e2m1_code,
    )


PLAIN = Kind("plain", STORED_AS="plain", ORDERED=False)
ORDERED = Kind("ordered", STORED_AS="plain", ORDERED=True)
CODES = {
    name: _kind("codes", name) for name in ("mxfp8", "mxfp4", "nvfp4", "fp8_1x128", "fp8_combine")
}
VALUES = {name: _kind("values", name) for name in ("mxfp8", "mxfp4", "nvfp4")}
SCALED = {"fp8_1x128": _kind("scaled", "fp8_1x128")}
PLACED = {name: _kind("placed", name) for name in ("mxfp8", "mxfp4", "nvfp4")}


@triton.jit
def quantise_blocks(x, g, ACTS: tl.constexpr):
    """FP32 [r, blocks, group] -> quotients yet to be rounded, stored scales, scales as FP32."""
    stored, scale, step = ACTS.scale(tl.max(abs_bits(x), 2), g, ACTS.EXPONENT, ACTS.MANTISSA)
    dead = (step == 0.0) | (abs_bits(step) >= INF_BITS)
    divisor = tl.where(dead, 1.0, step)
    return tl.where(dead[:, :, None], 0.0, ACTS.divide(x, divisor[:, :, None])), stored, scale


@triton.jit
def _store_values(
    values, out, row, row_mask, first_col, width, ACTS: tl.constexpr, COLS: tl.constexpr
):
    """BF16 values as they stand or, for FP4 weights, in their order of K, with zeros to the end."""
    col = first_col + tl.arange(0, COLS)
    if ACTS.ORDERED:
        values, col, width = (
            tile_in_order(values),
            tile_positions(first_col, COLS),
            stored_cols(width),
        )
    start = row.to(tl.uint32).to(tl.int64) * width  # rows are not negative: nothing to extend
    at = start[:, None] + col[None, :]
    tl.store(out + at, values, mask=row_mask[:, None] & (col < width)[None, :])


@triton.jit
def store_acts(
    x, g, out, out_scale, row, row_mask, first_col, width,
    ACTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Keep an FP32 tile [ROWS, COLS], zero beyond `width`, at `row` and columns from first_col."""
    col = first_col + tl.arange(0, COLS)
    mask = row_mask[:, None] & (col < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + col[None, :]
    if ACTS.STORED_AS == "plain":
        _store_values(to_bf16(x), out, row, row_mask, first_col, width, ACTS, COLS)
    else:
        G: tl.constexpr = ACTS.GROUP
        ratio, stored, scale = quantise_blocks(tl.reshape(x, (ROWS, COLS // G, G)), g, ACTS)
        if ACTS.STORED_AS == "values":
            values = to_bf16(tl.reshape(ACTS.round(ratio) * scale[:, :, None], (ROWS, COLS)))
            _store_values(values, out, row, row_mask, first_col, width, ACTS, COLS)
        else:
            block = first_col // G + tl.arange(0, COLS // G)
            num_blocks = tl.cdiv(width, G)
            scale_at = row.to(tl.int64)[:, None] * num_blocks + block[None, :]
            scale_mask = row_mask[:, None] & (block < num_blocks)[None, :]
            tl.store(out_scale + scale_at, stored.to(out_scale.dtype.element_ty), mask=scale_mask)
            if ACTS.STORED_AS == "scaled":
                values = to_bf16(tl.reshape(ACTS.round(ratio), (ROWS, COLS)))
                _store_values(values, out, row, row_mask, first_col, width, ACTS, COLS)
            elif ACTS.BITS == 8:
                code = tl.reshape(ACTS.code(ratio), (ROWS, COLS))
                tl.store(out + at, code, mask=mask)
            else:
                pairs = tl.reshape(ACTS.code(ratio), (ROWS, COLS // 2, 2))
                low, high = tl.split(pairs)
                byte = first_col // 2 + tl.arange(0, COLS // 2)
                byte_at = row.to(tl.int64)[:, None] * (width // 2) + byte[None, :]
                byte_mask = row_mask[:, None] & (byte < width // 2)[None, :]
                tl.store(out + byte_at, low | (high << 4), mask=byte_mask)


@triton.jit
def combine_value(code, scale_code):
    """FP32 value of FP8 combine bytes and their E8M0 codes."""
    return e4m3_value(code) * e8m0_value(scale_code.to(tl.int32))
