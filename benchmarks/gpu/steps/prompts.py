"""Prompts of a published model: tokens a second by the size of a step, against the rate of a matrix product."""

from __future__ import annotations

import time
from typing import Any

import torch

from bateleur.runner import LLM, SamplingParams
from bateleur.runner.diagnose.step_costs import default_cache_costs, step_costs, total

from ..job import Job
from ..models import described, engine, layers_of
from ..plan import LLAMA, NEMOTRON, QWEN
from .decode import kernels_of

LAYERS = {LLAMA: 8, NEMOTRON: 13, QWEN: 8}
"""A quarter of the model; a prompt's time is proportional to the layers."""
LENGTH, STEP_TOKENS, TURNS = 8192, (2048, 8192), 3


def run(job: Job) -> None:
    """Time both sizes of a step."""
    rate = job.matrix_rate()
    for tokens in (48,) if job.quick else STEP_TOKENS:
        name = f"steps of {tokens}"
        if job.has_time(name, 15):
            with job.part(name):
                measure(job, name, tokens, rate)


def measure(job: Job, name: str, tokens: int, rate: float) -> None:
    """Time prompts of `LENGTH` tokens, one after the other."""
    options: dict[str, Any] = {
        "max_model_len": 16384,
        "max_num_seqs": 4,
        "max_num_batched_tokens": tokens,
        "cudagraph_mode": "NONE",
        "kv_cache_memory_bytes": 4 << 30,
    }
    length = 96 if job.quick else LENGTH
    with engine(job, job.case, LAYERS[job.case], **options) as llm:
        times = [prompt_seconds(job, llm, length, turn) for turn in range(TURNS)]
        seconds = min(times[1:])
        caches = default_cache_costs(llm.spec, llm.dtype, 16384, llm.device.type)
        flops = length * total(step_costs(described(llm), caches, 1, length // 2)).flops
        job.record.figure(
            f"{name}, {layers_of(job, job.case, LAYERS[job.case])} layers",
            key=True,
            tokens_per_s=length / seconds,
            ms=seconds * 1e3,
            of_bound=flops / rate / seconds,
            TFLOP_per_s=flops / seconds / 1e12,
            matrix_TFLOP_per_s=rate / 1e12,
            copy_GB_per_s=job.copy_rate / 1e9,
            first_ms=times[0] * 1e3,
        )
        if job.cuda:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                prompt_seconds(job, llm, length, TURNS)
            kernels_of(job, f"{name}: kernels", seen, 1)


def prompt_seconds(job: Job, llm: LLM, length: int, turn: int) -> float:
    """Seconds of a prompt and its first token."""
    prompt = [(37 * j + 11 * turn) % 400 + 4 for j in range(length)]
    job.synchronize()
    began = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt}], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    job.synchronize()
    return time.perf_counter() - began
