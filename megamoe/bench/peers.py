"""Recorded times of other libraries, kept as data beside the package, and ratios to them.

A file has "provenance", "method" and "cells": {"flash-ep8/8": {"some-peer": microseconds}}.
The best peer of a cell is the fastest one listed. `RECORDED` has the times that megamoe compares
with: its "provenance" begins with the GPU. Standard library only.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from megamoe.errors import FileError, require

BEST = "best"
RECORDED = Path(__file__).with_name("peers.json")


@dataclass(frozen=True, slots=True)
class Peers:
    """Microseconds per cell and peer."""

    provenance: str
    method: str
    cells: dict[str, dict[str, float]]

    @property
    def gpu(self) -> str:
        """The GPU that the times are of; empty where the file does not say."""
        return gpu_of(self.provenance)

    def best(self, cell: str) -> tuple[str, float] | None:
        """Name and time of the fastest peer in a cell."""
        times = self.cells.get(cell)
        return min(times.items(), key=lambda item: item[1]) if times else None

    def ratios(self, cell: str, us: float) -> dict[str, float]:
        """us / peer for each peer that was recorded in the cell, and for the best of them."""
        best = self.best(cell)
        if best is None:
            return {}
        return {BEST: us / best[1], **{n: us / t for n, t in self.cells[cell].items()}}

    @property
    def common(self) -> tuple[str, ...]:
        """The peers that were recorded in every cell."""
        sets = [set(times) for times in self.cells.values()]
        return tuple(sorted(set.intersection(*sets))) if sets else ()


def gpu_of(provenance: str) -> str:
    """The machine that a provenance begins with.

    >>> gpu_of("one NVIDIA H200, driver 580"), gpu_of("NVIDIA H100 (cuda, 8 CPU threads), torch 2")
    ('NVIDIA H200', 'NVIDIA H100')
    """
    return re.split(r", | \(", provenance.removeprefix("one "))[0]


def load(path: str | Path) -> Peers:
    """Read a file of recorded times; anything else is refused with what is wrong."""
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise FileError(f"the peers file must be readable; got {error}") from error
    except ValueError as error:
        raise FileError(f"the peers file must be JSON; got {error} in {path}") from error
    require(
        isinstance(data, dict) and isinstance(data.get("cells"), dict),
        'the peers file must hold {"provenance", "method", "cells": {cell: {peer: us}}}',
        got=f"{type(data).__name__} in {path}",
        kind=FileError,
    )
    cells: dict[str, dict[str, float]] = {}
    for cell, times in data["cells"].items():
        good = isinstance(times, dict) and all(
            isinstance(t, int | float) and t > 0 for t in times.values()
        )
        require(
            good,
            "every cell of the peers file must map peers to positive microseconds",
            got=f"{times!r} for {cell}",
            kind=FileError,
        )
        cells[str(cell)] = {str(name): float(t) for name, t in times.items()}
    return Peers(str(data.get("provenance", "")), str(data.get("method", "")), cells)
