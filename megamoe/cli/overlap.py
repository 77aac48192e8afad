"""`megamoe bench overlap`: parse, call, print."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from megamoe.bench.cells import cells_named
from megamoe.cli.bench import (
    ALL_SHARES,
    Gpu,
    Out,
    Recipes,
    Repeats,
    Rounds,
    Tokens,
    Workloads,
    counts_in,
    names_in,
    one_line_a_row,
)
from megamoe.cli.problems import overrides_from
from megamoe.cli.shared import Bars, Json, gpu_named, whole_table, writable_folder, write_atomic
from megamoe.errors import RangeError, require

if TYPE_CHECKING:
    from megamoe.bench.overlap import Overlap


CONTAIN = (
    "compute, links and both are whole calls: quantise, sort, exchange and combine are in each of "
    "them; links also has the pull at what its SMs copy. wire: the bytes alone at the links' pace."
)


def add_to(bench: typer.Typer) -> None:
    """Register the command on the `bench` group."""
    bench.command("overlap")(overlap)


def overlap(
    record: Annotated[
        str | None, typer.Option("--from", help="A record; nothing is measured then.")
    ] = None,
    workloads: Workloads = ALL_SHARES,
    tokens: Tokens = "512,2048,8192",
    recipes: Recipes = "w4a8_block,w8a8",
    ranks: Annotated[int, typer.Option(help="Ranks that share the GPU, 1 to 8.")] = 8,
    links: Annotated[
        float | None, typer.Option(help="GB/s of a rank's links; default: its part of NVLink.")
    ] = None,
    latency: Annotated[float, typer.Option(help="us of a trip to another rank, at least.")] = 0.0,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Of the plan's tile, name=value; may be given again."),
    ] = None,
    repeats: Repeats = 9,
    rounds: Rounds = 2,
    device: Gpu = "auto",
    out: Out = None,
    picture: Annotated[
        bool,
        typer.Option("--picture", help="With --out: a trace and a picture a cell.", metavar=""),
    ] = False,
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="With --from: what the simulator says.", metavar=""),
    ] = False,
    as_json: Json = False,
) -> None:
    """Time ranks of a chain on one GPU: arithmetic alone, links alone, both; what is hidden."""
    require(
        record is not None or not simulate, "--simulate needs a record", got="no --from",
        kind=RangeError,
    )  # fmt: skip
    if record is not None:
        rows = _recorded(Path(record), out, quiet=as_json)
        raise typer.Exit(_simulated(rows, as_json) if simulate else _shown(rows, as_json))
    cells = cells_named(names_in(workloads), counts_in(tokens) if tokens else None)
    where = gpu_named(device, or_cpu=False)
    folder = None if out is None else writable_folder(out)
    require(
        folder is not None or not picture, "--picture needs a folder", got="no --out",
        kind=RangeError,
    )  # fmt: skip
    from megamoe.bench.overlap import measure
    from megamoe.bench.spans import draw, launches_of, overlap_us

    rows = []

    def keep(row: Overlap) -> None:
        rows.append(row)
        if folder is not None:
            text = json.dumps([as_dict(one) for one in rows], indent=1)
            write_atomic(folder / "overlap.json", text + "\n")

    def keep_trace(row: Overlap, trace: dict[str, Any]) -> None:
        assert folder is not None
        name = f"overlap-{row.cell.replace('/', '-')}-{row.recipe}"
        write_atomic(folder / f"{name}.json", json.dumps(trace))
        title = f"{row.cell}, {row.recipe}: {row.num_ranks} ranks of {row.sms} SMs on one GPU"
        title += f", links of {row.links_gbs:.0f} GB/s; profiled"
        launches = launches_of(trace)
        title += f", {overlap_us(launches, 'pull', 'L1'):,.0f} us of rank 0's pull beside L1"
        draw(launches, title, row.provenance, folder / f"{name}.png")

    with Bars(quiet=as_json) as bars:
        measure(
            cells, names_in(recipes), device=where, num_ranks=ranks, links_gbs=links,
            latency_us=latency, overrides=overrides_from(overrides), repeats=repeats, rounds=rounds,
            progress=bars, on_row=keep, on_trace=keep_trace if picture else None,
        )  # fmt: skip
    raise typer.Exit(_shown(rows, as_json))


def _recorded(path: Path, out: str | None, quiet: bool) -> list[Overlap]:
    """The rows of a record; with --out, its picture."""
    folder = None if out is None else writable_folder(out)
    from megamoe.bench import overlap_picture

    rows = overlap_picture.load(path)
    if folder is not None:
        picture = overlap_picture.draw(rows, folder / "overlap.png")
        Console(stderr=quiet).print(f"wrote {picture}", soft_wrap=True, highlight=False)
    return rows


def _shown(rows: list[Overlap], as_json: bool) -> int:
    """Print the rows; the exit code that they ask for."""
    if as_json:
        print(json.dumps([as_dict(row) for row in rows], indent=1))
    else:
        show(rows)
    return 0 if all(row.same_bits for row in rows) else 1


def _simulated(rows: list[Overlap], as_json: bool) -> int:
    """Print what the simulator says of a record's cells."""
    from megamoe.bench.overlap_model import NAMES, measured, simulated

    with Bars(quiet=as_json) as bars:
        pairs_us = []
        for done, row in enumerate(rows):
            bars("cells", done, len(rows))
            pairs_us.append(simulated(row))
        bars("cells", len(rows), len(rows))
    if as_json:
        both = zip(rows, pairs_us, strict=True)
        cells = [{**as_dict(row), "simulated_us": one._asdict()} for row, one in both]
        print(json.dumps(cells, indent=1))
        return 0
    wide = one_line_a_row(Console())
    table = Table("cell", "recipe", title="ranks of a chain on one GPU: measured and simulated, us")
    for name in NAMES:
        for column in (name, "simulated", "error"):
            table.add_column(column, justify="right")
    for row, one in zip(rows, pairs_us, strict=True):
        pairs = zip(measured(row), one, strict=True)
        cells = (text for measured, said in pairs for text in _beside(measured, said))
        table.add_row(row.cell, row.recipe, *cells)
    whole_table(wide, table, 2)
    return 0


