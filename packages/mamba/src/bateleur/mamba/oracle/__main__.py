"""`python -m bateleur.mamba.oracle --runs 1000000`: exit status 1 if anything differs."""

from __future__ import annotations

import argparse
import sys

import torch

from bateleur.mamba.oracle.run import run


def main() -> int:
    """Simulate, print what was seen, and say whether the planner was right."""
    parser = argparse.ArgumentParser(prog="python -m bateleur.mamba.oracle", description=__doc__)
    parser.add_argument("--runs", type=int, default=20_000, help="requests to simulate (default 20000)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = run(args.runs, args.seed)
    print(report)
    for case in report.failing:
        print("failing:", case)
    return int(report.differences > 0)


if __name__ == "__main__":
    sys.exit(main())
