"""`megamoe bench layer`, `gemm` and `plot`: parse, call, print.

Exit codes are those of `megamoe.cli.main`: 1 is a wrong result (which is never timed), 70 means
that one of our backends raised.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megamoe.bench.cells import (
    GEMM_SHAPES,
    SHAPES,
    SHARES,
    UNEVEN_GEMMS,
    cells_named,
    gemms_named,
)
from megamoe.bench.peers import load
from megamoe.bench.record import OK, WRONG, Report, Row, read, write
from megamoe.cli.shared import Bars, Json, gpu_named, whole_table, writable_folder
from megamoe.errors import NotAvailable, RangeError, require


def number(value: float | None, digits: int) -> str:
    """A figure of the table, or a dash where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def _of_read(row: Row) -> float | None:
    return 1 / row.of_read if row.of_read else None


def _read_tbs(row: Row) -> float | None:
    return row.weight_bytes / row.read_us / 1e6 if row.read_us else None


INTERRUPTED = 130  # exit code, as shells have it

Columns = dict[str, Callable[[Row], str]]
COLUMNS: Columns = {
    "cell": lambda r: r.cell,
    "contestant": lambda r: r.contestant + (" (eager)" if r.how == "eager" else ""),
    "recipe": lambda r: r.recipe,
    "us": lambda r: number(r.us, 1),
    "±%": lambda r: number(None if r.spread is None else 100 * r.spread, 1),
    "TFLOP/s": lambda r: number(r.tflops, 1),
    "GB/s": lambda r: number(r.gbs, 0),
    "floor us": lambda r: f"{number(r.floor_us, 1)} {r.floor_by}",
    "x floor": lambda r: number(r.of_floor, 2),
    "read us": lambda r: number(r.read_us, 1),
    "x read": lambda r: number(r.of_read, 2),
}
GEMM_COLUMNS: Columns = {name: text for name, text in COLUMNS.items() if name != "x read"} | {
    "weights TB/s": lambda r: number(None if r.weight_gbs is None else r.weight_gbs / 1e3, 2),
    "read TB/s": lambda r: number(_read_tbs(r), 2),
    "of read": lambda r: number(_of_read(r), 3),
}

ALL_SHARES = ",".join(SHARES)
ALL_GEMMS = ",".join(UNEVEN_GEMMS)
SHAPE_HELP = (
    f"Comma-separated: {', '.join(SHAPES)}; or cells such as flash-ep8/64, or flash-ep8/64@24 with "
    "24 experts touched."
)
BACKEND_HELP = (
    "Comma-separated: auto, reference, portable, hopper, blackwell, with :mode if wanted; "
    "torch-bf16, torch-fp8."
)
CONTESTANT_HELP = (
    "Comma-separated: hopper-RECIPE with @TILE or @all if wanted; portable-RECIPE or "
    "blackwell-RECIPE with -dynamic, -sorted or -dynamic-sorted if wanted; torch-bf16, torch-fp8."
)
FLUSH_HELP = "How L2 is emptied before each call: memset, read or none."

Workloads = Annotated[str, typer.Option(help=SHAPE_HELP)]
Tokens = Annotated[str | None, typer.Option(help="Token counts; default: the workload's own.")]
Backends = Annotated[str, typer.Option(help=BACKEND_HELP)]
Recipes = Annotated[str, typer.Option(help="Comma-separated recipes for our backends.")]
Repeats = Annotated[int, typer.Option(help="Timed calls in each round.")]
Rounds = Annotated[int, typer.Option(help="Rounds; in each, every contestant takes its turn.")]
Flush = Annotated[str, typer.Option(help=FLUSH_HELP)]
GraphCalls = Annotated[
    int, typer.Option(help="Calls in a graph, each after a dense product, not counted.")
]
Device = Annotated[str, typer.Option(help="cuda, cuda:1, ...; auto is a GPU; cpu if asked for.")]
Gpu = Annotated[str, typer.Option("--device", help="cuda, cuda:1, ...; auto is a GPU.")]
Out = Annotated[str | None, typer.Option(help="Folder for JSON, CSV and plots.")]
PeersFile = Annotated[str | None, typer.Option("--peers", help="Recorded times; prints ratios.")]
Eager = Annotated[bool, typer.Option("--eager", help="Time calls without CUDA graphs.", metavar="")]


def add_to(bench: typer.Typer) -> None:
    """Register the commands on the `bench` group."""
    bench.command("layer")(layer)
    bench.command("gemm")(gemm)
    bench.command("plot")(plot)


