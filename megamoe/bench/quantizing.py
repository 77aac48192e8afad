"""How fast experts are quantised, and how much memory that takes."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass

import torch

from megamoe.bench.job import Progress
from megamoe.bench.provenance import provenance
from megamoe.bench.workloads import Model
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import RangeError, require


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement of `ExpertWeights.quantize`."""

    preset: str
    recipe: str
    num_experts: int
    in_bytes: int
    out_bytes: int
    seconds: float
    gbs: float  # BF16 bytes read per second
    extra_bytes: int  # peak beside input and output
    extra_of_expert: float  # the same, in BF16 experts
    provenance: str


def measure(
    model: Model, recipe: str, num_experts: int | None, device: str, progress: Progress
) -> Row:
    """Quantise `num_experts` experts of `model`, all made of one random expert."""
    count = model.num_experts if num_experts is None else num_experts
    require(count >= 1, "there must be at least one expert", got=count, kind=RangeError)
    where = torch.device(device)
    shapes = (2 * model.intermediate, model.hidden), (model.hidden, model.intermediate)
    small = torch.randn(1, 64, 64, dtype=torch.bfloat16, device=where)
    ExpertWeights.quantize(
        small, small[:, :, :32].contiguous(), recipe
    )  # loads what first use loads
    w13, w2 = (torch.empty(count, *shape, dtype=torch.bfloat16, device=where) for shape in shapes)
    for w in (w13, w2):
        w[0].normal_()
        w[1:] = w[0]
    before = _peak(where, reset=True)
    began = time.perf_counter()
    weights = ExpertWeights.quantize(
        w13, w2, recipe, progress=lambda n: progress("quantise", n, count)
    )
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    seconds = time.perf_counter() - began
    in_bytes = 2 * (w13.numel() + w2.numel())
    extra = max(_peak(where) - before - weights.nbytes, 0)
    return Row(
        preset=model.name,
        recipe=recipe,
        num_experts=count,
        in_bytes=in_bytes,
        out_bytes=weights.nbytes,
        seconds=seconds,
        gbs=in_bytes / seconds / 1e9,
        extra_bytes=extra,
        extra_of_expert=extra / (in_bytes / count),
        provenance=provenance(where),
    )


def _peak(device: torch.device, *, reset: bool = False) -> int:
    """Most bytes in use so far: of the GPU's allocator, or of the process (Linux: in KiB)."""
    if device.type == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
