"""Speed of the paged attention backends: microseconds, GB/s of KV cache reads, and the effect of a loose bound.

    uv run python benchmarks/attention.py --device cuda --output benchmarks/results/attention-h200.json

All backends that support the device run the same batches in interleaved rounds. A decode reads all keys and values
once, so it is limited by GB/s; a prefill is limited by TFLOP/s. `loose` repeats a batch with a `max_seq_len` far above
its longest row, as in a CUDA graph: it shows kernels that iterate up to the bound.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bateleur.metadata import (
    AttentionBackend,
    BatchLimits,
    BatchShape,
    InputBuffers,
    KVCacheGroup,
    StepRows,
    get_backend,
)
from bateleur.metadata.backends import backend_names

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 16


def cases(quick: bool) -> list[tuple[str, int, int, int]]:
    """Returns (name, rows, query length, computed tokens) of each batch."""
    if quick:
        return [("decode", 4, 1, 256), ("prompt", 1, 128, 0)]
    decodes = [("decode", rows, 1, context) for rows in (1, 8, 64, 256) for context in (512, 4096, 16384)]
    prompts = [("prompt", 1, 2048, 0), ("prompt", 8, 256, 0), ("extend", 4, 512, 8192)]
    return [case for case in decodes if case[1] * case[3] <= 1 << 20] + prompts


def timed(calls: dict[str, Callable[[], object]], device: torch.device, rounds: int) -> dict[str, float]:
    """Median microseconds of each call, in interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            if device.type == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                start.record()
                call()
                end.record()
                torch.cuda.synchronize()
                times[name].append(start.elapsed_time(end) * 1e3)
            else:
                began = time.perf_counter()
                call()
                times[name].append((time.perf_counter() - began) * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def backends(device: torch.device, dtype: torch.dtype) -> tuple[dict[str, AttentionBackend], dict[str, str]]:
    """The backends that run here, and for the others the reason. The reference backend is left out: it is a
    specification.
    """
    usable, refused = {}, {}
    for name in backend_names():
        if name == "reference":
            continue
        try:
            usable[name] = get_backend(name, device=device, dtype=dtype, head_dim=HEAD_DIM)
        except ValueError as error:
            refused[name] = str(error)
    return usable, refused


def bench(case: tuple[str, int, int, int], device: torch.device, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    kind, rows, query_len, computed = case
    length = query_len + computed
    width = -(-length // BLOCK)
    model_len = 4 * width * BLOCK
    limits = BatchLimits(rows, rows * query_len, model_len)
    buffers = InputBuffers(limits, [KVCacheGroup(BLOCK, 4 * width)], device)
    tables = np.zeros((rows, 4 * width), np.int32)
    tables[:, :width] = 1 + np.random.default_rng(0).permutation(rows * width).reshape(rows, width)
    batch = buffers.stage(
        StepRows(
            np.full(rows, query_len, np.int32),
            np.full(rows, computed, np.int32),
            np.full(rows, query_len > 1),
            np.zeros(rows * query_len, np.int32),
            (tables,),
        ),
        BatchShape.of(rows, rows * query_len, query_len),
    )
    torch.manual_seed(0)
    kv = [torch.randn(1 + rows * width, BLOCK, KV_HEADS, HEAD_DIM, device=device, dtype=dtype) for _ in "kv"]
    for cache in kv:
        cache[0, 0] = 0
    q = torch.randn(rows * query_len, HEADS, HEAD_DIM, device=device, dtype=dtype)
    k, v = (torch.randn(rows * query_len, KV_HEADS, HEAD_DIM, device=device, dtype=dtype) for _ in "kv")
    calls: dict[str, Callable[[], object]] = {}
    usable, _ = backends(device, dtype)
    for name, backend in usable.items():
        meta = backend.builder().build(batch, 0)
        loose = replace(meta, max_seq_len=model_len)
        for label, each in ((name, meta), (f"{name} loose", loose)):
            work = backend.build_work_list(each, (kv[0], kv[1]), HEADS)  # shared by all layers, so not part of a call
            calls[label] = lambda b=backend, m=each, w=work: b.attend(  # type: ignore[misc]
                q, k, v, (kv[0], kv[1]), m, HEAD_DIM**-0.5, work=w
            )
    micros = timed(calls, device, rounds)
    kv_bytes = 2 * rows * length * KV_HEADS * HEAD_DIM * dtype.itemsize
    flops = 4 * HEADS * HEAD_DIM * rows * sum(computed + i + 1 for i in range(query_len))
    return {
        "case": f"{kind} {rows} x {query_len} over {computed}",
        "us": micros,
        "GB_per_s": {name: kv_bytes / us / 1e3 for name, us in micros.items()},
        "TFLOP_per_s": {name: flops / us / 1e6 for name, us in micros.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="run two small cases, to test the script")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.inference_mode():
        rows = [bench(case, device, dtype, args.rounds) for case in cases(args.quick)]
    for row in rows:
        unit = "GB_per_s" if row["case"].startswith("decode") else "TFLOP_per_s"
        figures = ", ".join(f"{name} {us:.0f} us ({row[unit][name]:.2f})" for name, us in row["us"].items())
        print(f"{row['case']:<28} {figures}  [{unit.replace('_per_', '/')}]")
    result = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "dtype": str(dtype),
        "torch": torch.__version__,
        "refused": backends(device, dtype)[1],
        "rows": rows,
    }
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
