"""bench overlap: its sums, and the whole measurement on the emulator, where times say nothing."""

import json
from pathlib import Path

import pytest
import torch
import typer

import megamoe as mm
from megamoe.bench import overlap, overlap_model, overlap_picture
from megamoe.bench.cells import cells_named
from megamoe.cli import overlap as cli
from megamoe.engine import backends
from tests import emulator, pretending
from tests.kernels.support import INTERPRETED


def row(compute, links, both, same=True):
    return overlap.Overlap(
        "flash-ep8/512", "w8a8", 8, 16, 2, "a tile", 50.0, compute, links, both, same, "here"
    )


def test_a_record_is_printed_and_drawn_again(tmp_path, capsys):
    """The picture of docs/expert-parallel.md; a file that is no record is refused by name."""
    pytest.importorskip("matplotlib")
    file = tmp_path / "overlap.json"
    rows = [row(100.0, 40.0, 104.0), row(40.0, 100.0, 100.0)]
    file.write_text(json.dumps([cli.as_dict(one) for one in rows]))
    assert overlap_picture.load(file) == rows
    with pytest.raises(typer.Exit) as end:
        cli.overlap(record=str(file), out=str(tmp_path))
    assert end.value.exit_code == 0 and "90%" in capsys.readouterr().out
    assert (tmp_path / "overlap.png").read_bytes().startswith(b"\x89PNG")
    file.write_text('[{"cell": "flash-ep8/512"}]')
    with pytest.raises(mm.FileError, match=r"of megamoe bench overlap; got .*\.json: it has"):
        overlap_picture.load(file)


def test_the_simulator_is_printed_beside_a_record(tmp_path, capsys):
    record = Path(__file__).parents[2] / "benchmarks" / "h200" / "overlap.json"
    file = tmp_path / "overlap.json"
    file.write_text(json.dumps(json.loads(record.read_text())[:1]))
    with pytest.raises(typer.Exit) as end:
        cli.overlap(record=str(file), simulate=True)
    text = capsys.readouterr().out
    assert end.value.exit_code == 0 and "2,281" in text and "simulated" in text
    with pytest.raises(typer.Exit):
        cli.overlap(record=str(file), simulate=True, as_json=True)
    (one,) = json.loads(capsys.readouterr().out)
    assert set(one["simulated_us"]) == {"compute", "links", "both"}
    with pytest.raises(mm.RangeError, match="--simulate needs a record; got no --from"):
        cli.overlap(simulate=True)


def test_hidden_is_the_share_of_the_shorter_that_takes_no_time():
    assert row(100.0, 40.0, 104.0).hidden == pytest.approx(0.9)
    assert row(100.0, 40.0, 140.0).hidden == 0.0
    assert row(40.0, 100.0, 100.0).hidden == 1.0
    assert row(100.0, 40.0, 104.0).slower == pytest.approx(1.04)
    assert cli.as_dict(row(100.0, 40.0, 104.0))["hidden"] == pytest.approx(0.9)


def test_wire_is_the_time_of_the_bytes_alone():
    """Of 512 tokens 2688 slots are elsewhere: a record of 4096 + 128 bytes in, 8192 bytes home."""
    one = row(100.0, 40.0, 104.0)
    assert overlap_model.wire_us(one) == pytest.approx(2688 * (4224 + 8192) / 50e3)
    late = overlap.replace(one, latency_us=2.0)
    assert overlap_model.wire_us(late) == overlap_model.wire_us(one) + 2.0
    record = Path(__file__).parents[2] / "benchmarks" / "h200" / "overlap.json"
    rows = overlap_picture.load(record)
    assert all(0.55 < overlap_model.wire_us(one) / one.links_us < 0.8 for one in rows)


@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")
def test_a_cell_is_checked_and_timed_three_ways(monkeypatch, capsys):
    monkeypatch.setattr(backends, "resolve", lambda *wanted: None)
    kernels = emulator.install(monkeypatch, num_sms=8)
    pretending.pretend_h200(monkeypatch, 8)
    monkeypatch.setattr(overlap, "hardware_of", pretending.planning.hardware_of)
    alone = lambda *inputs, **options: pretending.staged(inputs[:3], inputs[3])  # noqa: E731
    monkeypatch.setattr(overlap.mm, "moe", alone)
    made = overlap.LocalRanks

    def ranks(*args, **options):
        found = made(*args, **options)
        found._chain._make(8, 2)
        for name in ("exchange_kernel", "finish_kernel", "pull_kernel", "gemm_swap_ab_kernel",
                     "gemm_kernel"):  # fmt: skip
            kernels[name].hold = [m.buffer.tokens for m in found._chain._members]
        return found

    monkeypatch.setattr(overlap, "LocalRanks", ranks)
    (cell,) = cells_named(["tiny/8"])
    small = overlap.replace(cell.shape, hidden=256, intermediate=128, num_experts=2)
    cells = [overlap.replace(cell, shape=small)]
    seen = []
    (found,) = overlap.measure(
        cells, ["w8a8"], device="cpu", num_ranks=2, repeats=1, rounds=1, on_row=seen.append,
        latency_us=1.5,
    )  # fmt: skip
    assert found.same_bits and seen == [found] and torch.isfinite(torch.tensor(found.hidden))
    assert (found.num_ranks, found.sms, found.pull_sms, found.links_gbs) == (2, 4, 1, 201.0)
    cli.show([found, row(1.0, 1.0, 1.0, same=False)])
    text = capsys.readouterr().out
    assert "3 + 1" in text and "OTHER" in text and "wire us" in text
    assert "combine are in each" in text and "another rank: 0, 1.5 us at least" in text
    with pytest.raises(mm.RangeError, match="latency of 0 to 1000 us; got None GB/s, -1"):
        overlap.measure([], [], device="cpu", latency_us=-1)
    json.dumps(cli.as_dict(found))
