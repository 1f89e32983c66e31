"""Whether host time per step or lookup grows with the number of cached blocks or queued requests.

    uv run python benchmarks/growth.py --output benchmarks/results/growth-cpu.json

Measured are a prefix cache lookup of 8,000 tokens and the eviction of the least recently used block, by number of
cached blocks; and scheduling of 8 running requests, by number of queued ones. CPU microseconds of one thread, median of
the fastest half of interleaved rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

from bateleur.runner import LLM, SamplingParams
from bateleur.runner.cache.block_pool import BlockPool
from bateleur.runner.cache.prefix_cache import PrefixCache
from bateleur.runner.requests.request import Request, RequestTable

BLOCK, LOOKUP_TOKENS = 16, 8000
CACHED = (1_000, 10_000, 100_000)
WAITING = (0, 100, 1_000, 10_000)


def medians(calls: dict[int, Callable[[], float]], rounds: int) -> dict[int, float]:
    """Median microseconds that each call returns, in interleaved rounds."""
    times: dict[int, list[float]] = {size: [] for size in calls}
    for _ in range(rounds):
        for size, call in calls.items():
            times[size].append(call())
    return {size: statistics.median(sorted(found)[: max(1, rounds // 2)]) for size, found in times.items()}


def timed(call: Callable[[], object]) -> float:
    """CPU microseconds of a call in this thread."""
    began = time.thread_time()
    call()
    return (time.thread_time() - began) * 1e6


def filled(cached: int) -> tuple[PrefixCache, BlockPool, Request]:
    """A prefix cache with so many blocks, including those of the returned request's prompt."""
    length = LOOKUP_TOKENS + 1
    table = RequestTable(1, length + BLOCK, length // BLOCK + 2)
    pool = BlockPool(cached + 2)
    cache = PrefixCache(table, pool, BLOCK, None)
    prompt = [(7 * i) % 997 + 1 for i in range(length)]
    request = Request("lookup", prompt, SamplingParams(), 0, frozenset(), length + 1)
    table.admit(request)
    own = pool.allocate(LOOKUP_TOKENS // BLOCK)
    for index, block in enumerate(own):
        keys = cache._keys(request)
        pool.insert(block, keys.of(table.token_ids[request.row], (index + 1) * BLOCK))
    others = pool.allocate(cached - len(own))
    for block in others:
        pool.insert(block, block.to_bytes(16, "little"))
    pool.free(others)
    return cache, pool, request


def lookups(rounds: int, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    made = {size: filled(size) for size in sizes}
    for cache, _, request in made.values():
        assert cache.match(request).num_tokens == LOOKUP_TOKENS, "all of it is found"

    def evict(pool: BlockPool) -> None:
        (block,) = pool.allocate(1)
        pool.insert(block, (time.perf_counter_ns(), block))
        pool.free([block])

    match = medians({s: (lambda s=s: timed(lambda: made[s][0].match(made[s][2]))) for s in sizes}, rounds)  # type: ignore[misc]
    evicted = medians({s: (lambda s=s: timed(lambda: evict(made[s][1]))) for s in sizes}, rounds)  # type: ignore[misc]
    return [{"cached_blocks": s, "lookup_us": match[s], "evict_us": evicted[s]} for s in sizes]


def waiting(rounds: int, sizes: tuple[int, ...], rows: int = 8) -> list[dict[str, Any]]:
    def engine(count: int) -> Callable[[], float]:
        llm = LLM(device="cpu", max_num_seqs=rows, max_model_len=1024, max_num_batched_tokens=256)
        params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
        for i in range(rows + count):
            llm.add_request([1 + i % 999, 2, 3], params)
        for _ in range(6):
            llm.step()
        seconds = llm.get_metrics().seconds

        def step() -> float:
            before = seconds["schedule"]
            llm.step()
            return (seconds["schedule"] - before) * 1e6

        return step

    found = medians({size: engine(size) for size in sizes}, rounds)
    return [{"waiting": size, "schedule_us": us} for size, us in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="run small sizes, to test the script")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    blocks, queue = ((1_000, 2_000), (0, 10)) if args.quick else (CACHED, WAITING)
    cached, queued = lookups(args.rounds, blocks), waiting(args.rounds, queue)
    for row in (*cached, *queued):
        print(
            "  ".join(
                f"{name} {value:,.1f}" if isinstance(value, float) else f"{name} {value:,}"
                for name, value in row.items()
            )
        )
    result = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{platform.machine()}, 1 thread, load {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores",
        "torch": torch.__version__,
        "block_size": BLOCK,
        "lookup_tokens": LOOKUP_TOKENS,
        "cached": cached,
        "waiting": queued,
    }
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
