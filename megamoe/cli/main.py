"""`megamoe`: run, plan, simulate, trace, balance, compile, formats, doctor, certify, bench.

Exit codes: 0 correct, 1 the result failed a check, 2 bad input, 3 not available here, 4 memory ran
out, 70 a defect of megamoe (with a traceback), 130 interrupted, 141 the reader of a pipe is gone.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from contextlib import suppress
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

import megamoe
from megamoe.bench.workloads import MODELS, model_named
from megamoe.cli import balance as balance_command
from megamoe.cli import bench as bench_commands
from megamoe.cli import bench_more
from megamoe.cli import certify as certify_command
from megamoe.cli import compile as compile_command
from megamoe.cli import headline as headline_command
from megamoe.cli import overlap as overlap_command
from megamoe.cli import plan as plan_command
from megamoe.cli import simulate as simulate_command
from megamoe.cli import split as split_command
from megamoe.cli import trace as trace_command
from megamoe.cli.shared import Bars, Json, device_named, plain_where_needed, reason_table
from megamoe.errors import MegaMoEError, NotAvailable, RangeError, require
from megamoe.formats.spec import FORMATS, RECIPES


class _Flags:
    """A command whose help shows no value after --help, which takes none."""

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.metavar = ""
        return option


class _Command(_Flags, TyperCommand):
    pass


class _Group(_Flags, TyperGroup):
    pass


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A Mixture-of-Experts layer as one fast call.",
)
bench = typer.Typer(
    cls=_Group, no_args_is_help=True, help="Measurements, each with its provenance."
)
bench_commands.add_to(bench)
bench_more.add_to(bench)
headline_command.add_to(bench)
overlap_command.add_to(bench)
split_command.add_to(bench)
app.add_typer(bench, name="bench")
plan_command.add_to(app)
simulate_command.add_to(app)
trace_command.add_to(app)
balance_command.add_to(app)
certify_command.add_to(app)
compile_command.add_to(app)
out, err = Console(), Console(stderr=True)
# What a full disk, a quota, a broken device or a closed pipe answers to a write.
UNWRITTEN = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE
CODES = OUT_OF_MEMORY, CRASHED, INTERRUPTED, CLOSED_PIPE = 4, 70, 130, 141


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", metavar="")
    ] = False,
) -> None:
    if version:
        print(megamoe.__version__)
        raise typer.Exit


@app.command()
def run(
    preset: Annotated[
        str, typer.Argument(help=f"Model: {', '.join(MODELS)}.")
    ] = "deepseek-v4-flash",
    recipe: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(RECIPES)}; default: what it is deployed in there."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens per rank.")] = 64,
    ranks: Annotated[int, typer.Option(help="Ranks, a process each.")] = 1,
    scale: Annotated[
        str, typer.Option(help="Shrink both widths by this factor, or auto to fit this machine.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ... or auto.")] = "auto",
    backend: Annotated[str, typer.Option(help="auto or the name of a backend.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of weights, tokens and routing.")] = 0,
    as_json: Json = False,
) -> None:
    """Make a layer and tokens, run it, check it against the reference, say what it cost."""
    from megamoe.bench import job

    with Bars(quiet=as_json) as bars:
        result = job.run(
            model_named(preset),
            recipe=recipe,
            num_tokens=tokens,
            num_ranks=ranks,
            scale=_scale(scale),
            device=device_named(device),
            backend=backend,
            seed=seed,
            progress=bars,
        )
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))
    else:
        _print_result(result)
    raise typer.Exit(0 if result.ok else 1)


@app.command()
def formats(as_json: Json = False) -> None:
    """Print the number formats and the recipes made of them."""
    if as_json:
        rows = {
            f.name: {
                "element": f.element.name,
                "block": f.block,
                "scale": f.scale.value,
                "bits_per_value": f.bits_per_value,
            }
            for f in FORMATS.values()
        }
        recipes = {
            r.name: {"weights": r.weights.name, "acts": r.acts.name, "tolerance": r.tolerance}
            for r in RECIPES.values()
        }
        print(json.dumps({"formats": rows, "recipes": recipes}, indent=2))
        return
    columns = ("format", "element", "block", "scale", "bits/value", "about")
    parts = []
    for f in FORMATS.values():
        block = "x".join(map(str, f.block)) if f.scale.value != "none" else "-"
        scale = f.scale.value + (" x fp32" if f.has_global else "")
        parts.append((f.name, f.element.name, block, scale, f"{f.bits_per_value:.3g}", f.about))
    reason_table(out, "Formats", columns, parts)
    parts = [
        (r.name, r.weights.name, r.acts.name, f"{r.tolerance:g}", r.about) for r in RECIPES.values()
    ]
    reason_table(out, "Recipes", ("recipe", "weights", "activations", "tolerance", "about"), parts)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what works on this machine, and why the rest does not."""
    from dataclasses import asdict

    report = megamoe.doctor()
    if as_json:
        print(json.dumps(asdict(report), indent=2))
        return
    table = Table("", "what", "finding")
    for f in report.findings:
        table.add_row("[green]ok[/]" if f.ok else "[yellow]--[/]", f.name, escape(f.detail))
    out.print(table)
    for where, name in report.best.items():
        out.print(f"backend auto on {where}: [bold]{name}[/]")


