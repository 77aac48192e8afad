"""`megamoe plan`: how a call runs, every choice with its reason. No GPU, no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, is_dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megamoe.bench.cells import GEMM_SHAPES, gemms_named
from megamoe.cli import problems as of
from megamoe.cli.shared import Json, reason_table, untested
from megamoe.errors import RangeError, one_of, require
from megamoe.hardware import Hardware
from megamoe.planner.choice import SharedMemory
from megamoe.planner.floor import Floor
from megamoe.planner.launches import Launch
from megamoe.planner.plan import Plan, plan
from megamoe.problem import Problem

out = Console()
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
    overrides: of.Set = None,
    compare: Compare = None,
    study: of.Study = None,
    cubins: Annotated[
        str | None, typer.Option(help="Also count what calls of these sizes compile, e.g. 1-512.")
    ] = None,
    gemm: Annotated[
        str | None,
        typer.Option(help=f"Grouped GEMMs alone instead of a layer: {', '.join(GEMM_SHAPES)}."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print what moe and MoE launch for a call: choices with reasons, launches, memory, floor."""
    if gemm is not None:
        from megamoe.cli import grouped

        layers = {"a preset": preset, "--hidden": hidden, "--intermediate": intermediate,
                  "--experts": experts, "--top-k": top_k, "--compare": compare, "--study": study,
                  "--cubins": cubins}  # fmt: skip
        others = [name for name, value in layers.items() if value is not None]
        require(
            not others, "--gemm plans grouped GEMMs alone, without what describes a layer",
            got=", ".join(others), fix="leave it out, or leave out --gemm", kind=RangeError,
        )  # fmt: skip
        shapes = gemms_named([word.strip() for word in gemm.split(",")])
        of_gemm = of.overrides_from(overrides)
        grouped.print_plans(out, shapes, hardware, recipe, of_gemm, as_json=as_json)
        return
    shape = {
        "hidden": hidden,
        "intermediate": intermediate,
        "num_experts": experts,
        "top_k": top_k,
    }
    words = [word.strip() for word in compare.split(",")] if compare else [hardware]
    machines = [Hardware.named(word) for word in words]
    fixed = of.overrides_from(overrides)

    def problem_on(arch: str) -> tuple[str, Problem]:
        return of.problem_from(preset, shape, recipe=recipe, tokens=tokens, ranks=ranks, arch=arch)

    if study is not None:
        from megamoe.cli import study as of_study

        one_of(study, of.STUDIES, "study")
        name, problem = problem_on("")
        head = _head(name, [problem])
        of_study.print_plans(out, head, problem, words, fixed, as_json=as_json)
        return
    names, problems = zip(*(problem_on(machine.arch) for machine in machines), strict=True)
    head = _head(names[0], problems)
    plans = [plan(one, hw, **fixed) for one, hw in zip(problems, machines, strict=True)]
    if as_json:
        dicts = {one.hardware.name: as_dict(one) for one in plans}
        print(json.dumps(dicts if compare else dicts[plans[0].hardware.name], indent=2))
        return
    out.print(head, highlight=False, soft_wrap=True)
    for one in plans:
        if warning := untested(one.hardware):
            out.print(warning, highlight=False, soft_wrap=True, style="bold")
    if compare:
        out.print(_side_by_side(plans))
    else:
        _print_plan(plans[0])
        if cubins is not None:
            _print_cubins(plans[0], cubins)


def _head(name: str, problems: Sequence[Problem]) -> str:
    """A line on what is planned; `problems` differ in their recipes alone."""
    p = problems[0]
    recipes = " or ".join(dict.fromkeys(one.recipe for one in problems))
    ranks_text = f" on each of {p.num_ranks} ranks" if p.num_ranks > 1 else " on one rank"
    return (
        f"[bold]{escape(name)}[/]: {of.counted(p.num_tokens, 'token')}{ranks_text}, "
        f"top-{p.top_k} of {p.num_experts} experts, "
        f"{p.hidden} x {p.intermediate}, {recipes}"
    )


