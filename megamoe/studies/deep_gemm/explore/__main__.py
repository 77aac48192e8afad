"""`python -m megamoe.studies.deep_gemm.explore [runs] [mutation ...]`: explore every case."""

from __future__ import annotations

import argparse
import sys
import time

from megamoe.studies.deep_gemm.explore import CASES, MUTATIONS, explore_many


def main(args: list[str]) -> int:
    """0 if every rule held in every run."""
    parser = argparse.ArgumentParser(
        prog="python -m megamoe.studies.deep_gemm.explore",
        description="Explore the protocol of the reference system, with bugs planted or without.",
    )
    parser.add_argument("runs", type=int, nargs="?", default=100, help="interleavings of each case")
    parser.add_argument("mutations", nargs="*", metavar="mutation", help=", ".join(MUTATIONS))
    asked = parser.parse_args(args)
    broken = 0
    for case in CASES.values():
        began = time.perf_counter()
        report = explore_many(case, asked.runs, mutations=asked.mutations)
        rate = report.num_runs / (time.perf_counter() - began)
        print(f"{case.name:<24}{report.num_runs:>7} runs {rate:>7.0f}/s  {report.found or 'ok'}")
        broken += not report.ok
    return int(broken > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
