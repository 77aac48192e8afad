"""What is installed: bounds that go together, and files that a source archive must have."""

import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from megamoe.engine import backends
from megamoe.tested import TESTED, TRITON_OF_TORCH, gpu_warning, minor, triton_warning

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDS = {re.split(r"[<>=!~; ]", need)[0]: need for need in PROJECT["dependencies"]}
CONSTRAINTS = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line
)


def numbers(version):
    return tuple(int(part) for part in version.split("+")[0].split("."))


def allows(need, version):
    """Whether a requirement's bounds, of the forms >= and <, hold for a version."""
    bounds = re.findall(r"(>=|<)([\d.]+)", need.partition(";")[0])
    return all(
        numbers(version) >= numbers(bound) if sign == ">=" else numbers(version) < numbers(bound)
        for sign, bound in bounds
    )


def test_every_torch_that_is_allowed_has_a_triton_that_is_allowed():
    """torch's CUDA wheels require one Triton: refusing that refuses the torch."""
    for torch, triton in TRITON_OF_TORCH.items():
        if allows(NEEDS["torch"], torch):
            assert allows(NEEDS["triton"], triton), (torch, triton)
    assert not allows(NEEDS["torch"], "2.9") and not allows(NEEDS["triton"], TRITON_OF_TORCH["2.9"])


def test_what_was_tested_can_be_installed():
    for one in TESTED:
        assert allows(NEEDS["torch"], one.torch) and allows(NEEDS["triton"], one.triton)
        assert allows(PROJECT["requires-python"], one.python)
    assert any(TRITON_OF_TORCH[minor(t.torch)] == minor(t.triton) for t in TESTED if t.gpu)


def test_ci_installs_what_pyproject_allows():
    for name, need in NEEDS.items():
        assert allows(need, CONSTRAINTS[name]), need
    for extra in ("docs", "test"):
        for need in PROJECT["optional-dependencies"][extra]:
            name = re.split(r"[<>=!~; ]", need)[0]
            assert name in CONSTRAINTS and allows(need, CONSTRAINTS[name]), need


def test_the_source_archive_has_every_file_of_the_checkout():
    """Tests read documents, records and data: without one of them they fail in an archive."""
    lines = [line.split() for line in (ROOT / "MANIFEST.in").read_text().splitlines()]
    single = {name for words in lines if words[0] == "include" for name in words[1:]}
    assert all((ROOT / name).is_file() for name in single)
    trees = [words[1:] for words in lines if words[0] == "recursive-include"]
    by_setuptools = {"README.md", "LICENSE", "MANIFEST.in", "pyproject.toml"}
    git = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True)
    if git.returncode:
        pytest.skip("no git checkout")
    for path in git.stdout.splitlines():
        name = path.rpartition("/")[2]
        assert (
            path in single | by_setuptools | {".gitignore"}
            or path.startswith("megamoe/")
            or any(
                path.startswith(f"{folder}/") and any(fnmatch(name, one) for one in patterns)
                for folder, *patterns in trees
            )
        ), path


def test_authors_are_those_of_the_license():
    (author,) = PROJECT["authors"]
    assert f"Copyright (c) 2026 {author['name']}\n" in (ROOT / "LICENSE").read_text()


def test_types_are_shipped():
    assert (ROOT / "megamoe" / "py.typed").is_file()
    assert "Typing :: Typed" in PROJECT["classifiers"]


def test_data_beside_the_code_is_shipped():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]
    shipped = {
        path
        for package, patterns in data.items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    for path in (ROOT / "megamoe").rglob("*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            assert path in shipped, path


def test_doctor_warns_of_an_untested_triton(monkeypatch):
    real = backends.metadata.version
    monkeypatch.setattr(
        backends.metadata, "version", lambda name: "3.8.0" if name == "triton" else real(name)
    )
    (found,) = (f for f in backends.doctor().findings if f.name == "triton")
    assert not found.ok and found.detail.startswith("3.8.0: compiled there, never run; tested")


@pytest.mark.parametrize(("name", "warns"), [("NVIDIA H200", False), ("NVIDIA H100 80GB", True)])
def test_a_gpu_that_was_never_run_is_named(name, warns):
    assert bool(gpu_warning(name)) == warns
    assert not triton_warning("3.6.1")
    assert triton_warning("3.9.0").startswith("compiled there, never run; tested is 3.6")
    assert triton_warning("3.10.0").startswith("untested; tested is 3.6")


def test_workflows_name_no_host_of_packages():
    """A mirror of the user's own serves CI too: actions and the runner are all that is named."""
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        assert not re.search(r"https?://|--(extra-)?index-url", path.read_text()), path
    assert "./test --every" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def test_the_packages_are_those_of_megamoe_alone():
    """A folder beside it, such as megamoe-simulation, is none."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert tool["packages"]["find"]["include"] == ["megamoe", "megamoe.*"]
