"""Histograms: counts by bucket."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bateleur.runner.stats import Histogram

VALUES = st.lists(st.tuples(st.floats(0, 100), st.integers(0, 5)), max_size=20)


@given(VALUES)
def test_counts_are_those_of_a_plain_loop(observed: list[tuple[float, int]]) -> None:
    bounds = (0.5, 1.0, 20.0)
    histogram = Histogram(bounds)
    histogram.observe_all([value for value, _ in observed], [times for _, times in observed])
    at_most = [sum(times for value, times in observed if value <= bound) for bound in bounds]
    assert np.cumsum(histogram.counts)[:-1].tolist() == at_most
    assert histogram.count == sum(times for _, times in observed)
    assert np.isclose(histogram.total, sum(value * times for value, times in observed))


def test_one_value_counts_once() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(2.0)
    histogram.observe(3)
    assert histogram.counts.tolist() == [0, 1, 1]
    assert histogram.total == 5.0
