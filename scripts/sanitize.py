#!/usr/bin/env python
"""Every kernel under the tools that look for races and stray accesses, with a record.

    PYTHONPATH=. python scripts/sanitize.py FOLDER [--tools memcheck,consan] [--parts hopper-w8a8]

Tools: compute-sanitizer's memcheck, racecheck and synccheck, and `consan`, Triton's own sanitizer
of barriers, copies and products (TRITON_INSTRUMENTATION_MODE). Parts are those of
`sanitize_calls.py`; ConSan knows what Gluon's kernels do, so it gets Hopper's alone. Kernels are
compiled first, several processes at a time: under ConSan one takes 40 to 220 s of a core (compiled
on a CPU, 2026-11-18).

Writes FOLDER/sanitizer.txt: provenance, what no tool sees, a line for each tool and part; and the
whole output of a tool for each part that is not clean. Exit codes: 0 clean, 1 something was found
or did not end, 3 compute-sanitizer is missing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megamoe.files import write_atomic
from megamoe.planner.numerics import HOPPER_RECIPES
from megamoe.problem import RECIPES

ROOT = Path(__file__).parent.parent
CALLS = ROOT / "scripts" / "sanitize_calls.py"
PORTABLE = (*RECIPES, "quantisers", "graphs")
HOPPER = tuple(f"hopper-{recipe}" for recipe in HOPPER_RECIPES)
HOPPER += tuple(f"chain-{recipe}" for recipe in HOPPER_RECIPES)
TOOLS = {  # tool: the parts it runs
    "memcheck": PORTABLE + HOPPER,
    "racecheck": PORTABLE + HOPPER,
    "synccheck": PORTABLE + HOPPER,
    "consan": HOPPER,
}
UNSEEN = (
    "racecheck sees shared memory accessed by threads, not by TMA or wgmma; ConSan sees those, but "
    "not inline PTX: the bounded waits on global memory, signals and reports, griddepcontrol, "
    "proxy fences of global memory, prefetches, L2 policies, decoding of FP4. Chains run on one "
    "rank: tools may hold apart what ranks launch side by side. Order between CTAs, launches and "
    "ranks is what tests/proof schedules"
)
SUMMARY = re.compile(r"(ERROR SUMMARY|RACECHECK SUMMARY): .*")
HAZARD = re.compile(r"Race reported between .* access at (\w+)")
FAULT = re.compile(r".*(device-side assert|Assertion|CUDA error|illegal).*")


@dataclass(frozen=True)
class Found:
    """What one tool said of one part."""

    tool: str
    part: str
    is_clean: bool
    said: str
    seconds: float

    def __str__(self) -> str:
        state = "clean" if self.is_clean else "FOUND"
        return f"{self.tool} {self.part}: {state}, {self.said} ({self.seconds:.0f} s)"


def sanitizer() -> str | None:
    """compute-sanitizer, on PATH or in the CUDA toolkit."""
    cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    places = (cuda / "bin", cuda / "compute-sanitizer", cuda / "extras" / "compute-sanitizer")
    inside = (shutil.which("compute-sanitizer", path=str(place)) for place in places)
    return shutil.which("compute-sanitizer") or next(filter(None, inside), None)


def command(tool: str, part: str, where: str | None) -> list[str]:
    """What runs one part under one tool; without a sanitizer, or for ConSan, the part alone."""
    run = [sys.executable, str(CALLS), part]
    if tool == "consan" or where is None:
        return run
    return [where, "--tool", tool, "--print-limit", "20", "--error-exitcode", "9", *run]


def environment(tool: str) -> dict[str, str]:
    """Of a run under the tool."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    if tool == "consan":
        return env | {"TRITON_INSTRUMENTATION_MODE": "consan"}
    return env | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def judge(tool: str, part: str, code: int, output: str, seconds: float) -> Found:
    """Clean: the run ended well, finished its part, and a tool with a summary counted nothing.

    Hazards are named with the kernels in which they were shown, at most 20 a part.
    """
    sums = [line.group() for line in map(SUMMARY.search, output.splitlines()) if line]
    is_done = f"done {part}" in output.splitlines()
    faults = [line.group() for line in map(FAULT.search, output.splitlines()) if line]
    is_silent = tool == "consan" or (bool(sums) and " 0 " in sums[-1])
    said = sums[-1] if sums else ("the part ran to its end" if is_done else "it did not finish")
    hazards = Counter(HAZARD.findall(output))
    if hazards:
        said += "; shown of " + ", ".join(f"{name} {n}" for name, n in hazards.most_common())
    if code == 124:
        said = f"not ended in time; {said}"
    if faults:
        said += f"; {faults[0].strip()[:200]}"
    return Found(tool, part, code == 0 and is_done and is_silent, said, seconds)


