#!/usr/bin/env python
"""Random programs of calls on a Hopper GPU, with a record of how many ran.

    PYTHONPATH=. python scripts/fuzz.py FOLDER [--seeds 0:10] [--steps 5800] [--wanted 50000]

Each seed is a program of `tests/engine/test_fuzz.py`, whose results are held bit for bit to single
staged calls. Writes FOLDER/fuzz.txt after every seed: provenance, how many calls were held so far,
by kind, and a line for each seed. The record says that all ran only when as many did as were
wanted. Exit codes: 0 so many ran and all had their bits, 1 fewer or not, 3 no Hopper GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import torch

from megamoe.bench.provenance import provenance
from megamoe.files import write_atomic
from tests.engine import test_fuzz

STEPS = 5800  # of a seed; some 5,200 of them are calls whose result is held


def record(where: str, ran: dict[int, Counter], failed: dict[int, str], wanted: int) -> str:
    """The text of the record, of the seeds that have ended."""
    total = sum((held for seed, held in ran.items() if seed not in failed), Counter())
    num = sum(total.values())
    if num >= wanted and not failed:
        head = f"{num:,} random calls of {len(ran)} seeds, all with the bits of single calls."
    else:
        head = f"NOT COMPLETE: {num:,} of {wanted:,} random calls had the bits of single calls"
        head += f"; {len(failed)} of {len(ran)} seeds failed."
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in total.most_common())
    lines = [
        f"seed {seed}: FAILED, {failed[seed]}" if seed in failed
        else f"seed {seed}: {sum(held.values()):,} calls"
        for seed, held in ran.items()
    ]  # fmt: skip
    return "\n".join([where, f"{head} By kind: {kinds or 'none'}.", *lines, ""])


def main() -> int:
    """Run the seeds and write the record after each."""
    ask = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    ask.add_argument("folder", type=Path)
    ask.add_argument("--seeds", default="0:10", help="first:end")
    ask.add_argument("--steps", type=int, default=STEPS)
    ask.add_argument("--wanted", type=int, default=50_000, help="calls in all")
    got = ask.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("needs a Hopper GPU; nothing was run", file=sys.stderr)
        return 3
    where = provenance(torch.device("cuda"))
    ran: dict[int, Counter] = {}
    failed: dict[int, str] = {}
    for seed in range(*map(int, got.seeds.split(":"))):
        ran[seed] = Counter()
        try:
            ran[seed] = test_fuzz.run(seed, got.steps, "cuda", "hopper", test_fuzz.of(seed)).ran
        except Exception as error:  # the record has it, and the next seed runs
            failed[seed] = f"{type(error).__name__}: {error}"[:300].replace("\n", " ")
        write_atomic(got.folder / "fuzz.txt", record(where, ran, failed, got.wanted))
    text = record(where, ran, failed, got.wanted)
    print(text)
    return 1 if "NOT COMPLETE" in text else 0


if __name__ == "__main__":
    sys.exit(main())
