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


NOT_RUN = "emulated and compiled, not yet run on the hardware"
BLACKWELL = re.compile(r"blackwell|\bG?B200\b|\bB300\b", re.IGNORECASE)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_who_names_blackwell_says_that_it_has_not_run_or_links_to_what_is_known(page):
    text = " ".join(page.read_text().split())
    if BLACKWELL.search(text):
        is_linked = re.search(r"\]\([^)]*blackwell\.md[^)]*\)", text)
        assert is_linked or NOT_RUN in text.replace("Emulated", "emulated"), page


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_index_links_every_page():
    docs = ROOT / "docs"
    linked = set(re.findall(r"\]\(([^)#:]+\.md)", (docs / "index.md").read_text()))
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")}
    assert {p for p in pages if not p.startswith("decisions/")} - linked == {"index.md"}


def commits_in(text):
    """Words that can only be a commit: 7 to 12 hexadecimal digits, of which some are letters."""
    return re.findall(r"\b(?=\w*\d)(?=\w*[a-f])[0-9a-f]{7,12}\b", text)


def citing():
    """Pages whose figures are of today; decisions are of their day."""
    for page in PAGES:
        if page.parent.name != "decisions":
            yield pytest.param(page, id=str(page.relative_to(ROOT)))


@pytest.mark.parametrize("page", list(citing()))
def test_a_record_that_is_cited_with_a_commit_has_it(page):
    """In a paragraph, row or item that cites records, a commit stands in one of them."""
    records = {p.name: p.read_text() for p in (ROOT / "benchmarks" / "h200").iterdir()}
    for part in re.split(r"\n\s*\n|\n(?=\||- )", page.read_text()):
        cited = {name for name in re.findall(r"[\w-]+\.(?:txt|json)\b", part) if name in records}
        for commit in commits_in(part) if cited else ():
            assert any(commit[:7] in records[name] for name in cited), (commit, sorted(cited))


def test_nothing_says_to_install_what_is_not_released():
    """Until a release, megamoe is installed from a checkout: no package index has it."""
    texts = [*PAGES, *(ROOT / "megamoe").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    for page in texts:
        assert not re.search(r"install '?megamoe\b", page.read_text()), page


def test_the_portable_backends_ratios_are_those_of_its_record():
    record = (ROOT / "benchmarks" / "h200" / "portable-layer.txt").read_text()
    rows = [line.split("│") for line in record.splitlines() if line.startswith("│ ")]
    ratios = [float(cells[-5]) for cells in rows]
    words = re.search(
        r"took ([\d.]+) to ([\d.]+) times the best peer's time", (ROOT / "README.md").read_text()
    )
    assert words.groups() == (f"{min(ratios):.2f}", f"{max(ratios):.2f}")


RECORDS = ROOT / "benchmarks" / "h200"
CHANGED = set(
    re.findall(
        r"`([\w-]+\.(?:txt|json))`",
        (ROOT / "benchmarks" / "README.md")
        .read_text()
        .partition("Of kernels that have changed")[2],
    )
)
OLD = ("docs/history.md", "docs/measurements/portable.md")  # all of it of earlier kernels
SAYS_SO = re.compile(r"changed\s+since|not\s+measured\s+since|earlier\s+(form|kernels)|history\.md")


@pytest.mark.parametrize("page", list(citing()))
def test_a_figure_of_earlier_kernels_says_so(page):
    """In each paragraph, row or item that cites such a record; two pages have nothing else."""
    assert {name for name in CHANGED if not (RECORDS / name).is_file()} == set() != CHANGED
    text = page.read_text()
    if str(page.relative_to(ROOT)) in OLD:
        assert "changed since" in " ".join(text[:900].split()) or "have changed" in text[:900]
        return
    for part in re.split(r"\n\s*\n|\n(?=\||- )", text):
        cited = CHANGED.intersection(re.findall(r"[\w-]+\.(?:txt|json)\b", part))
        assert not cited or SAYS_SO.search(part), (sorted(cited), part[:200])


def test_every_record_names_its_commit():
    """What is published elsewhere has its source instead."""
    for path in RECORDS.iterdir():
        assert path.name.startswith("peers-public") or commits_in(path.read_text()), path.name
