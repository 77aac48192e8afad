"""Loops of kernels carry what they should: a trap of Gluon's that the emulator cannot show.

    before = idx
    for k in range(steps):
        use(before)
        before = idx
        idx += 1

Python, and so the emulator, uses the idx of the step before. Compiled, `before` is for ever the
first idx: at its first look at the loop the compiler finds the same value in both.
"""

import ast
from collections import Counter
from pathlib import Path

import pytest

import megamoe.kernels

FILES = sorted(Path(megamoe.kernels.__file__).parent.rglob("*.py"))
TRAP = "before = idx\nfor k in x:\n    before = idx\n    idx += 1"


def aliases(node):
    """(name, other) of every `name = other`; other: a name, or a field of one."""
    for found in ast.walk(node):
        if isinstance(found, ast.Assign) and isinstance(found.value, ast.Name | ast.Attribute):
            for target in found.targets:
                if isinstance(target, ast.Name):
                    yield target.id, ast.unparse(found.value)


def stored(node):
    """Names that are set."""
    return {
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }


def lost(function):
    """Lines of loops that would not carry a variable."""
    for loop in ast.walk(function):
        if isinstance(loop, ast.For | ast.While):
            inside, here = Counter(aliases(loop)), stored(loop)
            outside = Counter(aliases(function)) - inside
            if any(pair in outside and pair[1].partition(".")[0] in here for pair in inside):
                yield loop.lineno


def test_the_trap_is_seen():
    assert list(lost(ast.parse(TRAP))) == [2]
    assert not list(lost(ast.parse(TRAP.replace("    before = idx", "    before = idx + 0"))))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_loops_carry_what_they_set(path):
    functions = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]
    assert not [(f.name, line) for f in functions for line in lost(f)]
