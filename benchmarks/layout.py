"""Time of a linear projection by weight layout: rows (as in checkpoints), columns, or packed for oneDNN.

uv run python benchmarks/layout.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from bateleur.runner.models.matrix import Projection

SHAPES = ((256, 1160), (512, 256), (256, 768), (768, 256), (256, 512), (256, 256), (256, 4096))


def median_us(project: Callable[[Tensor], Tensor], x: Tensor, evict: Tensor, rounds: int = 40) -> float:
    """Microseconds of a projection with a cold cache."""
    times = []
    for _ in range(rounds):
        evict.mul_(1.0)
        began = time.perf_counter()
        project(x)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


@torch.inference_mode()
def main() -> None:
    evict = torch.randn(6_000_000)
    for tokens in (1, 2, 5, 8, 32, 128):
        us = dict.fromkeys(("rows", "columns", "packed"), 0.0)
        for inputs, outputs in SHAPES:
            x, weight = torch.randn(tokens, inputs), torch.randn(outputs, inputs)
            packed = Projection(weight)
            packed.pack()
            forms = (Projection(weight), Projection(weight.t().contiguous().t()), packed)
            for name, form in zip(us, forms, strict=True):
                us[name] += median_us(form, x, evict)
        figures = "   ".join(f"{name} {figure:6.0f} us" for name, figure in us.items())
        print(f"{tokens:>3} tokens: {figures}")


if __name__ == "__main__":
    main()
