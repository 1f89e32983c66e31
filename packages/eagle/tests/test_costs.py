"""Costs out of times of one moment, on a machine that is slower the next."""

from __future__ import annotations

import numpy as np
import pytest

from bateleur.eagle.costs import Costs

TRUE = (1.0, 1.5, 1.7, 1.8, 2.4)


def alternate(
    costs: Costs, numbers: tuple[int, ...], rounds: int, pace: float = 1.0, noise: float = 0.05
) -> None:
    """Four steps of each number, in turn."""
    random = np.random.default_rng(0)
    for number in numbers * rounds:
        for _ in range(4):
            costs.learn(number, pace * TRUE[number] * float(np.exp(random.normal(0, noise))))


def test_the_speed_of_the_machine_is_in_no_cost() -> None:
    costs = Costs(4, None)
    for pace in (1.0, 1.7, 0.3):
        alternate(costs, (0, 4, 2), 8, pace)
        assert costs.pace == pytest.approx(pace, rel=0.1)
    assert np.exp(costs.of)[[0, 2, 4]] == pytest.approx([1.0, 1.7, 2.4], rel=0.05)
    assert np.exp(costs.of)[3] == pytest.approx(2.0, rel=0.1), "in between costs are about linear"
    deviation = np.sqrt(costs.variance(0))
    assert deviation[0] == 0
    assert deviation[[2, 4]].max() < 0.05 < deviation[1]


def test_a_number_that_runs_alone_says_nothing_of_costs() -> None:
    costs = Costs(4, None)
    before, unsure = costs.of, costs.variance(0)
    for number in (4, 0):
        costs.forget_pace()
        alternate(costs, (number,), 50, pace=3.0)
        assert costs.of == pytest.approx(before, abs=0.01)
        assert costs.variance(0) == pytest.approx(unsure, rel=0.02)
    assert costs.pace == pytest.approx(3.0, rel=0.1)


def test_costs_that_walk_are_less_and_less_sure() -> None:
    costs, forever = Costs(2, 100), Costs(2, None)
    for each in (costs, forever):
        alternate(each, (0, 2), 10)
        each.passed(0)
    known = costs.variance(0)[2]
    costs.passed(100)
    assert costs.variance(0)[2] == pytest.approx(known + 0.01)
    assert costs.variance(2)[0] == pytest.approx(known + 0.01), "none beside two is two beside none"
    before = forever.variance(0)
    forever.passed(10**6)
    assert np.array_equal(forever.variance(0), before)


def test_a_machine_that_leaps_leaves_costs_less_sure_and_as_they_were() -> None:
    steady, leaping = Costs(4, None), Costs(4, None)
    for step in range(96):
        number = 4 * (step // 4 % 2)
        steady.learn(number, TRUE[number])
        leaping.learn(number, TRUE[number] * 1.7 ** (step // 10 % 2))
    assert leaping.of[4] == pytest.approx(steady.of[4], abs=0.15)
    assert leaping.variance(0)[4] > 2 * steady.variance(0)[4]


def test_others_are_a_beginning() -> None:
    known = Costs(4, None)
    alternate(known, (0, 4), 10)
    like = Costs(4, None, known, 0.4)
    assert np.array_equal(like.of, known.of)
    assert known.variance(0)[4] < like.variance(0)[4] < Costs(4, None).variance(0)[4]
