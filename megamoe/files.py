"""Files that are whole or not there: text is written beside its target and then takes its place."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megamoe.errors import FileError


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """An empty file beside `path`, which takes its place unless the block raises.

    A symlink stays, and its target is replaced; what is there and no regular file is refused. A new
    file has the mode that the umask gives, an older one keeps its own.
    """
    target = Path(os.path.realpath(path))
    mode = _mode(target, path)
    # A name as long as may be has no room for more; what is private stays so while it is written.
    part = target.with_name(f".{target.name[:40]}.{os.getpid()}.{os.urandom(4).hex()}.part")
    first = 0o666 if mode is None else 0o600
    handle = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, first)
    try:
        mode = stat.S_IMODE(os.fstat(handle).st_mode) if mode is None else mode
        os.close(handle)
        yield part
        os.chmod(part, mode)  # some writers make a file of their own, for this user alone
        os.replace(part, target)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _mode(target: Path, path: str | Path) -> int | None:
    """The mode of a regular file; None if there is none."""
    try:
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        raise FileError(
            f"what is written must be a regular file; got {path}, a device, pipe, folder or link "
            "to itself; give the path of a file"
        )
    return stat.S_IMODE(mode)


def write_atomic(path: str | Path, text: str | bytes) -> None:
    """Write `text` to `path`, or raise FileError and leave what was there: never half a file.

    Folders that are missing are made.
    """
    try:
        Path(os.path.realpath(path)).parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_bytes(text.encode() if isinstance(text, str) else text)
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"{path} must be writable; got {_reason(error)}") from error


def writable_folder(path: str | Path, what: str = "--out") -> Path:
    """The folder, in which a file could be written just now.

    Called before the work, so that a folder that cannot be written is refused at once. One that is
    missing is left to `write_atomic`: what is tried is the nearest folder that exists.
    """
    folder = Path(path)
    try:
        there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"\0")
    except OSError as error:
        raise FileError(
            f"{what} must be a folder that can be written; got {path}: {_reason(error)}"
        ) from error
    return folder


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
