"""When each launch of each rank ran, as the profiler saw it, and a picture of it.

Ranks of a chain are streams of one GPU. A line of the picture is a launch of a rank: pulls run
beside L1, and rows go home while L2 runs.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megamoe.errors import MegaMoEError, require

# kernel -> line of the picture
LINES = {
    "_quantize_kernel": "tokens and slots", "_count_kernel": "tokens and slots",
    "_scan_kernel": "tokens and slots", "_place_kernel": "tokens and slots",
    "exchange_kernel": "exchange", "_rows_kernel": "exchange", "pull_kernel": "pull",
    "gemm_kernel": "L1", "gemm_swap_ab_kernel": "L1", "finish_kernel": "finish",
    "_combine_kernel": "combine",
}  # fmt: skip
GEMMS = ("gemm_kernel", "gemm_swap_ab_kernel")
ORDER = ("tokens and slots", "exchange", "pull", "L1", "L2", "finish", "combine")
COLOURS = {
    "tokens and slots": "#6B7280", "exchange": "#6B7280", "pull": "#56B4E9", "L1": "#0072B2",
    "L2": "#E69F00", "finish": "#CC79A7", "combine": "#009E73",
}  # fmt: skip


class Launched(NamedTuple):
    """One launch: microseconds from the first one of all ranks."""

    rank: int
    line: str  # of ORDER
    start_us: float
    end_us: float


def recorded(call: Callable[[], object]) -> dict[str, Any]:
    """The profiler's trace of one call, in Chrome's format."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return trace


def launches_of(trace: dict[str, Any]) -> list[Launched]:
    """The chain's launches in a trace; streams are ranks, in the order of their first launches."""
    kernels = [e for e in trace["traceEvents"] if e.get("cat") == "kernel" and e["name"] in LINES]
    require(bool(kernels), "a trace must hold a chain's launches", got="none", kind=MegaMoEError)
    kernels.sort(key=lambda e: e["ts"])
    first = kernels[0]["ts"]
    ranks: dict[int, int] = {}
    gemms: dict[int, int] = {}
    launches = []
    for event in kernels:
        rank = ranks.setdefault(event["args"]["stream"], len(ranks))
        line = LINES[event["name"]]
        if event["name"] in GEMMS:
            line = ("L1", "L2")[gemms.get(rank, 0) % 2]
            gemms[rank] = gemms.get(rank, 0) + 1
        start = event["ts"] - first
        launches.append(Launched(rank, line, start, start + event["dur"]))
    return launches


def overlap_us(launches: Sequence[Launched], one: str, other: str, rank: int = 0) -> float:
    """Microseconds in which launches of both lines run on a rank."""
    spans = {
        line: [x for x in launches if (x.rank, x.line) == (rank, line)] for line in (one, other)
    }
    return sum(
        max(0.0, min(a.end_us, b.end_us) - max(a.start_us, b.start_us))
        for a in spans[one]
        for b in spans[other]
    )


def draw(launches: Sequence[Launched], title: str, note: str, path: Path, ranks: int = 2) -> Path:
    """The first ranks, a line for each kind of launch."""
    from megamoe.bench.plots import pyplot_or_refuse, save

    ranks = min(ranks, 1 + max(x.rank for x in launches))
    figure = pyplot_or_refuse().figure(figsize=(11.0, 0.6 + 2.2 * ranks), layout="constrained")
    panels = figure.subplots(ranks, 1, sharex=True, squeeze=False)[:, 0]
    for rank, axes in enumerate(panels):
        for x in launches:
            if x.rank == rank:
                at, width = ORDER.index(x.line), max(x.end_us - x.start_us, 0.5) / 1e3
                axes.barh(at, width, left=x.start_us / 1e3, height=0.8, color=COLOURS[x.line])
        axes.set_yticks(range(len(ORDER)), ORDER, fontsize=8)
        axes.set_ylim(len(ORDER) - 0.4, -0.6)
        axes.set_title(f"rank {rank}", loc="left", fontsize=9)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[-1].set_xlabel("ms")
    figure.suptitle(title, fontsize=12, fontweight="bold")
    figure.supxlabel(note, fontsize=7, color="gray")
    return save(figure, path)
