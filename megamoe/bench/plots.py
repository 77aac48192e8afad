"""Pictures of a report: times over the cells, and the roofline. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megamoe.bench.record import OK, Report
from megamoe.errors import NotAvailable

SIZE = (11.0, 5.5)


def write(report: Report, folder: str | Path, name: str) -> list[Path]:
    """Write `name`-times.png and `name`-roofline.png into `folder`."""
    pyplot = _pyplot()
    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    made = []
    for kind, draw in (("times", _times), ("roofline", _roofline)):
        figure, axes = pyplot.subplots(figsize=SIZE, layout="constrained")
        draw(report, axes)
        figure.supxlabel(report.provenance, fontsize=6, color="gray")
        path = where / f"{name}-{kind}.png"
        figure.savefig(path, dpi=150)
        pyplot.close(figure)
        made.append(path)
    return made


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise NotAvailable(
            "plots need matplotlib; got none; install it with pip install megamoe[plots]"
        ) from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def times_of(report: Report) -> tuple[list[str], dict[str, list[float]]]:
    """Cells, and a series of microseconds for each bar; NaN where there is no figure."""
    best = report.best_of_ours()
    cells = list(best)
    none = float("nan")
    peers = report.peers
    best_peer = [peers.best(c) if peers is not None else None for c in cells]
    floors = {c: (r.read_us, r.floor_us) for c, r in best.items()}
    series = {
        "ours, fastest recipe": [best[c].us or none for c in cells],
        "best recorded peer": [none if p is None else p[1] for p in best_peer],
        "practical floor: one read of the weights": [floors[c][0] or none for c in cells],
        "roofline": [floors[c][1] or none for c in cells],
    }
    return cells, {n: v for n, v in series.items() if any(x == x for x in v)}


def _times(report: Report, axes: Any) -> None:
    cells, series = times_of(report)
    width = 0.8 / max(len(series), 1)
    for idx, (name, values) in enumerate(series.items()):
        at = [c + (idx - (len(series) - 1) / 2) * width for c in range(len(cells))]
        axes.bar(at, values, width, label=name)
    best = report.best_of_ours()
    labels = [f"{c}\n{best[c].contestant}\n{best[c].recipe}" for c in cells]
    axes.set_xticks(range(len(cells)), labels, rotation=60, ha="right", fontsize=7)
    axes.set_yscale("log")
    axes.set_ylabel("microseconds")
    axes.set_title(report.title)
    if series:
        axes.legend()


def _roofline(report: Report, axes: Any) -> None:
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
