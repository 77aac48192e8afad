"""FP4 weights to BF16 in tensor memory, where the MMA's first operand may stand."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.kernels.common.numbers import e2m1_to_bf16, e8m0_twice
from megamoe.kernels.gluon.compat import get_tmem_reg_layout

PART = gl.constexpr(64)  # columns at a time: 128 spill


@gluon.jit
def decode_block(codes, scales, into):
    """A half of a stage: bytes [128, K / 2] and E8M0 [128, K / 32] to BF16 [128, K].

    A thread has a row, as in tensor memory. Products are exact, since no scale that counts is below
    2**-126 (`engine.blackwell` has looked).
    """
    K: gl.constexpr = into.shape[1]
    for start in gl.static_range(0, K, PART):
        _decode_part(
            codes.slice(start // 2, PART // 2, 1), scales.slice(start // 32, PART // 32, 1),
            into.slice(start, PART),
        )  # fmt: skip


@gluon.jit
def _decode_part(codes, scales, into):
    """PART columns of it."""
    LAYOUT: gl.constexpr = get_tmem_reg_layout(gl.bfloat16, (128, PART), into.type.layout, 4)
    BYTES: gl.constexpr = gl.BlockedLayout([1, PART // 2], [32, 1], [4, 1], [1, 0])
    SPLIT: gl.constexpr = gl.BlockedLayout([1, PART // 32, 32], [32, 1, 1], [4, 1, 1], [2, 1, 0])
    byte = codes.load(BYTES).to(gl.int16)
    code = gl.join(byte & 15, (byte >> 4) & 15).reshape([128, PART // 32, 32])
    scale = scales.load(gl.SliceLayout(2, SPLIT)).to(gl.int32)
    scale = e8m0_twice(scale).to(gl.int16).to(gl.bfloat16, bitcast=True)
    value = gl.convert_layout(e2m1_to_bf16(code), SPLIT) * gl.expand_dims(scale, 2)
    into.store(gl.convert_layout(value.reshape([128, PART]), LAYOUT))
