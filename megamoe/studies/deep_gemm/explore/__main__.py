"""`python -m megamoe.studies.deep_gemm.explore [runs] [mutation ...]`: explore every case and say so."""

from __future__ import annotations

import sys
import time

from megamoe.studies.deep_gemm.explore import CASES, explore_many


def main(args: list[str]) -> int:
    """0 if every rule held in every run."""
    num_runs, bugs = int(args[0]) if args else 100, args[1:]
    broken = 0
    for case in CASES.values():
        began = time.perf_counter()
        report = explore_many(case, num_runs, mutations=bugs)
        rate = report.num_runs / (time.perf_counter() - began)
        print(f"{case.name:<24}{report.num_runs:>7} runs {rate:>7.0f}/s  {report.found or 'ok'}")
        broken += not report.ok
    return int(broken > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
