"""Weights as the kernels read them."""
