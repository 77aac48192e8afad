"""`megamoe compile`: all kernels of a model's layer into the disk cache, without a GPU."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from megamoe.bench.workloads import MODELS, Model, model_named
from megamoe.cli.shared import Bars, Json
from megamoe.errors import NotAvailable, RangeError, one_of, require
from megamoe.formats.spec import RECIPES, recipe_named
from megamoe.hardware import MACHINES, Hardware
from megamoe.planner.call import SharedSpec
from megamoe.planner.plan import MODES
from megamoe.problem import check_even

if TYPE_CHECKING:
    from megamoe.engine.recording import LayerSpec

out = Console()
MAX_SIZES = 16384
TOKENS_HELP = "Numbers of tokens per rank, e.g. 1,8,64 or 1-256,512."


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("compile")(command)


def command(
    preset: Annotated[str, typer.Argument(help=f"Model: {', '.join(MODELS)}.")],
    tokens: Annotated[str, typer.Option(help=TOKENS_HELP)] = "1,2,4,8,16,32,64,128,256,512",
    recipe: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(RECIPES)}; default: what it is deployed in there."),
    ] = None,
    ranks: Annotated[int, typer.Option(help="Ranks of the process group; 1: no group.")] = 1,
    max_tokens: Annotated[
        int | None, typer.Option(help="Over a group: max_tokens_per_rank; default: the largest.")
    ] = None,
    experts: Annotated[
        int | None, typer.Option(help="Experts over all ranks, if not the model's.")
    ] = None,
    gpu: Annotated[str, typer.Option(help=f"{', '.join(MACHINES)}.")] = "h200",
    mode: Annotated[
        str, typer.Option(help="auto, staged, fused, split or, over ranks, chain.")
    ] = "auto",
    graphs: Annotated[
        bool, typer.Option(help="With the graphs of a layer of cuda_graphs=True.", metavar="")
    ] = True,
    shared: Annotated[
        bool, typer.Option(help="With the model's shared experts.", metavar="")
    ] = False,
    processes: Annotated[
        int | None, typer.Option(help="That compile side by side; default: one per core.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count the kernels and compile none.", metavar="")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compile what mm.MoE launches for these sizes into Triton's disk cache. Needs no GPU."""
    model = model_named(preset)
    sizes = sizes_from(tokens)
    layer = layer_spec(
        model, Hardware.named(gpu), recipe=recipe, ranks=ranks, experts=experts, mode=mode,
        graphs=graphs, shared=shared, max_tokens=max_tokens or max(sizes),
    )  # fmt: skip
    if dry_run:
        cubins = count_cubins(layer, sizes)
        if as_json:
            print(json.dumps(cubins, indent=2))
        else:
            print_cubins(cubins, len(sizes))
        return
    _need_triton()
    from megamoe.engine.precompile import compile_layer

    with Bars(quiet=as_json) as bars:
        compiled = compile_layer(
            layer, sizes, processes=processes,
            progress=lambda done, of: bars("cubins", done, of),
        )  # fmt: skip
    if as_json:
        print(json.dumps(compiled._asdict(), indent=2))
    else:
        out.print(f"{model.name}, {layer.recipe}: {compiled}", highlight=False)


def layer_spec(
    model: Model, machine: Hardware, *, recipe: str | None, ranks: int, experts: int | None,
    mode: str, graphs: bool, shared: bool, max_tokens: int,
) -> LayerSpec:  # fmt: skip
    """The layer of a model, with weights whose exponents fit the recipe's fastest image."""
    _need_triton()
    from megamoe.engine.recording import LayerSpec

    recipe, num = recipe or model.recipe_on(machine.arch), experts or model.num_experts
    fmt = recipe_named(recipe).weights
    one_of(mode, MODES, "mode")
    require(
        mode != "chain" or ranks > 1, "mode chain is for the ranks of a group",
        got=f"--ranks {ranks}", fix="give --ranks 2 to 8", kind=RangeError,
    )  # fmt: skip
    check_even(num, ranks)
    extra = None
    if shared and model.num_shared:
        apart = "" if fmt.name == "mxfp4" and not model.has_bias else f"shared experts in {recipe}"
        extra = SharedSpec(model.num_shared, recipe, model.intermediate, True, apart)
    return LayerSpec(
        recipe, model.hidden, model.intermediate, num, model.top_k,
        (machine.label, machine.num_sms, machine.arch, machine.hbm_bytes), num_ranks=ranks,
        options=model.options, has_bias=model.has_bias, shared=extra, max_tokens=max_tokens,
        graphs=graphs, overrides=(("mode", mode),),
    )  # fmt: skip


def count_cubins(layer: LayerSpec, sizes: Sequence[int]) -> dict[str, int]:
    """By kernel, how many compilations calls of these sizes need."""
    from megamoe.engine.recording import cubins_of

    return dict(Counter(one.kernel for one in cubins_of(layer, sizes)))


def print_cubins(cubins: dict[str, int], num_sizes: int) -> None:
    """A table of them."""
    sizes = f"{num_sizes} size{'s' * (num_sizes != 1)}"
    table = Table(title=f"{sum(cubins.values())} cubins for {sizes}", title_justify="left")
    table.add_column("kernel")
    table.add_column("cubins", justify="right")
    for name, num in cubins.items():
        table.add_row(name, str(num))
    out.print(table)


def sizes_from(text: str) -> list[int]:
    """Numbers and ranges of numbers.

    >>> sizes_from("8,1-3"), sizes_from("64")
    ([1, 2, 3, 8], [64])
    """
    sizes: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        is_number = first.isdigit() and (not dash or last.isdigit())
        require(is_number, "tokens must be numbers or ranges", got=part, fix="such as 1,8,64-128",
                kind=RangeError)  # fmt: skip
        require(int(first) <= int(last or first), "a range of tokens must go up", got=part,
                fix="such as 64-128", kind=RangeError)  # fmt: skip
        sizes |= set(range(int(first), int(last or first) + 1))
    sizes -= {0}
    require(
        0 < len(sizes) <= MAX_SIZES, f"there must be 1 to {MAX_SIZES} numbers of tokens",
        got=len(sizes), kind=RangeError,
    )  # fmt: skip
    return sorted(sizes)


def _need_triton() -> None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise NotAvailable(f"compiling needs Triton; got {error}; pip install triton") from error
