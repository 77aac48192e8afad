"""Triton kernels that run wherever Triton runs, and in its interpreter on a CPU."""
