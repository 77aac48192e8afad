"""A record of `megamoe bench overlap`: read from its file, and drawn.

Two bars a cell, in units of the cell's arithmetic: what compute and links take one after the
other, and what the call takes that does both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from megamoe.bench.overlap import Overlap
from megamoe.bench.plots import pyplot_or_refuse, save
from megamoe.bench.record import NOT_ITS_OWN, no_record
from megamoe.errors import FileError, MegaMoEError, require

COMPUTE, LINKS, BOTH = "#2f7fc1", "#e0a458", "#1b9e77"
UNSAVED = {"tile": "", "latency_us": 0.0}  # records from before a column was added


def load(path: Path) -> list[Overlap]:
    """The rows of a record."""
    names = [field.name for field in fields(Overlap)]
    try:
        with path.open(encoding="utf-8") as file:
            rows = [{**UNSAVED, **row} for row in json.load(file)]
        cells = [Overlap(**{name: row[name] for name in names}) for row in rows]
    except NOT_ITS_OWN as error:
        raise no_record(error, path, "megamoe bench overlap") from error
    require(bool(cells), "the record must have a cell", got=f"none in {path}", kind=FileError)
    return cells


def draw(rows: Sequence[Overlap], path: Path) -> Path:
    """All cells of a record, from above in its order."""
    require(bool(rows), "a picture must have a cell", got="none", kind=MegaMoEError)
    figure = pyplot_or_refuse().figure(figsize=(11.0, 1.9 + 0.55 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for at, row in enumerate(rows):
        _bars(axes, at, row)
    _frame(axes, rows)
    first = rows[0]
    title = (
        f"{first.num_ranks} ranks of a chain share one GPU, measured: how much of the links' time"
        " the arithmetic hides"
    )
    figure.legend(  # its title is the figure's: a title of its own would lie over the legend
        loc="outside upper center", ncols=3, fontsize=9, frameon=False, title=title,
        title_fontproperties={"size": 12, "weight": "bold"},
    )  # fmt: skip
    note = (
        f"each rank: {first.sms} SMs, {first.sms - first.pull_sms} compute and {first.pull_sms}"
        f" pull; links paced to {first.links_gbs:.0f} GB/s; no traffic between GPUs\n"
        + first.provenance
    )
    figure.supxlabel(note, fontsize=7, color="gray")
    return save(figure, path)


def _bars(axes: Any, at: int, row: Overlap) -> None:
    """Above: compute, then links. Below: the call, with its time and what it hides."""
    links, both = row.links_us / row.compute_us, row.both_us / row.compute_us
    names = ("compute alone", "links alone", "the call: both") if at == 0 else ("", "", "")
    axes.barh(at - 0.2, 1.0, height=0.36, color=COMPUTE, label=names[0])
    axes.barh(at - 0.2, links, left=1.0, height=0.36, color=LINKS, label=names[1])
    axes.barh(at + 0.2, both, height=0.36, color=BOTH, label=names[2])
    inside = {"va": "center", "fontsize": 7.5, "color": "white"}
    axes.text(0.01, at - 0.2, _ms(row.compute_us), **inside)
    axes.text(1.01, at - 0.2, _ms(row.links_us), **inside)
    axes.text(0.01, at + 0.2, _ms(row.both_us), **inside)
    text = f"{100 * row.hidden:.0f}% hidden"
    axes.text(max(1.0, both) + 0.015, at + 0.2, text, va="center", fontsize=8.5, fontweight="bold")


def _frame(axes: Any, rows: Sequence[Overlap]) -> None:
    names = [f"{row.cell.replace('-ep8', '').replace('/', ', ')}, {row.recipe}" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=9)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0.0, 1.05 + max(row.links_us / row.compute_us for row in rows))
    axes.axvline(1.0, color="black", linewidth=0.8, zorder=3)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time / time of the arithmetic alone   (model, tokens a rank, recipe)")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _ms(us: float) -> str:
    return f"{us / 1e3:,.1f} ms"
