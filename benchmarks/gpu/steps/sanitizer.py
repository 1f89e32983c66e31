"""compute-sanitizer over a small eager run without the caching allocator, so that every tensor has its own bounds.

`python -m benchmarks.gpu.steps.sanitizer` is the run itself, on a GPU or a CPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from ..job import Job

TOOL = "compute-sanitizer"
HOMES = ("/usr/local/cuda/bin",)
FAULTS = ("Invalid", "hazard", "ERROR SUMMARY", "Error:")
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 24,
    "cudagraph_mode": "NONE",
    "draft": "auto",
    "enable_prefix_caching": True,
    "mamba_block_size": 16,
    "kv_cache_memory_bytes": 1 << 26,
}


def run(job: Job) -> None:
    """Run one tool over the small run."""
    if not job.needs_cuda():
        return
    tool = shutil.which(TOOL) or next((f"{home}/{TOOL}" for home in HOMES if Path(home, TOOL).exists()), None)
    if tool is None:
        job.record.skip(f"sanitizer:{job.case}", f"{TOOL} is not installed")
        return
    command = [tool, "--tool", job.case, "--target-processes", "application-only", "--print-limit", "8"]
    command += ["--error-exitcode", "9", sys.executable, "-m", "benchmarks.gpu.steps.sanitizer"]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    seconds = job.left() - 5
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment, check=False)
    except subprocess.TimeoutExpired:
        job.record.skip(f"sanitizer:{job.case}", f"the run did not end within {seconds:.0f} s")
        return
    text = done.stdout + done.stderr
    print(text[-20_000:])
    found = [line.strip("= ") for line in text.splitlines() if any(fault in line for fault in FAULTS)]
    why = f"exit status {done.returncode}: {'; '.join(found[:6]) or text[-300:]}"
    job.record.check(job.case, done.returncode == 0, why, key=True)


def small_run() -> None:
    """Generate a few tokens with drafts, truncation and prefix caching."""
    from bateleur.runner import LLM, SamplingParams

    device = "cuda" if torch.cuda.is_available() else "cpu"
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=6, ignore_eos=True)
    with LLM(device=device, **OPTIONS) as llm:
        for output in llm.generate(["def f(x):", "import os", "class A:"], params):
            print(output.outputs[0].token_ids)


if __name__ == "__main__":
    small_run()
