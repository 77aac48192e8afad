"""FP4 weights to BF16 in tensor memory, where the MMA's first operand may stand."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import get_tmem_reg_layout

from megamoe.kernels.common.numbers import e2m1_to_bf16, e8m0_twice


@gluon.jit
def decode_block(codes, scales, into):
    """A half of a stage: bytes [128, K / 2] and E8M0 [128, K / 32] to BF16 [128, K].

    A thread has a row, as tensor memory does: 32 codes share a scale. Products are exact, since no
    scale that counts is below 2**-126 (the launcher's caller has looked).
    """
    K: gl.constexpr = into.shape[1]
    LAYOUT: gl.constexpr = get_tmem_reg_layout(gl.bfloat16, (128, K), into.type.layout, 4)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [4, 1], [1, 0])
    byte = codes.load(ROWS).to(gl.int16)
    code = gl.join(byte & 15, (byte >> 4) & 15).reshape([128, K])
    LONG: gl.constexpr = code.type.layout
    GROUPS: gl.constexpr = gl.BlockedLayout([1, K // 32], [32, 1], [4, 1], [1, 0])
    scale = e8m0_twice(scales.load(GROUPS).to(gl.int32)).to(gl.int16).to(gl.bfloat16, bitcast=True)
    wide = gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(2, _split(LONG, K))), 2)
    value = e2m1_to_bf16(code).reshape([128, K // 32, 32]) * wide
    into.store(gl.convert_layout(value.reshape([128, K]), LAYOUT))


@gluon.constexpr_function
def _split(layout, k):
    """Layout of [128, K] as [128, K / 32, 32]: a thread has whole rows of its columns."""
    return gl.BlockedLayout([1, 1, 32], [32, 1, 1], [4, 1, 1], [2, 1, 0])
