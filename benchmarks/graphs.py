"""Steps with CUDA graphs compared with eager steps: milliseconds per decode step, and host time of a replay.

    uv run python benchmarks/graphs.py --device cuda --output benchmarks/results/graphs-h200.json

Two engines of the shipped model, one eager and one with graphs, decode the same requests in interleaved rounds. On a
CPU the graphs are emulated, which shows their semantics but saves no time.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

from bateleur.cudagraph import Phase
from bateleur.runner import LLM, SamplingParams


def engine(device: torch.device, batch: int, mode: str) -> LLM:
    """An engine that decodes `batch` requests."""
    llm = LLM(
        device=device,
        max_num_seqs=batch,
        max_model_len=1024,
        cudagraph_mode=mode,
        cudagraph_backend="cuda" if device.type == "cuda" else "recorded",
        cudagraph_capture_sizes=[batch],
        cudagraph_checks="OFF",
    )
    params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
    for i in range(batch):
        llm.add_request([(7 * i + j) % 999 + 1 for j in range(16)], params)
    for _ in range(8):
        llm.step()
    return llm


def step_ms(batch: int, device: torch.device, rounds: int) -> dict[str, float]:
    engines = {mode: engine(device, batch, mode) for mode in ("NONE", "FULL_DECODE_ONLY")}
    times: dict[str, list[float]] = {mode: [] for mode in engines}
    for _ in range(rounds):
        for mode, llm in engines.items():
            began = time.perf_counter()
            llm.step()  # ends with the copy of sampled ids to the host, so it synchronises
            times[mode].append((time.perf_counter() - began) * 1e3)
    eager, graph = (statistics.median(values) for values in times.values())
    return {
        "eager_ms": eager,
        "graph_ms": graph,
        "ratio": eager / graph,
        **replay_us(engines["FULL_DECODE_ONLY"], rounds),
    }


def replay_us(llm: LLM, rounds: int) -> dict[str, float]:
    """Host time of `manager.replay` and of the graph's replay within it; the difference is the overhead."""
    manager = llm.engine.runner.graphs.manager
    assert manager is not None
    (key,) = manager.ready
    with torch.inference_mode():
        staged = manager.states[key].restage(Phase.RUN)
        recording = manager._captured[key].graph
        calls: dict[str, Callable[[], object]] = {
            "replay_us": lambda: manager.replay(key, staged),
            "of_these_the_recording_us": lambda: recording.replay(staged.state),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                if llm.device.type == "cuda":
                    torch.cuda.synchronize()
                began = time.perf_counter()
                call()
                times[name].append((time.perf_counter() - began) * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    rows: list[dict[str, Any]] = []
    for batch in args.batches:
        rows.append({"batch": batch, **step_ms(batch, device, args.rounds)})
        print({name: round(value, 3) for name, value in rows[-1].items()})
    result = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "rows": rows,
    }
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
