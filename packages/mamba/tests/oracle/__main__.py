"""`python packages/mamba/tests/oracle --runs 1000000 --jobs 2`: exit status 1 if anything differs."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # where the package is found, by spawned processes too

from oracle.parallel import reports
from oracle.run import Report


def main() -> int:
    """Run the simulation, print the result, and return whether there were no differences."""
    parser = argparse.ArgumentParser(prog="python packages/mamba/tests/oracle", description=__doc__)
    parser.add_argument("--runs", type=int, default=20_000, help="requests to simulate (default 20000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    args = parser.parse_args()
    if args.runs < 1 or args.jobs < 1:
        parser.error(f"--runs is {args.runs} and --jobs is {args.jobs}; both must be at least 1")
    torch.set_num_threads(1)
    report, began = Report(), time.perf_counter()
    for part in reports(args.runs, args.seed, args.jobs):
        report.add(part)
        report.seconds = time.perf_counter() - began
        if report.runs < args.runs:
            print(f"{report.runs} of {args.runs} runs, {report.differences} differences", flush=True)
    print(report)
    for case in report.failing:
        print("failing:", case)
    return int(report.differences > 0)


if __name__ == "__main__":
    sys.exit(main())
