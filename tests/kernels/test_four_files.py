"""A tile of a Hopper kernel is followed from its scheduler to its stores in four files at most."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = "megamoe.kernels."
# Leaves, which say nothing of where a tile goes: rings and waits, records, numbers.
PRIMITIVES = {
    "gluon.pipeline", "gluon.pool", "gluon.arithmetic", "gluon.l2_policy", "gluon.compat",
    "gluon.mega.sync", "gluon.mega.state", "gluon.mega.events", "hopper.weights.decode",
    "common.columns", "common.numbers", "common.quantise",
}  # fmt: skip
# What roles do before their first tile and after the last one.
BEGIN_AND_END = {"read_routing", "fill_pool", "fill_later", "combine"}
EPILOGUE = "hopper.gemm.epilogue"
FUSED = ["gluon.mega.scheduler", "hopper.mega.kernel", "hopper.gemm.swap_ab", EPILOGUE]
SWAP_AB = ["gluon.tile_scheduler", "hopper.gemm.swap_ab", EPILOGUE]
PLAIN = ["gluon.tile_scheduler", "hopper.gemm.plain", EPILOGUE]


@functools.cache
def module(name):
    """({function: its tree}, {name: (module, name) that it is imported as}) of a kernels' file."""
    path = ROOT / (KERNELS + name).replace(".", "/")
    tree = ast.parse(path.with_suffix(".py").read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    imported = {
        alias.asname or alias.name: (node.module.removeprefix(KERNELS), alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module.startswith(KERNELS)
        for alias in node.names
    }
    return functions, imported


def reached(roots):
    """The modules of all functions that the roots, (module, function), name or lead to."""
    seen, left = set(), list(roots)
    while left:
        where, name = left.pop()
        functions, imported = module(where)
        if name in imported:
            left.append(imported[name])
        elif name in functions and (where, name) not in seen:
            seen.add((where, name))
            if where not in PRIMITIVES:
                names = {n.id for n in ast.walk(functions[name]) if isinstance(n, ast.Name)}
                left += [(where, other) for other in names - BEGIN_AND_END]
    return {where for where, _ in seen}


def roots_of(where, *names):
    assert set(names) <= module(where)[0].keys(), "roles have other names"
    return [(where, name) for name in names]


TILES = {
    "fused": (FUSED, [
        *roots_of("gluon.mega.scheduler", "schedule_tiles", "pop_item"),
        *roots_of("hopper.mega.kernel", "load_weights", "load_tokens", "publish", "math"),
    ]),
    "swap_ab": (SWAP_AB, roots_of(
        "hopper.gemm.swap_ab", "load_weights", "load_tokens", "load_epilogue_operands", "math"
    )),
    "plain": (PLAIN, roots_of("hopper.gemm.plain", "load_weights", "math")),
    "plain, dynamic": (PLAIN, roots_of(
        "hopper.gemm.plain", "load_weights", "load_dynamic_tokens", "math"
    )),
    "plain, decoded per tile": ([*PLAIN, "hopper.gemm.decode_per_tile"], [
        *roots_of("hopper.gemm.decode_per_tile", "load_images", "decode"),
        *roots_of("hopper.gemm.plain", "math"),
    ]),
    "plain, decoded per wave": ([*PLAIN, "hopper.gemm.decode_per_wave"], [
        *roots_of("hopper.gemm.decode_per_wave", "load_decoded", "load_jobs", "decode_jobs",
                  "publish_jobs"),
        *roots_of("hopper.gemm.plain", "load_tokens", "math"),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("tile", TILES)
def test_a_tile_is_followed_in_four_files(tile):
    files, roots = TILES[tile]
    assert len(files) <= 4 and reached(roots) - PRIMITIVES == set(files)


def test_primitives_are_leaves():
    for name in PRIMITIVES:
        _, imported = module(name)
        compiler = {"gluon.compiler_hooks", "common.compat"}
        assert {where for where, _ in imported.values()} <= PRIMITIVES | compiler, name


def test_the_document_names_these_files_and_the_primitives():
    text = (ROOT / "docs" / "architecture.md").read_text()
    (section,) = re.findall(r"## One tile on Hopper\n(.*?)\n## ", text, re.DOTALL)
    for name in (*FUSED, *PRIMITIVES):
        path = name.replace(".", "/") + ".py"
        assert f"`kernels/{path}`" in section or f"`{path.rpartition('/')[2]}`" in section, path


def test_a_function_elsewhere_would_be_seen(monkeypatch):
    monkeypatch.setattr("tests.kernels.test_four_files.PRIMITIVES", PRIMITIVES - {"gluon.pool"})
    files, roots = TILES["fused"]
    assert reached(roots) - PRIMITIVES == {*files, "gluon.pool"}
