"""What is written takes the place of a regular file, and of nothing else."""

import os
import stat

import pytest
import torch

import megamoe as mm
from megamoe.errors import FileError
from megamoe.files import replacing, write_atomic

EXPERTS = mm.ExpertWeights.quantize(torch.ones(2, 64, 32), torch.ones(2, 32, 32), "bf16")
WRITERS = {"text": lambda path: write_atomic(path, "new"), "experts": EXPERTS.save}


@pytest.fixture(params=WRITERS)
def write(request):
    return WRITERS[request.param]


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_a_new_file_has_the_mode_of_the_umask_and_an_older_one_its_own(write, tmp_path):
    path = tmp_path / "file"
    write(path)
    assert mode(path) == 0o640
    path.chmod(0o604)
    write(path)
    assert mode(path) == 0o604 and os.listdir(tmp_path) == ["file"]


def test_a_private_file_is_private_while_it_is_written(tmp_path):
    path = tmp_path / "file"
    path.touch(0o600)
    with replacing(path) as part:
        assert mode(part) == 0o600
    assert mode(path) == 0o600


@pytest.mark.parametrize("letter", ["a", "\u00e9", "\U0001f600"])
def test_a_name_may_be_as_long_as_the_filesystem_takes(write, letter, tmp_path):
    path = tmp_path / (letter * (255 // len(letter.encode())))
    write(path)
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("there", [True, False])
def test_links_stay_and_their_target_is_written(write, there, tmp_path):
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "target", tmp_path / "link"
    if there:
        target.write_text("old")
    link.symlink_to(target)
    write(link)
    assert link.is_symlink() and target.is_file() and target.read_bytes() != b"old"
    assert sorted(os.listdir(tmp_path)) == ["far", "link"] and os.listdir(target.parent) == [
        "target"
    ]


def test_what_is_no_regular_file_is_refused_and_stays(write, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to_pipe").symlink_to(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "folder").mkdir()
    before = {one.name: one.lstat() for one in tmp_path.iterdir()}
    for name in before:
        with pytest.raises(FileError, match=f"must be a regular file; got .*{name}"):
            write(tmp_path / name)
    assert {one.name: one.lstat().st_ino for one in tmp_path.iterdir()} == {
        name: found.st_ino for name, found in before.items()
    }
    assert stat.S_ISFIFO(before["pipe"].st_mode) and (tmp_path / "pipe").is_fifo()


def test_a_write_that_fails_leaves_what_was_there(write, tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("old")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(FileError, match=r"must be writable; got .*No space left"):
        write(path)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]
