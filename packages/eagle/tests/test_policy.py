"""How many drafts: against brute force, and under load."""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bateleur.eagle.policy import ByBatchSize, BySurvival, DraftPolicy, FixedDrafts, PolicyRows, StepCost
from bateleur.eagle.stats import AcceptanceEstimates


def str_of(value: object) -> str:
    """A name that is the same in every process."""
    return str(value) if isinstance(value, list | tuple | int) else type(value).__name__


def rows(acceptance: Any, most: Any = None, others: int = 0) -> PolicyRows:
    acceptance = np.asarray(acceptance, np.float64)
    most = np.full(len(acceptance), acceptance.shape[1]) if most is None else np.array(most)
    return PolicyRows(np.arange(len(acceptance)), most, acceptance, others)


def alike(num_rows: int, acceptance: float = 0.8, k: int = 4) -> PolicyRows:
    return rows(np.full((num_rows, k), acceptance))


def expected(batch: PolicyRows, lengths: Any) -> float:
    survival = batch.acceptance.cumprod(1)
    return len(batch) + sum(survival[row, :length].sum() for row, length in enumerate(lengths))


@pytest.mark.parametrize(
    ("policy", "want"),
    [
        (FixedDrafts(3), [3, 2, 0]),
        (FixedDrafts(0), [0, 0, 0]),
        (FixedDrafts(9), [4, 2, 0]),
        (ByBatchSize({1: 4, 3: 1, 8: 0}), [1, 1, 0]),
        (ByBatchSize({4: 0, 1: 4}), [4, 2, 0]),
        (BySurvival(StepCost([1], [1.0]), probe_every=None), [0, 0, 0]),
        (BySurvival(StepCost([99], [1.0])), [4, 2, 0]),
        (BySurvival(StepCost([99], [1.0]), uniform=True), [4, 2, 0]),
    ],
    ids=str_of,
)
def test_no_row_gets_more_than_it_may_have(policy: DraftPolicy, want: list[int]) -> None:
    lengths = policy.lengths(rows(np.full((3, 4), 0.8), most=[4, 2, 0]))
    assert lengths.tolist() == want
    assert lengths.dtype == np.int32
    assert policy.lengths(rows(np.zeros((0, 4)))).shape == (0,)


def test_batch_sizes_choose_the_entry_below_them() -> None:
    policy = ByBatchSize({1: 4, 8: 2, 32: 0})
    given = [int(policy.lengths(alike(size)).max()) for size in (1, 7, 8, 31, 32, 100)]
    assert given == [4, 4, 2, 2, 0, 0]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), draft_cost=st.sampled_from([0.0, 0.3]))
def test_survival_finds_what_brute_force_finds(data: st.DataObject, draft_cost: float) -> None:
    """Of all lengths of all rows none has more expected tokens per cost."""
    num_rows, k = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    chance = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])
    acceptance = [data.draw(st.lists(chance, min_size=k, max_size=k)) for _ in range(num_rows)]
    most = data.draw(st.lists(st.integers(0, k), min_size=num_rows, max_size=num_rows))
    others = data.draw(st.integers(0, 3))
    seconds = np.cumsum(data.draw(st.lists(st.sampled_from([0.0, 0.05, 0.5]), min_size=15, max_size=15))) + 1.0
    cost = StepCost(range(1, 16), seconds.tolist())
    batch = rows(acceptance, most, others)

    def rate(lengths: Any) -> float:
        spent = cost(np.array([num_rows + others + sum(lengths)]))[0] + draft_cost * max(lengths)
        return expected(batch, lengths) / float(spent)

    got = BySurvival(cost, draft_cost=draft_cost).lengths(batch).tolist()
    best = max(rate(lengths) for lengths in product(*(range(each + 1) for each in most)))
    assert rate(got) == pytest.approx(best, rel=1e-12)
    assert got == BySurvival(cost, draft_cost=draft_cost).lengths(batch).tolist()


def test_uniform_lengths_pay_for_the_padding() -> None:
    """One good row among bad ones gets its drafts alone, unless all must have as many."""
    acceptance = [[0.95] * 3, [0.05] * 3, [0.05] * 3, [0.05] * 3]
    cost = StepCost(range(1, 17), 1.0 + 0.1 * np.arange(16))
    assert BySurvival(cost).lengths(rows(acceptance)).tolist() == [3, 0, 0, 0]
    assert BySurvival(cost, uniform=True).lengths(rows(acceptance)).tolist() == [0, 0, 0, 0]
    assert BySurvival(cost, uniform=True).lengths(rows(acceptance[:1] * 3)).tolist() == [3, 3, 3]


@pytest.mark.parametrize("uniform", [False, True])
def test_under_load_it_steps_aside_and_comes_back(uniform: bool) -> None:
    """sglang#9319: flat cost up to 64 tokens, then every token pays."""
    cost = StepCost([64, *range(65, 2000)], [1.0, *(n / 64 for n in range(65, 2000))])
    policy = BySurvival(cost, uniform=uniform)
    assert policy.lengths(alike(8)).tolist() == [4] * 8
    assert policy.lengths(alike(128)).tolist() == [0] * 128
    assert policy.lengths(alike(8)).tolist() == [4] * 8


