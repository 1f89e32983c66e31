"""Start-up time of processes compared with one that only imports torch: CPU and wall seconds, interleaved.

    uv run python benchmarks/start.py --output benchmarks/results/start-cpu.json

`generate` ends with the first token of the shipped model. The ratio is of CPU seconds, which hardly depend on other
processes; medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

CASES = {
    "import torch": ("-c", "import torch"),
    "import bateleur.runner": ("-c", "import bateleur.runner"),
    "from bateleur.runner import LLM": ("-c", "from bateleur.runner import LLM"),
    "import transformers": ("-c", "import torch, transformers"),
    "bateleur generate, first token": (
        *("-m", "bateleur.runner", "generate", "class Shape:", "--max-tokens", "1", "--device", "cpu"),
    ),
}


def once(arguments: tuple[str, ...]) -> tuple[float, float]:
    """CPU and wall seconds of one process."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    for arguments in CASES.values():
        once(arguments)  # warm the file cache
    for _ in range(args.rounds):
        for name, arguments in CASES.items():
            times[name].append(once(arguments))
    rows: list[dict[str, Any]] = []
    for name, runs in times.items():
        cpu, wall = (statistics.median(each) for each in zip(*runs, strict=True))
        first = rows[0] if rows else {"cpu_s": cpu, "wall_s": wall}
        ratios = {"ratio_cpu": cpu / first["cpu_s"], "ratio_wall": wall / first["wall_s"]}
        rows.append({"case": name, "cpu_s": cpu, "wall_s": wall, **ratios})
        print(f"{name:<34}{cpu:7.2f} s CPU{wall:8.2f} s wall   {ratios['ratio_cpu']:.2f} of import torch", flush=True)
    result = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        "results": rows,
    }
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
