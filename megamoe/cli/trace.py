"""`megamoe trace`: a real fused launch as a timeline, beside the simulated one.

Exit codes are those of `megamoe.cli.main`: 1 is a launch whose stamps or bits are not right.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megamoe.bench.cells import SHAPES, cells_named
from megamoe.cli import problems as of
from megamoe.cli.bench import Device, Eager, Flush, Repeats, Rounds, one_line_a_row
from megamoe.cli.shared import Bars, Json, device_named, writable_folder, write_atomic
from megamoe.errors import FileError, RangeError, require
from megamoe.formats.spec import RECIPES
from megamoe.trace.beside import MAX_OVERHEAD, Pair, timelines_json
from megamoe.trace.perfetto import perfetto
from megamoe.trace.stamps import Recording
from megamoe.trace.text import MARGIN, gantt

STAMPS = "stamps.json"
FILES = (STAMPS, "timeline.json", "timeline.html", "trace.json")
FOLDER = "megamoe-trace"

What = Annotated[
    str,
    typer.Argument(
        help=f"Workload and tokens, such as flash-ep8/8, of {', '.join(SHAPES)}; or a file of "
        "stamps that an earlier trace saved, which needs no GPU."
    ),
]
Recipe = Annotated[str, typer.Option(help=f"{', '.join(RECIPES)}.")]
Folder = Annotated[
    str | None,
    typer.Option(
        "--out", help=f"Folder for {', '.join(FILES)}; default {FOLDER}, or that of the stamps."
    ),
]
NoFiles = Annotated[bool, typer.Option("--no-files", help="Print only; write nothing.", metavar="")]


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("trace")(command)


def command(
    what: What = "flash-ep8/8",
    recipe: Recipe = "w4a8_block",
    repeats: Repeats = 25,
    rounds: Rounds = 3,
    flush: Flush = "memset",
    eager: Eager = False,
    device: Device = "auto",
    hardware: of.Machine = "h200",
    folder: Folder = None,
    no_files: NoFiles = False,
    as_json: Json = False,
) -> None:
    """Run one fused launch that stamps what every role does when; see it beside the simulation."""
    is_file = what.endswith(".json")
    is_same = True
    where = Path(what).parent if is_file else Path(FOLDER)
    if not no_files:
        where = writable_folder(where if folder is None else folder)
    with Bars(quiet=as_json) as bars:
        if is_file:
            recording = _read(Path(what))
        else:
            recording, is_same = _record(what, recipe, repeats, rounds, flush, eager, device, bars)
        pair = Pair.of(recording, hardware)
        written = "" if no_files else _write(where, pair, bars)
    if as_json:
        print(json.dumps({**pair.as_dict(), "has_same_bits": is_same, "folder": written}, indent=2))
    else:
        _print(pair, is_same, written)
    raise typer.Exit(0 if is_same and not recording.faults() else 1)


def _record(
    name: str, recipe: str, repeats: int, rounds: int, flush: str, eager: bool, device: str,
    bars: Bars,
) -> tuple[Recording, bool]:  # fmt: skip
    cells = cells_named([name])
    require(
        len(cells) == 1,
        "a trace is of one workload at one number of tokens",
        got=name,
        fix=f"for example {name}/8",
        kind=RangeError,
    )
    from megamoe.bench.layer import Settings
    from megamoe.bench.tracing import record

    settings = Settings(
        device=device_named(device), repeats=repeats, rounds=rounds, flush=flush, eager=eager
    )
    return record(cells[0], recipe, settings, bars)


def _read(path: Path) -> Recording:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"a file of stamps must be readable; got {path}: {error}") from error
    return Recording.from_json(text)


def _write(folder: Path, pair: Pair, bars: Bars) -> str:
    lines = pair.measured, pair.simulated
    makers: tuple[Callable[[], str], ...] = (
        pair.recording.to_json,
        lambda: timelines_json(lines),
        pair.page,
        lambda: perfetto(*lines),
    )
    for done, (file, make) in enumerate(zip(FILES, makers, strict=True)):
        bars("write", done, len(FILES))
        write_atomic(folder / file, make())
    bars("write", len(FILES), len(FILES))
    return str(folder)


def _print(pair: Pair, is_same: bool, folder: str) -> None:
    out = one_line_a_row(Console())
    recording = pair.recording
    table = Table(title=pair.measured.name, title_justify="left")
    for column in ("figure", "measured", "simulated", "simulated less measured", "what it means"):
        right = column in ("measured", "simulated", "simulated less measured")
        table.add_column(column, justify="right" if right else "left")
    for row in pair.rows:
        cells = row.text(row.measured), row.text(row.simulated), row.difference
        table.add_row(row.name, *cells, row.about)
    out.print(table)
    if (
        recording.plain_us is not None
        and recording.traced_us is not None
        and recording.overhead is not None
    ):
        verdict = "within" if recording.overhead < MAX_OVERHEAD else "[red]beyond[/]"
        out.print(
            f"stamping: {recording.plain_us:,.1f} us without, {recording.traced_us:,.1f} us with, "
            f"{recording.overhead:+.1%}: {verdict} the bar of {MAX_OVERHEAD:.0%}",
            highlight=False,
        )
    width = max(20, min(out.width, 140) - MARGIN)
    for line in (pair.measured, pair.simulated):
        out.print(f"\n{line.source}", style="bold")
        out.print(gantt(line, width=width), highlight=False, markup=False, soft_wrap=True)
    if not is_same:
        out.print("[bold red]WRONG[/]: the launch gave other bits with stamps than without")
    for fault in recording.faults():
        out.print(f"[bold red]NOT WHOLE[/]: {escape(fault)}", highlight=False, soft_wrap=True)
    if recording.provenance:
        out.print(recording.provenance, style="dim", highlight=False, soft_wrap=True)
    if folder:
        out.print(f"wrote {', '.join(FILES)} to {folder}", highlight=False, soft_wrap=True)
