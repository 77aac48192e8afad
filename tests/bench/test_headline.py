"""The headline: README's table and picture are those of the record, and the record is measured."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megamoe.bench import headline
from megamoe.bench.cells import TOKENS, cells_named
from megamoe.bench.floors import Ceilings
from megamoe.bench.headline import LINES, Record, Timed
from megamoe.bench.layer import Settings
from megamoe.bench.peers import RECORDED, Peers, load
from megamoe.bench.record import FAILED, OK, WRONG, Report, Row
from megamoe.errors import FileError

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import headline_pages  # noqa: E402

PATH = ROOT / "benchmarks" / "h200" / "headline.json"
RECORD = Record.load(PATH)
README = (ROOT / "README.md").read_text()


def block(text):
    return re.search(r"<!-- headline: [^\n]* -->\n(.*)<!-- /headline -->", text, re.DOTALL)[1]


def test_readme_has_the_records_table():
    assert block(README) == RECORD.markdown()


def test_pages_have_what_the_script_writes():
    """README's table, and every cell in docs/hopper.md: decode in FP8 too."""
    for page, (name, written) in headline_pages.pages(RECORD).items():
        text = page.read_text()
        assert headline_pages.with_block(text, name, written) == text, page.name
    rows = RECORD.cells_table().splitlines()[2:]
    assert len(rows) == len(RECORD.cells)
    assert any(row.startswith("| DeepSeek-V3, `w8a8` | 8 | 276.8 | 0.1% |") for row in rows)


def test_a_recipe_without_a_peer_has_no_line_of_ratios():
    assert [line.split("`")[1] for line in RECORD.summary()] == ["w4a8_block", "w8a8"]


def test_readmes_table_equals_the_record_cell_by_cell():
    """Read back without the code that wrote it."""
    rows = [r for r in block(README).splitlines() if r.startswith("| ")][2:]
    seen = {}
    for row in rows:
        name, *cells = (part.strip() for part in row.strip("|").split("|"))
        recipe = name.split("`")[1]
        for tokens, text in zip(TOKENS, cells, strict=True):
            seen[name.split(",")[0], recipe, tokens] = text
    whole = json.loads(PATH.read_text())["cells"]
    assert len(seen) == 20
    for cell in whole:
        text = seen.pop((cell["model"], cell["recipe"], cell["num_tokens"]))
        numbers = [float(n.replace(",", "")) for n in re.findall(r"[\d,]*\d(?:\.\d+)?", text)]
        wanted = [round(cell["us"])]
        if cell["peer_us"] is not None:
            ratio = cell["us"] / cell["peer_us"]
            wanted += [round(cell["peer_us"]), float(f"{ratio:.2f}")]
            assert ("slower" in text) == (ratio >= 1.005), text
        assert numbers == wanted, text
    assert all(text == "not measured" for text in seen.values())


@pytest.mark.parametrize("cell", [c for c in RECORD.cells if c.peer], ids=lambda c: c.cell)
def test_the_peer_is_the_fastest_that_serves_the_checkpoint(cell):
    """Of those that were recorded, and of those that were timed in the same run."""
    recorded = load(RECORDED).cells.get(cell.cell, {})
    times = {n: us for n, us in (cell.timed | recorded).items() if headline.serves(n, cell.recipe)}
    assert (cell.peer, cell.peer_us) == min(times.items(), key=lambda item: item[1])
    assert cell.whose in {name for name, _ in headline.FAMILIES.values()}


def test_the_record_was_measured_in_one_run_and_readme_says_so():
    assert RECORD.how == headline.MEASURED and all(cell.us for cell in RECORD.cells)
    assert "measured in one run" in README and "recorded in other processes" in README


def test_the_words_on_the_peers_are_those_of_their_file():
    peers, about = headline.comparable(load(RECORDED), "NVIDIA H200")
    assert peers == load(RECORDED) and about == RECORD.about_peers
    assert peers.provenance in about


