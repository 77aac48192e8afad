"""What several commands share: devices by name, and progress bars."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from megamoe.errors import NotAvailable, RangeError, require


def device_named(name: str) -> str:
    """The device of that name; auto is a GPU where there is one."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, idx = name.partition(":")
    require(
        kind in ("cpu", "cuda") and (not idx or idx.isdigit()),
        "device must be auto, cpu or cuda[:N]",
        got=name,
        kind=RangeError,
    )
    found = torch.cuda.device_count()
    require(
        kind == "cpu" or int(idx or 0) < found,
        f"device {name} must exist",
        got=f"{found} CUDA device(s)",
        fix="use --device cpu",
        kind=NotAvailable,
    )
    return name


class Bars:
    """One progress bar per step of a job, on stderr."""

    def __init__(self, *, quiet: bool) -> None:
        columns = (TextColumn("{task.description:8}"), BarColumn(), MofNCompleteColumn())
        self.bars = Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet)
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> Bars:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def __call__(self, step: str, done: int, of: int) -> None:
        if step not in self.tasks:
            self.tasks[step] = self.bars.add_task(step, total=of)
        self.bars.update(self.tasks[step], completed=done)
