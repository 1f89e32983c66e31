"""`bateleur bench latency` and `bateleur bench throughput`: engines without a server, in turn, on the same prompts."""

from __future__ import annotations

import os
import platform
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from bateleur.runner.bench.config import LatencyConfig, OfflineConfig, ThroughputConfig
from bateleur.runner.bench.rounds import Engine, Run, Runs, Task, in_turn
from bateleur.runner.checkpoint.open import open_checkpoint, resolve_dtype
from bateleur.runner.config.engine_config import EngineConfig
from bateleur.runner.diagnose.step_costs import caches_of, step_costs, total
from bateleur.runner.errors import Unmeasured
from bateleur.runner.models import HybridDecoder
from bateleur.runner.utils.device import resolve_device

OURS, READ = "bateleur", "read"
_READ_BYTES = {"cpu": 1 << 28, "cuda": 1 << 32}
_READ_PASSES = 4
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Place:
    """What is measured, and where."""

    model: Path
    options: dict[str, Any]
    """Of `LLM`, as given."""
    num_threads: int | None
    """Of every engine; None leaves it to them."""
    say: Say
    """Told what happens meanwhile."""


class Bench:
    """A checkpoint whose engines can be opened, and whose steps have a bound.

    Raises ValueError as `LLM` would, before anything is loaded.
    """

    def __init__(self, place: Place, max_model_len: int, max_num_seqs: int) -> None:
        given = {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs, **place.options}
        config = EngineConfig.of(model=place.model, **given)
        self._place = place
        self.checkpoint = open_checkpoint(place.model)
        self.device = resolve_device(config.model.device)
        self.dtype = resolve_dtype(config.model.dtype, self.checkpoint, self.device)
        self.max_num_seqs: int = given["max_num_seqs"]
        self._settings = {
            "model": str(place.model),
            "options": given,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": self.device.type,
            "num_threads": place.num_threads,
            "max_model_len": given["max_model_len"],
            "max_num_seqs": given["max_num_seqs"],
            "read_bytes": _READ_BYTES[self.device.type],
        }
        self.skipped: dict[str, str] = {}
        """Peers that could not be opened, and why."""
        self._reads: list[Run] = []

    def prompts(self, lengths: list[int], seed: int) -> list[list[int]]:
        """Token ids, drawn from all but the first and last few, which are often special."""
        dice, size = random.Random(seed), self.checkpoint.spec.vocab_size
        low, high = (5, size - 8) if size > 32 else (1, size)
        return [[dice.randrange(low, high) for _ in range(length)] for length in lengths]

    @contextmanager
    def engines(self, config: OfflineConfig) -> Iterator[list[Engine]]:
        """Ours and the peers, loaded; those that cannot be are `skipped`."""
        with ExitStack() as stack:
            opened = []
            for name in (OURS, *config.chosen):
                self._place.say(f"opening {name}")
                python = str(config.vllm) if name == "vllm" else sys.executable
                try:
                    engine = Engine(name, {**self._settings, "gguf": str(config.gguf)}, python)
                except (Unmeasured, OSError) as error:
                    if name == OURS:
                        raise
                    self.skipped[name] = str(error).strip().splitlines()[-1]
                    self._place.say(f"{name} is left out: {self.skipped[name]}")
                    continue
                stack.callback(engine.close)
                opened.append(engine)
            yield opened

    def measure(
        self, config: OfflineConfig, tasks: list[Task]
    ) -> tuple[list[dict[str, Runs]], dict[str, Any]]:
        """What each engine did of each task, and what they said of themselves. Memory is read in every round."""
        with self.engines(config) as engines, ExitStack() as stack:
            reader = Engine(READ, self._settings)
            stack.callback(reader.close)
            self._place.say(f"{config.num_iters_warmup + config.num_iters} rounds")
            passes = Task([], [_READ_PASSES])
            runs = in_turn(
                engines,
                tasks,
                config.num_iters,
                config.num_iters_warmup,
                beside=lambda: self._reads.append(reader.run(passes)),
            )
            return runs, {engine.name: engine.facts.get("version") for engine in engines}

    def read_bytes_per_s(self) -> float:
        """Bandwidth of the fastest of the reads."""
        return max(run.ids[0][0] / run.seconds for run in self._reads)

    def step(self, batch: int, context: int) -> dict[str, float]:
        """What a plain decode step has to move, and the time that takes at the bandwidth that was read."""
        spec = self.checkpoint.spec
        model = HybridDecoder(spec, dtype=self.dtype, device="meta")
        caches = caches_of(spec, self.dtype, max(context + 1, 64), self.device.type)
        moved = total(step_costs(model, caches, batch, context))
        bandwidth = self.read_bytes_per_s()
        return {
            "batch": batch,
            "context": context,
            "bytes": moved.total_bytes,
            "flops": moved.flops,
            "read_GB_per_s": bandwidth / 1e9,
            "bound_us": moved.bound_us(bandwidth),
        }

    def record(self, command: str) -> dict[str, Any]:
        """What a result begins with."""
        load = f"load {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores"
        where = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else platform.machine()
        return {
            "date": date.today().isoformat(),
            "command": command,
            "machine": f"{where}, {load}",
            "model": self._place.model.name,
            "dtype": self._settings["dtype"],
            "num_threads": self._place.num_threads or torch.get_num_threads(),
            "skipped": self.skipped,
        }


