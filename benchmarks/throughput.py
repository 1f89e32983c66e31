"""Tokens per second beside `transformers.generate`: same checkpoint, threads and run, rounds interleaved.

    uv run python benchmarks/throughput.py

Prints a table and writes JSON: decode (equal prompts, the best case of a static batch) and mixed (ragged
prompts and output lengths), batch 1, 8 and 32, greedy, float32 on CPU. Of decode the same is told of the tokens
behind the first of each request alone, over the time that they took: of steps without prompts. Then the host's work
per step at 64 running requests, and peak memory beside weights plus cache budget. `--family llama` takes the Llama of
135 M random parameters of `rival.py`, for the table alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rival import write_checkpoint
from torch import Tensor

from bateleur.cudagraph import Execution
from bateleur.runner import LLM, SamplingParams
from bateleur.runner.assets import shipped_model
from bateleur.runner.bench import worker
from bateleur.runner.checkpoint.open import open_checkpoint
from bateleur.runner.models import HybridDecoder, StepContext

HOST_PARTS = ("schedule", "stage", "build", "emit")


def workload(kind: str, batch: int, new: int, vocab: int) -> list[tuple[list[int], int]]:
    """(prompt ids, tokens wanted) of each request."""
    if kind == "decode":
        return [([(7 * i + 13 * j) % (vocab - 8) + 5 for j in range(32)], new) for i in range(batch)]
    return [
        (
            [(7 * i + 13 * j) % (vocab - 8) + 5 for j in range(16 + 37 * i % 160)],
            max(1, new * (1 + i % 4) // 4),
        )
        for i in range(batch)
    ]


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def in_turn(rounds: int, *runs: Callable[[], object]) -> list[list[float]]:
    """Seconds of each, round after round."""
    return [list(each) for each in zip(*(map(seconds, runs) for _ in range(rounds)), strict=True)]


def compare(model: Path, rounds: int, new: int, batches: list[int]) -> list[dict[str, Any]]:
    settings = {"model": str(model), "dtype": "float32", "device": "cpu"}
    ours_of, _ = worker.bateleur({**settings, "options": {"dtype": "float32", "device": "cpu"}})
    hf_of, _ = worker.transformers(settings)
    vocab = open_checkpoint(model).spec.vocab_size
    rows = []
    for kind in ("decode", "mixed"):
        for batch in batches:
            requests = workload(kind, batch, new, vocab)
            prompts, tokens = [p for p, _ in requests], [n for _, n in requests]
            total = sum(tokens)
            ours_ids, hf_ids = ours_of(prompts, tokens), hf_of(prompts, tokens)
            ours, theirs, ours_first, theirs_first = (
                statistics.median(each)
                for each in in_turn(
                    rounds,
                    *(partial(of, prompts, n) for n in (tokens, [1] * batch) for of in (ours_of, hf_of)),
                )
            )
            fast, slow = total / ours, total / theirs
            rows.append(
                {
                    "workload": kind,
                    "batch": batch,
                    "tokens": total,
                    "bateleur_tokens_per_s": round(fast, 1),
                    "transformers_tokens_per_s": round(slow, 1),
                    "ratio": round(fast / slow, 2),
                    "equal_requests": sum(a == b for a, b in zip(ours_ids, hf_ids, strict=True)),
                }
            )
            told = ""
            if kind == "decode":
                rows[-1]["ratio_behind_first"] = round((theirs - theirs_first) / (ours - ours_first), 2)
                told = f", {rows[-1]['ratio_behind_first']:.2f}x behind the first"
            print(
                f"{kind:>7} batch {batch:>3}: same tokens {rows[-1]['equal_requests']}/{batch}   "
                f"bateleur {fast:8.1f} tok/s   transformers {slow:8.1f} tok/s   {fast / slow:5.2f}x{told}"
            )
    return rows


class IdleModel:
    """Stands in for the network: its work takes no time, so that what is left is the host's."""

    def __init__(self, model: HybridDecoder, batch: int) -> None:
        self.spec, self.ranks = model.spec, model.ranks
        self._hidden = torch.zeros(batch, model.spec.hidden_size)
        self._logits = torch.zeros(1, 1).expand(batch, model.spec.vocab_size)

    def run(self, execution: Execution[StepContext], taps: object = ()) -> tuple[Tensor, ...]:
        return (self._hidden,)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits


