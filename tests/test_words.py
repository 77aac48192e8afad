"""Words that the code had for things that the field has words for; none of them comes back."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# before -> now
GONE = {
    "crew": "state", "manner": "launch options", "greet": "signal", "mail": "replay arguments",
    "mailbox": "replay queue", "deal": "assignment", "hand": "work items", "firsts": "row_begin",
    "looks": "signature", "across": "num_n_tiles", "Held": "ExpertModule", "Calc": "Compute",
    "Faults": "DeviceStatus", "rooms": "symmetric buffers", "SECONDS": "L2_DONE",
    "EARLY": "PREFETCH_STEPS", "straight": "plain", "swapped": "swap_ab", "draw_tile": "dynamic",
    "told": "report", "num_told": "num_reported", "room": "stage", "meeting": "rendezvous",
    "meet": "gather", "SECOND": "L2",
}  # fmt: skip
# Participles that hid what a value is; MegaMoETimeout says what was `expected` and `seen`.
NO_NOUNS = {"found", "made", "kept", "told", "seen", "given", "turn"}
SAYS = {"errors.py": {"seen"}}
FILES = [
    path
    for folder in ("megamoe", "tests", "scripts")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "studies" not in path.parts
]


def names(path):
    yield path.stem
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_names_are_the_fields(path):
    assert not {name for name in names(path) if name.strip("_") in GONE}


@pytest.mark.parametrize(
    "path", [one for one in FILES if ROOT / "megamoe" in one.parents], ids=lambda p: p.name
)
def test_a_name_of_the_package_is_a_noun(path):
    says = SAYS.get(path.name, set())
    assert not {name.strip("_") for name in names(path)} & (NO_NOUNS - says)
