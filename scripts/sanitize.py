#!/usr/bin/env python
"""Every kernel under the tools that look for races and stray accesses, with a record.

    PYTHONPATH=. python scripts/sanitize.py FOLDER [--tools memcheck,consan] [--parts hopper-w8a8]
        [--tool PATH]

Tools: compute-sanitizer's memcheck, racecheck and synccheck, and `consan`, Triton's own sanitizer
of barriers, copies and products (TRITON_INSTRUMENTATION_MODE). Parts are those of
`sanitize_calls.py`; ConSan knows what Gluon's kernels do, and gets parts of its own
(`sanitize_consan.py`): few kernels on few CTAs, built first, under a limit of their own.

The newest compute-sanitizer runs: that of --tool, on PATH or in the CUDA toolkit. pip's wheel
nvidia-cuda-sanitizer-api has one that needs no toolkit and can be carried to a machine without a
network. racecheck's hazards are held, pair by pair, to the table of `sanitize_races.py`; and it
judges two control kernels, so that a reader knows whether it sees an mbarrier's order at all.

Writes FOLDER/sanitizer.txt: provenance, what no tool sees, a line for each tool and part; and the
whole output of a tool for each part that is not clean. Exit codes: 0 all is clean or explained,
1 something was found or did not end, 3 compute-sanitizer is missing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megamoe.files import write_atomic
from megamoe.planner.numerics import HOPPER_RECIPES
from megamoe.problem import RECIPES
from scripts import sanitize_consan
from scripts.sanitize_races import races

ROOT = Path(__file__).parent.parent
CALLS = ROOT / "scripts" / "sanitize_calls.py"
PORTABLE = (*RECIPES, "quantisers", "graphs")
HOPPER = tuple(f"hopper-{recipe}" for recipe in HOPPER_RECIPES)
HOPPER += tuple(f"chain-{recipe}" for recipe in HOPPER_RECIPES)
HOPPER += tuple(f"refresh-{recipe}" for recipe in HOPPER_RECIPES)
CONTROLS = ("control-ordered", "control-racing")
TOOLS = {  # tool: the parts it runs
    "memcheck": PORTABLE + HOPPER,
    "racecheck": PORTABLE + HOPPER + CONTROLS,
    "synccheck": PORTABLE + HOPPER,
    "consan": sanitize_consan.PARTS,
}
KNOWN = PORTABLE + HOPPER + CONTROLS + sanitize_consan.PARTS
UNSEEN = (
    "racecheck sees shared memory accessed by threads, not by TMA or wgmma; ConSan sees those, but "
    "not inline PTX: the bounded waits on global memory, signals and reports, griddepcontrol, "
    "proxy fences of global memory, prefetches, L2 policies, decoding of FP4. Chains run on one "
    "rank: tools may hold apart what ranks launch side by side. Order between CTAs, launches and "
    "ranks is what tests/proof schedules"
)
SUMMARY = re.compile(r"(ERROR SUMMARY|RACECHECK SUMMARY): .*")
UNSURE = re.compile(r".*(Detected overflow|didn't track the launch).*")
VERSION = re.compile(r"Version (\d+(?:\.\d+)*)")
FAULT = re.compile(r".*(device-side assert|Assertion|CUDA error|illegal).*")


@dataclass(frozen=True)
class Found:
    """What one tool said of one part."""

    tool: str
    part: str
    is_clean: bool
    said: str
    seconds: float
    is_explained: bool = False  # racecheck's hazards, all of them

    @property
    def is_fine(self) -> bool:
        return self.is_clean or self.is_explained or self.part in CONTROLS  # see `verdict`

    def __str__(self) -> str:
        state = "clean" if self.is_clean else "explained" if self.is_explained else "FOUND"
        return f"{self.tool} {self.part}: {state}, {self.said} ({self.seconds:.0f} s)"


def version_of(where: str) -> str:
    """What a compute-sanitizer calls itself, such as 2026.3.0.0."""
    done = subprocess.run([where, "--version"], capture_output=True, text=True)
    found = VERSION.search(done.stdout)
    return found[1] if found else "of unknown version"


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def sanitizer(given: Path | None = None) -> tuple[str, str] | None:
    """The newest compute-sanitizer that runs here, and its version: as given, on PATH or in the
    CUDA toolkit. One that is newer than the driver may not."""
    cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    places = (cuda / "bin", cuda / "compute-sanitizer", cuda / "extras" / "compute-sanitizer")
    names = [shutil.which("compute-sanitizer", path=str(place)) for place in places]
    names += [shutil.which("compute-sanitizer"), str(given) if given else None]
    known = [(name, version_of(name)) for name in dict.fromkeys(filter(None, names))]
    known.sort(key=lambda one: _order(one[1]), reverse=True)
    return next((one for one in known if len(known) == 1 or _runs(one[0])), None)


def _runs(where: str) -> bool:
    """Whether this compute-sanitizer runs a kernel of torch's on this driver."""
    kernel = [sys.executable, "-c", "import torch; print(torch.ones(3, device='cuda').sum())"]
    try:
        done = subprocess.run([where, "--tool", "memcheck", *kernel], capture_output=True,
                              text=True, timeout=120)  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0 and "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr


