"""`megamoe simulate`: predict one call, print it, and write the pictures. No GPU, no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape

from megamoe.cli import problems as of
from megamoe.cli.shared import Bars, Json, reason_table, untested, writable_folder, write_atomic
from megamoe.errors import FileError, MegaMoEError, one_of, require
from megamoe.hardware import Hardware
from megamoe.planner.choice import Value
from megamoe.planner.plan import plan
from megamoe.problem import Problem
from megamoe.simulator.prediction import Prediction
from megamoe.simulator.sample import SKEWS
from megamoe.simulator.schedule import Schedule
from megamoe.simulator.simulate import simulate
from megamoe.trace.perfetto import perfetto
from megamoe.trace.plot import Bar, exposed_plot
from megamoe.trace.predicted import prediction_page
from megamoe.trace.text import MARGIN, gantt

out = Console()
FILES = ("trace.json", "timeline.html", "exposed.svg")
PLOT_RANKS = 8  # the plot goes at least so far, where the machine and the experts allow

MODE_HELP = "auto, staged, fused, split or, over ranks, chain; of a study its own."
Mode = Annotated[str, typer.Option(help=MODE_HELP)]
Skew = Annotated[str, typer.Option(help=f"{', '.join(SKEWS)}.")]
Seed = Annotated[int, typer.Option(help="Seed of the sampled routing.")]
CountsFile = Annotated[
    str | None,
    typer.Option("--counts", help="JSON file: rows that rank r sends to expert e, [[...], ...]."),
]
Folder = Annotated[str, typer.Option("--out", help=f"Folder for {', '.join(FILES)}.")]
RanksPlot = Annotated[
    bool, typer.Option(help="Simulate other numbers of ranks too, for exposed.svg.", metavar="")
]
NoFiles = Annotated[bool, typer.Option("--no-files", help="Print only; write nothing.", metavar="")]


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
    overrides: of.Set = None,
    folder: Folder = "megamoe-simulation",
    ranks_plot: RanksPlot = True,
    no_files: NoFiles = False,
    study: of.Study = None,
    as_json: Json = False,
) -> None:
    """Predict what a call's launches cost, without a GPU: time, waits, a timeline to look at."""
    shape = {
        "hidden": hidden,
        "intermediate": intermediate,
        "num_experts": experts,
        "top_k": top_k,
    }
    machine = Hardware.named(hardware)
    name, problem = of.problem_from(
        preset, shape, recipe=recipe, tokens=tokens, ranks=ranks,
        arch="" if study else machine.arch,  # what another system takes is the checkpoint's own
    )  # fmt: skip
    fixed = of.overrides_from(overrides)
    if mode != "auto":
        fixed["mode"] = mode
    measured = _counts(counts) if counts is not None else None
    if study is not None:
        one_of(study, of.STUDIES, "study")
    make = _Maker(machine, study)
    how = make(problem, fixed)
    where = None if no_files else writable_folder(folder)
    with Bars(quiet=as_json) as bars:
        prediction = simulate(
            how, measured, skew=skew, seed=seed,
            progress=lambda done, num: bars("blocks", done, num),
        )  # fmt: skip
        written: list[str] = []
        if where is not None:
            swept = _sweep(make, fixed, skew, seed, prediction, bars) if ranks_plot else []
            written = _write(where, name, prediction, swept, bars)
    if as_json:
        print(json.dumps({**as_dict(prediction), "files": written}, indent=2))
        return
    _print(name, prediction, written)


class _Maker(NamedTuple):
    """Makes what is simulated: this library's launches on a machine, or a study's."""

    machine: Hardware
    study: str | None

    def __call__(self, problem: Problem, fixed: dict[str, Value]) -> Schedule:
        if self.study is not None:
            from megamoe.cli.study import schedule_from

            return schedule_from(problem, self.machine, fixed)
        return Schedule.of_plan(plan(problem, self.machine, **fixed))


def as_dict(prediction: Prediction) -> dict[str, Any]:
    """The prediction as plain values."""
    how, s, u = prediction.schedule, prediction.summary, prediction.usage
    return {
        "source": "simulated",
        "study": how.label,
        "note": prediction.note,
        "hardware": how.hardware.name,
        "backend": how.backend,
        "mode": how.mode,
        "num_ranks": how.problem.num_ranks,
        "num_tokens": how.problem.num_tokens,
        "time_us": prediction.time_us,
        "floor_us": prediction.floor.time_us,
        "floor_bound": prediction.floor.bound,
        "exposed_us": prediction.exposed_us,
        "exposed_share": prediction.exposed_share,
        "tail_us": s.tail_us,
        "imbalance": s.imbalance,
        "num_waves": prediction.timeline.num_waves,
        "num_spans": len(prediction.timeline.spans),
        "busy": dict(s.busy),
        "usage": {"tensor": u.tensor, "hbm": u.hbm, "nvlink": u.nvlink},
        "steps": [{"name": step, "us": us} for step, us in prediction.steps],
    }


