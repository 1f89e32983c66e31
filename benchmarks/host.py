"""Host microseconds of a step around the forward pass: staging, building metadata, graph dispatch, and replay overhead.

    uv run python benchmarks/host.py --vllm VENV/bin/python --output benchmarks/results/host-cpu.json

Also prints the CPU time of the parts of an engine step with prefix caching, with and without drafts (`host_step.py`),
and with --vllm that of vLLM's scheduler (`host_rival.py`).

All rows of a table are timed in one run on one thread, in interleaved rounds. Figures are medians of the fastest half
of the rounds, which vary less on a shared machine. Block tables have 4,096 tokens per request in blocks of 16; decodes
have 100 to 1,000 tokens of context. The columns `mamba` and `attention` are for the builders alone: a hybrid model
needs staging and both.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import host_step
import numpy as np
import torch

from bateleur.cudagraph import (
    BatchExecutionDescriptor,
    CudagraphDispatcher,
    CudaGraphManager,
    CudaGraphMode,
    Execution,
    Phase,
    ReplayChecks,
    StagedBatch,
    UnpaddedBatch,
)
from bateleur.cudagraph.backends import get_backend as get_graph_backend
from bateleur.mamba import CacheLayout, MambaCacheMode, MambaMetadataBuilder
from bateleur.metadata import BatchLimits, BatchShape, BlockTable, InputBuffers, KVCacheGroup, StepRows, get_backend
from bateleur.runner.bench.peers import run_script
from bateleur.runner.model_runner.graph_dispatcher import default_capture_sizes

MODEL_LEN = 4096
LIMITS = BatchLimits(max_num_reqs=512, max_num_tokens=16384, max_model_len=MODEL_LEN)
CASES: dict[str, tuple[int, list[int]]] = {
    "1 decode": (1, []),
    "8 decodes": (8, []),
    "64 decodes": (64, []),
    "256 decodes": (256, []),
    "64 + 1 x 512": (64, [512]),
    "64 + 4 x 2048": (64, [2048] * 4),
    "64 + 16 x 512": (64, [512] * 16),
}


def microseconds(calls: Mapping[str, Callable[[], object]], rounds: int, repeats: int = 20) -> dict[str, float]:
    """Time of each call, in interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.perf_counter()
            for _ in range(repeats):
                call()
            times[name].append((time.perf_counter() - began) / repeats * 1e6)
    return {name: statistics.median(sorted(values)[: max(1, rounds // 2)]) for name, values in times.items()}


def rows_of(decodes: int, prompts: list[int]) -> tuple[StepRows, BatchShape]:
    rng = np.random.default_rng(0)
    query_lens = np.array([1] * decodes + prompts, np.int32)
    num_reqs, num_tokens = len(query_lens), int(query_lens.sum())
    computed = np.array([*rng.integers(100, 1000, decodes), *[0] * len(prompts)], np.int32)
    ids = np.zeros(num_tokens, np.int32)
    rows = StepRows(query_lens, computed, computed == 0, ids, block_table_rows=np.arange(num_reqs))
    return rows, BatchShape.of(num_reqs, num_tokens, int(query_lens.max()))


def stage_and_build(rounds: int) -> list[dict[str, Any]]:
    layout = CacheLayout(MambaCacheMode.NONE, MODEL_LEN, 0, MODEL_LEN)
    groups = [KVCacheGroup(16, MODEL_LEN // 16), KVCacheGroup(MODEL_LEN, 1, has_slots=False)]
    blocks = np.random.default_rng(0).integers(1, 9999, (LIMITS.max_num_reqs, MODEL_LEN // 16))
    slots = np.arange(1, LIMITS.max_num_reqs + 1)[:, None]
    tables = [ids.astype(np.int32) for ids in (blocks, slots)]
    attention = get_backend("torch", device="cpu", dtype=torch.float32, head_dim=128).builder()
    mamba = MambaMetadataBuilder(layout, 256, LIMITS.max_num_reqs, "cpu")
    table = []
    for name, (decodes, prompts) in CASES.items():
        rows, shape = rows_of(decodes, prompts)
        buffers = InputBuffers(LIMITS, groups, "cpu", tables=[BlockTable(ids) for ids in tables])
        batch = buffers.stage(rows, shape)
        calls: dict[str, Callable[[], object]] = {
            "stage_us": lambda rows=rows, shape=shape, buffers=buffers: buffers.stage(rows, shape),  # type: ignore[misc]
            "mamba_us": lambda batch=batch: mamba.build(batch, 1),  # type: ignore[misc]
            "attention_us": lambda batch=batch: attention.build(batch, 0),  # type: ignore[misc]
        }
        table.append({"case": name, **microseconds(calls, rounds)})
    return table


class NullProducer:
    """Stages nothing, so that only the manager's time remains."""

    generation = 1

    def stage(self, key: BatchExecutionDescriptor, phase: Phase) -> StagedBatch[object]:
        return StagedBatch(key, object(), self.generation)

    def addresses(self) -> dict[str, int]:
        return {f"buffer {i}": i for i in range(40)}


def replay(rounds: int) -> dict[str, float]:
    """Replay of an empty body at each check level. The first entry is the call of the body itself."""
    plan = CudagraphDispatcher.make(CudaGraphMode.FULL_DECODE_ONLY, [1, 8, 64], max_num_reqs=64)
    key = plan.keys[0]

    def body(execution: Execution[object]) -> None:
        return None

    staged = NullProducer().stage(key, Phase.RUN)
    calls: dict[str, Callable[[], object]] = {"body_us": lambda: body(Execution(key, staged.state))}
    for checks in ReplayChecks:
        manager = CudaGraphManager[object, None](plan, get_graph_backend("eager", "cpu"), checks=checks)
        manager.capture(NullProducer(), body)
        calls[f"{checks.name.lower()}_us"] = lambda m=manager: m.replay(key, staged)  # type: ignore[misc]
    return microseconds(calls, rounds)


def decide(rounds: int) -> dict[str, float]:
    """`CudagraphDispatcher.dispatch` with the default capture sizes."""
    plan = CudagraphDispatcher.make(
        CudaGraphMode.FULL_AND_PIECEWISE, default_capture_sizes(2048), max_num_reqs=256, max_num_tokens=2048
    )
    hit = UnpaddedBatch(37, 37, 1, 1, decode_only=True)
    piecewise = UnpaddedBatch(37, 300, None, 264, decode_only=False)
    eager = UnpaddedBatch(37, 2000, None, 1964, decode_only=False)
    return microseconds(
        {
            "decode_us": lambda: plan.dispatch(hit),
            "piecewise_us": lambda: plan.dispatch(piecewise),
            "eager_us": lambda: plan.dispatch(eager),
        },
        rounds,
    )


def vllm_scheduler(python: str) -> dict[str, Any]:
    """Run `host_rival.py` in the environment of that interpreter."""
    output = run_script(python, Path(__file__).with_name("host_rival.py"))
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--vllm", help="Python interpreter of an environment with vLLM")
    parser.add_argument("--output", "--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        steps = stage_and_build(args.rounds)
        replays, decisions = replay(args.rounds), decide(args.rounds)
    rounds = max(1, args.rounds // 20)
    engine = {f"{drafts} drafts": host_step.steps(rounds, drafts) for drafts in (0, host_step.DRAFTS)}
    prefixes = host_step.prefixes(max(3, args.rounds // 4))
    print(f"{'':<16}{'stage':>8}{'mamba':>8}{'attention':>11}   us")
    for row in steps:
        print(f"{row['case']:<16}{row['stage_us']:8.1f}{row['mamba_us']:8.1f}{row['attention_us']:11.1f}")
    by_case = {row["case"]: row for row in steps}
    growth = {
        column: (by_case["256 decodes"][column] - by_case["64 decodes"][column]) / 192
        for column in ("stage_us", "mamba_us", "attention_us")
    }
    print("growth per row from 64 to 256:", ", ".join(f"{k[:-3]} {v:.3f} us" for k, v in growth.items()))
    print("replay of an empty body:", ", ".join(f"{k[:-3]} {v:.2f} us" for k, v in replays.items()))
    print("decide:", ", ".join(f"{k[:-3]} {v:.2f} us" for k, v in decisions.items()))
    for name, found in engine.items():
        print(f"parts of a step with {name}, CPU us: requests", *host_step.PARTS, "total", "each request")
        for row in found["steps"]:
            print(f"{row['batch']:6}", *(f"{value:10.1f}" for part, value in row.items() if part != "batch"))
        print(f"fixed {found['fixed_us']:.0f} us, {found['us_per_request']:.2f} us a request more")
    rival = None if args.vllm is None else vllm_scheduler(args.vllm)
    if rival is not None:
        totals = ", ".join(f"{row['batch']}: {row['per_request']:.2f}" for row in rival["steps"])
        print(f"the scheduler of vLLM {rival['vllm']}, CPU us each request, by requests: {totals}")
    print("8,000 tokens:", ", ".join(f"{name[:-3]} {value:.0f} us" for name, value in prefixes.items()))
    result = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *("VENV/bin/python" if arg == args.vllm else arg for arg in sys.argv)]),
        "machine": f"{platform.machine()}, 1 thread",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "steps": steps,
        "growth_us_per_row": growth,
        "replay_us": replays,
        "decide_us": decisions,
        "engine": engine,
        "vllm_scheduler": rival,
        "prefixes": prefixes,
    }
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
