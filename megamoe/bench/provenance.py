"""Where a figure was made: machine, versions, commit, date."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch

from megamoe import __version__
from megamoe.engine.certified import driver_version, version_of


def provenance(device: torch.device) -> str:
    """One line that says what a measurement needs to be believed or repeated."""
    where = platform.processor() or platform.machine()
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
        where += f", driver {driver_version()}, CUDA {torch.version.cuda}"
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    parts = (
        f"{where} ({device}, {torch.get_num_threads()} CPU threads)",
        f"Python {platform.python_version()}",
        f"torch {torch.__version__}",
        f"triton {version_of('triton')}",
        f"megamoe {__version__} at {commit()}",
        date,
    )
    return ", ".join(parts)


def commit() -> str:
    """The checkout's commit, with a + where files differ from it.

    A copy that was made for a run may name its commit in a file `.commit` at its root.
    """
    root = Path(__file__).parent.parent.parent
    note = root / ".commit"
    if note.is_file():
        return note.read_text().strip()
    try:
        git = ["git", "-C", str(root)]
        head = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown commit"
    return head + ("+" if changed else "")
