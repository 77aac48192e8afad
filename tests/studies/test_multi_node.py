"""Several nodes: what docs/multi-node.md says is what the study says."""

from pathlib import Path

import pytest

from megamoe.errors import ShapeError
from megamoe.problem import Problem
from megamoe.studies.multi_node import study

PAGE = Path(__file__).parents[2] / "docs" / "multi-node.md"
SHAPES = {"DeepSeek-V4-Flash": (4096, 2048, 256, 6), "DeepSeek-V3": (7168, 2048, 256, 8)}


def rows():
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in SHAPES:
            yield cells


def test_the_pages_table_is_the_studys():
    found = [row for row in rows() if row[2] == "512"]
    assert len(found) == 4 and len(list(rows())) == 8
    for name, nodes, tokens, *figures in found:
        problem = Problem(int(tokens), *SHAPES[name], 8 * int(nodes), "w8a8")
        plain, fp8 = (study(problem, int(nodes), 45.0, rows=how) for how in ("bf16", "fp8"))
        by_node, by_rank = plain.token_bytes / 1e6, plain.tokens_by_rank_bytes / 1e6
        wanted = [
            f"{plain.inside_us:,.0f}", f"{by_node:.1f} ({by_rank:.1f})",
            f"{plain.row_bytes / 1e6:.1f}", f"{plain.serial_us:,.0f}",
            f"{plain.overlapped_us:,.0f}", f"{fp8.overlapped_us:,.0f}",
        ]  # fmt: skip
        assert figures == wanted


def test_experts_must_fill_the_nodes():
    with pytest.raises(ShapeError, match="2 nodes have 16 ranks"):
        study(Problem(8, 512, 256, 64, 4, 8, "w8a8"), 2, 45.0)
