"""Time of a projection by the layout of its weight: rows (as checkpoints have it) or columns.

uv run python benchmarks/layout.py
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor

SHAPES = ((256, 1160), (512, 256), (256, 768), (768, 256), (256, 512), (256, 256), (256, 4096))


def median_us(x: Tensor, weight: Tensor, evict: Tensor, rounds: int = 40) -> float:
    """Microseconds of `F.linear` with a cold cache."""
    times = []
    for _ in range(rounds):
        evict.mul_(1.0)
        began = time.perf_counter()
        F.linear(x, weight)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def main() -> None:
    evict = torch.randn(6_000_000)
    for tokens in (1, 8, 32, 64):
        rows = columns = 0.0
        for inputs, outputs in SHAPES:
            x, weight = torch.randn(tokens, inputs), torch.randn(outputs, inputs)
            rows += median_us(x, weight, evict)
            columns += median_us(x, weight.t().contiguous().t(), evict)
        print(f"{tokens:>3} tokens: rows {rows:7.0f} us   columns {columns:7.0f} us   {rows / columns:4.2f}x")


if __name__ == "__main__":
    main()