def layer(
    workloads: Workloads = ALL_SHARES,
    tokens: Tokens = None,
    backends: Backends = "auto,torch-bf16,torch-fp8",
    recipes: Recipes = "w4a8_block,w8a8,w4a16",
    repeats: Repeats = 25,
    rounds: Rounds = 3,
    flush: Flush = "memset",
    graph_calls: GraphCalls = 1,
    device: Device = "auto",
    out: Out = None,
    peers: PeersFile = None,
    eager: Eager = False,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, tokens and routing.")] = None,
    as_json: Json = False,
) -> None:
    """Time whole layers: our backends and importable peers side by side, each checked first."""
    cells = cells_named(names_in(workloads), None if tokens is None else counts_in(tokens))
    recorded = None if peers is None else load(peers)
    where = gpu_named(device)
    if out is not None:
        writable_folder(out)
    from megamoe.bench.layer import Settings, measure

    settings = Settings(
        backends=names_in(backends),
        recipes=names_in(recipes),
        device=where,
        repeats=repeats,
        rounds=rounds,
        flush=flush,
        graph_calls=graph_calls,
        eager=eager,
        **({} if seed is None else {"seed": seed}),
    )

    with SavedReport(out, "layer", as_json, COLUMNS) as saved, Bars(quiet=as_json) as bars:
        report = measure(cells, settings, peers=recorded, progress=bars, on_cell=saved)
    finish(report, out, "layer", as_json)


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
    chosen = gemms_named(names_in(shapes))
    where = gpu_named(device)
    if out is not None:
        writable_folder(out)
    from megamoe.bench.gemm import measure

    with Bars(quiet=as_json) as bars:
        report = measure(
            chosen, names_in(contestants), device=where, repeats=repeats,
            rounds=rounds, flush=flush, progress=bars,
        )  # fmt: skip
    finish(report, out, "gemm", as_json, GEMM_COLUMNS)


def plot(
    record: Annotated[str, typer.Argument(help="JSON file that --out of a benchmark wrote.")],
    out: Annotated[str | None, typer.Option(help="Folder; default: the file's own.")] = None,
    peers: PeersFile = None,
) -> None:
    """Draw a recorded run again, where matplotlib is: a GPU machine may lack it."""
    from megamoe.bench import plots

    report = read(record, None if peers is None else load(peers))
    path = Path(record)
    paths = plots.write(report, writable_folder(path.parent if out is None else out), path.stem)
    Console().print(f"wrote {', '.join(map(str, paths))}", soft_wrap=True, highlight=False)


class SavedReport:
    """The report so far: written after every cell where there is a folder, printed if interrupted.

    Both Ctrl-C and a signal to end (`timeout`, a scheduler) interrupt.
    """

    def __init__(self, folder: str | None, name: str, as_json: bool, columns: Columns) -> None:
        self.folder, self.name, self.as_json, self.columns = folder, name, as_json, columns
        self.last: Report | None = None
        self.before: Any = None  # what a signal to end did

    def __call__(self, so_far: Report) -> None:
        self.last = so_far
        if self.folder is not None:
            write(so_far, self.folder, self.name)

    def __enter__(self) -> SavedReport:
        self.before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        signal.signal(signal.SIGTERM, self.before)
        if kind is not KeyboardInterrupt:
            return
        Console(stderr=True).print("interrupted: what was measured until then")
        if self.last is not None:
            show_or_dump(self.last, self.as_json, self.columns)
        raise typer.Exit(INTERRUPTED)


def finish(
    report: Report, folder: str | None, name: str, as_json: bool, columns: Columns = COLUMNS
) -> None:
    """Print, write the files, and leave with the report's exit code."""
    console = Console(stderr=as_json)
    show_or_dump(report, as_json, columns)
    if folder is not None:
        paths = write(report, folder, name)
        from megamoe.bench import plots

        try:
            paths += plots.write(report, folder, name)
        except NotAvailable as error:
            console.print(f"no plots: {escape(str(error))}", soft_wrap=True)
        console.print(f"wrote {', '.join(map(str, paths))}", soft_wrap=True, highlight=False)
    raise typer.Exit(report.exit_code)


def show_or_dump(report: Report, as_json: bool, columns: Columns) -> None:
    """As a table, or as JSON."""
    if as_json:
        print(json.dumps(report.as_dict(), indent=1))
    else:
        show(report, Console(), columns)


def one_line_a_row(console: Console) -> Console:
    """A console that is wide enough for a table: a pipe has no width of its own."""
    if console.is_terminal:
        return console
    return Console(width=max(console.width, 240), stderr=console.stderr)


def show(report: Report, console: Console, columns: Columns = COLUMNS) -> None:
    """The report as a table, the geometric means, and what was not timed and why."""
    rivals = {
        f"/ {name}": lambda r, name=name: number(r.versus.get(name), 3)  # type: ignore[misc]
        for name in report.rivals
    }
    every: Columns = columns | rivals
    timed = [row for row in report.rows if row.status == OK]
    if timed:  # without the columns that no row has a figure in
        every = {n: text for n, text in every.items() if any(text(row) != "-" for row in timed)}
    every["error"] = lambda r: "-" if r.error is None else f"{r.error:.1e}"
    table = Table(*every, title=report.title)
    for column in table.columns[3:]:
        column.justify = "right"
    for row in timed:
        table.add_row(*(text(row) for text in every.values()))
    wide = one_line_a_row(console)
    if table.row_count:
        whole_table(wide, table, 3)
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


def names_in(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def counts_in(text: str, what: str = "tokens") -> tuple[int, ...]:
    parts = names_in(text)
    require(
        bool(parts) and all(part.isdigit() for part in parts),
        f"{what} must be whole numbers with commas between them",
        got=text,
        kind=RangeError,
    )
    return tuple(map(int, parts))
