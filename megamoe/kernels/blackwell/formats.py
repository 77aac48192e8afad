"""What the tensor cores of sm_100a multiply, by recipe, as compile-time types."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from megamoe.errors import NotAvailable, require
from megamoe.kernels.blackwell.pair import BY_ROWS
from megamoe.kernels.common.numbers import Kind
from megamoe.kernels.gluon import compat
from megamoe.planner.launches import GemmTmem
from megamoe.planner.tables import blackwell as tables

# W, X      elements of weights and tokens as the MMA takes them
# W_BITS    of a weight in memory, X_BITS of a token
# VEC       values that share a scale of the MMA
# SCALED    the MMA takes block scales of the weights; X_SCALED: of the tokens too, else ones
# PROMOTED  every 128 of K are a product of their own, which FP32 scales multiply
# DECODED   FP4 weights are multiplied as BF16, decoded on the way to tensor memory
# FACTOR    FP32 factors of weights: "block" of 128x128, "expert" or "none"
FORMATS = {
    kind.name: kind
    for kind in (
        Kind(
            "w4a8", W="e2m1", X="e4m3", W_BITS=4, X_BITS=8, VEC=32, SCALED=True, X_SCALED=True,
            PROMOTED=False, DECODED=False, FACTOR="none",
        ),
        Kind(
            "w4a4", W="e2m1", X="e2m1", W_BITS=4, X_BITS=4, VEC=32, SCALED=True, X_SCALED=True,
            PROMOTED=False, DECODED=False, FACTOR="none",
        ),
        Kind(
            "nvfp4", W="e2m1", X="e2m1", W_BITS=4, X_BITS=4, VEC=16, SCALED=True, X_SCALED=True,
            PROMOTED=False, DECODED=False, FACTOR="expert",
        ),
        Kind(
            "w8a8", W="e4m3", X="e4m3", W_BITS=8, X_BITS=8, VEC=32, SCALED=False, X_SCALED=False,
            PROMOTED=True, DECODED=False, FACTOR="block",
        ),
        Kind(
            "w4a8_block", W="e2m1", X="e4m3", W_BITS=4, X_BITS=8, VEC=32, SCALED=True,
            X_SCALED=False, PROMOTED=True, DECODED=False, FACTOR="none",
        ),
        Kind(
            "bf16", W="bf16", X="bf16", W_BITS=16, X_BITS=16, VEC=32, SCALED=False, X_SCALED=False,
            PROMOTED=False, DECODED=False, FACTOR="none",
        ),
        Kind(
            "w4a16", W="bf16", X="bf16", W_BITS=4, X_BITS=16, VEC=32, SCALED=False, X_SCALED=False,
            PROMOTED=False, DECODED=True, FACTOR="none",
        ),
    )
}  # fmt: skip

# MMA kinds with block scales: (elements of weights, of tokens, values a scale) -> PTX
SCALED_MMAS = {
    ("e2m1", "e4m3", 32): "mxf8f6f4.block_scale.scale_vec::1X",
    ("e4m3", "e4m3", 32): "mxf8f6f4.block_scale.scale_vec::1X",
    ("e2m1", "e2m1", 32): "mxf4.block_scale.scale_vec::2X",
    ("e2m1", "e2m1", 16): "mxf4nvf4.block_scale.scale_vec::4X",
}


LINE = 128  # bytes of the widest swizzle


def operand_layout(
    kind: Kind, rows: int, block_k: int, bits: int, num_ctas: int = 1
) -> gl.NVMMASharedLayout:
    """Shared memory of one operand's block, whose rows a pair of CTAs shares.

    FP4 beside FP8 is padded on the way, a byte a value: that is what kind::mxf8f6f4 reads.
    """
    element = {4: gl.uint8, 8: gl.float8e4nv, 16: gl.bfloat16}[bits]
    is_padded = bits == 4 and kind.X.value == "e4m3"
    return gl.NVMMASharedLayout.get_default_for(
        [rows, block_k * bits // max(bits, 8)], element, fp4_padded=is_padded,
        cga_layout=BY_ROWS if num_ctas == 2 else None,
    )  # fmt: skip


def check_tile(
    kind: Kind,
    tile: GemmTmem,
    layout: gl.NVMMASharedLayout | None = None,
    *,
    is_gated: bool = False,
    gathers: bool = False,
) -> None:
    """Refuse what Gluon 3.6 compiles in silence although it computes something else.

    layout    that of the weights' block
    is_gated  a tile has gate and up
    gathers   tokens are gathered
    """

    def refuse(when: bool, what: str, got: object, fix: str = "") -> None:
        require(not when, what, got=got, fix=fix, kind=NotAvailable)

    elements = kind.W.value, kind.X.value
    refuse(
        tile.num_ctas != 1 and not compat.HAS_PAIRS,
        "an MMA of a pair of CTAs needs Triton 3.8 or newer",
        f"Triton {'.'.join(map(str, compat.VERSION))}",
        fix="leave out cta_pair",
    )
    refuse(
        tile.num_ctas != 1 and not (kind.X_SCALED.value and tile.block_m >= tables.LEAST_PAIRED),
        f"a pair of CTAs needs scales of both operands and {tables.LEAST_PAIRED} tokens a tile",
        f"{kind.name}, block_m {tile.block_m}",
    )
    refuse(
        tile.num_ctas != 1 and (gathers or tile.is_dynamic or tile.num_halves != 2),
        "a pair of CTAs takes tiles of two halves in a fixed order, whose tokens lie together",
        f"{tile.num_halves} halves, {tile.schedule}{', gathered' if gathers else ''}",
    )
    refuse(
        tile.block_rows != tables.BLOCK_ROWS,
        "a block-scaled MMA has M = 128 in one CTA",
        f"M = {tile.block_rows}",
    )
    refuse(
        is_gated and tile.num_halves != 2,
        "a tile of a gated linear has 128 rows of gate and 128 of up",
        f"{tile.num_halves} x {tile.block_rows} rows",
    )
    line = tile.block_k * kind.X_BITS.value // 8
    refuse(
        gathers and line != LINE,
        f"gathered rows must have {LINE} bytes a stage: parts of a tile follow each other then",
        f"{line} bytes with block_k {tile.block_k}",
    )
    widths = tables.block_ms(kind.name, kind.PROMOTED.value)
    refuse(
        tile.block_m not in widths,
        f"tokens of a tile must be one of {', '.join(map(str, widths))}",
        f"block_m {tile.block_m}",
    )
    if kind.SCALED.value:
        refuse(
            (*elements, kind.VEC.value) not in SCALED_MMAS,
            "no MMA has these elements with scales of so many values",
            f"{elements[0]} x {elements[1]}, {kind.VEC.value} values a scale",
            fix="E4M3 operands have a scale for 32 values",
        )
        refuse(
            tile.block_k % (4 * kind.VEC.value) != 0,
            f"a stage must have a multiple of {4 * kind.VEC.value} columns: four scales a word",
            f"block_k {tile.block_k}",
        )
        is_mixed = elements == ("e2m1", "e4m3")
        refuse(
            layout is not None and layout.fp4_padded != is_mixed,
            "FP4 beside FP8 must be padded to a byte a value, FP4 beside FP4 packed",
            f"{elements[0]} x {elements[1]}, fp4_padded {layout and layout.fp4_padded}",
        )
    refuse(
        kind.PROMOTED.value and tile.block_k != 128,
        "a stage must have the 128 columns of an activation scale",
        f"block_k {tile.block_k}",
    )
