"""Decode steps of a published model against the time that their bytes take, by batch; and what a step consists of.

The step `drafts` does the same for steps that verify 4 drafts of each request: of an MTP head if the model has one,
whose own bytes are not part of the bound, else of a drafter that takes no time.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from bateleur.eagle import DraftContext, TargetNeeds
from bateleur.runner import LLM, SamplingParams
from bateleur.runner.diagnose.step_costs import default_cache_costs, step_costs, total

from ..job import CompileWatch, Job
from ..models import check_captures, described, engine, layers_of
from ..plan import NEMOTRON, QWEN

BATCHES, CONTEXT, STEPS, DRAFTS, MODEL_LEN = (1, 8, 64, 256), 512, 40, 4, 4096
LAYERS = {NEMOTRON: 26}
"""Half of Nemotron's layers have half of its 63 GB."""
CACHE_BYTES = 32 << 30
GREEDY: dict[str, Any] = {"temperature": 0}
TRUNCATED: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95, "top_k": 20}


class RepeatDrafter:
    """Proposes the last token again: its drafts cost nothing, and few of them are accepted."""

    num_speculative_tokens = DRAFTS
    needs = TargetNeeds()

    def admit(self, row: int, token_ids: list[int]) -> None:
        """Remember nothing."""

    def propose(self, context: DraftContext) -> Tensor:
        """Return (R, K) copies of each row's next token, -1 after the drafts that are wanted."""
        drafts = context.next_token.unsqueeze(1).repeat(1, DRAFTS)
        drafts[:, context.num_drafts :] = -1
        return drafts


def run(job: Job) -> None:
    """Time all batches of the model."""
    drafts = DRAFTS if job.step == "drafts" else 0
    batches = [size for size in ((1, 2) if job.quick else BATCHES) if size <= 64 or not drafts]
    watch = CompileWatch()
    options: dict[str, Any] = {
        "max_model_len": MODEL_LEN,
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": 4096,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [size * (1 + drafts) for size in batches],
        "kv_cache_memory_bytes": CACHE_BYTES,
    }
    if drafts:
        head = {"draft": "mtp", "mtp": True} if job.case == QWEN else {"drafter": RepeatDrafter()}
        options |= {"num_speculative_tokens": DRAFTS} | head
    with job.part(job.case), engine(job, job.case, LAYERS.get(job.case), **options) as llm:
        check_captures(job, job.case, llm)
        for batch in batches:
            timed_part(job, llm, batch, drafts, GREEDY, watch)
        for batch in batches[:: len(batches) - 1] if not drafts else ():
            timed_part(job, llm, batch, drafts, TRUNCATED, watch)
        if job.cuda and job.has_time("profile", 15):
            with job.part("profile"):
                profile(job, llm)


def timed_part(job: Job, llm: LLM, batch: int, drafts: int, law: dict[str, Any], watch: CompileWatch) -> None:
    """Time the steps of a batch if there is time."""
    name = f"batch {batch}" + (f", {drafts} drafts" if drafts else "") + (", truncated" if law is TRUNCATED else "")
    if job.has_time(name, 8):
        with job.part(name):
            timed(job, llm, name, batch, drafts, law, watch)


def timed(job: Job, llm: LLM, name: str, batch: int, drafts: int, law: dict[str, Any], watch: CompileWatch) -> None:
    """Time the steps of a batch against the bytes that they move, and check that none of them loads a kernel."""
    late = len(watch)
    us, host = step_time(job, llm, batch, law)
    caches = default_cache_costs(llm.spec, llm.dtype, MODEL_LEN, llm.device.type, drafts)
    costs = total(step_costs(described(llm), caches, batch, context_of(job) + STEPS, 1 + drafts))
    layers = layers_of(job, job.case, LAYERS.get(job.case))
    job.moved(name, us, costs.total_bytes, steps_per_s=1e6 / us, layers=layers, host_us=host)
    found = watch.facts(late)
    count = found["compiled"] + found["from_cache"]
    job.record.check(f"{name}: kernels in steps", count == 0, f"{count} are loaded in steps: {found['most']}")


def context_of(job: Job) -> int:
    """Tokens of a prompt."""
    return 16 if job.quick else CONTEXT


def begin(llm: LLM, batch: int, context: int, law: dict[str, Any]) -> list[str]:
    """Queue requests, and step until all of them decode."""
    before, vocab = llm.get_metrics().num_prefill_tokens, llm.spec.vocab_size
    room = llm.limits.max_model_len - context - 1
    params = SamplingParams(max_tokens=min(1000, room), seed=3, ignore_eos=True, **law)
    prompts = [[(31 * i + 7 * j) % (vocab - 9) + 4 for j in range(context)] for i in range(batch)]
    ids = [llm.add_request({"prompt_token_ids": prompt}, params) for prompt in prompts]
    while llm.get_metrics().num_prefill_tokens < before + batch * context:
        llm.step()
    for _ in range(5):
        llm.step()
    return ids


def finish(llm: LLM, ids: list[str]) -> None:
    """Abort requests, and step until the engine is idle."""
    for each in ids:
        llm.abort(each)
    while llm.has_unfinished_requests:
        llm.step()


def step_time(job: Job, llm: LLM, batch: int, law: dict[str, Any]) -> tuple[float, dict[str, int]]:
    """Return microseconds of a decode step, and of the host's parts of it."""
    ids = begin(llm, batch, context_of(job), law)
    steps = 4 if job.quick else STEPS
    before = dict(llm.get_metrics().seconds)
    job.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        llm.step()
    job.synchronize()
    us = (time.perf_counter() - began) / steps * 1e6
    host = {name: round((now - before[name]) / steps * 1e6) for name, now in llm.get_metrics().seconds.items()}
    if llm.get_metrics().num_running != batch:
        raise RuntimeError(f"{llm.get_metrics().num_running} of {batch} requests run at the end of the measurement")
    finish(llm, ids)
    return us, {name: spent for name, spent in host.items() if spent > 5}


def profile(job: Job, llm: LLM, batch: int = 64, steps: int = 8) -> None:
    """Record which kernels a step spends its time in."""
    ids = begin(llm, batch, 256, GREEDY)
    job.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            llm.step()
        job.synchronize()
    finish(llm, ids)
    kernels_of(job, f"kernels of a step of {batch} rows", seen, steps)


def kernels_of(job: Job, name: str, seen: torch.profiler.profile, steps: int) -> None:
    """Record a profile: microseconds and launches of a step, and the kernels that take the longest."""
    times: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in seen.events() or ():
        kernel = event.name.split("(")[0][-36:]
        times[kernel] += round(event.device_time_total)
        launches[kernel] += 1
    most = {kernel: f"{us / steps:.0f} us, {launches[kernel] / steps:.0f}x" for kernel, us in times.most_common(8)}
    us, count = sum(times.values()) / steps, sum(launches.values()) / steps
    job.record.figure(name, key=True, us=us, launches=count, most=most)
