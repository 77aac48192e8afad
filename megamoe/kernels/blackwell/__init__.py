"""Kernels for sm_100a in Gluon: emulated and compiled, not yet run on the hardware."""
