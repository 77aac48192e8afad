"""Gluon kernels for Hopper: warp roles, TMA rings, wgmma. Weights are wgmma's M, tokens its N."""