def _print_cubins(plan: Plan, sizes: str) -> None:
    """How many compilations a layer of this problem needs."""
    from megamoe.cli import compile as of_compile
    from megamoe.engine.recording import LayerSpec

    p, machine, nums = plan.problem, plan.hardware, of_compile.sizes_from(sizes)
    layer = LayerSpec(
        p.recipe, p.hidden, p.intermediate, p.num_experts, p.top_k,
        (machine.label, machine.num_sms, machine.arch, machine.hbm_bytes), num_ranks=p.num_ranks,
        max_tokens=max(nums), overrides=plan.overrides,
    )  # fmt: skip
    of_compile.print_cubins(of_compile.count_cubins(layer, nums), len(nums))


def as_dict(plan: Plan) -> dict[str, Any]:
    """The plan as plain values."""
    return {
        "study": "",
        "problem": asdict(plan.problem),
        "hardware": plan.hardware.name,
        "backend": plan.backend,
        "mode": plan.mode,
        "numerics": asdict(plan.numerics),
        "choices": [asdict(choice) for choice in plan.choices],
        "launches": [launch_dict(one, times) for one, times in _launches(plan)],
        "shared_memory": shared_memory_dict(plan.shared_memory),
        "memory": [asdict(buffer) for buffer in plan.buffers],
        "floor": floor_dict(plan.floor) if plan.launches else None,
        "overrides": dict(plan.overrides),
    }


def _launches(plan: Plan) -> Iterator[tuple[Launch, int]]:
    """Each launch, and how often in a row."""
    last, times = None, 0
    for one in plan.launches:
        if one != last and last is not None:
            yield last, times
            times = 0
        last, times = one, times + 1
    if last is not None:
        yield last, times


def launch_dict(one: Launch, times: int) -> dict[str, Any]:
    """A launch as plain values, so often in a row."""
    config = one.config
    return {
        "name": one.name,
        "kernel": one.kernel,
        "times": times,
        "grid": one.grid,
        "partition": one.partition,
        "config": {
            "kind": type(config).__name__,
            **(asdict(config) if is_dataclass(config) and not isinstance(config, type) else {}),
        },
        "constants": config.constants(),
        "why": one.why,
    }


def shared_memory_dict(smem: SharedMemory | None) -> dict[str, Any] | None:
    """The sum of a CTA as plain values."""
    if smem is None:
        return None
    return {
        "fixed": [term._asdict() for term in smem.fixed],
        "stage": [term._asdict() for term in smem.stage],
        "num_stages": smem.num_stages,
        "num_bytes": smem.num_bytes,
        "limit": smem.limit,
    }


def floor_dict(floor: Floor) -> dict[str, Any]:
    """The floor as plain values."""
    return {**asdict(floor), "time_us": floor.time_us, "bound": floor.bound}


def _print_plan(plan: Plan) -> None:
    overridden = {name for name, _ in plan.overrides}
    rows = [(c.name, shown(c.value), c.why) for c in plan.choices]
    bold = [at for at, c in enumerate(plan.choices) if c.name in overridden]
    title = f"Plan on {plan.hardware.label}"
    reason_table(out, title, ("choice", "value", "why"), rows, bold=bold)
    if plan.launches:
        launches = [
            (
                one.name,
                one.kernel.strip("_"),
                f"{times} x " * (times > 1) + " x ".join(f"{n:,}" for n in one.grid),
                str(one.config) + f"; on {one.partition}_sms" * bool(one.partition),
            )
            for one, times in _launches(plan)
        ]
        title = "Launches of a rank, in order" + (
            "; rows cross the links before and after those of the experts"
            if plan.call.is_group and plan.mode == "staged"
            else ""
        )
        columns = ("launch", "kernel", "grid", "configuration")
        reason_table(out, title, columns, launches, right=(2,))
    else:
        out.print(plan.why_no_launches, highlight=False)
    if plan.shared_memory is not None:
        print_shared_memory(out, plan.shared_memory)
    _print_memory(plan)
    if plan.launches:
        print_floor(out, plan.floor)


