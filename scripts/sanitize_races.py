"""What racecheck reports, pair by pair, held to a table of pairs that something orders.

racecheck names the lines of two accesses. Lines move, so the table has functions: those of the
checkout's own files, found by their lines. A pair that is not in the table is unexplained, and so
is every hazard that the summary counts and the text does not show.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KERNELS = Path(__file__).parent.parent / "megamoe" / "kernels"
_ACCESS = re.compile(
    r"(?:Race reported between|and) (?P<kind>Read|Write) access at (?P<kernel>\w+)[^+]*\+0x\w+"
    r"(?: in (?P<file>\S+):(?P<line>\d+))?"
)
_SUMMARY = re.compile(
    r"RACECHECK SUMMARY: (\d+) hazards? displayed(?: \((\d+) errors?, (\d+) warn)?"
)

Pair = tuple[
    str, str, str
]  # kernel, and the functions of two accesses, in the order of the alphabet

_ITEMS = "the queue's mbarriers, at which one thread arrives after a barrier of its warp"
_POSTED = "the mbarrier of the tile's first stage, likewise"
_ROUTED = "the mbarrier `routed`, likewise"
_STATE = "the compiler's own barrier.sync 1 of the CTA, around what a worker warp is told to run"
EXPLAINED: dict[Pair, str] = {
    ("mega_kernel", "hopper.mega.kernel.mega_kernel", "hopper.mega.kernel.mega_kernel"): _STATE,
    ("gemm_swap_ab_kernel", "hopper.gemm.swap_ab.gemm_swap_ab_kernel",
     "hopper.gemm.swap_ab.gemm_swap_ab_kernel"): _STATE,
    ("mega_kernel", "gluon.mega.scheduler._push", "gluon.mega.scheduler.pop_item"): _ITEMS,
    ("mega_kernel", "gluon.mega.dispatch.read_routing", "gluon.mega.scheduler._num_tiles"): _ROUTED,
    ("mega_kernel", "gluon.mega.dispatch._count_slots", "gluon.mega.dispatch._pool_rows"): _ROUTED,
    ("mega_kernel", "hopper.gemm.epilogue.post_tile", "hopper.gemm.epilogue.read_tile"): _POSTED,
    ("gemm_swap_ab_kernel", "hopper.gemm.epilogue.post_tile", "hopper.gemm.epilogue.read_tile"):
        _POSTED,
}  # fmt: skip


@dataclass(frozen=True)
class Races:
    """What racecheck counted, and of that what the table explains."""

    num: int
    num_explained: int
    unexplained: tuple[Pair, ...]  # those that were shown

    @property
    def is_explained(self) -> bool:
        """Whether every hazard that was counted is."""
        return self.num == self.num_explained

    def __str__(self) -> str:
        text = f"{self.num} hazards, {self.num_explained} explained, "
        text += f"{self.num - self.num_explained} unexplained"
        pairs = "; ".join(f"{kernel}: {a} with {b}" for kernel, a, b in self.unexplained)
        return f"{text}: {pairs}" if pairs else text


@functools.cache
def _functions(path: Path) -> list[tuple[int, int, str]]:
    """(first line, last line, name) of each function of a file, outer ones first."""
    return [
        (min([node.lineno, *(one.lineno for one in node.decorator_list)]), node.end_lineno or 0,
         node.name)
        for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)
    ]  # fmt: skip


def function_at(file: str | None, line: str | None) -> str:
    """gluon.mega.scheduler.pop_item, of .../megamoe/kernels/gluon/mega/scheduler.py:92."""
    if file is None or line is None:
        return "no line"
    inside = file.rpartition("megamoe/kernels/")[2]
    path = KERNELS / inside
    names = [
        name for first, last, name in (_functions(path) if path.is_file() else ())
        if first <= int(line) <= last
    ]  # fmt: skip
    return ".".join([*Path(inside).with_suffix("").parts, names[-1]]) if names else f"{file}:{line}"


def pairs(output: str) -> Iterator[Pair]:
    """One for each report: its first access and each of those that it lists below."""
    first = None
    for access in map(_ACCESS.search, output.splitlines()):
        if access is None:
            continue
        where = function_at(access["file"], access["line"])
        if "Race reported" in access[0]:
            first = where
        elif first is not None:
            a, b = sorted((first, where))
            yield access["kernel"], a, b


def _reports(output: str) -> list[list[Pair]]:
    """The pairs of each report that the text shows."""
    texts = output.split("Race reported")[1:]
    return [list(pairs("Race reported" + text)) for text in texts]


def races(output: str, explained: dict[Pair, str] | None = None) -> Races:
    """Of the whole output of a run: a report is explained if each of its pairs is."""
    table = EXPLAINED if explained is None else explained
    reports = _reports(output)
    num_explained = sum(bool(report) and all(p in table for p in report) for report in reports)
    shown = dict.fromkeys(p for report in reports for p in report if p not in table)
    sums = [found for found in map(_SUMMARY.search, output.splitlines()) if found]
    counted = max((sum(int(n or 0) for n in one.groups()[1:]) for one in sums), default=0)
    displayed = max((int(one[1]) for one in sums), default=0)
    return Races(max(counted, displayed, len(reports)), num_explained, tuple(shown))
