"""What thresholds leave of small vocabularies: that which a sort in float64 leaves."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bateleur.eagle import SamplingMetadata, draw, sample
from bateleur.eagle.sampling_metadata import truncation_thresholds
from eagle_doubles.laws import INF, NAN, SAMPLINGS, Row, keys_of, left_by, left_by_a_sort, likely, metadata_of, normal

LEVELS = st.sampled_from([-INF, -3.4028235e38, -1e4, -2.5, -1.0, -0.0, 0.0, 1.0, 1.0000001, 2.0, 50.0, 3.4028235e38])
LOGITS = st.one_of(
    st.lists(LEVELS, min_size=1, max_size=24),
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=24),
    st.builds(lambda value, num: [value] * num, LEVELS, st.integers(1, 300)),
)
ROWS = st.tuples(
    st.sampled_from([0.0, 1e-30, 1e-3, 0.7, 1.0, 3.0, 1e30]),
    st.sampled_from([0.0, 1e-30, 0.1, 0.5, 1.0]),
    st.sampled_from([0, 1, 2, 5, 23, 24, 25, 10**6]),
    st.sampled_from([1e-38, 0.1, 0.5, 0.9, 1 - 2**-24, 1.0]),
)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(LOGITS, ROWS, st.integers(0, 2**32 - 1))
@example([1.0, INF, 0.0], (1.0, 0.1, 2, 0.5), 1)
@example([1.0, NAN, 0.0], (1.0, 0.1, 2, 0.5), 1)
def test_a_draw_is_among_what_thresholds_leave(values: list[float], row: Row, seed: int) -> None:
    logits, metadata = torch.tensor([values]), metadata_of(row)
    left = left_by(logits, *truncation_thresholds(logits, metadata.values), metadata.temperature)
    scaled = logits / torch.tensor(row[0] or 1.0)
    best = float(scaled.max())
    if math.isfinite(best):
        assert left.any()
        assert left[0, int(scaled.argmax())]
        if row[0] > 0 and 0 < row[2] < len(values):
            assert int(left.sum()) <= row[2]
    else:
        assert torch.equal(left, scaled > -INF)
    drawn = sample(logits, metadata, keys_of(1, seed))
    assert torch.equal(drawn.token_ids, draw(metadata.apply(logits), metadata.temperature, keys_of(1, seed)).token_ids)
    assert bool(drawn.bad) == bool(scaled.isnan().any() or (scaled == -INF).all())
    assert drawn.bad or not math.isfinite(best) or left[0, int(drawn.token_ids)]


@pytest.mark.parametrize("metadata", [each for each in SAMPLINGS if each[0] > 0 and each[3] < 0.999])
def test_the_whole_law_against_a_sort(metadata: Row) -> None:
    for logits in (likely(1, 3001), normal(1, 3001, 2).mul(4).round().div(4)):
        want = left_by_a_sort(logits[0], metadata)
        assert {int(i) for i in (metadata_of(metadata).apply(logits)[0] > -INF).nonzero()} == want


def test_rows_that_are_no_law_are_left_as_they_are() -> None:
    logits = normal(4, 50)
    logits[0, 7], logits[1], logits[2, 9] = NAN, -INF, INF
    metadata: SamplingMetadata = metadata_of(*[(1, 0.1, 4, 0.5)] * 3, (0, 0.1, 4, 0.5))
    least, last = truncation_thresholds(logits, metadata.values)
    assert least.tolist() == [-INF] * 4
    assert last.tolist() == [50] * 4