def test_beside_a_long_prompt_drafts_are_cheap() -> None:
    """The step is long anyway; what counts is what another token adds to it."""
    cost = StepCost(range(1, 600), 1.0 + 0.1 * np.arange(599))
    assert BySurvival(cost).lengths(alike(16)).tolist() == [1] * 16
    assert BySurvival(cost).lengths(rows(np.full((16, 4), 0.8), others=500)).tolist() == [4] * 16


def test_rows_that_get_nothing_are_probed_in_turn() -> None:
    """Each once in ten steps and at most an eighth at once, the ones that waited longest first."""
    policy = BySurvival(StepCost([1], [1.0]), probe_every=10)
    batch = rows(np.full((16, 4), 0.01), most=[4] * 15 + [0])
    given = np.array([policy.lengths(batch) for _ in range(39)])
    assert given[:9].sum() == 0
    assert given.max() == 1
    assert given.sum(1).max() == 2
    assert given[:, 15].sum() == 0
    assert (given[9:, :15].sum(0) >= 2).all()
    assert given[9:17].sum(0).tolist() == [1] * 15 + [0]


def test_uniform_probes_are_one_step_for_all() -> None:
    policy = BySurvival(StepCost([1], [1.0]), probe_every=10, uniform=True)
    batch = rows(np.full((16, 4), 0.01), most=[4] * 15 + [0])
    given = np.array([policy.lengths(batch) for _ in range(20)])
    assert np.flatnonzero(given.any(1)).tolist() == [9, 19]
    assert given[9].tolist() == [1] * 15 + [0]


def test_a_wrong_estimate_recovers_through_probes() -> None:
    """Drafts were useless for a while and are perfect now: nobody would know without trying."""
    cost = StepCost([8, *range(9, 100)], [1.0, *(1.0 + 0.1 * n for n in range(1, 92))])
    policy, estimates, table = BySurvival(cost, probe_every=5), AcceptanceEstimates(8, 3), np.arange(8)

    def run(steps: int, accept: bool) -> Any:
        for _ in range(steps):
            lengths = policy.lengths(PolicyRows(table, np.full(8, 3), estimates.of(table)))
            estimates.update(table, lengths, lengths if accept else np.zeros_like(lengths))
        return lengths

    assert run(100, accept=False).sum() <= 1
    assert run(300, accept=True).tolist() == [3] * 8


def test_staircase_cost() -> None:
    cost = StepCost([4, 8], [1.0, 3.0])
    assert cost(np.array([0, 1, 4, 5, 8, 16])).tolist() == [1.0, 1.0, 1.0, 3.0, 3.0, 6.0]


def test_deciding_is_fast() -> None:
    """256 rows, 5 drafts, with a cost of passes: well below a millisecond where nothing else runs."""
    batch = alike(256, k=5)
    policy = BySurvival(StepCost(range(1, 2000), 1.0 + 0.001 * np.arange(1999)), draft_cost=0.01)
    best = 1.0
    for _ in range(20):
        start = time.process_time()
        policy.lengths(batch)
        best = min(best, time.process_time() - start)
    assert best < 5e-3


def test_bad_arguments() -> None:
    one = np.zeros(1, np.int64)
    with pytest.raises(ValueError, match=r"rows \(1,\), max_drafts \(1,\) and acceptance \(2, 3\)"):
        PolicyRows(one, one, np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"max_drafts=\[4\] must be in 0..3"):
        PolicyRows(one, one + 4, np.zeros((1, 3)))
    for wrong in (1.5, -0.1, np.nan):
        with pytest.raises(ValueError, match=r"acceptance must be in \[0, 1\]"):
            PolicyRows(one, one, np.full((1, 3), wrong))
    with pytest.raises(ValueError, match="num_drafts=-1 must not be negative"):
        FixedDrafts(-1)
    for table in ({}, {2: 3}, {0: 1, 1: 1}, {1: -1}):
        with pytest.raises(ValueError, match="must give a number of drafts >= 0 for 1 row"):
            ByBatchSize(table)
    for sizes, seconds, what in (
        ([], [], "at least one"),
        ([1, 2], [1.0], "must be as many"),
        ([2, 2], [1.0, 1.0], "must increase"),
        ([0], [1.0], "must increase from 1"),
        ([1, 2], [2.0, 1.0], "must not decrease"),
        ([1], [0.0], "must be above 0"),
    ):
        with pytest.raises(ValueError, match=what):
            StepCost(sizes, seconds)
    with pytest.raises(ValueError, match="probe_every=0 must be at least 1"):
        BySurvival(StepCost([1], [1.0]), probe_every=0)
    with pytest.raises(ValueError, match="draft_cost=-1 must not be negative"):
        BySurvival(StepCost([1], [1.0]), draft_cost=-1)
