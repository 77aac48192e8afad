"""`megamoe simulate`: predict one call, print it, and write the pictures. No GPU, no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from megamoe.cli import problems as of
from megamoe.cli.shared import Bars
from megamoe.errors import FileError, MegaMoEError, require
from megamoe.hardware import Hardware
from megamoe.problem import Problem
from megamoe.planner.choice import Value
from megamoe.studies.deep_gemm.plan import plan
from megamoe.simulator.prediction import Prediction
from megamoe.simulator.sample import SKEWS
from megamoe.simulator.simulate import simulate
from megamoe.trace.perfetto import perfetto
from megamoe.trace.plot import Bar, exposed_plot
from megamoe.trace.predicted import prediction_page
from megamoe.trace.text import MARGIN, gantt

out = Console()
FILES = ("trace.json", "timeline.html", "exposed.svg")
PLOT_RANKS = 8  # the plot goes at least so far, where the machine and the experts allow

Mode = Annotated[str, typer.Option(help="auto, fused, split or staged.")]
Skew = Annotated[str, typer.Option(help=f"{', '.join(SKEWS)}.")]
Seed = Annotated[int, typer.Option(help="Seed of the sampled routing.")]
CountsFile = Annotated[
    str | None,
    typer.Option("--counts", help="JSON file: rows that rank r sends to expert e, [[...], ...]."),
]
Folder = Annotated[str, typer.Option("--out", help=f"Folder for {', '.join(FILES)}.")]
RanksPlot = Annotated[
    bool, typer.Option(help="Simulate other numbers of ranks too, for exposed.svg.")
]
NoFiles = Annotated[bool, typer.Option("--no-files", help="Print only; write nothing.")]


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("simulate")(command)


def command(
    preset: of.Preset = None,
    hidden: of.Hidden = None,
    intermediate: of.Intermediate = None,
    experts: of.Experts = None,
    top_k: of.TopK = None,
    recipe: of.Recipe = None,
    tokens: of.Tokens = 512,
    ranks: of.Ranks = 8,
    hardware: of.Machine = "h200",
    mode: Mode = "auto",
    skew: Skew = "uniform",
    seed: Seed = 0,
    counts: CountsFile = None,
    given: of.Set = None,
    folder: Folder = "megamoe-simulation",
    ranks_plot: RanksPlot = True,
    no_files: NoFiles = False,
    as_json: of.Json = False,
) -> None:
    """Predict one call without a GPU: time, what it waits for, and a timeline to look at."""
    shape = {
        "hidden": hidden,
        "intermediate": intermediate,
        "num_experts": experts,
        "top_k": top_k,
    }
    name, problem = of.problem_from(preset, shape, recipe=recipe, tokens=tokens, ranks=ranks)
    machine = Hardware.named(hardware)
    fixed: dict[str, Value] = {**of.overrides_from(given), "mode": mode}
    measured = _counts(counts) if counts is not None else None
    with Bars(quiet=as_json) as bars:
        bars("simulate", 0, 1)
        found = simulate(plan(problem, machine, **fixed), measured, skew=skew, seed=seed)
        bars("simulate", 1, 1)
        written: list[str] = []
        if not no_files:
            swept = _sweep(problem, machine, fixed, skew, seed, found, bars) if ranks_plot else []
            written = _write(Path(folder), name, found, swept, bars)
    if as_json:
        print(json.dumps({**as_dict(found), "files": written}, indent=2))
        return
    _print(name, found, written)


def as_dict(found: Prediction) -> dict[str, Any]:
    """The prediction as plain values."""
    s, u = found.summary, found.usage
    return {
        "hardware": found.plan.hardware.name,
        "mode": found.plan.mode,
        "num_ranks": found.plan.problem.num_ranks,
        "num_tokens": found.plan.problem.num_tokens,
        "time_us": found.time_us,
        "floor_us": found.floor.time_us,
        "floor_bound": found.floor.bound,
        "exposed_us": found.exposed_us,
        "exposed_share": found.exposed_share,
        "tail_us": s.tail_us,
        "imbalance": s.imbalance,
        "num_waves": found.timeline.num_waves,
        "num_spans": len(found.timeline.spans),
        "busy": dict(s.busy),
        "usage": {"tensor": u.tensor, "hbm": u.hbm, "nvlink": u.nvlink},
        "steps": [{"name": step, "us": us} for step, us in found.steps],
    }


def _counts(path: str) -> list[list[int]]:
    what = "counts must be a JSON file with one list of integers per rank"
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise FileError(f"{what}; got {path}: {error}") from error
    is_lists = isinstance(found, list) and all(isinstance(row, list) for row in found)
    require(is_lists, what, got=f"{path}: {type(found).__name__}", kind=FileError)
    return [list(row) for row in found]


def _sweep_ranks(problem: Problem, machine: Hardware) -> Iterator[int]:
    """1, 2, 4, ... and the problem's own number."""
    last = max(problem.num_ranks, min(PLOT_RANKS, machine.nvlink_domain))
    powers = [1 << i for i in range(last.bit_length()) if 1 << i <= last]
    for ranks in sorted({*powers, problem.num_ranks}):
        if problem.num_experts % ranks == 0:
            yield ranks


