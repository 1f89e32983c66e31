"""Decoding with the shipped draft head compared with plain decoding: tokens per second, acceptance, and cost.

    uv run python benchmarks/speculative.py --output benchmarks/results/speculative-cpu.json

Engines of the shipped model continue the same held-out prompts (`held_out_prompts.json`) in interleaved rounds: without
drafts, with all drafts of the head, with `draft_policy="auto"`, and once more without drafts. Ratios are relative to
the mean of both engines without drafts; `control` is the ratio of the second to the first of them, and shows the error
of a ratio. Engines are created `--sets` times in different order, because two equal engines may differ by a few percent
for their lifetime, depending on where their memory lies. The number of requests with the tokens of the plain engine is
reported. Requests may differ only in ties within rounding, because the number of rows changes the rounding. `verify`
and `propose` are host times per step with all drafts; on a CPU they include the computation.

Two bounds are reported. The first is tokens per step divided by `cost`, the measured time of a step with all drafts
relative to one without. `bound` is tokens per step divided by the bytes of weights that such a step reads, relative to
one without drafts. It is the ratio of one request if reading weights were the only cost.

Each slot has `--queue` requests, at least eight in total, as on a busy server. Output lengths differ, with mean
`--tokens`: with equal lengths, plain requests would all start and end together. Rounds continue until every engine has
decoded `--least` tokens, and at least `--rounds`. On a CPU the time is that of the process's threads, so that other
processes do not count; with one thread (`--threads`) it does not wait for others.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bateleur.runner import LLM, SamplingParams
from bateleur.runner.spec_decode.draft_head import DraftHead
from bateleur.runner.stats import EngineStats

NAMES = ["plain", "fixed", "auto", "again"]
PROMPTS: list[str] = json.loads(Path(__file__).with_name("held_out_prompts.json").read_text())["prompts"]


def params(temperature: float, count: int, tokens: int) -> list[SamplingParams]:
    """Sampling parameters with output lengths from 0.5 to 1.5 times the mean."""
    lengths = [tokens if count == 1 else tokens // 2 + (i * 37) % (tokens + 1) for i in range(count)]
    return [
        SamplingParams(temperature=temperature, seed=i, max_tokens=length, ignore_eos=True)
        for i, length in enumerate(lengths)
    ]


def prompts_of(number: int, requests: int) -> list[str]:
    """The next prompts, for a round."""
    return [PROMPTS[(number * requests + i) % len(PROMPTS)] for i in range(requests)]


class Comparison:
    """Medians of tokens per second and of ratios for one workload, over the rounds of several sets of engines."""

    def __init__(self, requests: int, temperature: float, tokens: int) -> None:
        """requests: number per round. tokens: mean output length."""
        self.requests, self.temperature = requests, temperature
        self.params = params(temperature, requests, tokens)
        self.total = sum(each.max_tokens or 0 for each in self.params)
        self.speeds: dict[str, list[float]] = {name: [] for name in NAMES}
        self.equal = dict.fromkeys(NAMES, 0)
        self.ran = {name: np.zeros(3, np.int64) for name in NAMES}
        self.verified: NDArray[np.int64] = np.zeros(4, np.int64)
        self.seconds = dict.fromkeys(("sample", "draft"), 0.0)
        self.rounds = 0

    def run(self, engines: dict[str, LLM], rounds: int) -> None:
        """Run rounds on one set of engines, after a warm-up round in which the draft policy measures step times."""
        clock = time.process_time if engines["plain"].engine.device.type == "cpu" else time.perf_counter
        for name in ("fixed", "auto"):
            engines[name].generate(prompts_of(0, self.requests), self.params)
        drafting = engines["fixed"].engine.stats
        before, spent = verified(drafting), dict(drafting.seconds)
        began_at = {name: counts(llm) for name, llm in engines.items()}
        for _ in range(rounds):
            prompts, texts = prompts_of(self.rounds, self.requests), dict[str, list[list[int]]]()
            first = self.rounds % len(NAMES)
            for name in NAMES[first:] + NAMES[:first]:
                began = clock()
                outputs = engines[name].generate(prompts, self.params)
                self.speeds[name].append(self.total / (clock() - began))
                texts[name] = [output.outputs[0].token_ids for output in outputs]
            for name, mine in texts.items():
                self.equal[name] += sum(a == b for a, b in zip(mine, texts["plain"], strict=True))
            self.rounds += 1
        self.verified += verified(drafting) - before
        for name in self.seconds:
            self.seconds[name] += drafting.seconds[name] - spent[name]
        for name, llm in engines.items():
            self.ran[name] += counts(llm) - began_at[name]

    def row(self, engines: dict[str, LLM]) -> dict[str, Any]:
        """The row of the result. engines: the last set."""
        rows, emitted, steps, made = self.verified.tolist()
        middle = {name: statistics.median(values) for name, values in self.speeds.items()}
        took = {name: self.total * self.rounds / middle[name] / self.ran[name][0] for name in NAMES}
        return {
            "batch": engines["plain"].engine.limits.max_num_seqs,
            "requests": self.requests,
            "rounds": self.rounds,
            "temperature": self.temperature,
            "tokens_per_step": emitted / rows,
            "tokens_per_s": middle,
            "cost": took["fixed"] / took["plain"],
            "bound": emitted / rows / weights_read(engines["fixed"], made / rows),
            "drafted": float(self.ran["auto"][1] / self.ran["auto"][2]),
            "ratio": self.ratio("fixed"),
            "ratio_measured": self.ratio("auto"),
            "control": self.ratio("again"),
            "equal_requests": [self.equal["fixed"], self.equal["auto"]],
            "verify_us": self.seconds["sample"] / steps * 1e6,
            "propose_us": self.seconds["draft"] / steps * 1e6,
        }

    def ratio(self, name: str) -> float:
        """Tokens per second relative to the plain engines; for the second plain engine relative to the first."""
        first, second = self.speeds["plain"], self.speeds["again"]
        beside = first if name == "again" else [math.sqrt(a * b) for a, b in zip(first, second, strict=True)]
        return statistics.median(mine / plain for mine, plain in zip(self.speeds[name], beside, strict=True))


def counts(llm: LLM) -> NDArray[np.int64]:
    """Steps, rows that verified drafts, and rows that decoded."""
    stats = llm.engine.stats
    drafted = 0 if stats.acceptance is None else stats.acceptance.num_steps
    return np.array([stats.num_steps, drafted, stats.num_verify_rows])


def verified(stats: EngineStats) -> NDArray[np.int64]:
    """Rows that decoded, their tokens, steps, and drafts."""
    assert stats.acceptance is not None
    return np.array([stats.num_verify_rows, stats.num_verified_tokens, stats.num_steps, stats.acceptance.num_drafts])


def weights_read(llm: LLM, drafts: float) -> float:
    """Weight bytes of a step of one row with `drafts` drafts, relative to a step without. The head's weights are read
    once per draft, except for the feature fusion.
    """
    drafter, model = llm.engine.setup.drafter, llm.engine.model
    assert isinstance(drafter, DraftHead)
    head: Any = drafter.head
    layer = head.layers[0]
    each = [layer.attention.qkv_proj, layer.attention.o_proj, layer.mlp.up_proj, layer.mlp.down_proj]
    own = drafts * sum(map(kept_bytes, [*each, head.vocabulary.output])) + kept_bytes(head.fc)
    return 1 + own / sum(map(kept_bytes, model.projections))


def kept_bytes(product: Any) -> int:
    """Bytes of a matrix in memory."""
    in_c = product.in_c
    return int(product.weight.nbytes if in_c is None else in_c.weight.nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sets", type=int, default=6, help="number of times that engines are created")
    parser.add_argument("--least", type=int, default=40_000, help="least number of tokens per engine")
    parser.add_argument("--queue", type=int, default=3, help="requests per slot")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    record: dict[str, Any] = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "load": f"{os.getloadavg()[0]:.1f} of {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "sets": args.sets,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "num_speculative_tokens": args.drafts,
        "results": [],
    }
    for batch in args.batches:
        requests = max(batch * args.queue, 8)
        both = [Comparison(requests, temperature, args.tokens) for temperature in (0.0, 0.8)]
        rounds = max(args.rounds, -(-args.least // both[0].total))
        for first in range(args.sets):
            engines = dict[str, LLM]()  # only one set is in memory
            engines = engines_of(args.device, batch, args.drafts, first)
            record["dtype"] = str(engines["plain"].dtype)
            for each in both:
                each.run(engines, -(-rounds // args.sets))
        for each in both:
            record["results"].append(row := each.row(engines))
            report(row)
        if args.output is not None:  # after each batch, so that an interrupted run keeps its results
            args.output.write_text(json.dumps(record, indent=1) + "\n")


def engines_of(device: str, batch: int, drafts: int, first: int = 0) -> dict[str, LLM]:
    """Engines with `batch` slots, after one warm-up run each. first: which of `NAMES` is created first."""
    common: dict[str, Any] = {"device": device, "max_num_seqs": batch, "max_model_len": 512}
    drafting: dict[str, Any] = {"draft": "auto", "num_speculative_tokens": drafts}
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "fixed": drafting,
        "auto": {**drafting, "draft_policy": "auto"},
        "again": {},
    }
    first %= len(NAMES)
    engines = {name: LLM(**common, **options[name]) for name in NAMES[first:] + NAMES[:first]}
    for llm in engines.values():
        llm.generate(PROMPTS[0], params(0.0, 1, 32))
    return engines


def report(row: dict[str, Any]) -> None:
    speed = row["tokens_per_s"]
    print(
        f"batch {row['batch']:<3} {row['requests']:>4} requests T {row['temperature']:<4} "
        f"{speed['plain']:6.0f} tok/s plain, "
        f"{speed['fixed']:6.0f} all drafts ({row['ratio']:.2f}), "
        f"{speed['auto']:6.0f} as many as pay ({row['ratio_measured']:.2f}), "
        f"plain again ({row['control']:.2f}), "
        f"{row['tokens_per_step']:.2f} tokens per step of cost {row['cost']:.2f}, bound {row['bound']:.2f}, "
        f"{row['drafted']:.0%} of rows drafted, verify {row['verify_us']:.0f} us, "
        f"propose {row['propose_us']:.0f} us a step, equal {row['equal_requests']}",
        flush=True,
    )


if __name__ == "__main__":
    main()