def test_peers_of_another_gpu_are_not_compared_and_the_record_says_so():
    line = headline.Line("DeepSeek-V4-Flash", "w8a8", "tiny", (2,))
    others = Peers("one NVIDIA H200, 2026-11-15", "", {"tiny/2": {"dg-masked": 1e-3}})
    for given, words in ((others, "are of NVIDIA H200 and were not compared with"), (None, "No")):
        record = headline.measure(Settings(device="cpu", repeats=1, rounds=1), given, lines=[line])
        assert words in record.about_peers and record.about_peers in record.markdown()
        assert record.cells[0].peer == "torch-bf16" and not record.cells[0].peer_source


def test_the_picture_names_the_records_gpu(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure
    titles = []
    monkeypatch.setattr(figure, "suptitle", lambda self, text, **more: titles.append(text))
    other = replace(RECORD, provenance="NVIDIA H100, driver 580, torch 2.11.0")
    headline.draw(other, tmp_path / "h100.png")
    assert "on one NVIDIA H100, measured" in titles[0]


def test_peers_of_fewer_bits_serve_another_model():
    assert headline.serves("torch-fp8", "w8a8") and headline.serves("tk-bf16", "w4a16")
    assert not headline.serves("tk-bf16", "w8a8") and not headline.serves("humming-a8", "bf16")


def test_a_record_survives_its_file(tmp_path):
    headline.write(RECORD, tmp_path)
    assert Record.load(tmp_path / "headline.json") == RECORD
    (tmp_path / "other.json").write_text('{"cells": []}')
    with pytest.raises(FileError, match="must be a JSON file of megamoe bench headline"):
        Record.load(tmp_path / "other.json")


def report_of(cell, *rows):
    return Report("", "here", "so", Ceilings(1, 1, {}, 0, ""), rows)


def test_the_fastest_right_peer_counts_timed_or_recorded():
    line = LINES[0]
    ours = Row("flash-ep8/8", "hopper", line.recipe, True, OK, "", "", us=90.0, spread=0.01)
    torch_row = Row("flash-ep8/8", "torch-fp8", "fp8-row", False, OK, "", "", us=120.0)
    wrong = Row("flash-ep8/8", "torch-bf16", "bf16", False, WRONG, "", "", us=None)
    peers = Peers("", "", {"flash-ep8/8": {"dg-masked": 130.0}})
    cell = headline.cell_of(line, report_of(line, ours, torch_row, wrong), peers)
    assert (cell.us, cell.peer, cell.peer_us, cell.whose) == (90.0, "torch-fp8", 120.0, "torch")
    assert cell.ratio == 0.75 and cell.num_tokens == 8
    failed = Row("flash-ep8/8", "hopper", line.recipe, True, FAILED, "", "")
    cell = headline.cell_of(line, report_of(line, failed), peers)
    assert cell.us is None and headline.text_of(cell) == "not measured"


def test_wrong_counts_before_raised_before_absent():
    assert [headline._worse(*p) for p in ((0, 0), (3, 0), (3, 70), (70, 1))] == [0, 3, 70, 1]


def test_cells_are_checked_and_timed(monkeypatch):
    """On a CPU, with the reference in our backends' place."""
    line = headline.Line("tiny", "w8a8", "tiny", (2, 4))
    seen = []
    record = headline.measure(
        Settings(device="cpu", repeats=1, rounds=1), None, lines=[line], on_cell=seen.append
    )
    assert [c.cell for c in record.cells] == ["tiny/2", "tiny/4"] and len(seen) == 2
    assert all(c.us > 0 and c.how == "reference" and c.peer == "torch-bf16" for c in record.cells)
    assert (
        "shuffled call by call" in record.method
        and f"torch {torch.__version__}" in record.provenance
    )


def test_the_cells_of_the_lines_exist():
    for line in LINES:
        assert cells_named([line.workload], line.tokens)


def test_the_command_prints_writes_and_draws(megamoe, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, _ = megamoe(
        "bench", "headline", "--from", str(PATH), "--markdown", "--out", str(tmp_path)
    )
    assert code == 0 and out == RECORD.markdown()
    assert {p.name for p in tmp_path.iterdir()} == {"headline.json", "headline.png"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be measured")
def test_without_a_gpu_it_ends_at_once(megamoe):
    for args in ((), ("--device", "cpu")):
        code, out, _ = megamoe("bench", "headline", *args)
        assert code == 3 and not out


def test_ratios_without_a_peer_are_none():
    assert Timed("", "", "x/8", 8, 1.0).ratio is None
