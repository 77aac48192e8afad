"""Triton kernels that run wherever Triton runs, and in its interpreter on a CPU."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`grouped_gemm`, without loading every kernel with the package."""
    if name != "grouped_gemm":
        raise AttributeError(f"module 'megamoe.kernels.portable' has no attribute {name!r}")
    from megamoe.kernels.portable.grouped import grouped_gemm

    return grouped_gemm
