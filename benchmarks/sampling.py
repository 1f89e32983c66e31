"""Time of sampling compared with an argmax over the same logits.

    uv run python benchmarks/sampling.py --output benchmarks/results/sampling-cpu.json

CPU time of one thread (wall time with `--device cuda`), float32 and bfloat16 logits, medians of interleaved rounds.
`argmax` is torch's `logits.argmax(-1)`, `ours` the engine's; other columns are `bateleur.eagle.sample` with different
truncations, as multiples of torch's argmax. `zipf` logits are like a language model's: the r-th most likely token has
probability about r^-1.5. `normal` logits have standard deviation 3, with ten thousand tokens in a nucleus of 0.9.
Before timing, every token is compared with sampling from the fully processed logits. `--whole` times that as well.

JSON: {"environment": {...}, "rows": [{"rows", "vocabulary", "logits", "dtype", "law", "temperature", "min_p", "top_k",
"top_p", "us", "argmax_us", "ratio"}, ...]}, a row for each point of a plot.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bateleur.eagle import HashedVocab, Keys, SamplingMetadata, argmax, draw, sample

SAMPLINGS = {
    "greedy": (0.0, 0.0, 0, 1.0),
    "T 1": (1.0, 0.0, 0, 1.0),
    "T 0.8": (0.8, 0.0, 0, 1.0),
    "min_p 0.05": (0.8, 0.05, 0, 1.0),
    "top_k 50": (0.8, 0.0, 50, 1.0),
    "top_p 0.9": (0.8, 0.0, 0, 0.9),
    "top_p 0.9, T 1": (1.0, 0.0, 0, 0.9),
    "top_k 50, top_p 0.9": (0.8, 0.0, 50, 0.9),
}


def metadata_of(metadata: tuple[float, float, int, float], num_rows: int, device: str) -> SamplingMetadata:
    temperature, min_p, top_k, top_p = metadata
    row = (temperature, math.log(min_p) if min_p else -math.inf, top_k, top_p)
    table = np.tile(np.array(row, np.float32), (num_rows, 1))
    return SamplingMetadata(table, torch.from_numpy(table).to(device))


def logits_of(kind: str, num_rows: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, size, generator=generator)
    if kind == "normal":
        return logits * 3
    ranked = logits * 0.3 - 1.5 * torch.log(torch.arange(1.0, size + 1))
    return torch.stack([row[torch.randperm(size, generator=generator)] for row in ranked])


def microseconds(calls: dict[str, Callable[[int], object]], rounds: int, cuda: bool) -> dict[str, float]:
    """Median of each call, in interleaved rounds. A call gets the number of the round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name, call in calls.items():
            if cuda:
                torch.cuda.synchronize()
            began = time.perf_counter_ns() if cuda else time.process_time_ns()
            call(i)
            if cuda:
                torch.cuda.synchronize()
            times[name].append(((time.perf_counter_ns() if cuda else time.process_time_ns()) - began) / 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def drawn(logits: Tensor, metadata: SamplingMetadata, names: list[Keys], vocab: HashedVocab, i: int) -> Tensor:
    return sample(logits, metadata, names[i], vocab=vocab).token_ids


def drawn_whole(logits: Tensor, metadata: SamplingMetadata, names: list[Keys], vocab: HashedVocab, i: int) -> Tensor:
    return draw(metadata.apply(logits.float()), metadata.temperature, names[i], vocab=vocab).token_ids


def measure(kind: str, dtype: str, num_rows: int, size: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one shape."""
    device = options.device
    logits = logits_of(kind, num_rows, size).to(device, getattr(torch, dtype))
    vocab = HashedVocab.of(size, logits.device)
    names = [
        Keys(torch.arange(num_rows, device=device), torch.full((num_rows,), i, device=device))
        for i in range(options.rounds)
    ]
    laws = {name: metadata_of(metadata, num_rows, device) for name, metadata in SAMPLINGS.items()}
    calls: dict[str, Callable[[int], object]] = {
        "argmax": lambda i: logits.argmax(-1),
        "ours": lambda i: argmax(logits),
    }
    for name, metadata in laws.items():
        calls[name] = partial(drawn, logits, metadata, names, vocab)
        if options.whole:
            calls[f"{name} (whole)"] = partial(drawn_whole, logits, metadata, names, vocab)
        if not torch.equal(drawn(logits, metadata, names, vocab, 0), drawn_whole(logits, metadata, names, vocab, 0)):
            raise SystemExit(f"{kind} {dtype} {num_rows} x {size}, {name}: not the tokens of the whole law")
    us = microseconds(calls, options.rounds, device != "cpu")
    print(f"{kind:<7}{dtype:<9}{num_rows:>4}{size:>8}{us['argmax']:>10.0f} us  " + "  ".join(
        f"{name} {us[name] / us['argmax']:.2f}" for name in calls if name != "argmax"
    ))  # fmt: skip
    point = {"rows": num_rows, "vocabulary": size, "logits": kind, "dtype": dtype}
    keys = ("temperature", "min_p", "top_k", "top_p")
    return [
        point
        | {"law": name}
        | dict(zip(keys, SAMPLINGS.get(name.removesuffix(" (whole)"), (0.0, 0.0, 0, 1.0)), strict=True))
        | {"us": us[name], "argmax_us": us["argmax"], "ratio": us[name] / us["argmax"]}
        for name in calls
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", "--json", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[131_072, 248_320])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--whole", action="store_true", help="time sampling from fully processed logits, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        row
        for kind in ("zipf", "normal")
        for dtype in options.dtypes
        for num_rows in options.rows
        for size in options.vocabularies
        for row in measure(kind, dtype, num_rows, size, options)
    ]
    if options.output:
        where = platform.processor() or platform.machine()
        if options.device != "cpu":
            where = torch.cuda.get_device_name()
        environment = {
            "date": str(date.today()),
            "command": " ".join(["python", *sys.argv]),
            "machine": where,
            "torch": torch.__version__,
        }
        options.output.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
