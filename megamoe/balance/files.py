"""Small JSON files of ours: each says what it is and of which version."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megamoe.errors import FileError, require
from megamoe.files import write_atomic


def write_json(path: str | Path, whole: dict[str, Any]) -> None:
    """One object as a file in a folder that exists, whole or not at all."""
    parent = Path(os.path.realpath(path)).parent
    require(parent.is_dir(), "the folder must exist", got=parent, kind=FileError)
    write_atomic(path, json.dumps(whole) + "\n")


def read_json(path: str | Path, kind: str, version: int) -> dict[str, Any]:
    """The object in a file of ours."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"{path} must be a JSON file; got {error}") from error
    is_ours = isinstance(data, dict) and data.get("kind") == kind
    got = data.get("kind") if isinstance(data, dict) else type(data).__name__
    require(is_ours, f"{path} must be of kind {kind}", got=got, kind=FileError)
    require(
        data.get("version") == version,
        f"{path} must be of version {version}",
        got=data.get("version"),
        kind=FileError,
    )
    return dict(data)
