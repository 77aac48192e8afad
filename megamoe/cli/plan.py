"""`megamoe plan`: how a call would run, every choice with its reason. No GPU, no torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megamoe.cli import problems as of
from megamoe.hardware import Hardware
from megamoe.studies.deep_gemm.plan import Plan, plan

out = Console()
WIDE = 110  # columns from which the regions are explained too
Compare = Annotated[
    str | None, typer.Option(help="Machines side by side, comma-separated, e.g. h200,b200.")
]


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("plan")(command)


def command(
    preset: of.Preset = None,
    hidden: of.Hidden = None,
    intermediate: of.Intermediate = None,
    experts: of.Experts = None,
    top_k: of.TopK = None,
    recipe: of.Recipe = None,
    tokens: of.Tokens = 512,
    ranks: of.Ranks = 8,
    hardware: of.Machine = "h200",
    given: of.Set = None,
    compare: Compare = None,
    as_json: of.Json = False,
) -> None:
    """Print how a call would run: choices with reasons, shared memory, workspace, floor."""
    shape = {
        "hidden": hidden,
        "intermediate": intermediate,
        "num_experts": experts,
        "top_k": top_k,
    }
    name, problem = of.problem_from(preset, shape, recipe=recipe, tokens=tokens, ranks=ranks)
    machines = [word.strip() for word in compare.split(",")] if compare else [hardware]
    fixed = of.overrides_from(given)
    plans = [plan(problem, Hardware.named(machine), **fixed) for machine in machines]
    if as_json:
        dicts = {found.hardware.name: as_dict(found) for found in plans}
        print(json.dumps(dicts if compare else dicts[plans[0].hardware.name], indent=2))
        return
    p = problem
    out.print(
        f"[bold]{name}[/]: {p.num_tokens} tokens on each of {p.num_ranks} rank(s), "
        f"top-{p.top_k} of {p.num_experts} experts, {p.hidden} x {p.intermediate}, {p.recipe}",
        highlight=False,
    )
    if compare:
        out.print(_side_by_side(plans))
    else:
        _print_plan(plans[0])


def as_dict(found: Plan) -> dict[str, Any]:
    """The plan as plain values."""
    smem, workspace, floor = found.smem, found.workspace, found.floor
    return {
        "problem": asdict(found.problem),
        "hardware": found.hardware.name,
        "choices": [asdict(choice) for choice in found.choices],
        "roles": [asdict(role) for role in found.roles],
        "shared_memory": {
            "fixed": [term._asdict() for term in smem.fixed],
            "stage": [term._asdict() for term in smem.stage],
            "num_stages": smem.num_stages,
            "num_bytes": smem.num_bytes,
            "limit": smem.limit,
        },
        "workspace": {
            "num_bytes": workspace.num_bytes,
            "control_bytes": workspace.control_bytes,
            "regions": [
                {"name": r.name, "room": r.room, "num_bytes": r.num_bytes, "shape": r.shape}
                for r in workspace.regions
            ],
        },
        "floor": {**asdict(floor), "time_us": floor.time_us, "bound": floor.bound},
    }


def _print_plan(found: Plan) -> None:
    out.print(_choices(found))
    roles = _table("Warps of a CTA", "role", "warps", "registers", "why", right=(1, 2))
    for r in found.roles:
        roles.add_row(r.name, str(r.num_warps), str(r.registers), escape(r.why))
    out.print(roles)
    out.print(_shared_memory(found))
    out.print(_workspace(found))
    out.print(_floor(found))


def _table(title: str, *columns: str, right: tuple[int, ...] = ()) -> Table:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        is_right = i in right
        table.add_column(
            column, justify="right" if is_right else "left", no_wrap=is_right or i == 0
        )
    return table


def _shown(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return "none" if value is None else str(value)


def _choices(found: Plan) -> Table:
    table = _table(f"Plan on {found.hardware.label}", "choice", "value", "why", right=(1,))
    for c in found.choices:
        value = escape(_shown(c.value))
        is_given = c.why.startswith("given")
        table.add_row(c.name, f"[bold]{value}[/]" if is_given else value, escape(c.why))
    return table


def _shared_memory(found: Plan) -> Table:
    smem = found.smem
    table = _table(
        "Shared memory of a CTA", "what", "bytes", "times", "sum", "why", right=(1, 2, 3)
    )
    for term in smem.fixed:
        table.add_row(term.name, f"{term.num_bytes:,}", "", f"{term.num_bytes:,}", term.why)
    for term in smem.stage:
        total = term.num_bytes * smem.num_stages
        table.add_row(
            term.name, f"{term.num_bytes:,}", f"{smem.num_stages} stages", f"{total:,}", term.why
        )
    table.add_section()
    table.add_row("total", "", "", f"[bold]{smem.num_bytes:,}[/]", f"of {smem.limit:,}")
    return table


def _workspace(found: Plan) -> Table:
    is_wide = out.width >= WIDE
    columns = ("region", "bytes", "type", "shape", *(("about",) if is_wide else ()))
    table = _table("Workspace of a rank", *columns, right=(1,))
    for room in ("control", "data"):
        for r in found.workspace.room(room):
            shape = " x ".join(f"{n:,}" for n in r.shape)
            about = (escape(r.about),) if is_wide else ()
            table.add_row(r.name, f"{r.num_bytes:,}", r.dtype, shape, *about)
        table.add_section()
    table.add_row("total", f"[bold]{found.workspace.num_bytes:,}[/]")
    table.add_row("of them control", f"{found.workspace.control_bytes:,}")
    return table


def _floor(found: Plan) -> Table:
    floor = found.floor
    title = "Floor of the call, at what the machine reached"
    table = _table(title, "resource", "us", "what passes", right=(1,))
    table.add_row("tensor", f"{floor.tensor_us:,.1f}", f"{floor.flops / 1e9:,.1f} GFLOP")
    for name, us, terms in (
        ("hbm", floor.hbm_us, floor.hbm),
        ("nvlink", floor.nvlink_us, floor.nvlink),
    ):
        told = " + ".join(f"{what} {size / 1e6:,.1f}" for what, size in terms)
        table.add_row(name, f"{us:,.1f}", f"MB: {told}" if terms else "nothing")
    table.add_section()
    table.add_row("floor", f"[bold]{floor.time_us:,.1f}[/]", f"set by {floor.bound}")
    return table


def _side_by_side(plans: list[Plan]) -> Table:
    """One column a machine; rows that differ are bold."""
    right = tuple(range(1, len(plans) + 1))
    table = _table("Plans side by side", "", *(p.hardware.label for p in plans), right=right)
    names = dict.fromkeys(choice.name for found in plans for choice in found.choices)
    values = [{choice.name: choice.value for choice in found.choices} for found in plans]

    def add(name: str, cells: list[str]) -> None:
        is_same = len(set(cells)) == 1
        table.add_row(name, *(escape(c) if is_same else f"[bold]{escape(c)}[/]" for c in cells))

    for name in names:
        add(name, [_shown(found[name]) if name in found else "-" for found in values])
    table.add_section()
    add("waves", [str(p.num_waves) for p in plans])
    add("shared memory, bytes", [f"{p.smem.num_bytes:,}" for p in plans])
    add("workspace, MB", [f"{p.workspace.num_bytes / 1e6:,.1f}" for p in plans])
    table.add_section()
    add("tensor floor, us", [f"{p.floor.tensor_us:,.1f}" for p in plans])
    add("hbm floor, us", [f"{p.floor.hbm_us:,.1f}" for p in plans])
    add("nvlink floor, us", [f"{p.floor.nvlink_us:,.1f}" for p in plans])
    add("floor, us", [f"{p.floor.time_us:,.1f}, {p.floor.bound}" for p in plans])
    return table
