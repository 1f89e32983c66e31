"""`bateleur bench latency` and `bateleur bench throughput`: offline engines in interleaved rounds, on equal prompts."""

import os
import platform
import random
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from bateleur.runner.bench.config import LatencyConfig, OfflineConfig, ThroughputConfig
from bateleur.runner.bench.peers import EngineProcess, Task, TaskRun, TaskRuns, run_interleaved, run_task
from bateleur.runner.checkpoint.open import describe_model, open_checkpoint, resolve_dtype
from bateleur.runner.config.engine_config import EngineConfig
from bateleur.runner.diagnose.step_costs import default_cache_costs, step_costs, total
from bateleur.runner.errors import Unmeasured
from bateleur.runner.utils.device import resolve_device

_OURS = "bateleur"
_READ_BYTES = {"cpu": 1 << 28, "cuda": 1 << 32}  # size of the buffer that measures the memory bandwidth
_READ_PASSES = 4
_COLUMNS = {
    "first_token_ms": ("first token", "{:.1f} ms"),
    "per_token_ms": ("per token", "{:.2f} ms"),
    "cpu_per_token_ms": ("CPU time", "{:.2f} ms"),
    "tokens_per_s": ("tokens/s", "{:,.1f}"),
    "requests_per_s": ("requests/s", "{:.2f}"),
    "of_bound": ("of bound", "{:.0%}"),
    "ratio": ("speedup", "{:.2f}x"),
}


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """The checkpoint and engine options to measure.

    options: options of `LLM`, as given. num_threads: CPU threads of every engine; None is each engine's default.
    report: called with progress messages.
    """

    model: Path
    options: dict[str, Any]
    num_threads: int | None
    report: Callable[[str], None]


