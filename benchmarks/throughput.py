"""Tokens per second compared with `transformers.generate`, host time per step, and peak memory, in float32 on CPU.

    uv run python benchmarks/throughput.py

Workloads: decode (equal prompts, the best case of a static batch) and mixed (different prompt and output lengths), at
batch sizes 1, 8 and 32, greedy, in interleaved rounds. `ratio_behind_first` compares only the time after the first
tokens, in steps without prompts. Host time is measured with 64 running requests, peak memory with a full KV cache.
`--family llama` compares a Llama with 135 M random parameters, without host time and memory.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rival import write_checkpoint
from torch import Tensor

from bateleur.cudagraph import Execution
from bateleur.runner import LLM, SamplingParams
from bateleur.runner.assets import shipped_model
from bateleur.runner.bench.peers import EngineProcess, Task, run_interleaved
from bateleur.runner.checkpoint.open import open_checkpoint
from bateleur.runner.models import HybridDecoder, StepContext

HOST_PARTS = ("schedule", "stage", "emit")


def workload(kind: str, batch: int, new: int, vocab: int) -> list[tuple[list[int], int]]:
    """(prompt ids, tokens wanted) of each request."""
    if kind == "decode":
        return [([(7 * i + 13 * j) % (vocab - 8) + 5 for j in range(32)], new) for i in range(batch)]
    return [
        ([(7 * i + 13 * j) % (vocab - 8) + 5 for j in range(16 + 37 * i % 160)], max(1, new * (1 + i % 4) // 4))
        for i in range(batch)
    ]


def compare(model: Path, rounds: int, new: int, batches: list[int], threads: int) -> list[dict[str, Any]]:
    """Return a row for each workload and batch size."""
    options = {"dtype": "float32", "device": "cpu"}
    settings = {"model": str(model), "num_threads": threads, "options": options, **options}
    vocab = open_checkpoint(model).spec.vocab_size
    engines = [EngineProcess(name, settings) for name in ("bateleur", "transformers")]
    rows = []
    for kind in ("decode", "mixed"):
        for batch in batches:
            task = Task(*map(list, zip(*workload(kind, batch, new, vocab), strict=True)))
            whole, first = run_interleaved(engines, [task, task.first_token_only()], rounds, warm_ups=1)
            ours, theirs = (whole[engine.name] for engine in engines)
            total = sum(task.tokens)
            row: dict[str, Any] = {
                "workload": kind,
                "batch": batch,
                "tokens": total,
                "bateleur_tokens_per_s": round(total / ours.seconds, 1),
                "transformers_tokens_per_s": round(total / theirs.seconds, 1),
                "ratio": round(theirs.seconds / ours.seconds, 2),
                "equal_requests": sum(a == b for a, b in zip(ours.ids, theirs.ids, strict=True)),
            }
            if kind == "decode":
                after_first = [whole[engine.name].seconds - first[engine.name].seconds for engine in engines]
                row["ratio_behind_first"] = round(after_first[1] / after_first[0], 2)
            print(row)
            rows.append(row)
    for engine in engines:
        engine.close()
    return rows


class IdleModel:
    """Replaces the model: its forward pass takes no time, so that only host work remains."""

    def __init__(self, model: HybridDecoder, batch: int) -> None:
        self.spec, self.ranks = model.spec, model.ranks
        self._hidden = torch.zeros(batch, model.spec.hidden_size)
        self._logits = torch.zeros(1, 1).expand(batch, model.spec.vocab_size)

    def run(self, execution: Execution[StepContext], taps: object = ()) -> tuple[Tensor, ...]:
        return (self._hidden,)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits


def host_cost(model: Path, num_requests: int, steps: int, idle: bool) -> dict[str, float]:
    """Host microseconds per request and step in steady decoding, by part.

    idle: replace the model by `IdleModel` and use one thread, as if a GPU ran the model. Otherwise the model runs on
    the same cores and evicts the caches of the host code.
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
            engine.runner.model = engine.runner.graphs.model = engine.runner.rejection_sampler.model = idle_model
        before = dict(stats.seconds)
        llm.step()
        if step >= 20:
            for part in HOST_PARTS:
                samples[part].append((stats.seconds[part] - before[part]) * 1e6 / num_requests)
    cost = {part: round(statistics.median(values), 3) for part, values in samples.items()}
    cost["total"] = round(statistics.median(map(sum, zip(*samples.values(), strict=True))), 3)
    torch.set_num_threads(threads)
    where = "without the model" if idle else "with the model on the same cores"
    print(f"host time per request and step at {num_requests} running requests, us ({where}): {cost}")
    return cost


MEMORY_PROBE = """
import gc, json, sys
from bateleur.cudagraph import Execution
from bateleur.runner import LLM, SamplingParams

def status(field):
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1]) * 1024

path = sys.argv[1]
# Warm up, so that libraries, tokenizer and thread pools are not counted.
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
    """Peak resident memory minus that of an idle process after a warm-up, with every KV block in use."""
    out = subprocess.run(
        [sys.executable, "-c", MEMORY_PROBE, str(model)], check=True, capture_output=True, text=True
    ).stdout
    facts: dict[str, Any] = json.loads(out.splitlines()[-1])
    facts["ratio"] = round(facts["peak_above_idle_bytes"] / (facts["weights_bytes"] + facts["cache_budget_bytes"]), 3)
    print(f"peak memory / (weights + cache budget): {facts['ratio']}")
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=shipped_model())
    parser.add_argument("--family", choices=["llama"], help="random parameters, instead of --model")
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
        result["throughput"] = compare(model, args.rounds, args.new, args.batches, args.threads)
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
