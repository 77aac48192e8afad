"""`megamoe bench layer` and `megamoe bench gemm`: parse, call, print.

Exit codes: 0 measured, 1 a wrong result (which is never timed), 2 bad input, 3 not available here.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megamoe.bench.cells import GEMM_SHAPES, SHAPES, SHARES, cells_named, gemms_named
from megamoe.bench.peers import BEST, load
from megamoe.bench.record import OK, WRONG, Report, Row, write
from megamoe.cli.shared import Bars, device_named
from megamoe.errors import NotAvailable, RangeError, require

COLUMNS = (
    "cell", "contestant", "recipe", "us", "±%", "TFLOP/s", "GB/s", "floor us", "x floor",
    "read us", "x read",
)  # fmt: skip

ALL_SHARES = ",".join(SHARES)
ALL_GEMMS = ",".join(GEMM_SHAPES)
SHAPE_HELP = f"Comma-separated: {', '.join(SHAPES)}; or cells such as flash-ep8/64."
BACKEND_HELP = (
    "Comma-separated: auto, reference, portable, hopper, blackwell, with :mode if wanted; "
    "torch-bf16, torch-fp8."
)
CONTESTANT_HELP = (
    "Comma-separated: portable-RECIPE with -dynamic, -sorted or -dynamic-sorted if wanted; "
    "torch-bf16, torch-fp8."
)
FLUSH_HELP = "How L2 is emptied before each call: memset, read or none."

Workloads = Annotated[str, typer.Option(help=SHAPE_HELP)]
Tokens = Annotated[str | None, typer.Option(help="Token counts; default 8,64,512,2048,8192.")]
Backends = Annotated[str, typer.Option(help=BACKEND_HELP)]
Recipes = Annotated[str, typer.Option(help="Comma-separated recipes for our backends.")]
Repeats = Annotated[int, typer.Option(help="Timed calls in each round.")]
Rounds = Annotated[int, typer.Option(help="Rounds; in each, every contestant takes its turn.")]
Flush = Annotated[str, typer.Option(help=FLUSH_HELP)]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ... or auto.")]
Out = Annotated[str | None, typer.Option(help="Folder for JSON, CSV and plots.")]
PeersFile = Annotated[str | None, typer.Option("--peers", help="Recorded times; prints ratios.")]
Eager = Annotated[bool, typer.Option("--eager", help="Time calls without CUDA graphs.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def add_to(bench: typer.Typer) -> None:
    """Register the two commands on the `bench` group."""
    bench.command("layer")(layer)
    bench.command("gemm")(gemm)


def layer(
    workloads: Workloads = ALL_SHARES,
    tokens: Tokens = None,
    backends: Backends = "auto,torch-bf16,torch-fp8",
    recipes: Recipes = "w8a8,w4a16",
    repeats: Repeats = 25,
    rounds: Rounds = 3,
    flush: Flush = "memset",
    device: Device = "auto",
    out: Out = None,
    peers: PeersFile = None,
    eager: Eager = False,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, tokens and routing.")] = None,
    as_json: Json = False,
) -> None:
    """Time whole layers: our backends and importable peers side by side, each checked first."""
    cells = cells_named(_names(workloads), None if tokens is None else _counts(tokens))
    recorded = None if peers is None else load(peers)
    from megamoe.bench.layer import Settings, measure

    settings = Settings(
        backends=_names(backends),
        recipes=_names(recipes),
        device=device_named(device),
        repeats=repeats,
        rounds=rounds,
        flush=flush,
        eager=eager,
        **({} if seed is None else {"seed": seed}),
    )

    def keep(so_far: Report) -> None:
        if out is not None:
            write(so_far, out, "layer")

    with Bars(quiet=as_json) as bars:
        report = measure(cells, settings, peers=recorded, progress=bars, on_cell=keep)
    _finish(report, out, "layer", as_json)


def gemm(
    shapes: Annotated[
        str, typer.Option(help=f"Comma-separated: {', '.join(GEMM_SHAPES)}.")
    ] = ALL_GEMMS,
    contestants: Annotated[
        str, typer.Option(help=CONTESTANT_HELP)
    ] = "portable-nvfp4,portable-nvfp4-dynamic,torch-bf16,torch-fp8",
    repeats: Repeats = 25,
    rounds: Rounds = 3,
    flush: Flush = "memset",
    device: Device = "auto",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Time grouped GEMMs alone."""
    chosen = gemms_named(_names(shapes))
    from megamoe.bench.gemm import measure

    with Bars(quiet=as_json) as bars:
        report = measure(
            chosen, _names(contestants), device=device_named(device),
            repeats=repeats, rounds=rounds, flush=flush, progress=bars,
        )  # fmt: skip
    _finish(report, out, "gemm", as_json)


