"""Bytes of weights as Hopper's kernels read them: blocks of 64 rows x 128 columns of K."""

from __future__ import annotations

SLAB, K_BLOCK = 64, 128
# kind -> bytes of the values of a block, and of their scales; those of "fp8" are 128x128 and apart
BLOCK_BYTES = {
    "bf16": (2 * SLAB * K_BLOCK, 0),
    "fp8": (SLAB * K_BLOCK, 0),
    "mx_image": (SLAB * K_BLOCK // 2, SLAB * K_BLOCK // 32),
    "placed_image": (SLAB * K_BLOCK // 2, SLAB * K_BLOCK // 32),
    "nv_image": (SLAB * K_BLOCK // 2, SLAB * K_BLOCK // 16),
    "e4m3_image": (SLAB * K_BLOCK // 2, SLAB * K_BLOCK // 64),  # two exponents share a byte
}


def block_bytes(kind: str) -> int:
    """Of a block of 64 rows x 128 columns with its scales.

    >>> block_bytes("e4m3_image"), block_bytes("nv_image")
    (4224, 4608)
    """
    return sum(BLOCK_BYTES[kind])


def image_bytes(kind: str, rows: int, cols: int, num_matrices: int) -> int:
    """Of one expert's image [rows, cols] of so many matrices, padded to blocks, and its factors."""
    assert rows % SLAB == 0 and cols % K_BLOCK == 0
    factors = {"e4m3_image": rows, "nv_image": num_matrices}.get(kind, 0)
    return rows // SLAB * (cols // K_BLOCK) * block_bytes(kind) + 4 * factors