@bench.command("quantize")
def bench_quantize(
    preset: Annotated[str, typer.Argument(help=f"Model: {', '.join(MODELS)}.")] = "tiny",
    recipe: Annotated[str, typer.Option(help=f"{', '.join(RECIPES)}.")] = "w4a8",
    experts: Annotated[int | None, typer.Option(help="How many; default: all of them.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ... or auto.")] = "auto",
    as_json: Json = False,
) -> None:
    """Quantise a model's experts: GB/s, and the memory it takes beside input and output."""
    from dataclasses import asdict

    from megamoe.bench.quantizing import measure

    with Bars(quiet=as_json) as bars:
        row = measure(model_named(preset), recipe, experts, device_named(device), bars)
    if as_json:
        print(json.dumps(asdict(row), indent=2))
        return
    out.print(
        f"{row.preset}, {row.recipe}: {row.num_experts} experts, {row.in_bytes / 1e9:.2f} GB "
        f"of BF16 in {row.seconds:.1f} s, {row.gbs:.2f} GB/s"
    )
    out.print(
        f"memory beside input and output: {row.extra_of_expert:.2f} of one expert's BF16 weights"
    )
    out.print(row.provenance, style="dim")


for _one in (*app.registered_commands, *bench.registered_commands):
    _one.cls = _Command


def main() -> None:
    """Run the command line; errors are one readable line and an exit code of their own."""
    plain_where_needed()
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # what is still buffered may fail to be written
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # a reader such as `head` has gone
            sys.exit(CLOSED_PIPE)
        raise
    except MegaMoEError as error:
        _say(str(error))
        sys.exit(3 if isinstance(error, NotAvailable) else 2)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in UNWRITTEN:
            _unwritten(error)
        if is_out_of_memory(error):
            reason = (str(error).strip().splitlines() or ["no text"])[0]
            _say(f"memory ran out; got {reason}; use fewer --tokens or a smaller --scale")
            sys.exit(OUT_OF_MEMORY)
        traceback.print_exc()
        _say(f"a defect of megamoe {megamoe.__version__}, not of your input: see the lines above")
        sys.exit(CRASHED)


def _unwritten(error: OSError) -> NoReturn:
    """End because output could not be written, and drop what is left of it."""
    with suppress(OSError, ValueError):  # the interpreter flushes stdout once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        sys.exit(CLOSED_PIPE)
    _say(f"output must be writable; got {error.strerror}; free space or write elsewhere")
    sys.exit(2)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: of Python, of torch on a GPU or of torch on the CPU."""
    words = "DefaultCPUAllocator", "not enough memory", "CUDA out of memory"
    kinds = {kind.__name__ for kind in type(error).__mro__}
    is_one = bool(kinds & {"MemoryError", "OutOfMemoryError"})
    return is_one or any(word in str(error) for word in words)


def _say(text: str) -> None:
    err.print(f"[red]megamoe:[/] {escape(text)}", highlight=False, soft_wrap=True)


def _print_result(r: Any) -> None:
    p = r.problem
    table = Table("what", "value", title=f"{r.preset}, {r.recipe}, {r.backend} on {r.device}")
    low, high = r.error_range
    ranks = f" on each of {p.num_ranks} ranks" if p.num_ranks > 1 else ""
    against = "bit for bit" if r.reference_error == 0 else f"{r.reference_error:.2e} relative"
    rows = {
        "shape": f"{p.hidden} wide, {p.intermediate} inside, top-{p.top_k} of {p.num_experts}",
        "tokens": f"{p.num_tokens}{ranks}",
        "experts touched": f"{r.experts_touched} of {p.num_experts}",
        "time": f"{r.time_ms:.1f} ms",
        "arithmetic": _rate(1e12 * r.tflops, "FLOP/s"),
        "bytes moved": f"{_size(r.bytes_moved)}, {_rate(1e9 * r.gbs, 'B/s')}",
        "weights": f"{_size(r.weight_bytes)}, {r.bf16_bytes / r.weight_bytes:.2f}x smaller than "
        f"BF16 ({_size(r.bf16_bytes)})",
        "error against BF16 layer": f"{r.error:.4f} relative (plausible {low:g} to {high:g})",
        "against the reference": f"{against}, token by token (bound {r.reference_bound:g})",
    }
    for what, value in rows.items():
        table.add_row(what, value)
    out.print(table)
    for note in r.notes:
        out.print(f"note: {note}")
    out.print("[bold green]correct[/]" if r.ok else "[bold red]WRONG: a check failed[/]")


def _rate(value: float, unit: str) -> str:
    """A rate with the prefix that gives it one to three digits before the point.

    >>> _rate(2e7, "FLOP/s"), _rate(2.66e6, "B/s"), _rate(3.1e12, "FLOP/s")
    ('20 MFLOP/s', '2.66 MB/s', '3.1 TFLOP/s')
    """
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value / 1e3:.3g} k{unit}"


def _size(num_bytes: int) -> str:
    """Bytes as MiB, or KiB where that is less than one."""
    mib = num_bytes / 2**20
    return f"{mib:,.1f} MiB" if mib >= 1 else f"{1024 * mib:,.1f} KiB"


def _scale(text: str) -> float | None:
    if text == "auto":
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    require(0 < value <= 1, "scale must be auto or lie in (0, 1]", got=text, kind=RangeError)
    return value
