"""Documents that must stay true: the checklist is complete, and links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
COUNTS = {"A": 87, "B": 13, "C": 14, "D": 20, "E": 9, "F": 8}


def test_the_checklist_has_every_id_once_with_a_state():
    rows = re.findall(
        r"^\| ([A-F]\d{3}) \| .+ \| (done|study|not yet|n/a)[^|]*\|$",
        (ROOT / "docs" / "checklist.md").read_text(),
        re.MULTILINE,
    )
    wanted = [f"{letter}{n:03}" for letter, count in COUNTS.items() for n in range(1, count + 1)]
    assert [name for name, _ in rows] == wanted


def test_files_named_as_done_exist():
    text = (ROOT / "docs" / "checklist.md").read_text()
    for name in re.findall(r"`([a-z_/]+\.py)`", text):
        assert (ROOT / "megamoe" / name).is_file(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_index_links_every_page():
    docs = ROOT / "docs"
    linked = set(re.findall(r"\]\(([^)#:]+\.md)", (docs / "index.md").read_text()))
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")}
    assert {p for p in pages if not p.startswith("decisions/")} - linked == {"index.md"}