def host_cost(model: Path, num_requests: int, steps: int, idle: bool) -> dict[str, float]:
    """Host microseconds per request and step, by part, in steady decoding.

    With `idle` the network is taken out and torch has one thread, as where a GPU does that work and in the figures that
    other engines publish; without, what the network's own CPU work does to caches and cores is part of the cost.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if idle else threads)
    llm = LLM(model, device="cpu", max_num_seqs=num_requests, max_model_len=512)
    for i in range(num_requests):
        params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        llm.add_request([(7 * i + j) % 999 + 1 for j in range(16)], params)
    samples: dict[str, list[float]] = {part: [] for part in HOST_PARTS}
    stats = llm.get_metrics()
    for step in range(steps + 20):
        if step == 10 and idle:
            idle_model = IdleModel(llm.engine.model, num_requests)
            engine: Any = llm.engine
            engine.model = engine.graphs.model = engine._verifier.model = idle_model
        before = dict(stats.seconds)
        llm.step()
        if step >= 20:
            for part in HOST_PARTS:
                samples[part].append((stats.seconds[part] - before[part]) * 1e6 / num_requests)
    cost = {part: round(statistics.median(values), 3) for part, values in samples.items()}
    cost["total"] = round(statistics.median(map(sum, zip(*samples.values(), strict=True))), 3)
    torch.set_num_threads(threads)
    where = "network taken out" if idle else "beside the network on the same cores"
    print(f"host work per request and step at {num_requests} running, us ({where}): {cost}")
    return cost


MEMORY_PROBE = """
import gc, json, sys
from bateleur.cudagraph import Execution
from bateleur.runner import LLM, SamplingParams

def status(field):
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1]) * 1024

path = sys.argv[1]
# A first small run loads what is loaded once: library pages, tokenizer, thread pools.
LLM(path, device="cpu", max_num_seqs=1, max_model_len=64).generate([[1] * 40], SamplingParams(max_tokens=8))
gc.collect()
base = status("VmRSS")
llm = LLM(path, device="cpu")
prompts = [[(i + j) % 999 + 1 for j in range(1700)] for i in range(64)]
llm.generate(prompts, SamplingParams(temperature=0, max_tokens=340, ignore_eos=True))
weights = sum(w.nbytes for w in llm.engine.model.weights().values())
print(json.dumps({"weights_bytes": weights, "cache_budget_bytes": llm.cache_plan.total_bytes,
                  "peak_above_idle_bytes": status("VmHWM") - base}))
"""


def memory(model: Path) -> dict[str, Any]:
    """Peak resident memory above an idle process that has run once, with every KV block in use."""
    out = subprocess.run(
        [sys.executable, "-c", MEMORY_PROBE, str(model)], check=True, capture_output=True, text=True
    ).stdout
    facts: dict[str, Any] = json.loads(out.splitlines()[-1])
    facts["ratio"] = round(
        facts["peak_above_idle_bytes"] / (facts["weights_bytes"] + facts["cache_budget_bytes"]), 3
    )
    print(f"peak memory / (weights + cache budget): {facts['ratio']}")
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=shipped_model())
    parser.add_argument("--family", choices=["llama"], help="random parameters, in place of --model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=64, help="tokens per request")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    import transformers

    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "command": "python benchmarks/throughput.py " + " ".join(sys.argv[1:]),
        "machine": f"{platform.machine()}, {args.threads} threads",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        if args.family is not None:
            write_checkpoint(Path(folder), args.family)
        model = args.model if args.family is None else Path(folder)
        result["throughput"] = compare(model, args.rounds, args.new, args.batches)
    if args.family is None:
        result["host_us_per_request_step"] = host_cost(args.model, 64, 200, idle=True)
        result["host_us_per_request_step_beside_network"] = host_cost(args.model, 64, 200, idle=False)
        result["memory"] = memory(args.model)
    if args.output:
        args.output.write_text(json.dumps(result, indent=2) + "\n")
    else:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