def run(tool: str, part: str, where: str | None, limit_s: float, folder: Path) -> Found:
    """One part under one tool; what a tool said of one that is not clean lies in `folder`."""
    began = time.monotonic()
    how = {"env": environment(tool), "cwd": ROOT, "capture_output": True, "text": True}
    try:
        done = subprocess.run(command(tool, part, where), timeout=limit_s, **how)
        code, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        code, output = 124, (late.stdout or b"").decode() if late.stdout else ""
    found = judge(tool, part, code, output, time.monotonic() - began)
    if not found.is_clean:
        write_atomic(folder / f"{tool}-{part}.log", output)
    return found


def compile_first(parts: list[str], jobs: int) -> None:
    """Fill the compile cache: under a tool it would take minutes."""
    with ThreadPoolExecutor(jobs) as pool:
        for part, code in zip(parts, pool.map(_compiled, parts), strict=True):
            print(f"compiled {part}" if code == 0 else f"{part} failed without a tool", flush=True)


def _compiled(part: str) -> int:
    return subprocess.run(command("", part, None), env=environment(""), cwd=ROOT).returncode


def main() -> int:
    """Run, print as results come, write the record."""
    ask = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    ask.add_argument("folder", type=Path)
    ask.add_argument("--tools", default=",".join(TOOLS))
    ask.add_argument("--parts", default="", help="some of them, by name")
    ask.add_argument("--jobs", type=int, default=max((os.cpu_count() or 2) // 2, 1))
    ask.add_argument("--limit-s", type=float, default=400.0, help="of one tool and part")
    got = ask.parse_args()
    tools, parts = got.tools.split(","), got.parts.split(",") if got.parts else None
    unknown = [t for t in tools if t not in TOOLS]
    unknown += [p for p in parts or () if p not in PORTABLE + HOPPER]
    if unknown or not got.folder.is_dir():
        known = f"tools {list(TOOLS)}; parts {PORTABLE + HOPPER}"
        ask.error(f"unknown: {unknown}; {known}; the folder must exist")
    where = sanitizer()
    if where is None and tools != ["consan"]:
        print("compute-sanitizer is neither on PATH nor in the CUDA toolkit", file=sys.stderr)
        return 3
    jobs = [(t, p) for t in tools for p in TOOLS[t] if parts is None or p in parts]
    compile_first(list(dict.fromkeys(p for t, p in jobs if t != "consan")), got.jobs)
    found = []
    with ThreadPoolExecutor(got.jobs) as pool:
        for one in pool.map(lambda job: run(*job, where, got.limit_s, got.folder), jobs):
            found.append(one)
            print(one, flush=True)
    write_atomic(got.folder / "sanitizer.txt", record(found))
    return 0 if all(one.is_clean for one in found) else 1


def record(found: list[Found]) -> str:
    """The text of the record."""
    import torch

    from megamoe.bench.provenance import provenance

    where = provenance(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    clean = sum(one.is_clean for one in found)
    return "\n".join([where, f"{clean} of {len(found)} clean. {UNSEEN}.", *map(str, found), ""])


if __name__ == "__main__":
    sys.exit(main())
