"""Write docs/api.md from the docstrings of every public name: `python scripts/api_docs.py`.

A docstring names its arguments in lines of their own, "name  text", the text aligned; a field of a
dataclass may carry a comment instead. `missing()` lists the arguments that nothing is said about.
"""

from __future__ import annotations

import inspect
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import megamoe as mm  # noqa: E402

PAGE = ROOT / "docs" / "api.md"
GROUPS = {
    "The layer": (
        "moe", "MoE", "GraphPool", "ExpertWeights", "Checkpoint", "Options", "warmup", "doctor",
    ),
    "Formats and routing": ("quantize", "dequantize", "Quantized", "route", "Router"),
    "Several ranks": ("Placement", "propose", "Statistics", "LocalRanks"),
    "Plan and simulate": ("Problem", "Hardware", "plan", "Plan", "simulate"),
    "Errors": (
        "MegaMoEError", "ShapeError", "DTypeError", "DeviceError", "RangeError", "FileError",
        "CapacityError", "NotAvailable", "RankError", "MegaMoETimeout",
    ),
}  # fmt: skip
# What public functions return, where it is no name of `mm`: value -> its module.
VALUES = {
    "Prediction": "simulator.prediction", "Schedule": "simulator.schedule",
    "Constants": "simulator.constants", "Launch": "planner.launches", "Pass": "planner.launches",
    "Buffer": "planner.plan", "CallSpec": "planner.call", "Report": "engine.backends",
    "Picked": "engine.loader",
}  # fmt: skip
HEAD = """# API reference

Everything that `import megamoe as mm` offers, made from the docstrings by
`scripts/api_docs.py`. Errors are `mm.MegaMoEError` and its kinds; each also derives from the
built-in error that fits, so `except ValueError` works too. Grouped GEMMs alone are in
`megamoe.engine.grouped`, which may still change.
"""
# What these mean wherever they occur; those of Options and Problem are said there.
COMMON = {
    "gate_up": '"split": gate rows, then up rows; "interleaved": gate, up, gate, up, ...',
    "b13": "biases [E, 2I], or None",
    "b2": "biases [E, H], or None",
    "parts": "experts in one recipe and of one size",
    "tensors": "by the names that `state_dict` gives them",
    "layer": "a `mm.MoE`",
    "path": "the file",
    "device": "torch device, or its name",
    "progress": "called with the number done so far",
    "rank": "this rank, from 0",
    "weights": "the experts of this rank",
    "shared": "experts that see every token with weight 1, in any recipe; None: there are none",
    "topk_idx": "int32 or int64 [T, top_k]; -1 masks a slot",
    "topk_weights": "float32 [T, top_k]",
    "loads": "rows of each logical expert",
    "seed": "seed of what is sampled",
}
# These mean something else from place to place: each docstring says what, and no table helps out.
OWN = {"num_experts", "experts", "num_tokens", "mode", "backend", "options", "overrides"}
NAMES = re.compile(r"(\w+(?:, \w+)*)  +(\S.*)")


def parsed(doc: str, names: set[str]) -> tuple[str, dict[str, str]]:
    """(the docstring without its argument lines, argument -> text)."""
    rest, found = [], {}
    current: list[str] = []
    indent = 0
    for line in doc.splitlines():
        match = NAMES.match(line.strip())
        here = match[1].split(", ") if match else []
        if match and (set(here) <= names or here == ["returns"]):
            current, indent = here, len(line) - len(line.lstrip())
            found.update(dict.fromkeys(here, match[2]))
        elif current and line.strip() and len(line) - len(line.lstrip()) > indent + 1:
            for name in current:
                found[name] += " " + line.strip()
        else:
            current = []
            rest.append(line)
    return "\n".join(rest).strip(), found


def parameters(thing: Any) -> list[inspect.Parameter]:
    found = inspect.signature(thing).parameters.values()
    return [p for p in found if p.name not in ("self", "cls")]


def comments(cls: type) -> dict[str, str]:
    """What stands after the fields of a dataclass, and goes on in lines of comment below."""
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):
        return {}
    found = re.findall(r"^    (\w+): [^#\n]*  # (.+(?:\n    # .+)*)$", source, re.MULTILINE)
    return {name: text.replace("\n    # ", " ") for name, text in found}


def texts(thing: Any) -> tuple[str, dict[str, str]]:
    names = {p.name for p in parameters(thing)}
    rest, found = parsed(inspect.getdoc(thing) or "", names)
    if isinstance(thing, type):
        found = comments(thing) | found
    if thing not in (mm.Options, mm.Problem):
        of_values = texts(mm.Problem)[1] | texts(mm.Options)[1]
        common = {name: text for name, text in (COMMON | of_values).items() if name not in OWN}
        found = common | found
    return rest, {name: text for name, text in found.items() if name in names | {"returns"}}


def type_of(annotation: Any) -> str:
    """A union with "or": a bar would end the cell of the table."""
    parts = [] if annotation is inspect.Parameter.empty else str(annotation).split(" | ")
    return " or ".join(f"`{part}`" for part in parts)