def latency(place: Place, config: LatencyConfig, command: str) -> dict[str, Any]:
    """Equal requests that start together: time of the first token, and of each one behind it, beside the bound.

    CPU time of the process stands beside, which other processes of a machine hardly change.
    """
    count, longest = config.batch_size, config.input_len + config.output_len
    bench = Bench(place, longest + 8, count)
    task = Task(bench.prompts([config.input_len] * count, 0), [config.output_len] * count)
    (whole, first), versions = bench.measure(config, [task, task.first()])
    step = bench.step(count, config.input_len + config.output_len // 2)
    rows = []
    for name, runs in whole.items():
        row = _checked(name, runs, whole[OURS], task)
        if "fault" not in row:
            per_token = (runs.seconds - first[name].seconds) / (config.output_len - 1)
            cpu = (runs.cpu_seconds - first[name].cpu_seconds) / (config.output_len - 1)
            row |= {
                "first_token_ms": 1e3 * first[name].seconds,
                "per_token_ms": 1e3 * per_token,
                "cpu_per_token_ms": 1e3 * cpu,
                "tokens_per_s": count / per_token,
                "of_bound": step["bound_us"] / (1e6 * per_token),
            }
        rows.append(row)
    sizes = {"input_len": config.input_len, "output_len": config.output_len, "batch_size": count}
    return {
        **bench.record(command),
        "versions": versions,
        **sizes,
        "step": step,
        "results": _beside_ours(rows),
    }


def throughput(place: Place, config: ThroughputConfig, command: str) -> dict[str, Any]:
    """Requests of many lengths, as many at once as fit: tokens a second, beside the bound of a full batch."""
    dice, spread = random.Random(config.seed), config.random_range_ratio

    def lengths(mean: int) -> list[int]:
        low, high = max(1, round(mean * (1 - spread))), round(mean * (1 + spread))
        return [dice.randint(low, high) for _ in range(config.num_prompts)]

    asked, wanted = lengths(config.input_len), lengths(config.output_len)
    bench = Bench(place, max(asked) + max(wanted) + 8, min(config.num_prompts, 64))
    task = Task(bench.prompts(asked, config.seed), wanted)
    (whole,), versions = bench.measure(config, [task])
    batch = min(bench.max_num_seqs, config.num_prompts)
    step = bench.step(batch, config.input_len + config.output_len // 2)
    most = 1e6 * batch / step["bound_us"]
    rows = []
    for name, runs in whole.items():
        row = _checked(name, runs, whole[OURS], task)
        if "fault" not in row:
            speed = sum(wanted) / runs.seconds
            figures = {"tokens_per_s": speed, "requests_per_s": config.num_prompts / runs.seconds}
            row |= {**figures, "of_bound": speed / most}
        rows.append(row)
    sizes = {name: getattr(config, name) for name in ("input_len", "output_len", "num_prompts", "seed")}
    return {
        **bench.record(command),
        "versions": versions,
        **sizes,
        "step": step,
        "results": _beside_ours(rows),
    }


def _checked(name: str, runs: Runs, ours: Runs, task: Task) -> dict[str, Any]:
    """A row without figures; `fault` says why there will be none: tokens are checked before a speed is told."""
    same = sum(a == b for a, b in zip(runs.ids, ours.ids, strict=True))
    fault = runs.fault(task)
    if fault is None and 2 * same < len(task.prompts):
        fault = f"{same} of {len(task.prompts)} requests got the tokens that ours got"
    row: dict[str, Any] = {"engine": name, "equal_requests": [same, len(task.prompts)]}
    return row if fault is None else row | {"fault": fault}


def _beside_ours(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With how many times as fast ours is."""
    ours = rows[0].get("tokens_per_s")
    for row in rows[1:]:
        if ours is not None and "tokens_per_s" in row:
            row["ratio"] = ours / row["tokens_per_s"]
    return rows