def _finish(report: Report, folder: str | None, name: str, as_json: bool) -> None:
    """Print, write the files, and leave with the report's exit code."""
    console = Console(stderr=as_json)
    if as_json:
        print(json.dumps(report.as_dict(), indent=1))
    else:
        show(report, console)
    if folder is not None:
        made = write(report, folder, name)
        from megamoe.bench import plots

        try:
            made += plots.write(report, folder, name)
        except NotAvailable as error:
            console.print(f"no plots: {escape(str(error))}", soft_wrap=True)
        console.print(f"wrote {', '.join(map(str, made))}", soft_wrap=True, highlight=False)
    raise typer.Exit(report.exit_code)


def show(report: Report, console: Console) -> None:
    """The report as a table, the geometric means, and what was not timed and why."""
    peers = () if report.peers is None else (BEST, *report.peers.common)
    table = Table(*COLUMNS, *(f"/ {p}" for p in peers), "error", title=report.title)
    for column in table.columns[3:]:
        column.justify = "right"
    for row in report.rows:
        if row.status == OK:
            table.add_row(*_cells(row, peers))
    # A pipe has no width of its own: keep one line a row there.
    wide = (
        console
        if console.is_terminal
        else Console(width=max(console.width, 180), stderr=console.stderr)
    )
    if table.row_count:
        wide.print(table)
    for label, means in report.geomeans().items():
        parts = (
            f"{n.replace('_', ' ')} {mean:.3f} ({count})" for n, (mean, count) in means.items()
        )
        wide.print(f"geometric mean (cells), {label}: " + ", ".join(parts), highlight=False)
    for row in report.rows:
        if row.status != OK:
            style = "bold red" if row.status == WRONG else "yellow"
            wide.print(
                f"[{style}]{row.status}[/] {row.cell} {escape(row.label)}: {escape(row.note)}",
                highlight=False,
                soft_wrap=True,
            )
    c = report.ceilings
    speeds = ", ".join(f"{mma} {peak:,.4g} TFLOP/s" for mma, peak in c.tflops.items())
    facts = (
        f"ceilings: copy {c.copy_gbs:,.0f} GB/s, read {c.read_gbs:,.0f} GB/s, {speeds}, "
        f"launch {c.launch_us:.1f} us",
        f"method: {report.method}",
        report.provenance,
    )
    for fact in facts:
        wide.print(fact, style="dim", highlight=False, soft_wrap=True)
    if report.peers is not None:
        recorded = f"recorded peers: {report.peers.provenance}"
        wide.print(recorded, style="dim", highlight=False, soft_wrap=True)


def _cells(row: Row, peers: tuple[str, ...]) -> list[str]:
    eager = " (eager)" if row.how == "eager" else ""
    figures = (row.us, row.tflops, row.gbs, row.floor_us, row.of_floor, row.read_us, row.of_read)
    us, tflops, gbs, floor, of_floor, read, of_read = ("-" if v is None else v for v in figures)
    ratios = (f"{row.versus[p]:.3f}" if p in row.versus else "-" for p in peers)
    return [
        row.cell, row.contestant + eager, row.recipe, _number(us, 1),
        "-" if row.spread is None else f"{100 * row.spread:.1f}", _number(tflops, 1),
        _number(gbs, 0), f"{_number(floor, 1)} {row.floor_by}", _number(of_floor, 2),
        _number(read, 1), _number(of_read, 2), *ratios,
        "-" if row.error is None else f"{row.error:.1e}",
    ]  # fmt: skip


def _number(value: Any, digits: int) -> str:
    return value if isinstance(value, str) else f"{value:,.{digits}f}"


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _counts(text: str) -> tuple[int, ...]:
    parts = _names(text)
    require(
        bool(parts) and all(part.isdigit() for part in parts),
        "tokens must be whole numbers with commas between them",
        got=text,
        kind=RangeError,
    )
    return tuple(map(int, parts))
