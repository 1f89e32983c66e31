"""Counts and estimates of acceptance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bateleur.eagle.stats import AcceptanceEstimates, AcceptStats


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def test_counts_of_two_steps() -> None:
    stats = AcceptStats(3)
    assert np.isnan(stats.mean_acceptance_length)
    stats.update(ints(3, 3, 0, 2), ints(3, 1, 0, 2))
    stats.update(ints(3, 1), ints(0, 1))
    assert (stats.num_steps, stats.num_plain, stats.num_accepted) == (5, 1, 7)
    assert stats.num_drafts == 3 + 3 + 0 + 2 + 3 + 1, "those that were never reached count as well"
    assert stats.mean_acceptance_length == 1 + 7 / 5
    assert stats.tried.tolist() == [5, 3, 1]
    assert stats.kept.tolist() == [4, 2, 1]
    assert stats.acceptance_per_position.tolist() == [4 / 5, 2 / 3, 1.0]


@pytest.mark.parametrize("right", range(5))
def test_right_up_to_s_is_a_mean_length_of_s_plus_one(right: int) -> None:
    stats = AcceptStats(4)
    for _ in range(7):
        stats.update(np.full(3, 4), np.full(3, right))
    assert stats.mean_acceptance_length == right + 1
    want = [1.0] * right + [0.0] * (right < 4) + [np.nan] * (3 - right)
    np.testing.assert_equal(stats.acceptance_per_position, want[:4])


def test_estimates_start_at_the_prior_and_find_each_request() -> None:
    estimates = AcceptanceEstimates(4, 3, prior=0.6, strength=4)
    np.testing.assert_allclose(estimates.of(np.arange(4)), 0.6)
    for _ in range(200):
        estimates.update(ints(2, 0), ints(3, 3), ints(3, 1))
    own = estimates.of(np.arange(4))
    assert (own[2] > 0.9).all()
    assert own[0, 0] > 0.9
    assert own[0, 1] < 0.15
    assert 0.4 < own[1, 1] < 0.6, "a row without observations is like the others"
    np.testing.assert_allclose(own[1], own[3])
    estimates.admit(0)
    np.testing.assert_allclose(estimates.of(ints(0)), own[1:2])


def test_estimates_follow_a_change_and_stay_inside() -> None:
    estimates = AcceptanceEstimates(1, 2, memory=8, memory_of_all=16, strength=2)
    row = ints(0)
    for accepted in [2] * 50 + [0] * 50:
        estimates.update(row, ints(2), ints(accepted))
        assert ((estimates.of(row) > 0) & (estimates.of(row) < 1)).all()
    assert estimates.of(row)[0, 0] < 0.1


def test_drafts_that_were_not_reached_change_nothing() -> None:
    estimates = AcceptanceEstimates(1, 3)
    before = estimates.of(ints(0))
    estimates.update(ints(0), ints(3), ints(0))
    after = estimates.of(ints(0))
    assert after[0, 0] < before[0, 0]
    np.testing.assert_array_equal(after[0, 1:], before[0, 1:])
    estimates.update(ints(0), ints(0), ints(0))
    np.testing.assert_array_equal(estimates.of(ints(0)), after)


def test_bad_arguments() -> None:
    stats = AcceptStats(2)
    for drafts, accepted in ((3, 0), (1, 2), (1, -1)):
        with pytest.raises(ValueError, match=f"row 1: num_accepted={accepted} and num_drafts={drafts} must"):
            stats.update(ints(1, drafts), ints(0, accepted))
    with pytest.raises(ValueError, match=r"num_drafts \(2,\) and num_accepted \(1,\)"):
        stats.update(ints(1, 1), ints(0))
    assert stats.num_steps == 0
    with pytest.raises(ValueError, match="num_speculative_tokens=0"):
        AcceptStats(0)
    with pytest.raises(ValueError, match="prior=1"):
        AcceptanceEstimates(1, 1, prior=1.0)
    with pytest.raises(ValueError, match="memory=0"):
        AcceptanceEstimates(1, 1, memory=0.5)
