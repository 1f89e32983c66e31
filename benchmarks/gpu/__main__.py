"""Command line of the bring-up: `python -m benchmarks.gpu [STEP ...]`, from the project's root."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from itertools import groupby
from pathlib import Path
from types import FrameType

from .plan import ROOT, select, waves
from .report import failed_steps, summary
from .run import SUMMARY, Runner, latest

MOST_STATUS = 100
"""Exit statuses above 125 have other meanings in a shell."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Checks the project on a GPU and measures it. The exit status is the number of failed steps. "
        "A machine without a GPU runs what it can at small sizes and lists the rest as skipped.",
    )
    made.add_argument("steps", nargs="*", metavar="STEP", help="steps to run, such as attention or decode:Qwen3.5-9B")
    made.add_argument("--seconds", type=float, default=540.0, help="time limit of the whole run (default: 540)")
    made.add_argument(
        "--output",
        type=Path,
        default=ROOT / "runs" / "gpu",
        help="folder for results.jsonl, summary.txt and log.txt; a run that is there is resumed (default: runs/gpu)",
    )
    made.add_argument("--again", action="store_true", help="run steps again that have ended in the output folder")
    made.add_argument("--quick", action="store_true", help="small sizes, to see that every step runs")
    made.add_argument("--list", action="store_true", help="list the steps and end")
    return made


def main(argv: list[str] | None = None) -> int:
    """Run the command, and return the number of failed steps."""
    began = time.monotonic()
    options = parser().parse_args(argv)
    every = waves(options.quick)
    if options.list:
        for title, group in groupby(every, key=lambda wave: wave.title):
            print(f"{title}:")
            for step in (step for wave in group for step in wave.steps):
                print(f"  {step.name:<40}{step.seconds:4.0f} s  {step.shows}")
        return 0
    try:
        chosen = select(every, options.steps)
        runner = Runner(options.output, began + options.seconds, options.quick)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2

    def stop(signal_number: int, frame: FrameType | None) -> None:
        runner.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    runner.run(chosen, set() if options.again else runner.ended)
    runner.close()
    lines = latest(runner.lines)
    text = summary(lines, [step.name for wave in chosen for step in wave.steps])
    (options.output / SUMMARY).write_text(text + "\n")
    print(text, flush=True)
    return min(len(failed_steps(lines)), MOST_STATUS)


if __name__ == "__main__":
    sys.exit(main())
