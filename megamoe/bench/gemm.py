"""`megamoe bench gemm`: grouped GEMMs alone, over the shapes of `cells.GEMM_SHAPES`.

Contestants stand in CONTESTANTS: name -> factory. A factory takes the inputs of a shape and gives
`GemmEntry(run, check, ...)`; it raises NotAvailable where it cannot run. `register` adds one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megamoe.bench import ceilings as ceilings_of
from megamoe.bench.cells import SEED, GemmShape
from megamoe.bench.contestants import rowwise, rowwise_experts, torch_function
from megamoe.bench.floors import Cost, mma_of
from megamoe.bench.gate import Verdict, poisoned_call, poisoned_memory, relative
from megamoe.bench.inputs import normal
from megamoe.bench.layer import Progress, first_line
from megamoe.bench.provenance import provenance
from megamoe.bench.reading import Reader
from megamoe.bench.record import ABSENT, FAILED, OK, WRONG, Measured, Report, Row
from megamoe.bench.timer import Prepared, Run, Timer
from megamoe.engine import backends
from megamoe.errors import NotAvailable, RangeError, one_of, require
from megamoe.formats.quantize import dequantize, quantize, weight_global_scale
from megamoe.formats.quantized import Quantized
from megamoe.formats.spec import recipe_named
from megamoe.problem import RECIPES


class GemmInputs:
    """BF16 rows [M, k] in order of their groups, and matrices [G, n, k]; quantised on demand."""

    def __init__(self, shape: GemmShape, device: torch.device, seed: int) -> None:
        self.shape, self.device = shape, device
        g, n, k = shape.num_groups, shape.n, shape.k
        self.x = normal(device, seed, sum(shape.rows), k).bfloat16()
        self.w = (normal(device, seed + 1, g, n, k) * k**-0.5).bfloat16()
        self.counts = torch.tensor(shape.rows, dtype=torch.int32, device=device)
        self._held: dict[tuple[str, str], Quantized] = {}
        self._exact: dict[str, Tensor] = {}

    def rows_as(self, fmt: str) -> Quantized:
        """The rows in a format of `formats`."""
        return self._as("x", fmt)

    def weights_as(self, fmt: str) -> Quantized:
        """The matrices in a format of `formats`; NVFP4 with a global scale each."""
        return self._as("w", fmt)

    def _as(self, name: str, fmt: str) -> Quantized:
        if (name, fmt) not in self._held:
            source = getattr(self, name)
            g = weight_global_scale(source) if (name, fmt) == ("w", "nvfp4") else None
            self._held[name, fmt] = quantize(source, fmt, global_scale=g)
        return self._held[name, fmt]

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


Factory = Callable[[GemmInputs], GemmEntry]
CONTESTANTS: dict[str, Factory] = {}


def register(name: str, factory: Factory) -> None:
    """Add a contestant, or replace the one of that name."""
    CONTESTANTS[name] = factory


def portable(
    inputs: GemmInputs, recipe: str, schedule: str = "static", sort_by_m: bool = False
) -> GemmEntry:
    """Our grouped GEMM; rows come quantised, and their counts lie on the device."""
    backends.resolve("portable", "auto", inputs.device)
    from megamoe.kernels.portable import grouped_gemm

    row = recipe_named(recipe)
    x, w = inputs.rows_as(row.acts.name), inputs.weights_as(row.weights.name)
    return GemmEntry(
        run=lambda: grouped_gemm(x, w, inputs.counts, schedule=schedule, sort_by_m=sort_by_m),
        check=inputs.check(recipe, row.tolerance),
        weight_bytes=w.nbytes,
        row_bytes=x.nbytes,
        mma=mma_of(recipe),
        recipe=recipe,
        ours=True,
    )


def torch_bf16(inputs: GemmInputs) -> GemmEntry:
    """torch._grouped_mm."""
    grouped = torch_function("_grouped_mm")
    ends = inputs.counts.cumsum(0).to(torch.int32)
    return GemmEntry(
        run=lambda: grouped(inputs.x, inputs.w.transpose(1, 2), offs=ends),
        check=inputs.check("bf16", 1e-2),
        weight_bytes=2 * inputs.w.numel(),
        row_bytes=2 * inputs.x.numel(),
        mma="bf16",
        recipe="bf16",
        ours=False,
    )


def torch_fp8(inputs: GemmInputs) -> GemmEntry:
    """torch._scaled_grouped_mm with row-wise scales; its rows come in quantised."""
    grouped = torch_function("_scaled_grouped_mm")
    require(
        inputs.device.type == "cuda",
        "torch._scaled_grouped_mm needs a GPU",
        got=str(inputs.device),
        kind=NotAvailable,
    )
    ends = inputs.counts.cumsum(0).to(torch.int32)
    (x, x_scale), (w, w_scale) = rowwise(inputs.x), rowwise_experts(inputs.w)
    return GemmEntry(
        run=lambda: grouped(
            x, w.transpose(1, 2), x_scale, w_scale,
            offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True,
        ),
        check=inputs.check("bf16", 6e-2),
        weight_bytes=w.numel() + 4 * w_scale.numel(),
        row_bytes=x.numel() + 4 * x_scale.numel(),
        mma="fp8",
        recipe="fp8-row",
        ours=False,
    )  # fmt: skip


# Tiles dealt by number or drawn by ticket (C005), groups as they come or large ones first (C010).
VARIANTS = {"": ("static", False), "-sorted": ("static", True),
            "-dynamic": ("dynamic", False), "-dynamic-sorted": ("dynamic", True)}  # fmt: skip
for _recipe in RECIPES:
    for _ending, (_schedule, _sorted) in VARIANTS.items():
        _make = partial(portable, recipe=_recipe, schedule=_schedule, sort_by_m=_sorted)
        register(f"portable-{_recipe}{_ending}", _make)
register("torch-bf16", torch_bf16)
register("torch-fp8", torch_fp8)


def measure(
    shapes: Sequence[GemmShape],
    names: Sequence[str],
    *,
    device: str,
    repeats: int = 25,
    rounds: int = 3,
    flush: str = "memset",
    seed: int = SEED,
    progress: Progress = lambda step, done, of: None,
) -> Report:
    """Check and time every contestant on every shape."""
    require(len(names) > 0, "there must be at least one contestant", got="none", kind=RangeError)
    for name in names:
        one_of(name, tuple(CONTESTANTS), "contestant")
    where = torch.device(device)
    timer = Timer(where, flush=flush, repeats=repeats, rounds=rounds)
    reader = Reader(where)
    progress("shapes", 0, len(shapes))
    report = Report(
        title="one grouped GEMM",
        provenance=provenance(where),
        method=timer.method,
        ceilings=ceilings_of.measure(where, reader),
        rows=(),
    )
    for done, shape in enumerate(shapes, 1):
        rows = _one_shape(GemmInputs(shape, where, seed), names, timer, reader, report)
        report = replace(report, rows=report.rows + tuple(rows))
        progress("shapes", done, len(shapes))
    return report


def _one_shape(
    inputs: GemmInputs, names: Sequence[str], timer: Timer, reader: Reader, report: Report
) -> list[Row]:
    rows: dict[str, Row] = {}
    ready: dict[str, tuple[GemmEntry, Prepared]] = {}
    for name in names:
        blank = Row(
            f"gemm-{inputs.shape.name}", name, "", name.startswith("portable"), FAILED, "",
            report.provenance, touched=inputs.shape.num_groups,
        )  # fmt: skip
        try:
            entry = CONTESTANTS[name](inputs)
            with poisoned_memory():
                verdict = entry.check(entry.run())
            if verdict.ok:
                one = timer.prepare(entry.run)
                verdict = entry.check(poisoned_call(one, timer))
            if verdict.ok:
                ready[name] = entry, one
        except NotAvailable as error:
            rows[name] = replace(blank, status=ABSENT, note=str(error))
            continue
        except Exception as error:
            rows[name] = replace(blank, note=first_line(error))
            continue
        rows[name] = replace(
            blank, status=OK if verdict.ok else WRONG, note=verdict.why, recipe=entry.recipe,
            ours=entry.ours, error=verdict.error, bound=verdict.bound,
        )  # fmt: skip
    reads = {
        f"read {n}": reader.prepare(n, timer)
        for n in sorted({entry.weight_bytes for entry, _ in ready.values()})
    }
    times = timer.time({name: one for name, (_, one) in ready.items()} | reads)
    for name, (entry, _) in ready.items():
        out_bytes = 2 * sum(inputs.shape.rows) * inputs.shape.n
        cost = Cost(
            inputs.shape.flops, entry.weight_bytes, entry.row_bytes + out_bytes, entry.mma
        )  # fmt: skip
        read = times[f"read {entry.weight_bytes}"]
        columns: dict[str, Any] = Measured(cost, times[name], read, report.ceilings).columns()
        rows[name] = replace(rows[name], **columns)
    return [*rows.values()]
