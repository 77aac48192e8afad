"""The grouped GEMM."""
