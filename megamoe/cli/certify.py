"""`megamoe certify`: prove a backend on this machine, write the certificate that `auto` needs.

Exit codes: 0 every check held, 1 one did not, 3 the backend cannot run here.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from megamoe.cli.shared import Bars, Json, device_named, reason_table, writable_folder, write_atomic
from megamoe.errors import NotAvailable, one_of, require
from megamoe.formats.spec import RECIPES
from megamoe.planner.plan import BACKENDS

if TYPE_CHECKING:
    from megamoe.certify.run import Report

out = Console()
MEANING = {
    "run": "run on this GPU",
    "interpreted": "in Triton's interpreter: says nothing of any GPU",
    "on the CPU": "the oracle on this CPU against the rules: says nothing of any GPU",
}

Backend = Annotated[str, typer.Option(help="auto or the name of a backend; reference on a CPU.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ... or auto.")]
Recipe = Annotated[
    list[str] | None, typer.Option(help=f"Some of {', '.join(RECIPES)}; default: all.")
]
Quick = Annotated[
    bool, typer.Option("--quick", help="Fewer sizes and launches; no certificate.", metavar="")
]
File = Annotated[str | None, typer.Option("--out", help="File for the report, as JSON.")]
NoCertificate = Annotated[
    bool,
    typer.Option("--no-certificate", help="Report only: keep and take back nothing.", metavar=""),
]


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("certify")(command)


def command(
    backend: Backend = "auto",
    device: Device = "auto",
    recipe: Recipe = None,
    quick: Quick = False,
    file: File = None,
    no_certificate: NoCertificate = False,
    as_json: Json = False,
) -> None:
    """Check a backend on this machine against the oracle, step by step; write a certificate."""
    _check_names(backend)
    for name in recipe or ():
        one_of(name, tuple(RECIPES), "recipe")
    if file is not None:
        writable_folder(Path(file).absolute().parent)
    where = device_named(device)
    if where == "cpu" and backend == "portable":
        _interpret()
    from megamoe.certify import run

    target = run.with_recipes(run.on(backend, where, is_quick=quick), tuple(recipe or ()))
    with Bars(quiet=as_json) as bars:
        report = run.certify(target, bars)
    outcome = "no certificate: not asked for" if no_certificate else run.keep(report)
    if file is not None:
        write_atomic(file, json.dumps(report.as_dict(), indent=2) + "\n")
    if as_json:
        print(json.dumps({**report.as_dict(), "kept": outcome}, indent=2))
    else:
        _print(report, outcome, file)
    raise typer.Exit(0 if report.ok else 1)


def _check_names(backend: str) -> None:
    require(
        backend != "emulator",
        "certify checks an installed backend",
        got="emulator, which is part of the tests",
        fix="run `pytest tests/certify tests/kernels/test_emulated.py` in a checkout",
        kind=NotAvailable,
    )
    one_of(backend, ("auto", *BACKENDS), "backend")


def _interpret() -> None:
    """Let Triton interpret kernels, which it decides when it is imported."""
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
        return
    import triton

    require(
        bool(triton.knobs.runtime.interpret),
        "on a CPU the portable kernels need Triton's interpreter from a process's start on",
        got="a process that has Triton without it",
        fix="run `megamoe certify --backend portable` as a command",
        kind=NotAvailable,
    )


def _print(report: Report, outcome: str, file: str | None) -> None:
    from megamoe.certify.checks import STAGES

    rows = []
    for stage, about in STAGES.items():
        of_stage = [one for one in report.findings if one.stage == stage]
        if of_stage:
            num_held = sum(one.ok for one in of_stage)
            seconds = sum(one.seconds for one in of_stage)
            rows.append((stage, f"{num_held} of {len(of_stage)}", f"{seconds:.1f}", about))
    title = f"{report.backend}, {report.label}: {MEANING[report.label]}"
    reason_table(out, title, ("stage", "held", "s", "what"), rows, right=(1, 2))
    for one in report.failed:
        text = f"FAILED {one.stage}, {one.name}: {one.detail}"
        out.print(text, style="red", highlight=False, markup=False, soft_wrap=True)
    if report.not_run:
        out.print(f"{report.not_run} checks not run: they lean on what failed", highlight=False)
    out.print(report.provenance, style="dim", highlight=False, soft_wrap=True)
    out.print(outcome, highlight=False, soft_wrap=True)
    if file is not None:
        out.print(f"report for us in {file}", highlight=False, soft_wrap=True)
    verdict = "[bold green]every check held[/]" if report.ok else "[bold red]a check FAILED[/]"
    out.print(verdict)
