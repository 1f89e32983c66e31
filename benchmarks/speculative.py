"""Decoding with the shipped draft head beside decoding without: tokens a second, acceptance, and what drafting costs.

    uv run python benchmarks/speculative.py --output benchmarks/results/speculative-cpu.json

Two engines on the shipped model, one with its head, decode the same held-out prompts, round about in one run; both
write the same tokens, which is checked. `verify` and `propose` are the host's time per step in the engine with the
head; on CPU that is their computation, too.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from bateleur.runner import LLM, SamplingParams

# Beginnings that are not in the standard library, from which both models were made.
PROMPTS = (
    "def fibonacci(n):\n",
    "class LinkedList:\n    def __init__(self):\n",
    "import os\nimport sys\n\n\ndef count_lines(path):\n",
    "def test_roundtrip(self):\n        for value in",
    "    def close(self):\n        if self._file is not None:\n",
    "def merge(left, right):\n    result = []\n",
    "class Config:\n    def get(self, name, default=None):\n",
    "try:\n    import numpy\nexcept ImportError:\n",
)


def params(temperature: float, batch: int, tokens: int) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=temperature, seed=i, max_tokens=tokens, ignore_eos=True)
        for i in range(batch)
    ]


def compare(
    engines: dict[str, LLM], batch: int, temperature: float, tokens: int, rounds: int
) -> dict[str, Any]:
    """One workload: the median of the rounds' tokens a second, and their ratios."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(batch)]
    wanted = params(temperature, batch, tokens)
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    texts: dict[str, list[list[int]]] = {}
    drafting = engines["draft"].engine.stats
    before = (drafting.num_verify_rows, drafting.num_verified_tokens, drafting.num_steps)
    spent = dict(drafting.seconds)
    for _ in range(rounds):
        for name, llm in engines.items():
            began = time.perf_counter()
            outputs = llm.generate(prompts, wanted)
            speeds[name].append(batch * tokens / (time.perf_counter() - began))
            texts[name] = [output.outputs[0].token_ids for output in outputs]
    if texts["plain"] != texts["draft"]:
        raise RuntimeError("the engines wrote different tokens")
    rows, emitted, steps = (
        now - then
        for now, then in zip(
            (drafting.num_verify_rows, drafting.num_verified_tokens, drafting.num_steps), before, strict=True
        )
    )
    middle = {name: statistics.median(values) for name, values in speeds.items()}
    part = {name: (drafting.seconds[name] - spent[name]) / steps * 1e6 for name in ("sample", "draft")}
    return {
        "batch": batch,
        "temperature": temperature,
        "tokens_per_step": emitted / rows,
        "plain_tokens_per_s": middle["plain"],
        "draft_tokens_per_s": middle["draft"],
        "ratio": statistics.median(d / p for d, p in zip(speeds["draft"], speeds["plain"], strict=True)),
        "verify_us": part["sample"],
        "propose_us": part["draft"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    largest = max(args.batches)
    common: dict[str, Any] = {"device": args.device, "max_num_seqs": largest, "max_model_len": 512}
    engines = {
        "plain": LLM(**common),
        "draft": LLM(**common, draft="auto", num_speculative_tokens=args.drafts),
    }
    for llm in engines.values():
        llm.generate(PROMPTS[0], params(0.0, 1, 32))
    results = []
    for temperature in (0.0, 0.8):
        for batch in args.batches:
            row = compare(engines, batch, temperature, args.tokens, args.rounds)
            results.append(row)
            print(
                f"T {temperature:<4} batch {batch:<3} {row['plain_tokens_per_s']:8.0f} tok/s plain "
                f"{row['draft_tokens_per_s']:8.0f} with drafts, ratio {row['ratio']:.2f}, "
                f"{row['tokens_per_step']:.2f} tokens per step, verify {row['verify_us']:.0f} us, "
                f"propose {row['propose_us']:.0f} us a step",
                flush=True,
            )
    if args.output is not None:
        record = {
            "date": date.today().isoformat(),
            "command": " ".join(["python", *sys.argv]),
            "device": torch.cuda.get_device_name()
            if args.device == "cuda"
            else platform.processor() or "cpu",
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "num_speculative_tokens": args.drafts,
            "results": results,
        }
        args.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
