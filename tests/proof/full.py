"""All interleavings of every case, and every planted bug from three first seeds, on a few cores.

    python -m tests.proof.full [--workers 2] [--within-s 240] [--only fused-ranks]

`scripts/proof.sh` runs it. Prints a line for each case with its first and last seed, and for each
module whose bugs were looked for. Cases are made before workers are forked, so each is made once.
Exit codes: 0 all passed, 1 something was found or missed, 2 it took longer than --within-s.
"""

import argparse
import gc
import multiprocessing
import sys
import time

import torch

from tests.emulator.exploring import Found, explore
from tests.proof import blackwell, campaign, excused
from tests.proof.test_blackwell import NUM as NUM_OF_BLACKWELL
from tests.proof.test_interleavings import NUM

BASES = 0, 10_000, 20_000  # first seeds of the three runs over planted bugs
PER_JOB = 50  # interleavings; the cores end at about the same time


def explored(name, first, num):
    """What failed of some interleavings of a case, as text; "" if nothing did."""
    try:
        explore(_case(name), range(first, first + num))
    except Found as found:
        return str(found)
    return ""


def _case(name):
    house, _, of = name.rpartition(" ")
    return blackwell.case(of) if house else campaign.case(of)


def cases():
    """{case: how many interleavings}, the dearest first."""
    nums = NUM | {f"blackwell {name}": num for name, num in NUM_OF_BLACKWELL.items()}
    return dict(sorted(nums.items(), key=lambda item: -item[1]))


def bugs():
    """{module: planted bugs without an excuse}; Blackwell's GEMM and fused launch are two more."""
    by_module = {}
    for name, bug in campaign.planted_bugs().items():
        if name not in excused.EXCUSED:
            by_module.setdefault(bug.module, []).append(bug)
    for what, planted, but in (
        ("blackwell GEMM", blackwell.planted_bugs(), blackwell.EXCUSED),
        ("blackwell fused", blackwell.fused_bugs(), blackwell.FUSED_EXCUSED),
    ):
        by_module[what] = [bug for name, bug in planted.items() if name not in but]
    return by_module


def hunted(module, base):
    """Names of the bugs of a module that were missed, one a line."""
    if module == "blackwell fused":
        missed = [b for b in BUGS[module] if not blackwell.hunt(b, base, cases=blackwell.FUSED)]
    elif module == "blackwell GEMM":
        missed = [bug for bug in BUGS[module] if not blackwell.hunt(bug, base)]
    else:
        missed = [bug for bug in BUGS[module] if not campaign.hunt(bug, base)]
    return "\n".join(bug.name for bug in missed)


BUGS = {}  # filled before workers are forked


def prepare(wanted):
    """Make what the workers share: cases, and which functions each runs."""
    for name in wanted:
        _case(name)
    BUGS.update(bugs())
    for name in campaign.CASES:
        campaign.reached(name)
    for name in (*blackwell.CASES, *blackwell.FUSED):
        blackwell.reached(name)
    gc.collect()
    gc.freeze()  # what is made lives on: no collection looks at it again


def jobs(wanted):
    """(title, function, arguments): bugs of large modules first, then cases in parts."""
    for module in sorted(BUGS, key=lambda module: -len(BUGS[module])):
        for base in BASES:
            title = f"bugs in {module}: {len(BUGS[module])}, found from seed {base}"
            yield title, hunted, (module, base)
    for name, num in wanted.items():
        title = f"{name}: {num} interleavings, seeds 0 to {num - 1}"
        for first in range(0, num, PER_JOB):
            yield title, explored, (name, first, min(PER_JOB, num - first))


def _run(job):
    title, act, arguments = job
    began = time.process_time()
    return title, act(*arguments), time.process_time() - began


def run(wanted, workers):
    """Run all jobs and print each title once its last part has ended; -> how many failed."""
    began = time.monotonic()
    torch.set_num_threads(1)  # workers are forked: OpenMP's threads would not be there
    prepare(wanted)
    print(f"{len(wanted)} cases made in {time.monotonic() - began:.0f} s", flush=True)
    todo = list(jobs(wanted))
    left, seconds, failed = {}, {}, 0
    for title, _, _ in todo:
        left[title] = left.get(title, 0) + 1
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        for title, found, took in pool.imap_unordered(_run, todo):
            left[title] -= 1
            seconds[title] = seconds.get(title, 0.0) + took
            failed += bool(found)
            if found:
                print(f"FAILED {title}\n{found}", flush=True)
            if not left[title]:
                print(f"{title} ({seconds[title]:.1f} s)", flush=True)
    num, cpu_s = sum(wanted.values()), sum(seconds.values())
    planted = sum(map(len, BUGS.values()))
    print(f"{num} interleavings of {len(wanted)} cases, {planted} bugs from each of seeds {BASES}: "
          f"{failed} parts failed, {cpu_s:.0f} s of CPU time, {time.monotonic() - began:.0f} s "
          f"with {workers} workers")  # fmt: skip
    return failed


def main():
    ask = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    ask.add_argument("--workers", type=int, default=2)
    ask.add_argument("--within-s", type=float, help="longer is a failure; a busy machine needs it")
    ask.add_argument("--only", default="", help="cases whose name has this")
    got = ask.parse_args()
    wanted = {name: num for name, num in cases().items() if got.only in name}
    if not wanted:
        ask.error(f"no case has {got.only!r} in its name; there are {', '.join(cases())}")
    began = time.monotonic()
    if run(wanted, got.workers):
        return 1
    return 2 if got.within_s and time.monotonic() - began > got.within_s else 0


if __name__ == "__main__":
    sys.exit(main())