class OfflineBench:
    """Runs tasks on bateleur and other engines. Computes the bandwidth bound, the time to read a decode step's bytes.

    max_model_len, max_num_seqs: used if `target` has no such options. Raises ValueError as `LLM` does.
    """

    def __init__(self, target: BenchTarget, max_model_len: int, max_num_seqs: int) -> None:
        options = {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs, **target.options}
        config = EngineConfig.of(model=target.model, **options)
        self._target, given = target, config.model
        self.checkpoint = open_checkpoint(target.model, given.hf_overrides, dequantize=given.dequantizes)
        self.device = resolve_device(given.device)
        self.dtype = resolve_dtype(given.dtype, self.checkpoint, self.device)
        self.kv_cache_dtype = str(config.cache.kv_cache_dtype)
        self.max_num_seqs: int = options["max_num_seqs"]
        self._settings = {
            "model": str(target.model),
            "options": options,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": self.device.type,
            "num_threads": target.num_threads,
            "read_bytes": _READ_BYTES[self.device.type],
            **{name: options[name] for name in ("max_model_len", "max_num_seqs")},
        }
        self.skipped: dict[str, str] = {}  # peers that did not start, with the error
        self._reads: list[TaskRun] = []

    def random_prompts(self, lengths: list[int], seed: int) -> list[list[int]]:
        """Return prompts of random token ids, without the first 5 and last 8 ids, which are often special tokens."""
        rng, size = random.Random(seed), self.checkpoint.spec.vocab_size
        low, high = (5, size - 8) if size > 32 else (1, size)
        return [[rng.randrange(low, high) for _ in range(length)] for length in lengths]

    def measure(self, config: OfflineConfig, tasks: list[Task]) -> tuple[list[dict[str, TaskRuns]], dict[str, Any]]:
        """Run all tasks on bateleur and the engines to compare with, and measure memory bandwidth.

        If another engine than bateleur fails to load, its error is added to the attribute `skipped`. Returns for each
        task its runs by engine, and a dict of the engines' versions.
        """
        with ExitStack() as stack:
            engines = []
            for name in (_OURS, *config.chosen_peers):
                self._target.report(f"loading {name}")
                python = str(config.vllm) if name == "vllm" else sys.executable
                try:
                    engines.append(EngineProcess(name, {**self._settings, "gguf": str(config.gguf)}, python))
                    stack.callback(engines[-1].close)
                except (Unmeasured, OSError) as error:
                    if name == _OURS:
                        raise
                    self.skipped[name] = str(error).strip().splitlines()[-1]
                    self._target.report(f"{name} is skipped: {self.skipped[name]}")
            reader = EngineProcess("read", self._settings)
            stack.callback(reader.close)
            warm_ups, rounds = config.num_iters_warmup, config.num_iters
            self._target.report(f"{warm_ups + rounds} rounds")
            read = Task([], [_READ_PASSES])
            runs = run_interleaved(
                engines, tasks, rounds, warm_ups, after_round=lambda: self._reads.append(run_task(reader, read))
            )
            return runs, {engine.name: engine.facts.get("version") for engine in engines}

    def step_bound(self, batch: int, context: int) -> dict[str, float]:
        """Return `bytes` and `flops` of a decode step without drafts, and `bound_us`, the time to move the bytes.

        context: cached tokens per request. The bandwidth (`read_GB_per_s`) is the best one that `measure` found.
        """
        spec, longest, dtype = self.checkpoint.spec, max(context + 1, 64), self.kv_cache_dtype
        model, _ = describe_model(self.checkpoint, self.dtype, "meta")
        caches = default_cache_costs(spec, self.dtype, longest, self.device.type, kv_cache_dtype=dtype)
        step = total(step_costs(model, caches, batch, context))
        bandwidth = max(run.ids[0][0] / run.seconds for run in self._reads)
        costs = {"batch": batch, "context": context, "bytes": step.total_bytes, "flops": step.flops}
        return costs | {"read_GB_per_s": bandwidth / 1e9, "bound_us": step.bound_us(bandwidth)}

    def result(self, command: str, rows: list[dict[str, Any]], **facts: Any) -> dict[str, Any]:
        """Return the JSON object of a benchmark.

        command: the command line. rows: results, one per engine, bateleur's first. facts: further entries.
        """
        load = f"load {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores"
        machine = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else platform.machine()
        ours = rows[0].get("tokens_per_s")
        for row in rows[1:]:
            if ours is not None and "tokens_per_s" in row:
                row["ratio"] = ours / row["tokens_per_s"]
        return {
            "date": date.today().isoformat(),
            "command": command,
            "machine": f"{machine}, {load}",
            "model": self._target.model.name,
            "dtype": self._settings["dtype"],
            "num_threads": self._target.num_threads or torch.get_num_threads(),
            "skipped": self.skipped,
            **facts,
            "results": rows,
        }


