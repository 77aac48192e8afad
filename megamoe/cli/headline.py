"""`megamoe bench headline`: measure README's table, or print and draw it from a record."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megamoe.bench import headline
from megamoe.bench.cells import TOKENS
from megamoe.bench.peers import RECORDED, load
from megamoe.cli.bench import (
    Flush,
    Gpu,
    Out,
    PeersFile,
    Repeats,
    Rounds,
    one_line_a_row,
)
from megamoe.cli.shared import Bars, Json, gpu_named, whole_table, writable_folder
from megamoe.errors import NotAvailable

From = Annotated[str | None, typer.Option("--from", help="A record; nothing is measured then.")]
Markdown = Annotated[
    bool, typer.Option("--markdown", help="Print the table as README has it.", metavar="")
]


def add_to(bench: typer.Typer) -> None:
    """Register the command on the `bench` group."""
    bench.command("headline")(command)


def command(
    record: From = None,
    markdown: Markdown = False,
    repeats: Repeats = 25,
    rounds: Rounds = 3,
    flush: Flush = "memset",
    peers: PeersFile = None,
    device: Gpu = "auto",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Time the cells of README's table, contestants shuffled call by call; table and picture."""
    if record is not None:
        result = headline.Record.load(record)
        folder = None if out is None else writable_folder(out)
    else:
        where = gpu_named(device, or_cpu=False, fix="print and draw a record with --from RECORD")
        folder = None if out is None else writable_folder(out)
        result = _measure(where, repeats, rounds, flush, peers, folder, as_json)
    if as_json:
        print(result.to_json(), end="")
    elif markdown:
        print(result.markdown(), end="")
    else:
        _show(result)
    if folder is not None:
        paths = headline.write(result, folder)
        console = Console(stderr=as_json or markdown)
        try:
            paths.append(headline.draw(result, folder / "headline.png"))
        except NotAvailable as error:
            console.print(f"no picture: {escape(str(error))}", soft_wrap=True)
        console.print(f"wrote {', '.join(map(str, paths))}", soft_wrap=True, highlight=False)
    raise typer.Exit(result.exit_code)


def _measure(
    device: str, repeats: int, rounds: int, flush: str, peers: str | None, folder: Path | None,
    quiet: bool,
) -> headline.Record:  # fmt: skip
    from megamoe.bench.layer import Settings

    settings = Settings(device=device, repeats=repeats, rounds=rounds, flush=flush)
    recorded = load(RECORDED if peers is None else peers)

    def keep(so_far: headline.Record) -> None:
        if folder is not None:
            headline.write(so_far, folder)

    with Bars(quiet=quiet) as bars:
        return headline.measure(settings, recorded, progress=bars, on_cell=keep)


def _show(record: headline.Record) -> None:
    out = one_line_a_row(Console())
    table = Table("model", "recipe", *(f"{n:,} tokens" for n in TOKENS), title="us of one layer")
    for line in headline.LINES:
        cells = (headline.text_of(cell).replace("**", "") for cell in record.of_line(line))
        table.add_row(line.model, line.recipe, *cells)
    whole_table(out, table, 2)
    where = f"{record.how}: {record.provenance}"
    for words in (*record.summary(), where, record.method, record.about_peers):
        out.print(words, highlight=False, markup=False, soft_wrap=True)
