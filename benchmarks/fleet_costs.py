"""Measures step times for `fleet.py`, and reads them back.

    uv run python benchmarks/fleet_costs.py --output benchmarks/results/fleet-costs-cpu.json

Decode steps by number of rows, and prefill steps by number of tokens, of the shipped model on one thread: CPU
milliseconds, medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

ROWS = (1, 2, 4, 8, 16, 32)
PROMPT = (16, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class StepTable:
    """Seconds of decode steps by rows, and of prefill steps by tokens, with linear interpolation."""

    rows: tuple[int, ...]
    rows_s: tuple[float, ...]
    prompt: tuple[int, ...]
    prompt_s: tuple[float, ...]
    source: str
    """What was measured, where and when."""

    @classmethod
    def read(cls, file: Path) -> StepTable:
        """Read a file that this script wrote."""
        found = json.loads(file.read_text())
        rows, prompt = found["rows"], found["prompt"]
        return cls(
            tuple(each["rows"] for each in rows),
            tuple(each["ms"] / 1e3 for each in rows),
            tuple(each["tokens"] for each in prompt),
            tuple(each["ms"] / 1e3 for each in prompt),
            f"{found['model']}, {found['machine']}, {found['date']}",
        )

    def seconds(self, num_decodes: int, prompt_tokens: int) -> float:
        """Seconds of a step. For a mixed step the sum of both parts, an upper bound."""
        return _between(num_decodes, self.rows, self.rows_s) + _between(prompt_tokens, self.prompt, self.prompt_s)


def _between(size: int, sizes: tuple[int, ...], seconds: tuple[float, ...]) -> float:
    """Interpolate linearly; 0 for size 0, and extrapolated beyond the largest size."""
    if not size:
        return 0.0
    if size > sizes[-1]:
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        return seconds[-1] + slope * (size - sizes[-1])
    return float(np.interp(size, sizes, seconds))


def measured(rounds: int, rows: tuple[int, ...], prompt: tuple[int, ...]) -> dict[str, list[dict[str, float]]]:
    """Milliseconds of CPU time by size."""
    from bateleur.runner import LLM, SamplingParams

    llm = LLM(device="cpu", max_num_seqs=max(rows), max_model_len=1024, max_num_batched_tokens=max(prompt))
    long = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    ids = iter(range(10**9))

    def text(length: int) -> list[int]:
        return [1 + (7 * next(ids)) % 997 for _ in range(length)]

    def decode(count: int) -> float:
        names = [llm.add_request(text(8), long) for _ in range(count)]
        for _ in range(4):
            llm.step()
        began = time.process_time()
        for _ in range(8):
            llm.step()
        found = (time.process_time() - began) / 8
        for name in names:
            llm.abort(name)
        return found

    def prefill(count: int) -> float:
        name = llm.add_request(text(count), long)
        began = time.process_time()
        llm.step()
        found = time.process_time() - began
        llm.abort(name)
        return found

    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for count in rows:
            times.setdefault(("rows", count), []).append(decode(count))
        for count in prompt:
            times.setdefault(("tokens", count), []).append(prefill(count))

    def listed(kind: str) -> list[dict[str, float]]:
        return [{kind: n, "ms": statistics.median(found) * 1e3} for (name, n), found in times.items() if name == kind]

    return {"rows": listed("rows"), "prompt": listed("tokens")}


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "model": "the shipped model",
        "machine": f"{platform.machine()}, 1 thread of {os.cpu_count()} cores",
        "torch": torch.__version__,
        **measured(args.rounds, ROWS, PROMPT),
    }
    for kind in ("rows", "prompt"):
        for row in found[kind]:
            print("  ".join(f"{name} {value:g}" for name, value in row.items()))
    if args.output is not None:
        args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
