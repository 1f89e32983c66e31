"""CPU time of the host in an engine step: schedule, stage, build and emit, without model, sampler and drafter.

Prefix caching is on. Requests have no drafts, or four per step of which two are accepted. Measured is the CPU time of
the stepping thread, and of all steps the median of the faster half, which varies less on a shared machine.
`benchmarks/host.py` prints and writes the result.

vLLM's time in `host_rival.py` is its scheduler's alone. It compares with `schedule` and `emit`, although `emit` also
includes token lists, request times and outputs here. `stage` and `build` correspond to vLLM's model runner.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bateleur.cudagraph import Execution
from bateleur.eagle import DraftContext, TargetNeeds
from bateleur.runner import LLM, SamplingParams
from bateleur.runner.assets import shipped_model
from bateleur.runner.cache.block_pool import BlockPool
from bateleur.runner.cache.prefix_cache import PrefixCache
from bateleur.runner.engine import engine, model_runner
from bateleur.runner.models import HybridDecoder, StepContext
from bateleur.runner.requests.prefix_keys import PrefixKeys
from bateleur.runner.requests.request import Request, RequestTable

PARTS = ("schedule", "stage", "emit")
BATCHES = (1, 8, 64, 256)
DRAFTS, CONTEXT, BLOCK = 4, 8000, 16


class IdleModel:
    """Replaces the model: its forward pass takes no time, and sampling from a vocabulary of one token takes little."""

    def __init__(self, model: HybridDecoder) -> None:
        self.spec, self.ranks = model.spec, model.ranks
        self._zero = torch.zeros(1, 1)

    def run(self, execution: Execution[StepContext], taps: object = ()) -> tuple[Tensor, ...]:
        return (self._zero.expand(execution.state.batch.num_tokens, self.spec.hidden_size),)

    def set_prompt_length(self, prompt_len: int) -> None:
        """Do nothing: there are no positions."""

    def logits(self, hidden: Tensor) -> Tensor:
        return self._zero.expand(len(hidden), 1)


class IdleDrafter:
    """Proposes constant drafts: two that are accepted and two that are not."""

    num_speculative_tokens = DRAFTS
    needs = TargetNeeds()

    def __init__(self, num_rows: int) -> None:
        self._drafts = torch.tensor([0, 0, 1, 1]).repeat(num_rows, 1)

    def admit(self, row: int, token_ids: list[int]) -> None:
        """Do nothing."""

    def propose(self, context: DraftContext) -> Tensor:
        return self._drafts[: len(context.rows)]


class Run:
    """An engine with `num_requests` decoding requests."""

    def __init__(self, num_requests: int, drafts: int) -> None:
        self.num_requests = num_requests
        speculation = {"drafter": IdleDrafter(num_requests), "num_speculative_tokens": drafts} if drafts else {}
        settings: Any = {"enable_prefix_caching": True, **speculation}
        self.llm = LLM(
            shipped_model(),
            device="cpu",
            max_num_seqs=num_requests,
            max_model_len=2048,
            kv_cache_memory_bytes=1 << 29,
            **settings,
        )
        for i in range(num_requests):
            params = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)
            self.llm.add_request([(7 * i + j) % 999 + 1 for j in range(16)], params)
        engine: Any = self.llm.engine
        idle = IdleModel(engine.model)
        engine.runner.model = engine.runner.graphs.model = engine.runner.rejection_sampler.model = idle
        engine.caches.pool.fold = lambda *_: None  # runs on the device

    def steps(self, count: int) -> list[dict[str, float]]:
        """Microseconds of each part of `count` steps."""
        seconds, found = self.llm.get_metrics().seconds, []
        for _ in range(count):
            before = dict(seconds)
            self.llm.step()
            found.append({part: (seconds[part] - before[part]) * 1e6 for part in PARTS})
        return found


def steps(rounds: int, drafts: int = DRAFTS, batches: Sequence[int] = BATCHES) -> dict[str, Any]:
    """Median microseconds per step of each part by batch size, and a linear fit: fixed cost and cost per request."""
    runs = [Run(batch, drafts) for batch in batches]
    found: dict[int, list[dict[str, float]]] = {run.num_requests: [] for run in runs}
    clocks: tuple[Any, ...] = (engine, model_runner)  # the modules that mark the parts of a step
    gc_was = gc.isenabled()
    for module in clocks:
        module.perf_counter = time.thread_time
    gc.disable()  # collections would fall into measured steps
    try:
        for run in runs:
            run.steps(8)
        for _ in range(rounds):
            for run in runs:
                found[run.num_requests] += run.steps(12)[2:]  # the first two have cold caches
    finally:
        for module in clocks:
            module.perf_counter = time.perf_counter
        if gc_was:
            gc.enable()
    table = []
    for batch, each in found.items():
        each = sorted(each, key=lambda step: sum(step.values()))[: -(-len(each) // 2)]
        row: dict[str, float] = {part: statistics.median(step[part] for step in each) for part in PARTS}
        total = statistics.median(sum(step.values()) for step in each)
        table.append({"batch": batch, **row, "total": total, "per_request": total / batch})
    slope, fixed = np.polyfit([row["batch"] for row in table], [row["total"] for row in table], 1)
    return {"steps": table, "fixed_us": float(fixed), "us_per_request": float(slope)}


def _median_us(call: Any, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.thread_time()
        call()
        times.append(time.thread_time() - began)
    return statistics.median(times) * 1e6


def prefixes(rounds: int, num_blocks: int = 100_000) -> dict[str, float]:
    """Microseconds to hash the blocks of 8,000 tokens, and to look them up, with `num_blocks` cached blocks."""
    table = RequestTable(2, CONTEXT + BLOCK, CONTEXT // BLOCK + 1)
    pool = BlockPool(num_blocks + 1)
    cache = PrefixCache(table, pool, BLOCK, None)
    held = pool.allocate(num_blocks)
    ids = np.arange(CONTEXT + 1, dtype=np.int32)
    keys = PrefixKeys(BLOCK)
    keys.of(ids, CONTEXT)
    for count, block in enumerate(held):
        own = count < CONTEXT // BLOCK
        pool.insert(block, keys.of(ids, (count + 1) * BLOCK) if own else count.to_bytes(16, "little"))
    pool.free(held)
    params = SamplingParams(max_tokens=1)
    request = Request("", ids.tolist(), params, 0, frozenset(), CONTEXT + 2)
    table.admit(request)
    request.prefix.keys = keys
    assert cache.match(request).num_tokens == CONTEXT
    return {
        "hash_us": _median_us(lambda: PrefixKeys(BLOCK).of(ids, CONTEXT), rounds),
        "lookup_us": _median_us(lambda: cache.match(request), rounds),
    }
