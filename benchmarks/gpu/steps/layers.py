"""Norms, activations, routers, grouped products and KV writes against the same calls in float64, at published widths.

A call in float64 runs torch's operators on any device; in other dtypes it runs Triton kernels on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.mamba import gated_rms_norm
from bateleur.metadata import ops
from bateleur.runner.models.grouped import grouped_product
from bateleur.runner.models.mlp import activation, gate
from bateleur.runner.models.norm import add_normed, add_rms_norm, rms_norm
from bateleur.runner.models.router import combine, route_tokens, sort_places

from ..job import CompileWatch, Job, graph_of

BOUNDS = {torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float32: 3e-6}
ROUTERS = {"Nemotron-3-Nano": (128, 6, True), "Qwen3.5": (256, 8, False), "512 experts": (512, 10, False)}
"""Experts, experts of a token, and whether scores are sigmoids with a correction."""
HEADS = {"Llama": (32, 8, 128, 128, False), "Qwen3.5": (16, 4, 256, 64, True), "Nemotron": (32, 2, 128, 0, False)}
"""Heads of queries and keys, lanes, lanes that rotate, and whether heads are normed."""


def run(job: Job) -> None:
    """Run all parts."""
    watch = CompileWatch()
    parts: list[tuple[str, Callable[[Job], None]]] = [
        ("norms", norms),
        ("activations", activations),
        ("routers", routers),
        ("grouped products", grouped),
        ("KV writes", writes),
    ]
    for name, part in parts:
        if job.has_time(name, 10):
            with job.part(name):
                part(job)
    watch.record(job)


def random(job: Job, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal numbers on the device."""
    return torch.randn(*shape, device=job.device).to(dtype)


def exact(value: Any) -> Any:
    """A copy, with floating tensors in float64."""
    if isinstance(value, Tensor):
        return value.to(torch.float64 if value.is_floating_point() else value.dtype, copy=True)
    if isinstance(value, list | tuple):
        return type(value)(map(exact, value))
    return torch.float64 if isinstance(value, torch.dtype) else value


def against_float64(job: Job, name: str, call: Callable[..., Tensor], *args: Any) -> None:
    """Compare a call in the dtype of its first argument with the same call in float64."""
    wanted = call(*exact(args))  # first: the call may write to its arguments
    job.compare(name, call(*args), wanted, BOUNDS[args[0].dtype])


def norms(job: Job) -> None:
    """Norms alone, with sums, and with gates."""
    for size in (64,) if job.quick else (2688, 4096):
        for dtype in (torch.bfloat16, torch.float32):
            h, y = (random(job, 33, size, dtype=dtype) for _ in "hy")
            weight, what = random(job, size, dtype=torch.float32), f"{size} {str(dtype)[6:]}"
            against_float64(job, f"rms_norm {what}", rms_norm, h, weight, 1e-5)
            against_float64(job, f"add_rms_norm {what}", add_rms_norm, h, [y, y], [1.0, 0.5], weight, 1e-5, dtype)
            against_float64(job, f"add_normed {what}", _added, h, y, 0.7, weight, 1e-5)
    inner, groups = (64, 2) if job.quick else (4096, 8)
    x, z, weight = random(job, 33, inner), random(job, 33, inner), random(job, inner)
    for first in (False, True):
        against_float64(job, f"gated_rms_norm, norm_first {first}", gated_rms_norm, x, z, weight, groups, 1e-5, first)


def _added(h: Tensor, y: Tensor, factor: float, weight: Tensor, eps: float) -> Tensor:
    add_normed(h, y, factor, weight, eps)
    return h


def activations(job: Job) -> None:
    """Activations, with a gate and without."""
    for name, gated, size in (("silu", True, 14336), ("relu2", False, 1856)):
        size = 48 if job.quick else size
        wide = random(job, 33, 2 * size if gated else size)
        against_float64(job, f"activation {name}", activation, wide, size, name, gated)
    x, by = random(job, 33, 64), random(job, 33, 64)
    for name in ("silu", "sigmoid"):
        against_float64(job, f"gate {name}", gate, x, by, name)


