"""Write the tables of README.md and docs/hopper.md from benchmarks/h200/headline.json.

`python scripts/headline_pages.py`; a test holds both pages to the record.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megamoe.bench.headline import Record  # noqa: E402


def with_block(text: str, name: str, block: str) -> str:
    """A page whose block between `<!-- name: ... -->` and `<!-- /name -->` is replaced."""
    marks = re.compile(f"(<!-- {name}: [^\\n]* -->\\n).*(<!-- /{name} -->)", re.DOTALL)
    assert marks.search(text), name
    return marks.sub(lambda found: found[1] + block + found[2], text)


def pages(record: Record) -> dict[Path, tuple[str, str]]:
    """By page: the name of its block, and what belongs there."""
    return {
        ROOT / "README.md": ("headline", record.markdown()),
        ROOT / "docs" / "hopper.md": ("cells", record.cells_table()),
    }


if __name__ == "__main__":
    for page, (name, block) in pages(Record.load(ROOT / "benchmarks/h200/headline.json")).items():
        page.write_text(with_block(page.read_text(), name, block))
