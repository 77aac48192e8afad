"""How released packages call DeepGEMM's MegaMoE, read from their wheels as text; none is imported.

    pip download --no-deps -d WHEELS sgl-deep-gemm==0.2.5 vllm==0.33.0 sglang==0.5.23 ...
    python scripts/wheel_calls.py WHEELS > tests/data/deep_gemm_calls.json

Writes the parameters of the fork's own functions, and for every call of one of them in the other
wheels how many arguments stand by position and which by name. `tests/compat/test_callers.py` binds
all of them to our signatures.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

UPSTREAM = "sgl_deep_gemm"
FILES = ("mega/__init__", "utils/math", "utils/layout", "utils/dist", "testing/bench",
         "testing/numeric", "testing/utils")  # fmt: skip
# Names that other branches have, and settings that are bound without a def.
MORE = ("NVFP4SymmBuffer", "fp8_mega_moe", "get_block_m_for_nvfp4_mega_moe", "get_num_sms",
        "get_symm_buffer_for_sm90_mega_moe", "set_num_sms", "transform_sf_into_required_layout",
        "transform_weights_for_mega_moe_sm90")  # fmt: skip
MODULES = ("deep_gemm", "deepgemm", "_deep_gemm", "dg")  # what callers call the module


def sources(wheel: Path) -> Iterator[tuple[str, ast.Module]]:
    """Path and syntax tree of every Python file of a wheel that speaks of DeepGEMM."""
    with zipfile.ZipFile(wheel) as files:
        for name in sorted(files.namelist()):
            if name.endswith(".py"):
                text = files.read(name)
                if b"deep_gemm" in text or b"deepgemm" in text:
                    yield name, ast.parse(text)


def signatures(wheel: Path) -> dict[str, list[str]]:
    """ "utils/math.align": parameter names, of the functions that callers may use."""
    found = {}
    with zipfile.ZipFile(wheel) as files:
        for file in FILES:
            for node in ast.walk(ast.parse(files.read(f"deep_gemm/{file}.py"))):
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                    if node.args.args[:1] and node.args.args[0].arg == "self":
                        continue
                    if node.name in ("decorator", "wrapper"):
                        continue
                    found[f"{file}.{node.name}"] = [a.arg for a in node.args.args]
                if isinstance(node, ast.ClassDef) and node.name == "SymmBuffer":
                    made = next(f for f in node.body if getattr(f, "name", "") == "__init__")
                    assert isinstance(made, ast.FunctionDef)
                    found[f"{file}.SymmBuffer"] = [a.arg for a in made.args.args[1:]]
    return dict(sorted(found.items()))


def calls(tree: ast.Module, names: set[str]) -> Iterator[dict[str, object]]:
    """Calls of `deep_gemm.name(...)`, or of a name that was imported from it."""
    imported = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "deep_gemm"
        for alias in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        func, name = node.func, None
        if isinstance(func, ast.Attribute):
            owner = func.value
            last = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            name = func.attr if last in MODULES else None
        elif isinstance(func, ast.Name):
            name = imported.get(func.id)
        if name in names:
            yield {
                "name": name,
                "line": node.lineno,
                "by_position": sum(not isinstance(a, ast.Starred) for a in node.args),
                "by_name": [k.arg for k in node.keywords if k.arg],
                "has_more": any(isinstance(a, ast.Starred) for a in node.args)
                or any(k.arg is None for k in node.keywords),
            }


def main() -> None:
    wheels = sorted(Path(sys.argv[1]).glob("*.whl"))
    own = next(w for w in wheels if w.name.startswith(UPSTREAM))
    upstream = signatures(own)
    names = {name.split(".")[-1] for name in upstream} | set(MORE)
    rows = [
        {"wheel": "-".join(wheel.name.split("-")[:2]), "file": file, **call}
        for wheel in wheels
        if wheel != own
        for file, tree in sources(wheel)
        for call in calls(tree, names)
    ]
    table = {"upstream": "-".join(own.name.split("-")[:2]), "signatures": upstream, "calls": rows}
    print(json.dumps(table, indent=None, separators=(",", ":")).replace('{"wheel"', '\n{"wheel"'))


if __name__ == "__main__":
    main()
