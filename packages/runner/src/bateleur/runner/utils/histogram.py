"""Histograms in the form of Prometheus: counts by upper bound."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike


class Histogram:
    """Counts of observations by bucket.

    bounds: ascending upper bounds of the buckets, inclusive; the last bucket, after them, has none.
    counts: (len(bounds) + 1,) int64. total: sum of all observations.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = np.array(bounds, dtype=np.float64)
        self._bounds = self.bounds.tolist()
        assert len(bounds), "a histogram has a bound"
        assert (np.diff(self.bounds) > 0).all(), "bounds ascend"
        self.counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Add the observation `value` `times` times."""
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def observe_all(self, values: ArrayLike, times: ArrayLike) -> None:
        """Add each of the observations (N,) as often as its entry of `times` (N,)."""
        values_N, times_N = np.asarray(values, dtype=np.float64), np.asarray(times, dtype=np.int64)
        buckets_N = self.bounds.searchsorted(values_N)
        found = np.bincount(buckets_N, times_N, minlength=len(self.counts))
        self.counts += found.astype(np.int64)
        self.total += float(values_N @ times_N)

    @property
    def count(self) -> int:
        """Number of observations."""
        return int(self.counts.sum())
