"""Versions, missing packages, and the ceilings that all figures are compared with."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from importlib import import_module
from importlib.util import find_spec

import torch

from ..job import CompileWatch, Job

NEEDED = ("torch", "triton", "transformers", "numpy", "safetensors", "tokenizers", "pytest")
OPTIONAL = (
    *("xdist", "pytest_timeout", "hypothesis", "psutil", "fastapi", "uvicorn", "httpx", "openai", "ray"),
    *("flashinfer", "fla", "vllm", "prometheus_client", "llguidance", "pyarrow"),
)
SMI = "name,driver_version,memory.total,memory.used,clocks.sm,power.limit"


def run(job: Job) -> None:
    """Record what the machine is, and what it can do at best."""
    machine(job)
    with job.part("C kernels"):
        from bateleur.metadata import native

        began = time.perf_counter()
        why = native.unavailable_reason()
        job.record.figure("C kernels", compiler=why or "found", seconds=time.perf_counter() - began)
    if not job.needs_cuda():
        return
    with job.part("ceilings"):
        ceilings(job)
    with job.part("Triton launch"):
        triton_launch(job)


def machine(job: Job) -> None:
    """Versions, tools and packages."""
    versions: dict[str, str] = {}
    for name in NEEDED:
        if find_spec(name) is None:
            job.record.check(name, False, "the package is not installed, and the project needs it")
        else:
            versions[name] = str(import_module(name).__version__)
    smi = shutil.which("nvidia-smi")
    card = "no nvidia-smi"
    if smi is not None:
        query = [smi, f"--query-gpu={SMI}", "--format=csv,noheader"]
        card = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    tools = {name: shutil.which(name) is not None for name in ("gcc", "ncu", "compute-sanitizer")}
    python = platform.python_version()
    job.record.figure("machine", key=True, card=card, python=python, **versions, cores=os.cpu_count(), tools=tools)
    missing = [name for name in OPTIONAL if find_spec(name) is None]
    job.record.figure("optional packages that are missing", names=missing)


def ceilings(job: Job) -> None:
    """Rates of a copy and of a matrix product, and the time per launch."""
    free, total = torch.cuda.mem_get_info()
    x = torch.zeros(1, device=job.device)

    def launches() -> None:
        for _ in range(200):
            x.add_(1)

    job.record.figure(
        "ceilings",
        key=True,
        copy_GB_per_s=job.copy_rate / 1e9,
        bf16_TFLOP_per_s=job.matrix_rate() / 1e12,
        launch_in_graph_us=job.microseconds(launches) / 200,
        launch_eager_us=job.microseconds(launches, graph=False) / 200,
        free_GB=free / 1e9,
        total_GB=total / 1e9,
    )


def triton_launch(job: Job) -> None:
    """Time of the first call of a kernel, which is compiled, and of later ones."""
    from bateleur.runner.models.norm import rms_norm

    watch = CompileWatch()
    x = torch.randn(1, 4096, device=job.device, dtype=torch.bfloat16)
    weight = torch.ones(4096, device=job.device)
    began = time.perf_counter()
    rms_norm(x, weight, 1e-5)
    first = time.perf_counter() - began

    def hundred() -> None:
        for _ in range(100):
            rms_norm(x, weight, 1e-5)

    eager, graph = (job.microseconds(hundred, graph=graph) / 100 for graph in (False, True))
    job.record.figure("Triton launch", key=True, first_call_s=first, eager_us=eager, in_graph_us=graph, **watch.facts())
