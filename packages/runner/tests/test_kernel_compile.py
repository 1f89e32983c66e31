"""Kernels of layers at published sizes, compiled: occupancy is at least what their docstrings say."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

from bateleur.metadata.dispatch import load  # noqa: E402
from bateleur.runner.models.kernels.grouped import grouped_products  # noqa: E402
from bateleur.runner.models.operators import FORMS  # noqa: E402
from sm90 import compiling, faults_of  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="nothing compiles in Triton's interpreter"
)
BF16, F32 = torch.bfloat16, torch.float32
TOKENS = 64


def some(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def operator(name: str, *arguments: Any) -> Callable[[], object]:
    return lambda: load(FORMS[name].triton or "")(*arguments)


def norms(size: int, stream: torch.dtype) -> dict[str, Callable[[], object]]:
    h, y, weight = some(TOKENS, size, dtype=stream), some(TOKENS, size), some(size)
    found = {
        f"{terms} terms of {size} to {stream}": operator(
            "add_rms_norm", h, [y] * terms, [1.0] * terms, weight, 1e-5, BF16
        )
        for terms in (0, 1, 2)
    }
    return found | {f"added norm of {size} to {stream}": operator("add_normed", h, y, 1.0, weight, 1e-5)}


def routers(experts: int, top_k: int, groups: int, sigmoid: bool) -> dict[str, Callable[[], object]]:
    logits, correction = some(TOKENS, experts, dtype=F32), some(experts, dtype=F32) if sigmoid else None
    chosen = torch.zeros(TOKENS, top_k, dtype=torch.int64)
    weights, gate = some(TOKENS, top_k, dtype=F32), None if sigmoid else some(TOKENS, 1)
    y, places = some(TOKENS * top_k, 2688), torch.zeros(TOKENS * top_k, dtype=torch.int64)
    name = f"of {top_k} of {experts} experts in {groups} groups"
    bounds = [groups, max(1, groups // 2)]
    return {
        f"route {name}": operator("route_tokens", logits, correction, top_k, sigmoid, 1e-20, 2.5, bounds),
        f"sort {name}": operator("sort_places", chosen, experts),
        f"combine {name}": operator("combine", y, places, weights, some(TOKENS, 2688), gate),
    }


def adapters(rank: int, columns: int, rows: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    y, x = some(TOKENS, rows, dtype=dtype), some(TOKENS, columns, dtype=dtype)
    a, b = some(4, rank, columns, dtype=dtype), some(4, rows, rank, dtype=dtype)
    slots = torch.ones(TOKENS, dtype=torch.int32)
    return {f"adapters of {rank} lanes of {columns} to {rows} in {dtype}": operator("add_lora", y, x, a, b, slots)}


CASES: dict[str, Callable[[], object]] = {
    **norms(4096, BF16),
    **norms(2688, F32),
    **norms(8192, BF16),
    **routers(256, 8, 1, sigmoid=False),
    **routers(128, 6, 1, sigmoid=True),
    **routers(512, 22, 8, sigmoid=True),
    "silu of a gated MLP": operator("activation", some(TOKENS, 2 * 14336), 14336, "silu", True),
    "gelu of a gated MLP": operator("activation", some(TOKENS, 2 * 15360), 15360, "gelu_tanh", True),
    "clamped swiglu of experts": operator("activation", some(TOKENS, 2 * 2880), 2880, "clamped_swiglu", True),
    "squared relu": operator("activation", some(TOKENS, 14336), 14336, "relu2", False),
    "gate by silu": operator("gate", some(TOKENS, 4096), some(TOKENS, 4096), "silu"),
    "gate by sigmoid": operator("gate", some(TOKENS, 4096), some(TOKENS, 4096), "sigmoid"),
    "heads of latents": operator("join_heads", some(TOKENS, 32 * 256), some(TOKENS, 64), 32, 128, 192),
}


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_fits_hopper(case: str, record_property: Callable[[str, object], None]) -> None:
    with compiling() as found:
        CASES[case]()
    (kernel,) = found.kernels
    record_property("kernel", (f"runner {case}", kernel.registers, kernel.spilled_bytes, kernel.shared_bytes))
    assert faults_of(kernel) == []


ADAPTERS = {
    **adapters(48, 4096, 6144, BF16),
    **adapters(192, 8192, 10240, BF16),
    **adapters(64, 2688, 10304, F32),
    **adapters(16, 14336, 4096, BF16),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_the_kernels_of_adapters_fit_hopper(case: str, record_property: Callable[[str, object], None]) -> None:
    with compiling() as found:
        ADAPTERS[case]()
    assert len(found.kernels) == 2
    for kernel in found.kernels:
        record_property("kernel", (f"runner {case}", kernel.registers, kernel.spilled_bytes, kernel.shared_bytes))
        assert faults_of(kernel) == []


@pytest.mark.parametrize(
    ("dtype", "rows", "capability"), [(torch.float16, 64, 90), (torch.float16, 32768, 80), (F32, 32768, 90)], ids=str
)
def test_a_grouped_product_fits(dtype: torch.dtype, rows: int, capability: int) -> None:
    """For a layer of 256 experts, and in the shared memory of all devices since sm_80."""
    x, weight, ends = (
        some(rows, 2048, dtype=dtype),
        some(256, 1024, 2048, dtype=dtype),
        torch.zeros(256, dtype=torch.int32),
    )
    with compiling(capability=capability) as found:
        grouped_products(x, weight, ends)
    (kernel,) = found.kernels
    assert faults_of(kernel) == []
    assert kernel.shared_bytes <= 99 << 10
