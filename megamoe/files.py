"""Files that are whole or not there: text is written beside its target and then takes its place."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from megamoe.errors import FileError


def write_atomic(path: str | Path, text: str) -> None:
    """Write `text` to `path`, or raise FileError and leave what was there: never half a file."""
    target = Path(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise FileError(f"{target} must be writable; got {_reason(error)}") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
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
    """The folder, made if it is missing, in which a file could be written just now.

    Called before the work, so that a folder that cannot be written is refused at once.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
    except OSError as error:
        raise FileError(
            f"{what} must be a folder that can be written; got {path}: {_reason(error)}"
        ) from error
    return folder


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
