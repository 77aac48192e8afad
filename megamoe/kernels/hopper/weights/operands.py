"""Operands as compile-time types: what a stage of the ring holds and how it becomes wgmma's A.

A `Kind` of WEIGHTS says whether a slab of 64 x 128 is decoded in registers or read from shared
memory, the element wgmma multiplies, the bytes of a slab and of its scales, and the depth of one
ring block. PROMOTED sums leave wgmma every 128 of K and are scaled in FP32; the others stay there.
"""

from triton.experimental.gluon import language as gl

from megamoe.kernels.common.numbers import Kind
from megamoe.kernels.hopper.weights.decode import (
    PAIR_WORDS,
    e4m3_slab,
    mx_bf16_slab,
    nv_bf16_slab,
    placed_bf16_slab,
)


def _kind(
    name: str, element, slab_bytes: int, scale_bytes: int, decode=None, by_group: bool = False
) -> Kind:
    is_fp8 = element is gl.float8e4nv
    return Kind(
        name,
        ELEMENT=gl.constexpr(element),
        DECODED=decode is not None,
        SLAB_BYTES=slab_bytes,
        SCALE_BYTES=scale_bytes,
        INSTR_K=32 if is_fp8 else 16,
        K_WIDTH=4 if is_fp8 else 2,
        BY_GROUP=by_group,  # how columns stand (`common.columns`)
        decode=decode,
    )


WEIGHTS = {
    "e4m3_image": _kind("e4m3_image", gl.float8e4nv, 4096, 4 * PAIR_WORDS.value, e4m3_slab, True),
    "placed_image": _kind("placed_image", gl.bfloat16, 4096, 256, placed_bf16_slab),
    "mx_image": _kind("mx_image", gl.bfloat16, 4096, 256, mx_bf16_slab),
    "nv_image": _kind("nv_image", gl.bfloat16, 4096, 512, nv_bf16_slab),
    "fp8": _kind("fp8", gl.float8e4nv, 8192, 0),
    "bf16": _kind("bf16", gl.bfloat16, 16384, 0),
}
