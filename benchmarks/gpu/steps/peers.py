"""Other kernels and engines on the same work, if installed: FlashInfer, torch varlen attention, fla, vLLM."""

from __future__ import annotations

import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import mamba
import torch
from rival import write_checkpoint

from bateleur.mamba import PromptScan
from bateleur.metadata import get_backend
from bateleur.runner.bench.peers import EngineProcess, Task, run_interleaved

from ..job import Job
from ..plan import MODELS
from .attention import Heads
from .kernels import decode_call
from .recurrences import Rows

BACKENDS = ("triton", "flashinfer", "torch_varlen")
SHAPES = ((1, 8192), (64, 2048))
SCANNED = 4096
BATCH, INPUT, OUTPUT = 64, 32, 128


def run(job: Job) -> None:
    """Compare what is installed; without a GPU there is nothing to compare."""
    if not job.needs_cuda():
        return
    for model in MODELS:
        for rows, context in SHAPES:
            name = f"decode, {model}: {rows} x {context}"
            if job.has_time(name, 6):
                attention(job, name, Heads.of(model), rows, context)
    if job.has_time("fla", 20):
        scans(job)
    if job.has_time("vllm", 40):
        vllm(job)


def attention(job: Job, name: str, heads: Heads, rows: int, context: int) -> None:
    """Time every backend that serves."""
    times: dict[str, float] = {}
    for peer in BACKENDS:
        try:
            backend = get_backend(peer, device=job.device, dtype=torch.bfloat16, head_dim=heads.dim)
        except ValueError as refusal:
            job.record.skip(peer, str(refusal))
            continue
        with job.part(f"{name}, {peer}"):
            call, layers, _ = decode_call(job, heads, rows, context, backend)
            times[peer] = job.microseconds(call) / layers
    job.record.figure(name, key=len(times) > 1, us=times, copy_GB_per_s=job.copy_rate / 1e9)


def scans(job: Job) -> None:
    """Time the scan of a prompt by bateleur's kernels and by fla's."""
    if find_spec("fla") is None:
        job.record.skip("fla", "fla is not installed")
        return
    for model in ("Qwen3.5-9B", "Kimi-Linear-48B"):
        with job.part(f"scan, {model}"):
            rows = Rows.random(mamba.MODELS[model].spec(0, mamba.SLOTS), [SCANNED], job.device)
            us = {
                form.value: job.microseconds(rows.scan_call(SCANNED, form)) for form in (PromptScan.OWN, PromptScan.FLA)
            }
            rate = job.copy_rate / 1e9
            job.record.figure(f"scan, {model}: {SCANNED} tokens", key=True, us=us, copy_GB_per_s=rate)


def vllm(job: Job) -> None:
    """Time a batch on both engines: a Llama of 135 M random parameters, the same prompts and greedy tokens."""
    if find_spec("vllm") is None:
        job.record.skip("vllm", "vllm is not installed")
        return
    with job.part("vllm"), tempfile.TemporaryDirectory() as folder:
        with torch.inference_mode(False):
            write_checkpoint(Path(folder), "llama")
        options = {"device": "cuda", "dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": BATCH}
        options["gpu_memory_utilization"] = 0.4
        settings = {"model": folder, "options": options, **options}
        engines = [EngineProcess(name, settings, sys.executable) for name in ("bateleur", "vllm")]
        task = Task([[(7 * i + 13 * j) % 1000 + 5 for j in range(INPUT)] for i in range(BATCH)], [OUTPUT] * BATCH)
        (runs,) = run_interleaved(engines, [task], 3, warm_ups=1)
        for engine in engines:
            engine.close()
        rates = {name: BATCH * OUTPUT / each.seconds for name, each in runs.items()}
        versions = {engine.name: engine.facts["version"] for engine in engines}
        job.record.figure("vllm", key=True, tokens_per_s=rates, versions=versions, batch=BATCH)
