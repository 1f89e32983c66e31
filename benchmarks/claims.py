"""Measures the README's claims about a CPU with two cores, and compares each figure with its bound.

    uv run python benchmarks/claims.py OUT --vllm VENV/bin/python --llama-cpp VENV/bin/python

Takes 25 minutes on an otherwise idle machine. Parts whose peer is not given are reported as not measured. JSON and logs
of the parts are in OUT, the verdicts in OUT/claims-cpu.json. The exit status is the number of figures out of bounds
plus the claims that were not measured. `--judge` only evaluates the results in OUT.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from parts import run

ROOT = Path(__file__).parents[1]
Figures = Iterator[tuple[str, float]]
_ENVIRONMENTS = re.compile(r"^.*/(?=bin/python)")


@dataclass(frozen=True)
class Claim:
    """Figures of one part that must be at least, or at most, the bound."""

    part: str
    what: str
    at_least: bool
    bound: float
    figures: Callable[[Any], Figures]
    unit: str = ""

    def holds(self, figure: float) -> bool:
        """Whether a figure meets the bound."""
        return figure >= self.bound if self.at_least else figure <= self.bound


def of_batches(key: str, **where: Any) -> Callable[[Any], Figures]:
    """Returns a function that reads `key` of each row of "results" or "throughput" with these values."""

    def figures(found: Any) -> Figures:
        for row in found.get("results") or found["throughput"]:
            if all(row[name] == value for name, value in where.items()):
                yield f"batch {row['batch']}", row[key]

    return figures


def drafts(only_batch: int | None, temperature: float) -> Callable[[Any], Figures]:
    return lambda found: (
        (f"batch {row['batch']}", row["ratio_measured"])
        for row in found["results"]
        if row["temperature"] == temperature and only_batch in (None, row["batch"])
    )


def host_per_request(num_drafts: int) -> Callable[[Any], Figures]:
    """Host time at the largest number of requests, which share the fixed cost of a step."""
    steps = f"{num_drafts} drafts"

    def figures(found: Any) -> Figures:
        row = found["engine"][steps]["steps"][-1]
        yield f"{row['batch']} requests", row["per_request"]

    return figures


def each_request(num_drafts: int) -> Callable[[Any], Figures]:
    steps = f"{num_drafts} drafts"
    return lambda found: iter([("each further request", found["engine"][steps]["us_per_request"])])


def prefixes(key: str) -> Callable[[Any], Figures]:
    return lambda found: iter([("8,000 tokens", found["prefixes"][key])])


def sampling(found: Any) -> Figures:
    """Time of the slowest truncation at each size, as a multiple of an argmax."""
    rows = [row for row in found["rows"] if row["law"] != "argmax"]
    for vocabulary in sorted({row["vocabulary"] for row in rows}):
        for count in sorted({row["rows"] for row in rows}):
            of = [row for row in rows if (row["vocabulary"], row["rows"]) == (vocabulary, count)]
            yield f"{count} x {vocabulary:,}", max(row["ratio"] for row in of)


def start(case: str) -> Callable[[Any], Figures]:
    return lambda found: ((case, row["ratio_cpu"]) for row in found["results"] if row["case"] == case)


def growth(part: str, key: str) -> Callable[[Any], Figures]:
    """Ratio of the largest to the smallest value."""
    return lambda found: iter([(key, found[part][-1][key] / found[part][0][key])])


AHEAD = "tokens per second relative to vLLM, "
CLAIMS = (
    Claim("rival-cpu", AHEAD + "hybrid, float32", True, 1.25, of_batches("ratio")),
    Claim("rival-llama-cpu", AHEAD + "Llama, float32", True, 1.25, of_batches("ratio")),
    Claim("rival-bfloat16-cpu", AHEAD + "hybrid, bfloat16", True, 1.25, of_batches("ratio")),
    Claim("rival-llama-bfloat16-cpu", AHEAD + "Llama, bfloat16", True, 1.25, of_batches("ratio")),
    Claim(
        "throughput-cpu",
        "decode steps per second relative to transformers, hybrid",
        True,
        2.0,
        of_batches("ratio_behind_first", workload="decode"),
    ),
    Claim(
        "throughput-llama-cpu",
        "decode steps per second relative to transformers, Llama",
        True,
        2.0,
        of_batches("ratio_behind_first", workload="decode"),
    ),
    Claim(
        "llama-cpp-cpu",
        "tokens per second relative to llama.cpp, Llama, float32",
        True,
        0.8,
        lambda found: iter([("batch 1", found["ratio"])]),
    ),
    # The demo model is small: trials of the other choice, and a head that sleeps, take up to a fifth of a run.
    Claim("speculative-cpu", "speed with drafts relative to none, T 0", True, 0.8, drafts(None, 0.0)),
    Claim("speculative-cpu", "speed with drafts relative to none, T 0.8", True, 0.8, drafts(None, 0.8)),
    Claim("speculative-cpu", "one greedy stream with drafts", True, 1.4, drafts(1, 0.0)),
    Claim("speculative-cpu", "one drawn stream with drafts", True, 1.1, drafts(1, 0.8)),
    Claim("host-cpu", "host work of a step", False, 3.0, host_per_request(0), " us"),
    Claim("host-cpu", "host work of a step with 4 drafts", False, 6.0, host_per_request(4), " us"),
    Claim("host-cpu", "host work of a step with 4 drafts", False, 3.0, each_request(4), " us"),
    Claim("host-cpu", "looking up a prefix", False, 100.0, prefixes("lookup_us"), " us"),
    Claim("host-cpu", "hashing a prefix", False, 600.0, prefixes("hash_us"), " us"),
    Claim("sampling-cpu", "time of sampling relative to an argmax", False, 2.0, sampling),
    Claim("start-cpu", "CPU time relative to importing torch", False, 1.5, start("bateleur generate, first token")),
    Claim("start-cpu", "CPU time relative to importing torch", False, 1.5, start("import bateleur.runner")),
    Claim("growth-cpu", "100,000 cached blocks relative to 1,000", False, 1.25, growth("cached", "lookup_us")),
    Claim("growth-cpu", "10,000 waiting requests relative to none", False, 1.25, growth("waiting", "schedule_us")),
)


def commands(out: Path, vllm: str | None, llama_cpp: str | None) -> dict[str, list[str]]:
    """Command lines of the parts that can be measured, by part."""

    def script(name: str, part: str, *arguments: str) -> list[str]:
        path = os.path.relpath(ROOT / "benchmarks" / f"{name}.py")  # as a user would type it
        return [path, *arguments, "--output", str(out / f"{part}.json")]

    found = {}
    if vllm is not None:
        llama = ["--family", "llama", "--tokens", "32", "--rounds", "2"]
        for part, more in {
            "rival-cpu": ["--rounds", "3"],
            "rival-llama-cpu": llama,
            "rival-bfloat16-cpu": ["--rounds", "3", "--dtype", "bfloat16"],
            "rival-llama-bfloat16-cpu": [*llama, "--dtype", "bfloat16"],
        }.items():
            found[part] = script("rival", part, vllm, *more)
    if llama_cpp is not None:
        found["llama-cpp-cpu"] = script("llama_rival", "llama-cpp-cpu", llama_cpp)
    return found | {
        "speculative-cpu": script("speculative", "speculative-cpu", "--tokens", "128"),
        "throughput-cpu": script("throughput", "throughput-cpu"),
        "throughput-llama-cpu": script(
            "throughput", "throughput-llama-cpu", "--family", "llama", "--new", "32", "--rounds", "2"
        ),
        "host-cpu": script("host", "host-cpu", "--rounds", "80", *(["--vllm", vllm] if vllm is not None else [])),
        "sampling-cpu": script("sampling", "sampling-cpu", "--rounds", "11"),
        "start-cpu": script("start", "start-cpu", "--rounds", "5"),
        "growth-cpu": script("growth", "growth-cpu"),
    }


def judge(out: Path) -> list[dict[str, Any]]:
    """A row for each claim."""
    rows = []
    for claim in CLAIMS:
        file = out / f"{claim.part}.json"
        measured = dict(claim.figures(json.loads(file.read_text()))) if file.exists() else {}
        rows.append(
            {
                "part": claim.part,
                "what": claim.what,
                "bound": f"at {'least' if claim.at_least else 'most'} {claim.bound:g}{claim.unit}",
                "measured": measured,
                "off": [name for name, figure in measured.items() if not claim.holds(figure)],
            }
        )
    return rows


def told(row: dict[str, Any]) -> str:
    """Format a row for the terminal."""
    figures = ", ".join(
        f"{name} {figure:.2f}{' (!)' if name in row['off'] else ''}" for name, figure in row["measured"].items()
    )
    return f"{row['what']}: {row['bound']}: {figures or 'not measured'}"


def processor() -> str:
    """Name of the processor, and the vector instructions that torch uses."""
    told: dict[str, str] = {}
    with contextlib.suppress(FileNotFoundError):  # only Linux has this file
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = told.get("model name", platform.processor() or platform.machine())
    family = "".join(f" {key} {told[key]}" for key in ("cpu family", "model") if key in told)
    return f"{name}{family}, {torch.backends.cpu.get_cpu_capability()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--vllm", help="Python interpreter of an environment with vLLM for CPU")
    parser.add_argument("--llama-cpp", help="Python interpreter of an environment with llama-cpp-python and gguf")
    parser.add_argument("--only", nargs="+", metavar="PART")
    parser.add_argument("--judge", action="store_true", help="only evaluate the results in OUT")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = {} if args.judge else commands(args.out, args.vllm, args.llama_cpp)
    for name, command in wanted.items():
        if args.only and name not in args.only:
            continue
        began = time.perf_counter()
        ended = run(command, args.out / f"{name}.log", 1800.0)
        print(f"{name:<26} {ended}  {time.perf_counter() - began:.0f} s", flush=True)
    rows = judge(args.out)
    for row in rows:
        print(told(row))
    record = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *(_ENVIRONMENTS.sub("VENV/", arg) for arg in sys.argv)]),
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "claims": rows,
    }
    (args.out / "claims-cpu.json").write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(sum(len(row["off"]) or not row["measured"] for row in rows))


if __name__ == "__main__":
    main()