def command(tool: str, part: str, where: str | None) -> list[str]:
    """What runs one part under one tool; without a sanitizer, or for ConSan, the part alone."""
    run = [sys.executable, str(CALLS), part]
    if tool == "consan" or where is None:
        return run
    more = ["--num-cuda-barriers", "256"] if tool in ("racecheck", "synccheck") else []
    shown = "0" if tool == "racecheck" else "20"  # 0: all of them, to be read pair by pair
    return [where, "--tool", tool, "--print-limit", shown, *more, "--error-exitcode", "9", *run]


def environment(tool: str) -> dict[str, str]:
    """Of a run under the tool."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    if tool == "consan":
        return env | sanitize_consan.environment()
    return env | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def judge(tool: str, part: str, code: int, output: str, seconds: float) -> Found:
    """Clean: the run ended well, finished its part, and a tool with a summary counted nothing.

    A tool that lost track of barriers or of a launch says nothing, whatever it counted.
    """
    lines = output.splitlines()
    sums = [line.group() for line in map(SUMMARY.search, lines) if line]
    is_done = f"done {part}" in lines
    faults = [line.group() for line in map(FAULT.search, lines) if line]
    unsure = [line.group() for line in map(UNSURE.search, lines) if line]
    is_silent = tool == "consan" or (bool(sums) and " 0 " in sums[-1])
    said = sums[-1] if sums else ("the part ran to its end" if is_done else "it did not finish")
    found = races(output) if tool == "racecheck" else None
    if found is not None and sums:
        said = str(found)
    if code == 124:
        said = f"not ended in time; {said}"
    for lost in (*unsure[:1], *faults[:1]):
        said += f"; {lost.strip()[:200]}"
    is_clean = code == 0 and is_done and is_silent and not unsure
    # racecheck's exit code says that there are hazards; what else it may mean is in the text.
    is_whole = code in (0, 9) and is_done and not unsure and not faults
    is_explained = bool(found and found.num and found.is_explained and is_whole)
    return Found(tool, part, is_clean, said, seconds, is_explained)


def verdict(found: list[Found]) -> str:
    """What racecheck's word on a hand-shake is worth, by the two control kernels."""
    by_part = {one.part: one for one in found if one.tool == "racecheck" and one.part in CONTROLS}
    if len(by_part) < len(CONTROLS):
        return "The control kernels did not run: nothing says whether racecheck sees such order."
    ordered, racing = (by_part[part].is_clean for part in CONTROLS)
    if ordered and not racing:
        return "racecheck tells a hand-shake on mbarriers from a race: its hazards are to be read."
    return (
        f"racecheck cannot judge hand-shakes on mbarriers: with one it is "
        f"{'silent' if ordered else 'not'}, without any it is {'silent' if racing else 'not'}."
    )


