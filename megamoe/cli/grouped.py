"""`megamoe plan --gemm`: how grouped GEMMs alone run, those of `megamoe bench gemm`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.console import Console

from megamoe.bench.cells import GemmShape
from megamoe.cli.plan import launch_dict, print_shared_memory, shared_memory_dict, shown
from megamoe.cli.shared import reason_table, untested
from megamoe.hardware import Hardware
from megamoe.planner.choice import Value
from megamoe.planner.grouped import GroupedPlan, GroupedSpec, plan_grouped

DEFAULT_RECIPE = "nvfp4"


def print_plans(
    out: Console,
    shapes: Sequence[GemmShape],
    machine: str,
    recipe: str | None,
    overrides: Mapping[str, Value],
    *,
    as_json: bool,
) -> None:
    """The plan of every shape: choices with reasons, launches, shared memory."""
    hw = Hardware.named(machine)
    plans = {shape.name: _plan(shape, hw, recipe or DEFAULT_RECIPE, overrides) for shape in shapes}
    if as_json:
        print(json.dumps({name: _as_dict(one) for name, one in plans.items()}, indent=2))
        return
    if warning := untested(hw):
        out.print(warning, highlight=False, soft_wrap=True, style="bold")
    for name, one in plans.items():
        s = one.spec
        rows = ", ".join(map(str, next(each.rows for each in shapes if each.name == name)))
        text = f"[bold]{name}[/]: {s.n} x {s.k} times groups of {rows} rows, {s.recipe}"
        out.print(text, highlight=False, soft_wrap=True)
        choices = [(c.name, shown(c.value), c.why) for c in one.choices]
        reason_table(out, f"Plan on {hw.label}", ("choice", "value", "why"), choices)
        grids = ((x, " x ".join(f"{n:,}" for n in x.grid)) for x in one.launches)
        launches = [(x.name, x.kernel.strip("_"), grid, str(x.config)) for x, grid in grids]
        columns = ("launch", "kernel", "grid", "configuration")
        reason_table(out, "Launches", columns, launches, right=(2,))
        if one.shared_memory is not None:
            print_shared_memory(out, one.shared_memory)


def _plan(
    shape: GemmShape, hw: Hardware, recipe: str, overrides: Mapping[str, Value]
) -> GroupedPlan:
    spec = GroupedSpec(recipe, sum(shape.rows), shape.num_groups, shape.n, shape.k)
    return plan_grouped(spec, hw, **overrides)  # type: ignore[arg-type]


def _as_dict(plan: GroupedPlan) -> dict[str, object]:
    return {
        "spec": asdict(plan.spec),
        "hardware": plan.hardware.name,
        "backend": plan.backend,
        "choices": [asdict(choice) for choice in plan.choices],
        "launches": [launch_dict(one, 1) for one in plan.launches],
        "shared_memory": shared_memory_dict(plan.shared_memory),
    }
