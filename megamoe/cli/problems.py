"""What `plan` and `simulate` share: a problem from a preset or from numbers, and overrides."""

from __future__ import annotations

from typing import Annotated

import typer

from megamoe.bench.workloads import MODELS, model_named
from megamoe.errors import RangeError, require
from megamoe.formats.spec import RECIPES, recipe_on
from megamoe.hardware import MACHINES
from megamoe.planner.choice import Value
from megamoe.planner.overrides import OVERRIDES
from megamoe.problem import Problem

DEFAULT_PRESET = "deepseek-v4-flash"
DEFAULT_RECIPE = "w4a8"  # of a shape without a preset, by machine as a preset's
RECIPE_HELP = f"{', '.join(RECIPES)}; default: what the model is deployed in there."
SET_HELP = f"name=value, as often as wanted: {', '.join(OVERRIDES)}."
STUDIES = ("deep_gemm",)
STUDY_HELP = (
    f"{', '.join(STUDIES)}: a model of another system, which this library does not run; "
    "--set then takes that system's names."
)

PRESET_HELP = f"Model: {', '.join(MODELS)}; default: {DEFAULT_PRESET}, or the four sizes alone."
Preset = Annotated[str | None, typer.Argument(help=PRESET_HELP)]
Hidden = Annotated[int | None, typer.Option(help="Width of a token.")]
Intermediate = Annotated[int | None, typer.Option(help="Width after the activation.")]
Experts = Annotated[int | None, typer.Option(help="Experts over all ranks.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Experts of a token.")]
Recipe = Annotated[str | None, typer.Option(help=RECIPE_HELP)]
Tokens = Annotated[int, typer.Option(help="Tokens per rank.")]
Ranks = Annotated[int, typer.Option(help="Ranks that share the experts, a GPU each.")]
Machine = Annotated[str, typer.Option("--hardware", help=f"{', '.join(MACHINES)}.")]
Set = Annotated[list[str] | None, typer.Option("--set", help=SET_HELP)]
Study = Annotated[str | None, typer.Option("--study", help=STUDY_HELP)]


def counted(num: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "rank"), counted(8, "rank")
    ('1 rank', '8 ranks')
    """
    return f"{num:,} {noun}{'' if num == 1 else 's'}"


def problem_from(
    preset: str | None,
    shape: dict[str, int | None],
    *,
    recipe: str | None,
    tokens: int,
    ranks: int,
    arch: str,
) -> tuple[str, Problem]:
    """(name, problem): a preset, with given numbers in place of its own, or four numbers alone.

    `shape` has hidden, intermediate, num_experts and top_k, each None if not given; where no recipe
    is given, it is the default on `arch`.
    """
    missing = [name for name, value in shape.items() if value is None]
    if preset is None and len(missing) < len(shape):
        require(
            not missing,
            "a shape without a preset needs hidden, intermediate, experts and top-k",
            got="no " + ", no ".join(n.removeprefix("num_").replace("_", "-") for n in missing),
            fix="name a preset, or give all four",
            kind=RangeError,
        )
        name, own = "custom shape", {}
    else:
        model = model_named(preset or DEFAULT_PRESET)
        name = model.name
        own = {field: getattr(model, field) for field in shape}
        recipe = recipe or model.recipe_on(arch)
    sizes = {field: value for field, value in shape.items() if value is not None}
    if own and any(own[field] != value for field, value in sizes.items()):
        name += ", changed"
    whole = {**own, **sizes}
    return name, Problem(
        tokens,
        whole["hidden"],
        whole["intermediate"],
        whole["num_experts"],
        whole["top_k"],
        ranks,
        recipe or recipe_on(DEFAULT_RECIPE, arch),
    )


def overrides_from(pairs: list[str] | None) -> dict[str, Value]:
    """--set block_m=64 --set mode=staged: integers and true or false where they look like one."""
    overrides: dict[str, Value] = {}
    for pair in pairs or []:
        name, equals, text = pair.partition("=")
        require(
            bool(name and equals and text),
            "--set takes name=value",
            got=pair,
            fix="for example --set block_m=64",
            kind=RangeError,
        )
        overrides[name.strip().replace("-", "_")] = _value(text)
    return overrides


def _value(text: str) -> Value:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.lstrip("-").isdigit() else text
