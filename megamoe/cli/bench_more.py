"""`megamoe bench sweep`, `calls` and `fixed`: parse, call, print."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megamoe.bench.cells import AT, cells_named, touching
from megamoe.bench.record import OK, FixedCost
from megamoe.cli.bench import (
    ALL_SHARES,
    COLUMNS,
    Backends,
    Columns,
    Device,
    Eager,
    Flush,
    Gpu,
    GraphCalls,
    Out,
    Recipes,
    Repeats,
    Rounds,
    SavedReport,
    Tokens,
    Workloads,
    counts_in,
    finish,
    names_in,
    number,
    one_line_a_row,
)
from megamoe.cli.shared import Bars, Json, gpu_named, whole_table, writable_folder, write_atomic

if TYPE_CHECKING:
    from megamoe.bench.calls import Row
    from megamoe.bench.record import Row as Point
    from megamoe.bench.sweep import Sweep

Recipe = Annotated[str, typer.Option(help="The recipe of the layer.")]
BAR_US = 20.0  # what a call may cost beside its weights


def add_to(bench: typer.Typer) -> None:
    """Register the commands on the `bench` group; `bench --sweep` is `bench sweep`."""
    bench.command("sweep")(sweep)
    bench.command("calls")(calls)
    bench.command("fixed")(fixed)

    @bench.callback(invoke_without_command=True)
    def top(
        ctx: typer.Context,
        is_sweep: Annotated[
            bool,
            typer.Option("--sweep", help="Short for `bench sweep` over all cells.", metavar=""),
        ] = False,
    ) -> None:
        if is_sweep and ctx.invoked_subcommand is None:
            sweep()


def sweep(
    workloads: Workloads = ALL_SHARES,
    tokens: Tokens = None,
    recipe: Recipe = "w4a8_block",
    repeats: Repeats = 15,
    rounds: Rounds = 2,
    flush: Flush = "memset",
    budget: Annotated[
        float, typer.Option(help="Seconds after which no further tile is begun.")
    ] = 600.0,
    workers: Annotated[int, typer.Option(help="Processes that compile tiles first; 0: none.")] = 8,
    device: Gpu = "auto",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Time Hopper's layer with every candidate tile: is the table's choice the best?"""
    cells = cells_named(names_in(workloads), None if tokens is None else counts_in(tokens))
    where = gpu_named(device, or_cpu=False)
    if out is not None:
        writable_folder(out)
    from megamoe.bench.layer import Settings
    from megamoe.bench.sweep import sweep as measure

    settings = Settings(
        device=where, recipes=(recipe,), repeats=repeats, rounds=rounds, flush=flush
    )
    with Bars(quiet=as_json) as bars:
        result = measure(
            cells, recipe, settings, budget_s=budget, workers=workers, progress=bars
        )  # fmt: skip
    _keep(result.as_dict(), out, "sweep")
    if as_json:
        print(json.dumps(result.as_dict(), indent=1))
    else:
        _show_sweep(result)
    raise typer.Exit(result.exit_code)


