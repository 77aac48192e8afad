"""The oracle. It sees `formats` and `routing` only; kernels never see it."""

from megamoe.reference.layer import expert_parallel, moe, received

__all__ = ["expert_parallel", "moe", "received"]
