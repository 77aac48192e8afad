"""Helpers that several backends' kernels share."""
