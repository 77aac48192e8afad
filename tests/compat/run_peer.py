"""Run a script that imports deep_gemm with megamoe in its place: run_peer.py FILE [ARGUMENT...]

Without a GPU "cuda" means the CPU here, so that the script runs without one, unchanged.
"""

from contextlib import nullcontext

import torch
from torch.overrides import TorchFunctionMode

from megamoe.compat.deep_gemm.__main__ import main


class CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


if __name__ == "__main__":
    with nullcontext() if torch.cuda.is_available() else CudaMeansCpu():
        main()
