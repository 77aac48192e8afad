"""`--study deep_gemm`: the reference system planned and simulated; all output says so."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megamoe.cli.plan import (
    floor_dict,
    print_floor,
    print_shared_memory,
    shared_memory_dict,
    shown,
)
from megamoe.cli.shared import reason_table
from megamoe.hardware import Hardware
from megamoe.planner.choice import Value
from megamoe.problem import Problem
from megamoe.simulator.schedule import NOT_OURS, Schedule
from megamoe.studies.deep_gemm.plan import Plan, plan
from megamoe.studies.deep_gemm.schedule import NAME, schedule_of

LABEL = f"{NOT_OURS} ({NAME})"


def schedule_from(problem: Problem, machine: Hardware, fixed: Mapping[str, Value]) -> Schedule:
    """What the simulator plays of the study."""
    return schedule_of(plan(problem, machine, **fixed))


def print_plans(
    out: Console,
    head: str,
    problem: Problem,
    machines: Sequence[str],
    fixed: Mapping[str, Value],
    *,
    as_json: bool,
) -> None:
    """The study's plan on one machine, or side by side on several."""
    plans = [plan(problem, Hardware.named(machine), **fixed) for machine in machines]
    if as_json:
        dicts = {one.hardware.name: as_dict(one) for one in plans}
        print(json.dumps(dicts if len(plans) > 1 else dicts[plans[0].hardware.name], indent=2))
        return
    out.print(head, highlight=False, soft_wrap=True)
    out.print(f"[bold red]{LABEL}[/]", highlight=False, soft_wrap=True)
    if len(plans) > 1:
        out.print(_side_by_side(plans))
        return
    one = plans[0]
    rows = [(c.name, shown(c.value), c.why) for c in one.choices]
    title = f"Study on {one.hardware.label}"
    reason_table(out, title, ("choice", "value", "why"), rows)
    roles = [(r.name, str(r.num_warps), str(r.registers), r.why) for r in one.roles]
    columns = ("role", "warps", "registers", "why")
    reason_table(out, "Warps of a CTA", columns, roles, right=(1, 2))
    print_shared_memory(out, one.smem)
    regions = [(r.name, f"{r.num_bytes:,}", r.about) for r in one.workspace.regions]
    regions.append(("total", f"{one.workspace.num_bytes:,}", "of a rank"))
    reason_table(out, "Workspace", ("region", "bytes", "what"), regions, right=(1,))
    print_floor(out, one.floor)


def as_dict(plan: Plan) -> dict[str, Any]:
    """The study's plan as plain values."""
    return {
        "study": LABEL,
        "problem": asdict(plan.problem),
        "hardware": plan.hardware.name,
        "choices": [asdict(choice) for choice in plan.choices],
        "roles": [asdict(role) for role in plan.roles],
        "shared_memory": shared_memory_dict(plan.smem),
        "workspace": {
            "num_bytes": plan.workspace.num_bytes,
            "control_bytes": plan.workspace.control_bytes,
            "regions": [
                {"name": r.name, "section": r.section, "num_bytes": r.num_bytes, "shape": r.shape}
                for r in plan.workspace.regions
            ],
        },
        "floor": floor_dict(plan.floor),
    }


def _side_by_side(plans: list[Plan]) -> Table:
    table = Table(title=LABEL, title_justify="left")
    table.add_column("", no_wrap=True)
    for one in plans:
        table.add_column(one.hardware.label)
    names = dict.fromkeys(choice.name for one in plans for choice in one.choices)
    values = [{choice.name: choice.value for choice in one.choices} for one in plans]
    for name in names:
        cells = [shown(one[name]) if name in one else "-" for one in values]
        table.add_row(name, *map(escape, cells))
    table.add_row("waves", *(str(one.num_waves) for one in plans))
    table.add_row("floor, us", *(f"{p.floor.time_us:,.1f}, {p.floor.bound}" for p in plans))
    return table
