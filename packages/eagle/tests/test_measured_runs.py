"""What the policy that measures gains and loses over many runs, on a machine as noisy as a shared one."""

from __future__ import annotations

import numpy as np
import pytest

from bateleur.eagle import ByMeasuredCost
from eagle_doubles.machine import Engine, Work

K, ACCEPTANCE = 4, 0.56
"""Of drawn tokens of the shipped model."""


def linear(ratio: float) -> Work:
    """All drafts would have `ratio`; half of what they cost comes with the first."""
    drafts = (sum(ACCEPTANCE**i for i in range(K + 1)) / ratio - 1) * (0.5 + 0.5 * np.arange(K + 1) / K)
    return Work((1.0, *(1 + drafts[1:])), ACCEPTANCE)


@pytest.mark.parametrize(
    ("ratio", "median"), [(0.6, 0.96), (0.8, 0.96), (0.95, 0.95), (1.05, 0.98), (1.13, 1.05), (1.5, 1.35)]
)
def test_it_gains_what_there_is_and_loses_next_to_nothing(ratio: float, median: float) -> None:
    speeds = [Engine(linear(ratio), ByMeasuredCost(K), seed).run(1000) for seed in range(12)]
    assert np.median(speeds) > median
    assert min(speeds) > 0.92


@pytest.mark.parametrize("noise", [0.036, 0.1])
@pytest.mark.parametrize(
    ("costs", "acceptance", "rows", "tokens", "median"),
    [
        ((1.0, 1.7, 1.9, 2.15, 2.3), 0.74, 1, 6000, 1.18),
        ((1.0, 1.5, 1.7, 1.9, 2.05), 0.74, 1, 6000, 1.3),
        ((1.0, 1.6, 1.8, 2.05, 2.25), 0.58, 1, 6000, 0.98),
        ((1.0, 1.45, 1.6, 1.8, 1.95), 0.58, 1, 6000, 1.08),
        ((1.0, 2.1, 2.9, 3.4, 3.9), 0.74, 4, 3000, 0.98),
        ((1.0, 2.1, 2.9, 3.4, 3.9), 0.58, 4, 3000, 0.98),
        ((1.0, 2.1, 3.4, 4.3, 5.1), 0.74, 16, 1200, 0.97),
        ((1.0, 2.1, 3.4, 4.3, 5.1), 0.58, 64, 1200, 0.97),
    ],
)
def test_of_one_thread_where_steps_of_more_rows_take_longer(
    costs: tuple[float, ...], acceptance: float, rows: int, tokens: int, median: float, noise: float
) -> None:
    """As the shipped model has them, with and without noise: a little is gained of one row, and nothing of many.

    Behind a first round, in which most is found out.
    """
    work, speeds = Work(costs, acceptance, rows=rows, noise=noise), []
    for seed in range(4):
        engine = Engine(work, ByMeasuredCost(K), seed)
        engine.run(1024 if rows == 1 else 384)
        speeds.append(engine.run(tokens))
    assert np.median(speeds) > median
    assert min(speeds) > 0.95