def bench_latency(target: BenchTarget, config: LatencyConfig, command: str) -> dict[str, Any]:
    """Measure one batch of equal requests: times to first token and per output token, and CPU time per token.

    command: the command line, for the result. Returns `OfflineBench.result`.
    """
    count, longest = config.batch_size, config.input_len + config.output_len
    bench = OfflineBench(target, longest + 8, count)
    task = Task(bench.random_prompts([config.input_len] * count, 0), [config.output_len] * count)
    (whole, first), versions = bench.measure(config, [task, task.first_token_only()])
    step = bench.step_bound(count, config.input_len + config.output_len // 2)

    def figures(name: str, runs: TaskRuns) -> dict[str, float]:
        per_token = (runs.seconds - first[name].seconds) / (config.output_len - 1)
        cpu_per_token = (runs.cpu_seconds - first[name].cpu_seconds) / (config.output_len - 1)
        times = {"first_token": first[name].seconds, "per_token": per_token, "cpu_per_token": cpu_per_token}
        bound = {"tokens_per_s": count / per_token, "of_bound": step["bound_us"] / (1e6 * per_token)}
        return {f"{kind}_ms": 1e3 * seconds for kind, seconds in times.items()} | bound

    sizes = {"input_len": config.input_len, "output_len": config.output_len, "batch_size": count}
    return bench.result(command, _rows(whole, task, figures), versions=versions, **sizes, step=step)


def bench_throughput(target: BenchTarget, config: ThroughputConfig, command: str) -> dict[str, Any]:
    """Measure output tokens and requests per second for requests of random lengths; see `bench_latency`."""
    rng, spread = random.Random(config.seed), config.random_range_ratio

    def random_lengths(mean: int) -> list[int]:
        low, high = max(1, round(mean * (1 - spread))), round(mean * (1 + spread))
        return [rng.randint(low, high) for _ in range(config.num_prompts)]

    input_lens, output_lens = random_lengths(config.input_len), random_lengths(config.output_len)
    bench = OfflineBench(target, max(input_lens) + max(output_lens) + 8, min(config.num_prompts, 64))
    task = Task(bench.random_prompts(input_lens, config.seed), output_lens)
    (whole,), versions = bench.measure(config, [task])
    batch = min(bench.max_num_seqs, config.num_prompts)
    step = bench.step_bound(batch, config.input_len + config.output_len // 2)

    def figures(name: str, runs: TaskRuns) -> dict[str, float]:
        speed = sum(output_lens) / runs.seconds
        bound = 1e6 * batch / step["bound_us"]
        return {"tokens_per_s": speed, "requests_per_s": config.num_prompts / runs.seconds, "of_bound": speed / bound}

    sizes = {name: getattr(config, name) for name in ("input_len", "output_len", "num_prompts", "seed")}
    return bench.result(command, _rows(whole, task, figures), versions=versions, **sizes, step=step)


def _rows(
    whole: dict[str, TaskRuns], task: Task, figures: Callable[[str, TaskRuns], dict[str, float]]
) -> list[dict[str, Any]]:
    """Return a result row per engine: its figures, or a `fault`.

    A fault is a wrong number of tokens, tokens that differ between rounds, or other tokens than bateleur's for more
    than half of the requests. whole: runs of `task` by engine. figures: computes times and speeds from an engine's name
    and runs.
    """
    rows: list[dict[str, Any]] = []
    for name, runs in whole.items():
        same, fault = sum(a == b for a, b in zip(runs.ids, whole[_OURS].ids, strict=True)), runs.fault(task)
        if fault is None and 2 * same < len(task.prompts):
            fault = f"not comparable: {same} of {len(task.prompts)} requests have bateleur's tokens"
        row = {"engine": name, "equal_requests": [same, len(task.prompts)]}
        rows.append(row | (figures(name, runs) if fault is None else {"fault": fault}))
    return rows


def offline_table(result: dict[str, Any]) -> str:
    """Return a result as a table for a terminal, and a line with the bandwidth bound.

    The table has for each engine its speeds, and the number of requests with the same tokens as from bateleur.
    """
    step, rows = result["step"], result["results"]
    columns = [name for name in _COLUMNS if any(name in row for row in rows)]
    heads = "".join(f"{_COLUMNS[name][0]:>14}" for name in columns)
    lines = [f"{'':<14}{'same tokens':>12}{heads}"]
    for row in rows:
        same = "{} of {}".format(*row["equal_requests"])
        cells = "".join(f"{_COLUMNS[name][1].format(row[name]) if name in row else '':>14}" for name in columns)
        lines.append(f"{row['engine']:<14}{same:>12}{'  ' + row['fault'] if 'fault' in row else cells}")
    lines += [f"{name:<14}skipped: {why}" for name, why in result["skipped"].items()]
    moved = f"a step of {step['batch']} at {step['context']:,} tokens moves {step['bytes'] / 1e6:,.1f} MB"
    read = f"reading them at {step['read_GB_per_s']:.1f} GB/s takes {step['bound_us']:,.0f} us"
    lines.append(f"bound: {moved}; {read}")
    return "\n".join(lines) + "\n"
