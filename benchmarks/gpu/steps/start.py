"""Start time and memory of an engine of a published model's sizes.

The step `compile` opens an engine with the fewest layers, so that several such steps fill Triton's cache at once. The
step `start` opens one with some more layers and the default options, alone on the card.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from ..job import CompileWatch, Job
from ..models import QUICK_LAYERS, check_captures, engine, layers_of
from ..plan import LLAMA, NEMOTRON, QWEN

LAYERS = {LLAMA: 8, NEMOTRON: 13, QWEN: 8}
"""Layers for `start`: a quarter of the model."""
SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
"""Captured sizes for `compile`: one of each kind of kernel."""


def run(job: Job) -> None:
    """Open the engine, and record how long that took."""
    watch = CompileWatch()
    with job.part(f"{job.step} {job.case}"):
        if job.step == "compile":
            options: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 30, "cudagraph_capture_sizes": SIZES}
            opened(job, watch, QUICK_LAYERS[job.case], options)
        else:
            opened(job, watch, LAYERS[job.case], {})


def opened(job: Job, watch: CompileWatch, layers: int, options: dict[str, Any]) -> None:
    """Open an engine with these layers, and record time, kernels, captures and memory."""
    began = time.perf_counter()
    with engine(job, job.case, layers, **options) as llm:
        seconds = time.perf_counter() - began
        facts: dict[str, Any] = watch.facts() | check_captures(job, job.case, llm)
        if job.cuda:
            free, total = torch.cuda.mem_get_info()
            facts |= {"free_GB": free / 1e9, "reserved_GB": torch.cuda.memory_reserved() / 1e9}
            if job.step == "start":
                least = 0.02 * total
                why = f"{free / 1e9:.1f} of {total / 1e9:.0f} GB are free after the start: captures took what was left"
                job.record.check("memory is left", free > least, why)
        name = f"{job.step} {job.case}, {layers_of(job, job.case, layers)} layers"
        job.record.figure(name, key=True, seconds=seconds, caches_GB=llm.cache_plan.total_bytes / 1e9, **facts)