def _show_sweep(sweep: Sweep) -> None:
    wide = one_line_a_row(Console())
    for choice in sweep.choices:
        title = f"{choice.cell}, {sweep.recipe}: {choice.rows_per_expert:,.1f} rows an expert"
        table = Table("tile", "us", "±%", "/ best", "", title=title)
        for column in table.columns[1:4]:
            column.justify = "right"
        best = choice.timed[0].us if choice.timed else None
        for row in choice.timed:
            ratio = row.us / best if row.us and best else None
            spread = None if row.spread is None else 100 * row.spread
            mark = "the table's" if row.contestant == choice.picked else ""
            table.add_row(
                row.contestant, number(row.us, 1), number(spread, 1), number(ratio, 3), mark
            )
        whole_table(wide, table, 1)
        worse = "was not timed"
        if choice.worse_by is not None:
            worse = f"is {100 * choice.worse_by:.1f}% above the best"
        wide.print(
            f"{choice.cell}: {choice.picked} {worse}; the table says: {escape(choice.why)}",
            highlight=False,
        )
    for row in sweep.report.rows:
        if row.status != OK:
            wide.print(
                f"{row.status} {row.cell} {row.contestant}: {escape(row.note)}",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
    for fact in (f"method: {sweep.report.method}", sweep.report.provenance):
        wide.print(fact, style="dim", highlight=False, soft_wrap=True)


def calls(
    workloads: Workloads = ALL_SHARES,
    tokens: Tokens = "8,64",
    recipe: Recipe = "w4a8_block",
    backend: Annotated[str, typer.Option(help="auto or the name of a backend.")] = "auto",
    rounds: Annotated[int, typer.Option(help="Rounds of 20 calls each.")] = 25,
    device: Device = "auto",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Time the host: microseconds a call takes to return, eager and replayed from CUDA graphs."""
    cells = cells_named(names_in(workloads), None if tokens is None else counts_in(tokens))
    where = gpu_named(device)
    if out is not None:
        writable_folder(out)
    from dataclasses import asdict

    from megamoe.bench.calls import measure

    with Bars(quiet=as_json) as bars:
        rows = measure(cells, recipe, device=where, backend=backend, rounds=rounds, progress=bars)
    _keep([asdict(row) for row in rows], out, "calls")
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        _show_calls(rows)
    raise typer.Exit(0 if all(row.has_same_bits for row in rows) else 1)


def _show_calls(rows: list[Row]) -> None:
    wide = one_line_a_row(Console())
    table = Table(
        "cell", "backend", "recipe", "call", "host us", "least", "with GPU us", "bits",
        title="one call as the host sees it",
    )  # fmt: skip
    for column in table.columns[4:7]:
        column.justify = "right"
    for row in rows:
        bits = "same" if row.has_same_bits else "[bold red]OTHER[/]"
        times = (number(us, 1) for us in (row.host_us, row.low_us, row.wall_us))
        table.add_row(row.cell, row.backend, row.recipe, row.how, *times, bits)
    whole_table(wide, table, 4)
    if rows:
        wide.print(rows[0].provenance, style="dim", highlight=False, soft_wrap=True)


def fixed(
    workloads: Workloads = "public-48",
    tokens: Tokens = "32",
    touched: Annotated[
        str | None, typer.Option(help="Numbers of experts; default: six, from top-k to all.")
    ] = None,
    backends: Backends = "auto",
    recipes: Recipes = "w4a8_block",
    repeats: Repeats = 25,
    rounds: Rounds = 3,
    flush: Flush = "memset",
    graph_calls: GraphCalls = 1,
    bar: Annotated[float, typer.Option(help="Microseconds to print beside the result.")] = BAR_US,
    device: Device = "auto",
    out: Out = None,
    eager: Eager = False,
    as_json: Json = False,
) -> None:
    """Time calls that touch more and more experts; print the time extrapolated to none."""
    cells = cells_named(names_in(workloads), None if tokens is None else counts_in(tokens))
    counts = None if touched is None else counts_in(touched, "experts touched")
    points = {point.name: point for cell in cells for point in touching(cell, counts)}
    where = gpu_named(device)
    if out is not None:
        writable_folder(out)
    from megamoe.bench.layer import Settings, measure

    settings = Settings(
        backends=names_in(backends), recipes=names_in(recipes), device=where,
        repeats=repeats, rounds=rounds, flush=flush, eager=eager, graph_calls=graph_calls,
    )  # fmt: skip
    with SavedReport(out, "fixed", as_json, COLUMNS) as saved, Bars(quiet=as_json) as bars:
        report = measure([*points.values()], settings, progress=bars, on_cell=saved)
    costs = report.fixed_costs()
    if costs and not as_json:
        _show_fixed(costs, bar)
    finish(report, out, "fixed", as_json, _point_columns(costs))


def _show_fixed(costs: Sequence[FixedCost], bar_us: float) -> None:
    table = Table(
        "cell", "contestant", "recipe", "points", "fixed us", "bar us", "a read's", "us an expert",
        "GB/s", "worst off us", title="fixed cost of a call: its time extrapolated to no experts",
    )  # fmt: skip
    for column in table.columns[3:]:
        column.justify = "right"
    for c in costs:
        table.add_row(
            c.cell, c.contestant, c.recipe, str(len(c.points)), number(c.us, 1),
            number(bar_us, 1), number(None if c.read is None else c.read.intercept, 1),
            number(c.line.slope, 3), number(c.gbs, 0), f"{c.worst_us:+,.1f}",
        )  # fmt: skip
    whole_table(one_line_a_row(Console()), table, 3)


def _point_columns(costs: Sequence[FixedCost]) -> Columns:
    """The columns of `bench layer`, the experts touched, and the distance from the line."""
    lines = {(c.cell, c.contestant, c.recipe): c.line for c in costs}

    def off(point: Point) -> str:
        line = lines.get((point.cell.partition(AT)[0], point.contestant, point.recipe))
        is_there = line is not None and point.us is not None
        return f"{point.us - line.at(point.touched):+,.1f}" if is_there else "-"

    first = {name: COLUMNS[name] for name in ("cell", "contestant", "recipe")}
    return {**first, "experts": lambda r: str(r.touched), **COLUMNS, "off us": off}


def _keep(result: object, folder: str | None, name: str) -> None:
    if folder is not None:
        write_atomic(writable_folder(folder) / f"{name}.json", json.dumps(result, indent=1) + "\n")
