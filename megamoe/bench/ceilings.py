"""What this machine reaches: copy, read and matrix products, measured once per run."""

from __future__ import annotations

import torch

from megamoe.bench.floors import Ceilings
from megamoe.bench.inputs import normal, words
from megamoe.bench.reading import Reader
from megamoe.bench.timer import Run, Timer
from megamoe.errors import MegaMoEError

GPU_COPY_BYTES, CPU_COPY_BYTES = 4 << 30, 8 << 20
GPU_WIDTH, CPU_WIDTH = 8192, 1024  # of the square matrices: narrower ones are far below the peak


def measure(device: torch.device, reader: Reader) -> Ceilings:
    """Measure all ceilings; an MMA type that torch cannot multiply here is left out."""
    on_gpu = device.type == "cuda"
    timer = Timer(device, flush="none", repeats=10 if on_gpu else 3, rounds=1, budget_s=5.0)
    num_bytes = GPU_COPY_BYTES if on_gpu else CPU_COPY_BYTES
    if on_gpu:
        num_bytes = min(num_bytes, torch.cuda.mem_get_info(device)[0] // 4)
    num_bytes -= num_bytes % 4
    copy_us = _copy_us(timer, num_bytes)
    read = timer.time({"read": reader.prepare(num_bytes, timer)})["read"]
    width = GPU_WIDTH if on_gpu else CPU_WIDTH
    flops = 2 * width**3
    tflops = {mma: flops / us / 1e6 for mma, us in _matmuls(timer, width, device).items()}
    one = torch.zeros(1, dtype=torch.float32, device=device)
    return Ceilings(
        copy_gbs=2 * num_bytes / copy_us / 1e3,
        read_gbs=num_bytes / read.us / 1e3,
        tflops=tflops,
        launch_us=_us(timer, lambda: one.add_(1)),
        about=f"copy and read of {num_bytes / 2**20:.0f} MiB, matrix products of width {width}, "
        "random data, medians of this run; launch: one small kernel",
    )


def _copy_us(timer: Timer, num_bytes: int) -> float:
    source = words(timer.device, num_bytes // 4)
    target = torch.empty_like(source)
    return _us(timer, lambda: target.copy_(source))


def _us(timer: Timer, run: Run) -> float:
    return timer.time({"one": timer.prepare(run)})["one"].us


def _matmuls(timer: Timer, width: int, device: torch.device) -> dict[str, float]:
    """Microseconds per MMA type: cuBLAS in BF16, and in FP8 with the better kind of scale."""
    a, b = (normal(device, seed, width, width).bfloat16() for seed in range(2))
    times = {"bf16": _us(timer, lambda: a @ b.T)}
    if device.type != "cuda":
        return times
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    rows = torch.ones(width, 1, dtype=torch.float32, device=device)
    one = torch.ones((), dtype=torch.float32, device=device)
    for scale_a, scale_b in ((one, one), (rows, rows.T)):
        try:
            us = _us(
                timer,
                lambda sa=scale_a, sb=scale_b: torch._scaled_mm(  # type: ignore[misc]
                    a8, b8.T, sa, sb, out_dtype=torch.bfloat16, use_fast_accum=True
                ),
            )
        except (RuntimeError, MegaMoEError):
            continue
        times["fp8"] = min(us, times.get("fp8", us))
    return times