def _beside(measured: float, said: float) -> tuple[str, str, str]:
    return f"{measured:,.0f}", f"{said:,.0f}", f"{said / measured - 1:+.1%}"


def as_dict(row: Overlap) -> dict[str, object]:
    """A row with what follows from it."""
    from megamoe.bench.overlap_model import wire_us

    return {**asdict(row), "wire_us": wire_us(row), "hidden": row.hidden, "slower": row.slower}


def show(rows: list[Overlap]) -> None:
    """The table, what its figures contain, and where it was measured."""
    from megamoe.bench.overlap_model import wire_us

    wide = one_line_a_row(Console())
    names = ("compute us", "links us", "wire us", "both us", "hidden", "both / compute")
    title = "ranks of a chain on one GPU, links paced"
    table = Table("cell", "recipe", "ranks", "SMs", "GB/s", *names, "bits", title=title)
    for column in table.columns[2:-1]:
        column.justify = "right"
    for r in rows:
        us = (f"{v:,.0f}" for v in (r.compute_us, r.links_us, wire_us(r), r.both_us))
        shares = f"{100 * r.hidden:.0f}%", f"{r.slower:.3f}"
        bits = "same" if r.same_bits else "[bold red]OTHER[/]"
        sms = f"{r.sms - r.pull_sms} + {r.pull_sms}"
        about = r.cell, r.recipe, str(r.num_ranks), sms, f"{r.links_gbs:.0f}"
        table.add_row(*about, *us, *shares, bits)
    whole_table(wide, table, 2)
    if rows:
        wide.print(CONTAIN, highlight=False)
        if any(r.latency_us for r in rows):
            us = ", ".join(sorted({f"{r.latency_us:g}" for r in rows}))
            wide.print(f"latency of a trip to another rank: {us} us at least", highlight=False)
        wide.print(rows[0].provenance, style="dim", highlight=False, soft_wrap=True)
