"""`megamoe bench split`: parse, call, print."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from megamoe.bench.cells import SPLIT, cells_named
from megamoe.cli.bench import (
    Flush,
    Gpu,
    Out,
    Recipes,
    Repeats,
    Rounds,
    Tokens,
    Workloads,
    counts_in,
    names_in,
    number,
    one_line_a_row,
)
from megamoe.cli.shared import Bars, Json, gpu_named, writable_folder, write_atomic
from megamoe.errors import RangeError, require

if TYPE_CHECKING:
    from megamoe.bench.split import SplitRow


ALL_SPLIT = ",".join(SPLIT)


def add_to(bench: typer.Typer) -> None:
    """Register the command on the `bench` group."""
    bench.command("split")(split)


def split(
    workloads: Workloads = ALL_SPLIT,
    tokens: Tokens = None,
    recipes: Recipes = "w4a8_block,w8a8",
    partitions: Annotated[
        str, typer.Option("--l1-sms", help="SMs of L1, comma-separated; plan: the plan's own.")
    ] = "80,plan,96",
    repeats: Repeats = 25,
    rounds: Rounds = 3,
    flush: Flush = "memset",
    device: Gpu = "auto",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Time L1 and L2 side by side on parts of the SMs, beside staged and fused launches."""
    cells = cells_named(names_in(workloads), counts_in(tokens) if tokens else None)
    parts = [_sms(one) for one in names_in(partitions)]
    where = gpu_named(device, or_cpu=False)
    folder = None if out is None else writable_folder(out)
    from megamoe.bench.split import measure

    rows: list[SplitRow] = []

    def keep(row: SplitRow) -> None:
        rows.append(row)
        if folder is not None:
            text = json.dumps([one.as_dict() for one in rows], indent=1)
            write_atomic(folder / "split.json", text + "\n")

    with Bars(quiet=as_json) as bars:
        measure(
            cells, names_in(recipes), device=where, partitions=parts, flush=flush,
            repeats=repeats, rounds=rounds, progress=bars, on_row=keep,
        )  # fmt: skip
    if as_json:
        print(json.dumps([row.as_dict() for row in rows], indent=1))
    else:
        show(rows)
    raise typer.Exit(1 if any(row.why for row in rows) else 0)


def _sms(text: str) -> int | None:
    if text == "plan":
        return None
    require(text.isdigit(), "SMs of L1 must be whole numbers, or plan", got=text, kind=RangeError)
    return int(text)


def show(rows: list[SplitRow]) -> None:
    """The table, and where it was measured."""
    wide = one_line_a_row(Console())
    names = ("experts", "I", "rows", "us", "±%", "/ staged", "TFLOP/s", "HBM GB/s")
    table = Table("cell", "recipe", "contestant", *names, "bits", title="L1 beside L2")
    for column in table.columns[3:-1]:
        column.justify = "right"
    for r in rows:
        percent = None if r.spread is None else 100 * r.spread
        us = (r.us, 1), (percent, 1), (r.ratio, 3), (r.tflops, 0), (r.hbm_gbs, 0)
        figures = (number(value, digits) for value, digits in us)
        about = str(r.num_experts), str(r.intermediate), f"{r.rows:,}"
        bits = "same" if not r.why else f"[bold red]{r.why}[/]"
        table.add_row(r.cell, r.recipe, r.contestant, *about, *figures, bits)
    wide.print(table)
    if rows:
        wide.print(rows[0].provenance, style="dim", highlight=False, soft_wrap=True)
