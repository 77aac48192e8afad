"""Pictures of a report: times over the cells and the roofline, or the lines of fixed costs.

They need matplotlib.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from megamoe.bench.peers import BEST
from megamoe.bench.record import OK, Report, Row
from megamoe.errors import NotAvailable
from megamoe.files import writable_folder, write_atomic

SIZE = (11.0, 5.5)
MAX_SERIES = 4  # bars of ours in a cell; of more, the fastest alone is drawn
PEER = "best recorded peer"
COLORS = ("#3f8fd2", "#a3cdf0", "#1b9e77", "#a6d8c3")
# column of a row -> what the legend calls it, dashes, color
FLOORS = {
    "read_us": ("practical floor: one launch that reads its weights", (0, (2, 1)), "#c1121f"),
    "floor_us": ("roofline", "-", "black"),
}


def write(report: Report, folder: str | Path, name: str) -> list[Path]:
    """Write `name`-times.png and `name`-roofline.png into `folder`, or `name`-lines.png."""
    pyplot = pyplot_or_refuse()
    where = writable_folder(folder)
    paths = []
    kinds = {"times": _times, "roofline": _roofline}
    for kind, draw in ({"lines": _lines} if report.fixed_costs() else kinds).items():
        figure = pyplot.figure(figsize=SIZE, layout="constrained")
        draw(report, figure)
        figure.supxlabel(report.provenance, fontsize=6, color="gray")
        paths.append(save(figure, where / f"{name}-{kind}.png"))
    return paths


def save(figure: Any, path: Path) -> Path:
    """The figure as a PNG file, whole or not at all."""
    picture = BytesIO()
    figure.savefig(picture, dpi=150, format="png")
    pyplot_or_refuse().close(figure)
    write_atomic(path, picture.getvalue())
    return path


def pyplot_or_refuse() -> Any:
    """matplotlib.pyplot, which draws into files."""
    try:
        import matplotlib
    except ImportError as error:
        raise NotAvailable("plots need matplotlib; got none; pip install matplotlib") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def ours_in(report: Report) -> dict[str, dict[str, Row]]:
    """Our rows as series: label -> cell -> row; where there are many, the fastest of each cell."""
    series: dict[str, dict[str, Row]] = {}
    for r in report.rows:
        if r.ours and r.status == OK and r.us is not None:
            series.setdefault(r.label, {})[r.cell] = r
    if len(series) > MAX_SERIES:
        series = {"ours, fastest recipe": report.best_of_ours()}
    return series


def times_of(report: Report) -> tuple[list[str], dict[str, list[float]]]:
    """Cells, and a series of microseconds for each bar; NaN where there is no figure."""
    cells = list(report.best_of_ours())
    none = float("nan")
    series = {
        label: [(rows[c].us or none) if c in rows else none for c in cells]
        for label, rows in ours_in(report).items()
    }
    if report.peers is not None:
        best = [report.peers.best(c) for c in cells]
        series[PEER] = [none if p is None else p[1] for p in best]
    return cells, {name: v for name, v in series.items() if any(x == x for x in v)}


def _times(report: Report, figure: Any) -> None:
    """A panel per shape; each bar of ours carries the two floors of its own recipe."""
    cells, series = times_of(report)
    if not cells:
        figure.suptitle(report.title)
        return
    groups: dict[str, list[int]] = {}
    for at, cell in enumerate(cells):
        groups.setdefault(cell.rpartition("/")[0], []).append(at)
    panels = figure.subplots(
        1, len(groups), sharey=True, squeeze=False, width_ratios=[len(g) for g in groups.values()]
    )[0]
    panels[0].set_yscale("log")
    panels[0].set_ylabel("microseconds")
    low = min(v for r in report.best_of_ours().values() for v in (r.floor_us, r.read_us, r.us) if v)
    high = max(v for values in series.values() for v in values if v == v)
    panels[0].set_ylim(low / 2, high * 1.8)
    panels[0].yaxis.set_major_formatter("{x:,.0f}")
    for axes, (shape, members) in zip(panels, groups.items(), strict=True):
        _panel(report, axes, [cells[at] for at in members], {
            name: [values[at] for at in members] for name, values in series.items()
        })  # fmt: skip
        axes.set_title(shape, fontsize=10)
        axes.set_xlabel("tokens" if shape else "")
    handles = {
        text: line
        for axes in panels
        for line, text in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    floors = [text for text, *_ in FLOORS.values()]
    names = [name for name in (*series, *floors) if name in handles]
    note = "\nabove each cell: fastest of ours / best recorded peer" if PEER in series else ""
    figure.legend(  # its title is the figure's: a title of its own would lie over the legend
        [handles[name] for name in names], names, loc="outside upper center",
        ncols=min(len(names), 5), fontsize=8, frameon=False, title=report.title + note,
        title_fontsize=10,
    )  # fmt: skip


def _panel(report: Report, axes: Any, cells: list[str], series: dict[str, list[float]]) -> None:
    """The cells of one shape."""
    width = 0.84 / len(series)
    rows = ours_in(report)
    colors = dict(zip(rows, COLORS, strict=False)) | {PEER: "#9a9a9a"}
    for idx, (name, values) in enumerate(series.items()):
        at = [c + (idx - (len(series) - 1) / 2) * width for c in range(len(cells))]
        axes.bar(at, values, 0.92 * width, label=name, color=colors[name])
        if name == PEER:
            _name_peers(report, axes, cells, at)
        else:
            _floors(axes, {x: rows[name].get(c) for x, c in zip(at, cells, strict=True)}, width)
    if PEER in series:
        highest = [max(v for v in bars if v == v) for bars in zip(*series.values(), strict=True)]
        _ratios(report, axes, cells, highest)
    axes.set_xticks(range(len(cells)), [c.rpartition("/")[2] for c in cells], fontsize=8)
    axes.grid(axis="y", which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _floors(axes: Any, bars: dict[float, Row | None], width: float) -> None:
    """Across each bar, what its own recipe cannot or hardly beat."""
    for column, (text, dashes, color) in FLOORS.items():
        us_at = {x: us for x, row in bars.items() if row and (us := getattr(row, column))}
        left, right = ([x + side * 0.46 * width for x in us_at] for side in (-1, 1))
        axes.hlines(
            list(us_at.values()), left, right, label=text, linestyles=[dashes], colors=color,
            linewidth=1.4,
        )  # fmt: skip


def _name_peers(report: Report, axes: Any, cells: list[str], at: list[float]) -> None:
    """Which peer was the best, at the foot of its bar."""
    assert report.peers is not None
    foot = axes.get_ylim()[0] * 1.08
    for x, cell in zip(at, cells, strict=True):
        best = report.peers.best(cell)
        if best is not None:
            axes.text(x, foot, best[0], rotation=90, fontsize=6, color="white", ha="center")


def _ratios(report: Report, axes: Any, cells: list[str], highest: list[float]) -> None:
    """Fastest of ours over the best peer: green where ours is as fast."""
    best = report.best_of_ours()
    for x, (cell, top) in enumerate(zip(cells, highest, strict=True)):
        ratio = best[cell].versus.get(BEST)
        if ratio is not None:
            color = "#1a7a3c" if ratio <= 1 else "#b3261e"
            axes.text(x, top * 1.06, f"{ratio:.2f}", ha="center", fontsize=8, color=color)


def _lines(report: Report, figure: Any) -> None:
    """Times over experts touched, the line through them down to none, and that of the read."""
    axes = figure.subplots()
    for cost in report.fixed_costs():
        last = max(touched for touched, _ in cost.points)
        label = f"{cost.cell} {cost.contestant} {cost.recipe}: {cost.us:,.1f} us"
        (line,) = axes.plot((0, last), (cost.us, cost.line.at(last)), linewidth=1, label=label)
        axes.scatter(*zip(*cost.points, strict=True), s=18, color=line.get_color())
        if cost.read is not None:
            begin, end = cost.read.intercept, cost.read.at(last)
            label = f"one launch that reads the same weights: {begin:,.1f} us"
            axes.plot((0, last), (begin, end), "--", linewidth=1, color="gray", label=label)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=min(0, *axes.get_ylim()))
    axes.set_xlabel("experts touched")
    axes.set_ylabel("microseconds")
    axes.set_title("fixed cost of a call: its time extrapolated to no experts")
    axes.legend(fontsize=7)


def _roofline(report: Report, figure: Any) -> None:
    axes = figure.subplots()
    done = [r for r in report.rows if r.status == OK and r.num_bytes and r.tflops]
    reach = [r.flops / r.num_bytes for r in done] or [1.0]
    low, high = min(reach) / 2, max(reach) * 2
    ceilings = report.ceilings
    for mma, peak in ceilings.tflops.items():
        ridge = peak * 1e3 / ceilings.hbm_gbs
        xs = sorted({low, min(max(ridge, low), high), high})
        ys = [min(peak, x * ceilings.hbm_gbs / 1e3) for x in xs]
        axes.plot(xs, ys, color="gray", linewidth=1)
        axes.annotate(
            f"{mma} {peak:,.0f} TFLOP/s", (high, ys[-1]), fontsize=7, ha="right", va="bottom"
        )
    for label in dict.fromkeys(r.label for r in done):
        own = [r for r in done if r.label == label]
        axes.scatter(
            [r.flops / r.num_bytes for r in own], [r.tflops for r in own], s=18, label=label
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(f"FLOP per byte; slope: {ceilings.hbm_gbs:,.0f} GB/s measured")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(report.title)
    if done:
        axes.legend(fontsize=7)