def routers(job: Job) -> None:
    """Which experts tokens take, with which weights, in which order, and the sum of what they make."""
    for name, (experts, top_k, sigmoid) in ROUTERS.items():
        logits = random(job, 300, experts, dtype=torch.float32)
        correction = random(job, experts, dtype=torch.float32) if sigmoid else None
        args = (logits, correction, top_k, sigmoid, 1e-20 if sigmoid else 0.0, 2.5 if sigmoid else 1.0, [1, 1])
        (weights, chosen), (want_weights, want_chosen) = route_tokens(*args), route_tokens(*exact(args))
        order, want_order = chosen.argsort(1), want_chosen.argsort(1)
        found, wanted = chosen.gather(1, order), want_chosen.gather(1, want_order)
        job.same(f"{name}: experts", found, wanted, "the best experts must be chosen")
        job.compare(f"{name}: weights", weights.gather(1, order), want_weights.gather(1, want_order), 1e-5)
        token, place, ends = sort_places(chosen, experts)
        by_expert = chosen.flatten().argsort(stable=True)
        job.same(f"{name}: tokens by expert", token, by_expert // top_k, "the order must be that of a stable sort")
        job.same(f"{name}: places", by_expert[place], torch.arange(len(place), device=place.device), "as above")
        counts = torch.bincount(chosen.flatten(), minlength=experts).cumsum(0).int()
        job.same(f"{name}: ends", ends, counts, "each expert's places end where its count says")
        y, shared, factor = random(job, len(place), 96), random(job, 300, 96), random(job, 300, 1)
        against_float64(job, f"{name}: combine", combine, y, place, weights, shared, factor)


def grouped(job: Job) -> None:
    """Products of rows with the matrix of their expert, and one in a graph without a wait for the device."""
    experts, size, inner = (8, 64, 48) if job.quick else (128, 2688, 1856)
    chosen = torch.rand(90, experts, device=job.device).topk(4, 1).indices
    token, place, ends = sort_places(chosen, experts)
    expert = chosen.flatten()[place.argsort()]
    for dtype, bound in BOUNDS.items():
        x = random(job, 90, size, dtype=dtype).index_select(0, token)
        weight = random(job, experts, inner, size, dtype=dtype)
        pairs = zip(x.float(), expert.tolist(), strict=True)
        wanted = torch.stack([F.linear(row, weight[e].float()) for row, e in pairs])
        job.compare(f"grouped product {str(dtype)[6:]}", grouped_product(x, weight, ends), wanted, bound)
        if job.cuda:
            graph_of(partial(without_waiting, grouped_product, x, weight, ends)).replay()


def without_waiting(call: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call an operator; torch raises an error if the call waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        return call(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def writes(job: Job) -> None:
    """Keys and values that are normed, rotated and written to their slots."""
    for name, (heads, kv_heads, dim, turning, norm) in HEADS.items():
        q, k, v = random(job, 40, heads, dim), random(job, 40, kv_heads, dim), random(job, 40, kv_heads, dim)
        angle = random(job, 40, 1, turning, dtype=torch.float32)
        turn = (angle.cos().bfloat16(), angle.sin().bfloat16()) if turning else (None, None)
        norms = [random(job, dim, dtype=torch.float32) for _ in "qk"] if norm else [None, None]
        slots = torch.randperm(8 * 16, device=job.device)[:40] + 16
        slots[3] = slots[17] = -1
        caches = [torch.zeros(9, 16, kv_heads, dim, device=job.device, dtype=q.dtype) for _ in "kv"]
        args = (q, k, v, *caches, slots, *turn, *norms, 1e-6)
        others = exact(args)
        ops.rotate_and_write_kv(*args)
        ops.rotate_and_write_kv(*others)
        for what, at in (("queries", 0), ("keys", 3), ("values", 4)):
            job.compare(f"{name}: {what}", args[at], others[at], 8e-3 if what != "values" else 0.0)
