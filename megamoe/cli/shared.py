"""What several commands share: devices by name, progress bars, tables, files, plain terminals."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from megamoe.errors import NotAvailable, RangeError, require
from megamoe.files import writable_folder, write_atomic
from megamoe.hardware import Hardware
from megamoe.tested import gpu_warning

__all__ = [
    "Bars", "Json", "device_named", "gpu_named", "plain_where_needed", "reason_table",
    "untested", "whole_table", "writable_folder", "write_atomic",
]  # fmt: skip

# metavar="": a flag takes no value, and help must not show one.
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.", metavar="")]
LEAST_REASON = 36  # columns that a reason needs to be read beside its row
# For terminals without these: bars of a chart by height, and the signs of tables.
PLAIN = dict(zip("▁▂▃▄▅▆▇█", ".._-=+*#", strict=True)) | {
    "±": "+-", "…": "...", "×": "x", "µ": "u", "—": "-", "•": "*", "━": "-", "→": "->",
}  # fmt: skip


def device_named(name: str) -> str:
    """The device of that name; auto is a GPU where there is one."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, idx = name.partition(":")
    require(
        kind in ("cpu", "cuda") and (not idx or idx.isdigit()),
        "device must be auto, cpu or cuda[:N]",
        got=name,
        kind=RangeError,
    )
    num_gpus = torch.cuda.device_count()
    require(
        kind == "cpu" or int(idx or 0) < num_gpus,
        f"device {name} must exist",
        got=f"{num_gpus} CUDA device(s)",
        fix="use --device cpu",
        kind=NotAvailable,
    )
    return name


def gpu_named(name: str, *, or_cpu: bool = True, fix: str = "") -> str:
    """The device of a benchmark: a GPU, or where `or_cpu` a CPU that is asked for by name."""
    device = device_named(name)
    if or_cpu:
        fix = "name the CPU with --device cpu to time the reference there"
    require(
        device != "cpu" or (or_cpu and name == "cpu"),
        f"{'a' if or_cpu else 'this'} benchmark times a GPU",
        got="the CPU" if name == "cpu" else "none on this machine",
        fix=fix,
        kind=NotAvailable,
    )
    return device


def untested(hardware: Hardware) -> str:
    """A line on a GPU that nothing was run on; "" where something was, and for a CPU."""
    warning = gpu_warning(hardware.label) if hardware.arch.startswith("sm_") else ""
    return f"{hardware.label}: {warning}" if warning else ""


def plain_where_needed() -> None:
    """Let a terminal or file that has no Unicode show plain signs, where printing would raise."""
    codecs.register_error("plain", _plain)
    for stream in (sys.stdout, sys.stderr):
        encoding = (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "")
        if not encoding.startswith("utf") and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="plain")


def _plain(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return "".join(PLAIN.get(sign, "?") for sign in text), error.end


class Bars:
    """One progress bar per step of a job, on stderr."""

    def __init__(self, *, quiet: bool) -> None:
        columns = (TextColumn("{task.description:8}"), BarColumn(), MofNCompleteColumn())
        console = Console(stderr=True)  # in a pipe bars would end in an empty line
        is_off = quiet or not console.is_interactive
        self.bars = Progress(*columns, console=console, transient=True, disable=is_off)
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> Bars:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def __call__(self, step: str, done: int, of: int) -> None:
        if step not in self.tasks:
            self.tasks[step] = self.bars.add_task(step, total=of)
        self.bars.update(self.tasks[step], completed=done, total=of)


def whole_table(console: Console, table: Table, num_keys: int) -> None:
    """Print a table of figures, none of which is cut off.

    num_keys  first columns, which name a row: on a terminal that is too narrow for the table each
              row is a line of these, then its figures with their columns' names
    """
    whole = console.measure(table, options=console.options.update(width=10_000)).maximum
    if not console.is_terminal or whole <= console.width:
        console.print(table)
        return
    names = [str(column.header) for column in table.columns]
    if table.title:
        console.print(f"[bold]{table.title}[/]", highlight=False)
    for row in zip(*(column.cells for column in table.columns), strict=True):
        cells = [str(cell) for cell in row]
        console.print(f"[bold]{', '.join(cells[:num_keys])}[/]", highlight=False, soft_wrap=True)
        figures = (
            f"{name} {cell}".strip()
            for name, cell in zip(names[num_keys:], cells[num_keys:], strict=True)
            if cell
        )
        console.print(Padding("; ".join(figures), (0, 0, 0, 4)), highlight=False)


def reason_table(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[int] = (),
    bold: Sequence[int] = (),
) -> None:
    """Print rows whose last column is a reason, which is never cut off.

    title    above the table; may hold markup
    columns  names; the last one is the reason's
    rows     as many cells each, as plain text
    right    columns that are aligned to the right
    bold     rows that are printed bold

    On a terminal with room for it this is a table; on a narrow one the reason stands below its row;
    in a pipe or file each row is one line.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    last = len(columns) - 1
    widths = [max(len(row[at]) for row in [columns, *cells]) for at in range(last)]
    frame = 3 * len(columns) + 1
    if console.is_terminal and console.width - sum(widths) - frame >= LEAST_REASON:
        table = Table(title=title, title_justify="left")
        for at, name in enumerate(columns):
            side = "right" if at in right else "left"
            table.add_column(escape(name), justify=side, no_wrap=at < last)  # type: ignore[arg-type]
        for at, row in enumerate(cells):
            table.add_row(*map(escape, row), style="bold" if at in bold else "")
        console.print(table)
        return

    def line(row: Sequence[str]) -> str:
        parts = (
            text.rjust(width) if at in right else text.ljust(width)
            for at, (text, width) in enumerate(zip(row, widths, strict=False))
        )
        return "  ".join(parts).rstrip()

    console.print(f"[bold]{title}[/]", highlight=False, soft_wrap=True)
    if not console.is_terminal:
        for row in [columns, *cells]:
            text = f"{line(row)}  {row[last]}".rstrip()
            console.print(text, highlight=False, markup=False, soft_wrap=True)
        return
    console.print(Text(line(columns), style="dim"), soft_wrap=True)
    for at, row in enumerate(cells):
        console.print(Text(line(row), style="bold" if at in bold else ""), soft_wrap=True)
        for part in Text(row[last]).wrap(console, max(console.width - 4, 20)):
            console.print(Text("    ") + part, highlight=False, soft_wrap=True)