def _counts(path: str) -> list[list[int]]:
    what = "counts must be a JSON file with one list of integers per rank"
    try:
        counts = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise FileError(f"{what}; got {path}: {error}") from error
    is_lists = isinstance(counts, list) and all(isinstance(row, list) for row in counts)
    require(is_lists, what, got=f"{path}: {type(counts).__name__}", kind=FileError)
    return [list(row) for row in counts]


def _sweep_ranks(problem: Problem, machine: Hardware) -> Iterator[int]:
    """1, 2, 4, ... and the problem's own number."""
    last = max(problem.num_ranks, min(PLOT_RANKS, machine.nvlink_domain))
    powers = [1 << i for i in range(last.bit_length()) if 1 << i <= last]
    for ranks in sorted({*powers, problem.num_ranks}):
        if problem.num_experts % ranks == 0:
            yield ranks


def _sweep(
    make: _Maker,
    fixed: dict[str, Value],
    skew: str,
    seed: int,
    prediction: Prediction,
    bars: Bars,
) -> list[Bar]:
    """The call with other numbers of ranks, and staged; what cannot run is left out."""
    problem = prediction.schedule.problem
    modes = dict.fromkeys((prediction.schedule.mode, "staged"))
    wanted = [(r, mode) for r in _sweep_ranks(problem, make.machine) for mode in modes]
    swept = []
    for done, (ranks, mode) in enumerate(wanted):
        bars("ranks", done, len(wanted))
        if (ranks, mode) == (problem.num_ranks, prediction.schedule.mode):
            swept.append(Bar.of(prediction))
            continue
        try:
            other = make(replace(problem, num_ranks=ranks), {**fixed, "mode": mode})
            swept.append(Bar.of(simulate(other, skew=skew, seed=seed)))
        except MegaMoEError:
            continue
    bars("ranks", len(wanted), len(wanted))
    return swept


def _write(
    folder: Path, name: str, prediction: Prediction, swept: list[Bar], bars: Bars
) -> list[str]:
    how = prediction.schedule
    title = f"{name}: one Mixture-of-Experts call, block by block"
    what = f"{name}, {of.counted(how.problem.num_tokens, 'token')} a rank, {how.problem.recipe}"
    texts: dict[str, Callable[[], str]] = {
        "trace.json": lambda: perfetto(prediction.timeline),
        "timeline.html": lambda: prediction_page(prediction, title),
    }
    if swept:
        label = f"{what} on {how.hardware.label}"
        texts["exposed.svg"] = lambda: exposed_plot(swept, label, _source(how))
    written = []
    for done, (file, make) in enumerate(texts.items()):
        bars("write", done, len(texts))
        write_atomic(folder / file, make())
        written.append(str(folder / file))
    bars("write", len(texts), len(texts))
    return written


def _source(how: Schedule) -> str:
    """Where a picture's figures come from, in a line."""
    unknown = "nothing measured on Blackwell" if how.note else ""
    return ", ".join(filter(None, ("simulated", how.label or unknown)))


def _print(name: str, prediction: Prediction, written: list[str]) -> None:
    s, u, floor = prediction.summary, prediction.usage, prediction.floor
    ratio = (
        f"{prediction.time_us / floor.time_us:.2f} times the floor" if floor.time_us else "no rows"
    )
    if prediction.schedule.study:
        out.print(f"[bold red]{prediction.schedule.label}[/]", highlight=False, soft_wrap=True)
    if warning := untested(prediction.schedule.hardware):
        out.print(f"[bold]{warning}[/]", highlight=False, soft_wrap=True)
    if prediction.note:
        out.print(f"[bold]{prediction.note}[/]", highlight=False, soft_wrap=True)
    rows = (
        ("predicted time", f"{prediction.time_us:,.1f} us", ratio),
        ("floor", f"{floor.time_us:,.1f} us", f"set by {floor.bound}"),
        (
            "exposed communication",
            f"{s.exposed_us:,.1f} us",
            f"{prediction.exposed_share:.1%} of the call, mean over SMs",
        ),
        ("tail", f"{s.tail_us:,.1f} us", "from an SM's mean last block to the rank's last"),
        ("imbalance", f"{s.imbalance:.2f}", "busiest rank over the mean"),
        ("tensor cores", f"{u.tensor:.0%}", "of what they reach"),
        ("HBM", f"{u.hbm:.0%}", "of what it reaches"),
        ("NVLink in", f"{u.nvlink:.0%}", "of what it reaches"),
        (
            "waves",
            str(prediction.timeline.num_waves),
            f"{len(prediction.timeline.spans):,} spans simulated",
        ),
    )
    title = f"{escape(name)}: {escape(prediction.timeline.name)} (simulated)"
    reason_table(out, title, ("figure", "value", "what it means"), rows, right=(1,))
    busy = ", ".join(f"{role} {share:.1%}" for role, share in s.busy if share >= 0.0005)
    out.print(f"busy: {busy}", highlight=False)
    out.print("steps: " + ", ".join(f"{step} {us:,.1f}" for step, us in prediction.steps) + " us\n")
    chart = gantt(prediction.timeline, width=max(20, min(out.width, 140) - MARGIN))
    out.print(chart, highlight=False, markup=False, soft_wrap=True)
    for file in written:
        out.print(f"wrote {file}", highlight=False, soft_wrap=True)
