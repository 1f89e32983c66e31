"""Greedy decoding of one request compared with llama.cpp: a Llama with 135 M random parameters in float32.

    uv run python benchmarks/llama_rival.py VENV/bin/python --output benchmarks/results/llama-cpp-cpu.json

The argument is the Python interpreter of an environment with `llama-cpp-python`, `gguf` and `safetensors`. The engines
run in their own processes in interleaved rounds, and their tokens must be equal. A step reads every weight once.
`of_read` is the speed as a share of a plain read of as many bytes, measured in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from rival import write_checkpoint

from bateleur.runner.bench.peers import EngineProcess, Task, run_interleaved, run_script, run_task

PASSES = 4


def compare(python: str, folder: Path, tokens: int, rounds: int, threads: int) -> dict[str, Any]:
    """Measure both engines and the bandwidth of a plain read."""
    gguf = folder / "model.gguf"
    run_script(python, Path(__file__).with_name("write_gguf.py"), str(folder), str(gguf))
    weights = (folder / "model.safetensors").stat().st_size
    options = {"device": "cpu", "dtype": "float32", "max_model_len": 512, "max_num_seqs": 1}
    settings = {"model": str(folder), "gguf": str(gguf), "num_threads": threads, "options": options, **options}
    engines = [EngineProcess("bateleur", settings), EngineProcess("llama.cpp", settings, python)]
    reader = EngineProcess("read", {**settings, "read_bytes": weights})
    task = Task([[(13 * j) % 1000 + 5 for j in range(32)]], [tokens])
    speeds: list[float] = []

    def read() -> None:
        run = run_task(reader, Task([], [PASSES]))
        speeds.append(run.ids[0][0] / run.seconds)

    whole, first = run_interleaved(engines, [task, task.first_token_only()], rounds, warm_ups=1, after_round=read)
    result: dict[str, Any] = {"weight_bytes": weights, "read_GB_per_s": max(speeds) / 1e9, "engines": {}}
    for engine in engines:
        if fault := whole[engine.name].fault(task):
            raise RuntimeError(f"{engine.name}: {fault}")
        steps = zip(whole[engine.name].runs, first[engine.name].runs, strict=True)
        seconds = statistics.median((run.seconds - start.seconds) / (tokens - 1) for run, start in steps)
        result["engines"][engine.name] = {
            "version": engine.facts["version"],
            "tokens_per_s": 1 / seconds,
            "of_read": weights / seconds / max(speeds),
        }
    for engine in (*engines, reader):
        engine.close()
    speed = {name: row["tokens_per_s"] for name, row in result["engines"].items()}
    result["ratio"] = speed["bateleur"] / speed["llama.cpp"]
    result["equal"] = whole["bateleur"].ids == whole["llama.cpp"].ids
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", help="Python interpreter of an environment with llama-cpp-python")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), "llama")
        found = compare(args.python, Path(folder), args.tokens, args.rounds, args.threads)
    told = ["VENV/bin/python" if arg == args.python else arg for arg in sys.argv]
    record = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *told]),
        "machine": f"{platform.machine()}, {args.threads} threads, load {os.getloadavg()[0]:.1f}",
        **found,
    }
    for name, row in found["engines"].items():
        print(f"{name:10} {row['tokens_per_s']:6.1f} tok/s, {row['of_read']:.0%} of a read's bandwidth")
    print(f"{found['ratio']:.2f}x, same tokens: {found['equal']}, a read: {found['read_GB_per_s']:.1f} GB/s")
    if args.output is not None:
        args.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
