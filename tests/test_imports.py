"""Packages of megamoe import one way, held by a test."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "megamoe"
FILES = sorted(ROOT.rglob("*.py"))

# A package (or module) of megamoe imports only those to its left.
ORDER = [
    "errors", "files", "tested", "certificate", "problem", "hardware", "formats", "routing",
    "reference", "layout", "planner", "balance", "kernels", "distributed", "engine", "compat",
    "integrations", "simulator", "trace", "bench", "certify", "studies", "cli",
]  # fmt: skip
NO_TORCH = {
    "errors", "files", "tested", "certificate", "problem", "layout", "planner", "balance",
    "simulator", "trace", "studies",
}  # fmt: skip
TORCH_FILES = {"studies/deep_gemm/local_world.py"}
NO_TORCH_FILES = {"formats/spec.py", "routing/spec.py", "bench/workloads.py", "__init__.py"}
SEE_REFERENCE = {"reference", "distributed", "engine", "bench", "certify", "studies"}
SEE_STUDIES = {"cli/study.py"}  # behind --study; the study itself, too


def imports(path: Path, *, top_level: bool = False) -> set[str]:
    """Modules that a file imports; `from megamoe import x` counts as megamoe.x."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level else ast.walk(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            found |= {f"megamoe.{a.name}" for a in node.names} if module == "megamoe" else {module}
    return found


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    package = package_of(path)
    if package in ("__init__", "__main__"):
        return
    for name in imports(path):
        top, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if top == "megamoe" and target in ORDER:
            assert ORDER.index(target) <= ORDER.index(package), f"{package} may not import {name}"
            assert target != "reference" or package in SEE_REFERENCE, f"{package} sees the oracle"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_packages_without_torch_do_not_load_it(path):
    name = str(path.relative_to(ROOT))
    if name in NO_TORCH_FILES or (package_of(path) in NO_TORCH and name not in TORCH_FILES):
        loaded = {name.partition(".")[0] for name in imports(path)}
        assert not loaded & {"torch", "triton", "numpy"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_launch_depends_on_a_study(path):
    """What stands in `studies` is true of other systems: the library works without the folder."""
    name = str(path.relative_to(ROOT))
    if package_of(path) != "studies" and name not in SEE_STUDIES:
        assert not {one for one in imports(path) if one.startswith("megamoe.studies")}


def test_a_forbidden_import_would_be_seen(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("from megamoe import reference\nimport torch.nn\n")
    assert imports(bad) == {"megamoe.reference", "torch.nn"}


@pytest.mark.parametrize("what", ["megamoe", "megamoe.formats.spec", "megamoe.cli.main"])
def test_importing_costs_no_torch(what):
    code = f"import sys, {what}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent).returncode == 0


def test_every_public_name_resolves():
    import megamoe

    for name in megamoe.__all__:
        assert getattr(megamoe, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        megamoe.nothing  # noqa: B018


def test_type_checkers_see_the_public_names_where_they_live():
    import megamoe

    (block,) = (
        node for node in ast.parse((ROOT / "__init__.py").read_text()).body
        if isinstance(node, ast.If)
    )  # fmt: skip
    seen = {
        alias.name: node.module.removeprefix("megamoe.")
        for node in block.body
        for alias in node.names
    }
    assert seen == megamoe._HOME and sorted(megamoe._HOME) == sorted(megamoe.__all__)
    assert set(megamoe.__all__) <= set(dir(megamoe)) and "import_module" not in dir(megamoe)
