"""The rows and matrices of a grouped GEMM, what they must give, and a contestant that is ready."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.bench.cells import GemmShape
from megamoe.bench.gate import Verdict, relative
from megamoe.bench.inputs import normal
from megamoe.bench.timer import Run
from megamoe.formats.quantize import dequantize, quantize, weight_global_scale
from megamoe.formats.quantized import Quantized
from megamoe.formats.spec import recipe_named


class GemmInputs:
    """BF16 rows [M, k] in order of their groups, and matrices [G, n, k]; quantised on demand."""

    def __init__(self, shape: GemmShape, device: torch.device, seed: int) -> None:
        self.shape, self.device = shape, device
        g, n, k = shape.num_groups, shape.n, shape.k
        self.x = normal(device, seed, sum(shape.rows), k).bfloat16()
        self.w = (normal(device, seed + 1, g, n, k) * k**-0.5).bfloat16()
        self.counts = torch.tensor(shape.rows, dtype=torch.int32, device=device)
        self._quantized: dict[tuple[str, str], Quantized] = {}
        self._exact: dict[str, Tensor] = {}

    def rows_as(self, fmt: str) -> Quantized:
        """The rows in a format of `formats`."""
        return self._as("x", fmt)

    def weights_as(self, fmt: str) -> Quantized:
        """The matrices in a format of `formats`; NVFP4 with a global scale each."""
        return self._as("w", fmt)

    def _as(self, name: str, fmt: str) -> Quantized:
        if (name, fmt) not in self._quantized:
            source = getattr(self, name)
            g = weight_global_scale(source) if (name, fmt) == ("w", "nvfp4") else None
            self._quantized[name, fmt] = quantize(source, fmt, global_scale=g)
        return self._quantized[name, fmt]

    def exact(self, recipe: str) -> Tensor:
        """What a recipe must give: its values multiplied in float64, rounded to BF16."""
        if recipe not in self._exact:
            self._exact[recipe] = self._product(recipe)
        return self._exact[recipe]

    def _product(self, recipe: str) -> Tensor:
        row = recipe_named(recipe)
        x = dequantize(self.rows_as(row.acts.name), torch.float64).split(list(self.shape.rows))
        w = self.weights_as(row.weights.name)
        parts = [
            one @ dequantize(w[g : g + 1], torch.float64)[0].T for g, one in enumerate(x)
        ]  # fmt: skip
        return torch.cat(parts).bfloat16()

    def check(self, recipe: str, bound: float) -> Callable[[Tensor], Verdict]:
        """A check of an output [M, n] against the exact one."""
        exact = self.exact(recipe)

        def judge(y: Tensor) -> Verdict:
            if y.shape != exact.shape:
                return Verdict(float("nan"), bound, f"shape {tuple(y.shape)}")
            error = relative(y, exact)
            good = bool(y.isfinite().all()) and error <= bound
            return Verdict(error, bound, "" if good else f"error {error:.2e} above {bound:.1e}")

        return judge


@dataclass(frozen=True, slots=True)
class GemmEntry:
    """A grouped GEMM that is ready: `run` gives BF16 [M, n], `check` judges it."""

    run: Run
    check: Callable[[Tensor], Verdict]
    weight_bytes: int
    row_bytes: int  # of the rows in
    mma: str
    recipe: str
    ours: bool
    note: str = ""
