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
        dicts = {found.hardware.name: as_dict(found) for found in plans}
        print(json.dumps(dicts if len(plans) > 1 else dicts[plans[0].hardware.name], indent=2))
        return
    out.print(head, highlight=False, soft_wrap=True)
    out.print(f"[bold red]{LABEL}[/]", highlight=False, soft_wrap=True)
    if len(plans) > 1:
        out.print(_side_by_side(plans))
        return
    found = plans[0]
    rows = [(c.name, shown(c.value), c.why) for c in found.choices]
    title = f"Study on {found.hardware.label}"
    reason_table(out, title, ("choice", "value", "why"), rows)
    roles = [(r.name, str(r.num_warps), str(r.registers), r.why) for r in found.roles]
    columns = ("role", "warps", "registers", "why")
    reason_table(out, "Warps of a CTA", columns, roles, right=(1, 2))
    print_shared_memory(out, found.smem)
    regions = [(r.name, f"{r.num_bytes:,}", r.about) for r in found.workspace.regions]
    regions.append(("total", f"{found.workspace.num_bytes:,}", "of a rank"))
    reason_table(out, "Workspace", ("region", "bytes", "what"), regions, right=(1,))
    print_floor(out, found.floor)


def as_dict(found: Plan) -> dict[str, Any]:
    """The study's plan as plain values."""
    return {
        "study": LABEL,
        "problem": asdict(found.problem),
        "hardware": found.hardware.name,
        "choices": [asdict(choice) for choice in found.choices],
        "roles": [asdict(role) for role in found.roles],
        "shared_memory": shared_memory_dict(found.smem),
        "workspace": {
            "num_bytes": found.workspace.num_bytes,
            "control_bytes": found.workspace.control_bytes,
            "regions": [
                {"name": r.name, "section": r.section, "num_bytes": r.num_bytes, "shape": r.shape}
                for r in found.workspace.regions
            ],
        },
        "floor": floor_dict(found.floor),
    }


def _side_by_side(plans: list[Plan]) -> Table:
    table = Table(title=LABEL, title_justify="left")
    table.add_column("", no_wrap=True)
    for found in plans:
        table.add_column(found.hardware.label)
    names = dict.fromkeys(choice.name for found in plans for choice in found.choices)
    values = [{choice.name: choice.value for choice in found.choices} for found in plans]
    for name in names:
        cells = [shown(found[name]) if name in found else "-" for found in values]
        table.add_row(name, *map(escape, cells))
    table.add_row("waves", *(str(found.num_waves) for found in plans))
    table.add_row("floor, us", *(f"{p.floor.time_us:,.1f}, {p.floor.bound}" for p in plans))
    return table
