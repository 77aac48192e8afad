"""Files that are whole or not there: text is written beside its target and then takes its place."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from megamoe.errors import FileError


def write_atomic(path: str | Path, text: str | bytes) -> None:
    """Write `text` to `path`, or raise FileError and leave what was there: never half a file.

    Folders that are missing are made.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise FileError(f"{target} must be writable; got {_reason(error)}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode() if isinstance(text, str) else text)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # mkstemp's own is for this user alone
        os.replace(name, target)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(name)
        if isinstance(error, OSError):
            raise FileError(f"{target} must be writable; got {_reason(error)}") from error
        raise


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
