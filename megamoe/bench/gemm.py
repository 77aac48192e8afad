"""`megamoe bench gemm`: grouped GEMMs alone, over the shapes of `cells.GEMM_SHAPES`.

Contestants stand in CONTESTANTS: name -> factory. A factory takes the inputs of a shape and gives
`GemmEntry(run, check, ...)`; it raises NotAvailable where it cannot run. `register` adds one.
"hopper-RECIPE@LABEL" is one with another tile than the table's, "hopper-RECIPE@all" all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megamoe.bench import ceilings as ceilings_of
from megamoe.bench.cells import SEED, GemmShape
from megamoe.bench.contestants import rowwise, rowwise_experts, torch_function
from megamoe.bench.floors import Cost
from megamoe.bench.gate import poisoned_call, poisoned_memory
from megamoe.bench.gemm_inputs import GemmEntry, GemmInputs
from megamoe.bench.hopper_gemm import hopper, tiles_by_label
from megamoe.bench.layer import Progress, first_line
from megamoe.bench.provenance import provenance
from megamoe.bench.reading import Reader
from megamoe.bench.record import ABSENT, FAILED, OK, WRONG, Measured, Report, Row
from megamoe.bench.timer import Prepared, Timer
from megamoe.engine import backends
from megamoe.errors import NotAvailable, RangeError, one_of, require
from megamoe.formats.spec import recipe_named
from megamoe.planner.numerics import BLACKWELL_RECIPES, HOPPER_RECIPES, narrowest_mma
from megamoe.problem import RECIPES

Factory = Callable[..., GemmEntry]  # of the inputs; Hopper's takes a tile too
CONTESTANTS: dict[str, Factory] = {}


def register(name: str, factory: Factory) -> None:
    """Add a contestant, or replace the one of that name."""
    CONTESTANTS[name] = factory


def portable(
    inputs: GemmInputs, recipe: str, schedule: str = "static", sort_by_m: bool = False
) -> GemmEntry:
    """Our grouped GEMM; rows come quantised, and their counts lie on the device."""
    backends.resolve("portable", "auto", inputs.device)
    from megamoe.engine.grouped import grouped_gemm

    row = recipe_named(recipe)
    x, w = inputs.rows_as(row.acts.name), inputs.weights_as(row.weights.name)
    how: dict[str, Any] = {"backend": "portable", "schedule": schedule, "sort_by_m": sort_by_m}
    return GemmEntry(
        run=lambda: grouped_gemm(x, w, inputs.counts, **how),
        check=inputs.check(recipe, row.tolerance),
        weight_bytes=w.nbytes,
        row_bytes=x.nbytes,
        mma=narrowest_mma(recipe),
        recipe=recipe,
        ours=True,
    )


def blackwell(
    inputs: GemmInputs, recipe: str, schedule: str = "auto", sort_by_m: bool = False
) -> GemmEntry:
    """Blackwell's grouped GEMM with the plan's tile; rows come quantised."""
    backends.resolve("blackwell", "auto", inputs.device)
    from megamoe.engine.grouped import grouped_gemm

    row = recipe_named(recipe)
    x, w = inputs.rows_as(row.acts.name), inputs.weights_as(row.weights.name)
    how: dict[str, Any] = {"backend": "blackwell", "schedule": schedule, "sort_by_m": sort_by_m}
    return GemmEntry(
        run=lambda: grouped_gemm(x, w, inputs.counts, **how),
        check=inputs.check(recipe, row.tolerance),
        weight_bytes=w.nbytes,
        row_bytes=x.nbytes,
        mma=narrowest_mma(recipe),
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


# Tiles by number or from a counter, groups as they come or large ones first.
VARIANTS = {"": ("static", False), "-sorted": ("static", True),
            "-dynamic": ("dynamic", False), "-dynamic-sorted": ("dynamic", True)}  # fmt: skip
for _recipe in RECIPES:
    for _ending, (_schedule, _sorted) in VARIANTS.items():
        _make = partial(portable, recipe=_recipe, schedule=_schedule, sort_by_m=_sorted)
        register(f"portable-{_recipe}{_ending}", _make)
for _recipe in HOPPER_RECIPES:
    register(f"hopper-{_recipe}", partial(hopper, recipe=_recipe))
for _recipe in BLACKWELL_RECIPES:
    register(f"blackwell-{_recipe}", partial(blackwell, recipe=_recipe))  # as the plan says
    for _ending, (_schedule, _sorted) in VARIANTS.items():
        _make = partial(blackwell, recipe=_recipe, schedule=_schedule, sort_by_m=_sorted)
        register(f"blackwell-{_recipe}{_ending or '-static'}", _make)
register("torch-bf16", torch_bf16)
register("torch-fp8", torch_fp8)


def field_of(names: Sequence[str], shape: GemmShape) -> dict[str, Factory]:
    """The contestants of a shape by name; tiles after an @ are spelled out."""
    factories: dict[str, Factory] = {}
    for name in names:
        plain, at, tile = name.partition("@")
        one_of(plain, tuple(CONTESTANTS), "contestant")
        make = CONTESTANTS[plain]
        if not at:
            factories[name] = make
            continue
        backend, _, recipe = plain.partition("-")
        one_of(backend, ("hopper",), "backend with a choice of tiles")
        labels = tiles_by_label(recipe, shape)
        if tile != "all":
            one_of(tile, tuple(labels), "tile")
            labels = {tile: labels[tile]}
        factories |= {f"{plain}@{text}": partial(make, tile=one) for text, one in labels.items()}
    return factories


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
    fields = [field_of(names, shape) for shape in shapes]
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
    for done, (shape, field) in enumerate(zip(shapes, fields, strict=True), 1):
        rows = _one_shape(GemmInputs(shape, where, seed), field, timer, reader, report)
        report = replace(report, rows=report.rows + tuple(rows))
        progress("shapes", done, len(shapes))
    return report


def _one_shape(
    inputs: GemmInputs, field: dict[str, Factory], timer: Timer, reader: Reader, report: Report
) -> list[Row]:
    rows: dict[str, Row] = {}
    ready: dict[str, tuple[GemmEntry, Prepared]] = {}
    for name, make in field.items():
        blank = Row(
            f"gemm-{inputs.shape.name}", name, "", not name.startswith("torch"), FAILED, "",
            report.provenance, touched=inputs.shape.num_groups,
        )  # fmt: skip
        try:
            entry = make(inputs)
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
            blank, status=OK if verdict.ok else WRONG, note=verdict.why or entry.note,
            recipe=entry.recipe, ours=entry.ours, error=verdict.error, bound=verdict.bound,
        )  # fmt: skip
    return [*_timed(inputs.shape, rows, ready, timer, reader, report).values()]


def _timed(
    shape: GemmShape,
    rows: dict[str, Row],
    ready: dict[str, tuple[GemmEntry, Prepared]],
    timer: Timer,
    reader: Reader,
    report: Report,
) -> dict[str, Row]:
    """The rows with figures; ours with their ratio to each of the others."""
    sizes = sorted({entry.weight_bytes for entry, _ in ready.values()})
    on_gpu = timer.device.type != "cpu"  # a CPU's read is no floor of its products
    reads = {f"read {n}": reader.prepare(n, timer) for n in sizes if on_gpu}
    times = timer.time({name: one for name, (_, one) in ready.items()} | reads)
    others = {name: times[name].us for name, (entry, _) in ready.items() if not entry.ours}
    for name, (entry, one) in ready.items():
        after = entry.check(poisoned_call(one, timer))
        if not after.ok:
            why = f"right before the timing, wrong after it: {after.why}"
            rows[name] = replace(rows[name], status=WRONG, note=why, error=after.error)
            continue
        token_bytes = entry.row_bytes + 2 * sum(shape.rows) * shape.n
        cost = Cost(shape.flops, entry.weight_bytes, token_bytes, entry.mma)
        read, us = times.get(f"read {entry.weight_bytes}"), times[name].us
        columns: dict[str, Any] = Measured(cost, times[name], read, report.ceilings).columns()
        versus = {other: us / theirs for other, theirs in others.items()} if entry.ours else {}
        rows[name] = replace(rows[name], versus=versus, **columns)
    return rows