def run(tool: str, part: str, where: str | None, limit_s: float, folder: Path) -> Found:
    """One part under one tool; what a tool said of one that is not clean lies in `folder`."""
    began = time.monotonic()
    how = {"env": environment(tool), "cwd": ROOT, "capture_output": True, "text": True}
    try:
        done = subprocess.run(command(tool, part, where), timeout=limit_s, **how)
        code, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        said = [text.decode() for text in (late.stdout, late.stderr) if text]
        code, output = 124, "".join(said)
    found = judge(tool, part, code, output, time.monotonic() - began)
    if not found.is_clean or found.part in CONTROLS:
        write_atomic(folder / f"{tool}-{part}.log", output)
    return found


def build_for_consan(parts: list[str], limit_s: float) -> str:
    """Build ConSan's kernels, no GPU needed; -> why there are none, or ""."""
    print(f"stage: building kernels of {len(parts)} parts for ConSan", flush=True)
    build = [sys.executable, str(CALLS.with_name("sanitize_consan.py")), "--compile-only", *parts]
    began = time.monotonic()
    try:
        done = subprocess.run(build, timeout=limit_s, env=environment("consan"), cwd=ROOT)
    except subprocess.TimeoutExpired:
        return f"its kernels were not built within {limit_s:.0f} s"
    print(f"stage: ConSan's builds ended after {time.monotonic() - began:.0f} s", flush=True)
    return "" if done.returncode == 0 else f"its build ended with {done.returncode}"


def run_all(jobs: list[tuple[str, str]], got: argparse.Namespace, where: str | None) -> list[Found]:
    """Build, then run every job; prints stages and results as they come."""
    compile_first(list(dict.fromkeys(p for t, p in jobs if t != "consan")), got.jobs)
    parts = [part for tool, part in jobs if tool == "consan"]
    why = build_for_consan(parts, got.build_limit_s) if parts else ""
    found = [Found("consan", part, False, why, 0.0) for part in parts if why]
    print("stage: running", flush=True)
    left = [job for job in jobs if not (why and job[0] == "consan")]
    with ThreadPoolExecutor(got.jobs) as pool:
        for one in pool.map(lambda job: run(*job, where, got.limit_s, got.folder), left):
            found.append(one)
            print(one, flush=True)
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
    ask.add_argument("--tool", type=Path, help="a compute-sanitizer; the newest of all runs")
    ask.add_argument("--jobs", type=int, default=max((os.cpu_count() or 2) // 2, 1))
    ask.add_argument("--limit-s", type=float, default=400.0, help="of a run of one tool and part")
    ask.add_argument("--build-limit-s", type=float, default=600.0, help="of ConSan's kernels")
    got = ask.parse_args()
    tools, parts = got.tools.split(","), got.parts.split(",") if got.parts else None
    unknown = [t for t in tools if t not in TOOLS]
    unknown += [p for p in parts or () if p not in KNOWN]
    if unknown or not got.folder.is_dir():
        known = f"tools {list(TOOLS)}; parts {KNOWN}"
        ask.error(f"unknown: {unknown}; {known}; the folder must exist")
    newest = sanitizer(got.tool)
    if newest is None and tools != ["consan"]:
        print("compute-sanitizer is neither on PATH nor in the CUDA toolkit; give --tool, such as "
              "that of pip's nvidia-cuda-sanitizer-api", file=sys.stderr)  # fmt: skip
        return 3
    where, version = newest or (None, "none")
    jobs = [(t, p) for t in tools for p in TOOLS[t] if parts is None or p in parts]
    found = run_all(jobs, got, where)
    write_atomic(got.folder / "sanitizer.txt", record(found, version))
    return 0 if all(one.is_fine for one in found) else 1


def record(found: list[Found], version: str) -> str:
    """The text of the record."""
    import torch

    from megamoe.bench.provenance import provenance

    where = provenance(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    clean, explained = (
        sum(getattr(one, f"is_{s}") for one in found) for s in ("clean", "explained")
    )
    head = f"{clean} of {len(found)} clean, {explained} explained. {UNSEEN}. {verdict(found)}"
    return "\n".join([f"{where}, compute-sanitizer {version}", head, *map(str, found), ""])


if __name__ == "__main__":
    sys.exit(main())
