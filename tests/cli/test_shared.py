"""What commands share: tables that keep their reasons, files that are whole."""

import io
import os

import pytest
from rich.console import Console
from rich.table import Table

from megamoe.cli import shared
from megamoe.cli.shared import reason_table, whole_table, writable_folder, write_atomic
from megamoe.errors import FileError
from megamoe.hardware import Hardware

WHY = "a reason that is long enough to need two lines on any terminal of eighty columns, and more"
ROWS = [("block_m", "128", WHY), ("staged_tile", "x" * 60, "short"), ("mode", "[bold]", "")]


def printed(*, width, is_terminal):
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=is_terminal, no_color=True)
    reason_table(console, "Plan", ("choice", "value", "why"), ROWS, right=(1,), bold=(1,))
    return file.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "pipe"])
@pytest.mark.parametrize("width", [40, 80, 100, 200])
def test_a_reason_is_never_cut(width, is_terminal):
    text = printed(width=width, is_terminal=is_terminal)
    assert "…" not in text and "..." not in text
    words = [word for word in text.split() if word not in "│┃"]
    for word in (*WHY.split(), "x" * 60, "[bold]", "short", "choice"):
        assert any(word in seen for seen in words), word


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_figure_is_never_cut(width):
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    figures = {f"column {n}": f"{n}23,456.7" for n in range(9)}
    table = Table("cell", "recipe", *figures, title="times")
    table.add_row("deepseek-v4-flash/8192", "w4a8_block", *figures.values())
    whole_table(console, table, 2)
    text = file.getvalue()
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    words = text.split()
    for one in (*figures.values(), "deepseek-v4-flash/8192"):
        assert any(one in word for word in words), one


def test_in_a_pipe_a_row_is_a_line():
    lines = printed(width=80, is_terminal=False).splitlines()
    assert len(lines) == 2 + len(ROWS)
    assert lines[2].startswith("block_m") and lines[2].endswith(WHY)


def test_text_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    write_atomic(path, "one\n")
    assert path.read_text() == "one\n" and path.stat().st_mode & 0o777 == 0o666 & ~_umask()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(FileError, match=r"trace\.json must be writable; got No space left"):
        write_atomic(path, "two\n")
    assert path.read_text() == "one\n" and list(tmp_path.iterdir()) == [path]


def test_a_folder_is_tried_before_the_work(tmp_path):
    assert writable_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="--out must be a folder that can be written; got"):
        writable_folder(tmp_path / "file" / "in")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]  # nothing is left by trying


def test_missing_folders_are_made_and_files_are_none(tmp_path):
    write_atomic(tmp_path / "none" / "x.json", "here")
    assert (tmp_path / "none" / "x.json").read_text() == "here"
    with pytest.raises(FileError, match="must be writable; got"):
        write_atomic(tmp_path / "none" / "x.json" / "y.json", "")


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_bars_leave_nothing_in_a_pipe(capsys):
    """An error after them is the first line there."""
    with shared.Bars(quiet=False) as bars:
        bars("cells", 1, 2)
    assert capsys.readouterr().err == ""


def test_a_gpu_on_which_nothing_ran_is_named_and_no_cpu():
    assert shared.untested(Hardware.named("h20")).startswith("NVIDIA H20: never run on it by us")
    assert shared.untested(Hardware.named("h200")) == ""