def shown(value: object) -> str:
    """A choice's value as text."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "none" if value is None else str(value)


def print_shared_memory(console: Console, smem: SharedMemory) -> None:
    """The sum of a CTA, term by term."""
    rows = [(t.name, f"{t.num_bytes:,}", t.why) for t in smem.fixed if t.num_bytes]
    for term in smem.stage:
        if term.num_bytes:
            total = term.num_bytes * smem.num_stages
            why = f"{smem.num_stages} stages of {term.num_bytes:,}; {term.why}"
            rows.append((term.name, f"{total:,}", why))
    rows.append(("total", f"{smem.num_bytes:,}", f"of {smem.limit:,}"))
    columns = ("what", "bytes", "why")
    title = "Shared memory of a CTA"
    reason_table(console, title, columns, rows, right=(1,), bold=(len(rows) - 1,))


def _print_memory(plan: Plan) -> None:
    rows = [(b.name, b.kind, f"{b.num_bytes:,}", b.about) for b in plan.buffers]
    sums: dict[str, int] = {}
    for buffer in plan.buffers:
        sums[buffer.kind] = sums.get(buffer.kind, 0) + buffer.num_bytes
    about = {
        "weights": "for as long as the layer lives",
        "local": "of one call, from the caching allocator",
        "symmetric": "that the ranks of a group see of each other",
    }
    rows += [("sum", kind, f"{size:,}", about.get(kind, "")) for kind, size in sums.items()]
    bold = range(len(plan.buffers), len(rows))
    columns = ("memory", "kind", "bytes", "what")
    reason_table(out, "Memory of a rank", columns, rows, right=(2,), bold=tuple(bold))


def print_floor(console: Console, floor: Floor) -> None:
    """What no schedule beats."""
    rows = [("tensor", f"{floor.tensor_us:,.1f}", f"{floor.flops / 1e9:,.1f} GFLOP")]
    for name, us, terms in (
        ("hbm", floor.hbm_us, floor.hbm),
        ("nvlink", floor.nvlink_us, floor.nvlink),
    ):
        counts = " + ".join(f"{what} {size / 1e6:,.1f}" for what, size in terms)
        rows.append((name, f"{us:,.1f}", f"MB: {counts}" if terms else "nothing"))
    rows.append(("floor", f"{floor.time_us:,.1f}", f"set by {floor.bound}"))
    title = "Floor of the call, at what the machine reached"
    columns = ("resource", "us", "what passes")
    reason_table(console, title, columns, rows, right=(1,), bold=(len(rows) - 1,))


def _side_by_side(plans: list[Plan]) -> Table:
    """One column a machine; rows that differ are bold."""
    table = Table(title="Plans side by side", title_justify="left")
    table.add_column("", no_wrap=True)
    for one in plans:
        table.add_column(one.hardware.label)
    names = dict.fromkeys(choice.name for one in plans for choice in one.choices)
    values = [{choice.name: choice.value for choice in one.choices} for one in plans]

    def add(name: str, cells: list[str]) -> None:
        is_same = len(set(cells)) == 1
        table.add_row(name, *(escape(c) if is_same else f"[bold]{escape(c)}[/]" for c in cells))

    add("recipe", [one.problem.recipe for one in plans])
    for name in names:
        add(name, [shown(one[name]) if name in one else "-" for one in values])
    add("launches", [", ".join(_named(one)) for one in plans])
    table.add_section()
    smem = [one.shared_memory for one in plans]
    add("shared memory, bytes", ["-" if s is None else f"{s.num_bytes:,}" for s in smem])
    for kind in ("weights", "local", "symmetric"):
        sums = [sum(b.num_bytes for b in one.buffers if b.kind == kind) for one in plans]
        add(f"{kind}, MB", [f"{size / 1e6:,.1f}" for size in sums])
    table.add_section()
    add("tensor floor, us", [f"{p.floor.tensor_us:,.1f}" for p in plans])
    add("hbm floor, us", [f"{p.floor.hbm_us:,.1f}" for p in plans])
    add("nvlink floor, us", [f"{p.floor.nvlink_us:,.1f}" for p in plans])
    add("floor, us", [f"{p.floor.time_us:,.1f}, {p.floor.bound}" for p in plans])
    return table


def _named(plan: Plan) -> Iterator[str]:
    for one, times in _launches(plan):
        yield f"{times} x {one.name}" if times > 1 else one.name