def stars(p: inspect.Parameter) -> str:
    """What stands before the name of keywords that are taken together."""
    return "**" if p.kind is p.VAR_KEYWORD else ""


def default_of(p: inspect.Parameter) -> str:
    if p.kind is p.VAR_KEYWORD:
        return "none"
    if p.default is p.empty:
        return "required"
    if isinstance(p.default, (str, int, float, bool, tuple, type(None))):
        return f"`{p.default!r}`"
    return "its own"


def table(thing: Any, found: dict[str, str]) -> list[str]:
    rows = []
    for p in parameters(thing):
        cells = f"`{stars(p)}{p.name}`", type_of(p.annotation), default_of(p)
        rows.append(f"| {' | '.join(cells)} | {found.get(p.name, '')} |")
    if not rows:
        return []
    return ["", "| argument | type | default | meaning |", "| --- | --- | --- | --- |", *rows]


def described(title: str, thing: Any, level: str) -> list[str]:
    if isinstance(thing, type) and issubclass(thing, BaseException):
        bases = " and ".join(f"`{b.__name__}`" for b in thing.__bases__)
        doc = _paragraphs(inspect.getdoc(thing) or "")
        return ["", f"{level} `{title}`", "", doc, "", f"Derives from {bases}."]
    rest, found = texts(thing)
    lines = ["", f"{level} `{title}`", "", _paragraphs(rest), *table(thing, found)]
    kind = "" if isinstance(thing, type) else type_of(inspect.signature(thing).return_annotation)
    said = [part for part in ("" if kind == "`None`" else kind, found.get("returns", "")) if part]
    return [*lines, "", f"Returns {': '.join(said)}."] if said else lines


def _paragraphs(text: str) -> str:
    """Doctests as code, lines "name  text" as items of a list, the rest as it stands."""
    found: list[str] = []
    code = item = False
    for line in text.splitlines():
        match = re.match(r"(\S+(?: \S+)*)  +(\S.*)", line)
        if match and not code:
            found += [] if item else [""]
            found.append(f"- **{match[1]}**: {match[2]}")
            item = True
            continue
        if item and line.startswith("    "):
            found[-1] += " " + line.strip()
            continue
        item = False
        is_code = line.startswith((">>>", "...", "    ")) or (code and bool(line.strip()))
        if is_code != code:
            found += ["", "```python"] if is_code else ["```", ""]
            code = is_code
        found.append(line)
    return "\n".join([*found, "```"] if code else found).strip()


def members(cls: type) -> list[tuple[str, Any]]:
    """Public methods and properties that a class defines and describes itself."""
    return [
        (name, value)
        for name, value in vars(cls).items()
        if not name.startswith("_")
        and getattr(value, "__doc__", None)
        and (isinstance(value, (property, classmethod, staticmethod)) or inspect.isfunction(value))
    ]


def of_members(name: str, thing: type) -> list[str]:
    """The methods of a class, then its properties."""
    found, lines = members(thing), []
    properties = [(n, v) for n, v in found if isinstance(v, property)]
    for own, value in found:
        if not isinstance(value, property):
            lines += described(f"{name}.{own}", getattr(thing, own), "####")
    if properties:
        lines += ["", "| property | type | meaning |", "| --- | --- | --- |"]
    for own, value in properties:
        kind = type_of(inspect.signature(value.fget).return_annotation)
        lines.append(f"| `{own}` | {kind} | {_first(inspect.getdoc(value) or '')} |")
    return lines


def page() -> str:
    lines = [HEAD.strip()]
    for group, names in GROUPS.items():
        lines += ["", f"## {group}"]
        for name in names:
            thing = getattr(mm, name)
            lines += described(f"mm.{name}", thing, "###")
            if isinstance(thing, type) and not issubclass(thing, BaseException):
                lines += of_members(name, thing)
    lines += ["", "## Values that these return", "", "They are no names of `mm`."]
    for name, module in VALUES.items():
        thing = getattr(import_module(f"megamoe.{module}"), name)
        lines += [*described(f"megamoe.{module}.{name}", thing, "###"), *of_members(name, thing)]
    return "\n".join(lines) + "\n"


def _first(doc: str) -> str:
    return " ".join(doc.split("\n\n")[0].split()).replace("|", "\\|")


def missing() -> list[str]:
    """Arguments, as name.argument, about which no docstring says anything, or half a sentence."""
    found = []
    for name in mm.__all__:
        thing = getattr(mm, name)
        if isinstance(thing, type) and issubclass(thing, BaseException):
            continue
        things = {name: thing}
        if isinstance(thing, type):
            things |= {
                f"{name}.{n}": getattr(thing, n)
                for n, v in members(thing)
                if not isinstance(v, property)
            }
        for title, one in things.items():
            said = texts(one)[1]
            found += [f"{title}.{p.name}" for p in parameters(one) if is_cut(said.get(p.name, ""))]
    return found


def is_cut(text: str) -> bool:
    """Whether a text is missing, or ends before its sentence does."""
    is_open = text.count("(") != text.count(")")
    return not text or is_open or text.endswith((":", ",", ";", " and", " or", " of", " the", "-"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}; without a word: {', '.join(missing()) or 'none'}")