def _sweep(
    problem: Problem,
    machine: Hardware,
    fixed: dict[str, Value],
    skew: str,
    seed: int,
    found: Prediction,
    bars: Bars,
) -> list[Bar]:
    """The call with other numbers of ranks, and staged; what the overrides forbid is left out."""
    modes = dict.fromkeys((found.plan.mode, "staged"))
    wanted = [(r, mode) for r in _sweep_ranks(problem, machine) for mode in modes]
    swept = []
    for done, (ranks, mode) in enumerate(wanted):
        bars("ranks", done, len(wanted))
        if (ranks, mode) == (problem.num_ranks, found.plan.mode):
            swept.append(Bar.of(found))
            continue
        try:
            other = plan(replace(problem, num_ranks=ranks), machine, **{**fixed, "mode": mode})
            swept.append(Bar.of(simulate(other, skew=skew, seed=seed)))
        except MegaMoEError:
            continue
    bars("ranks", len(wanted), len(wanted))
    return swept


def _write(folder: Path, name: str, found: Prediction, swept: list[Bar], bars: Bars) -> list[str]:
    title = f"{name}: one Mixture-of-Experts call, block by block"
    p = found.plan.problem
    what = f"{name}, {p.num_tokens} tokens a rank, {p.recipe}"
    texts: dict[str, Callable[[], str]] = {
        "trace.json": lambda: perfetto(found.timeline),
        "timeline.html": lambda: prediction_page(found, title),
    }
    if swept:
        label = f"{what} on {found.plan.hardware.label}"
        texts["exposed.svg"] = lambda: exposed_plot(swept, label)
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for done, (file, make) in enumerate(texts.items()):
            bars("write", done, len(texts))
            (folder / file).write_text(make(), encoding="utf-8")
            written.append(str(folder / file))
    except OSError as error:
        raise FileError(f"--out must be a folder that can be written; got {error}") from error
    bars("write", len(texts), len(texts))
    return written


def _print(name: str, found: Prediction, written: list[str]) -> None:
    s, u, floor = found.summary, found.usage, found.floor
    ratio = f"{found.time_us / floor.time_us:.2f} times the floor" if floor.time_us else "no rows"
    table = Table(title=f"{name}: {found.timeline.name}", title_justify="left")
    for column, justify in (("figure", "left"), ("value", "right"), ("what it means", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    rows = (
        ("predicted time", f"{found.time_us:,.1f} us", ratio),
        ("floor", f"{floor.time_us:,.1f} us", f"set by {floor.bound}"),
        (
            "exposed communication",
            f"{s.exposed_us:,.1f} us",
            f"{found.exposed_share:.1%} of the call, mean over SMs",
        ),
        ("tail", f"{s.tail_us:,.1f} us", "from an SM's mean last block to the rank's last"),
        ("imbalance", f"{s.imbalance:.2f}", "busiest rank over the mean"),
        ("tensor cores", f"{u.tensor:.0%}", "of what they reach"),
        ("HBM", f"{u.hbm:.0%}", "of what it reaches"),
        ("NVLink in", f"{u.nvlink:.0%}", "of what it reaches"),
        ("waves", str(found.timeline.num_waves), f"{len(found.timeline.spans):,} spans simulated"),
    )
    for row in rows:
        table.add_row(*row)
    out.print(table)
    busy = ", ".join(f"{role} {share:.1%}" for role, share in s.busy if share >= 0.0005)
    out.print(f"busy: {busy}", highlight=False)
    out.print("steps: " + ", ".join(f"{step} {us:,.1f}" for step, us in found.steps) + " us\n")
    chart = gantt(found.timeline, width=max(20, min(out.width, 140) - MARGIN))
    out.print(chart, highlight=False, markup=False, soft_wrap=True)
    for file in written:
        out.print(f"wrote {file}", highlight=False, soft_wrap=True)
