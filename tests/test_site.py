"""The documentation: the site builds without a warning, snippets run, the reference is complete."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import megamoe as mm
from megamoe.tested import TESTED, TRITON_OF_TORCH

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import api_docs  # noqa: E402

FENCE = re.compile(r"(?:<!-- ([^\n]*) -->\n)?```python\n(.*?)```", re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPETS = {str(page.relative_to(ROOT)): FENCE.findall(page.read_text()) for page in PAGES}
SNIPPETS = {name: found for name, found in SNIPPETS.items() if found and name != "docs/api.md"}


@pytest.mark.parametrize("name", SNIPPETS)
def test_snippets_run_in_the_order_of_their_page(name):
    """A comment `<!-- not run: why -->` before a fence says why it is not run here."""
    parts = [compile(code, name, "exec") for why, code in SNIPPETS[name] if not why]
    for why, code in SNIPPETS[name]:
        compile(code, name, "exec")
        assert not why or why.startswith("not run: "), why
    names = {}
    for part in parts:
        exec(part, names)


def test_the_pages_that_a_newcomer_reads_are_run():
    first = ("README.md", "docs/index.md", "docs/recipes.md", "docs/limits.md")
    for name in first:
        assert any(not why for why, _ in SNIPPETS[name]), name


def test_the_site_builds_strictly(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "api.html").is_file() and (tmp_path / "pictures/headline.png").is_file()


def test_the_reference_has_every_public_name():
    grouped = [name for names in api_docs.GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(mm.__all__)
    titles = re.findall(r"^### `mm\.(\w+)`$", api_docs.PAGE.read_text(), re.MULTILINE)
    assert sorted(titles) == sorted(mm.__all__)


def test_the_reference_is_that_of_the_docstrings():
    assert api_docs.PAGE.read_text() == api_docs.page(), "run python scripts/api_docs.py"


def test_every_argument_is_described():
    assert api_docs.missing() == []


def test_a_text_that_ends_too_early_counts_as_missing():
    for text in ("", "staged: the experts; chain:", "one, two,", "the sum of", "(up to 8"):
        assert api_docs.is_cut(text), text
    assert not api_docs.is_cut("the sum (of all ranks)")


def test_no_common_text_stands_for_a_name_with_several_meanings():
    def said(thing):
        return api_docs.texts(thing)[1]

    assert "one rank's" in said(mm.ExpertWeights.empty)["num_experts"]
    assert "of the layer" in said(mm.MoE.empty)["num_experts"]
    assert "chain" in said(mm.Plan)["mode"] and "chain" in said(mm.MoE)["mode"]
    assert said(mm.Plan)["passes"].endswith("alone")
    assert "| `**options` | `Any` | none |" in api_docs.PAGE.read_text()
    assert not re.search(r"\b[A-F]\d{3}\b", api_docs.PAGE.read_text())


def test_the_install_page_has_the_tested_versions():
    text = (ROOT / "docs" / "install.md").read_text()
    for torch, triton in TRITON_OF_TORCH.items():
        assert f"| {torch} | {triton} |" in text
    for one in TESTED:
        assert f"torch {one.torch} with Triton {one.triton}" in text
        assert one.gpu in text and one.driver in text and one.python in text


def test_exit_codes_are_documented():
    from megamoe.cli import main

    text = (ROOT / "docs" / "limits.md").read_text()
    for code in (0, 1, 2, 3, *main.CODES):
        assert f"\n| {code} | " in text
