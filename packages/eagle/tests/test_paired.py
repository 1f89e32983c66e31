"""Costs out of times of one moment, on a machine that is slower the next."""

from __future__ import annotations

import numpy as np
import pytest

from bateleur.eagle.paired import Costs, Trial


def trial(
    costs: Costs, number: int, running: int, *times: float, slow: float = 1.0, after: float = 1.0
) -> bool:
    """Four steps of the number that runs, `times` of another one, and four again; whether it was fair."""
    costs.forget_pace()
    for _ in range(4):
        costs.ran(slow)
    made = Trial(number, costs.pace)
    made.times += [slow * time for time in times]
    assert [made.ended(slow * after) for _ in range(4)] == [False] * 3 + [True]
    fair = made.is_fair
    if fair:
        costs.learn(made, running)
    return fair


def test_the_speed_of_the_machine_is_in_no_cost() -> None:
    costs = Costs(4)
    for slow in (1.0, 1.7, 0.3):
        assert trial(costs, 4, 0, 3.0, 3.0, 3.0, 3.0, slow=slow)
    assert costs.of(4) == pytest.approx(3.0)
    assert costs.by_number(0.5).tolist() == pytest.approx([1.0, 1.5, 2.0, 2.5, 3.0])
    assert not trial(costs, 4, 0, 9.0, after=1.7)
    assert not trial(costs, 4, 0, 9.0, after=0.6)
    assert trial(costs, 2, 4, 0.4), "beside steps of four drafts"
    assert costs.of(2) == pytest.approx(1.2)
    assert trial(costs, 0, 4, 0.3), "steps without drafts say what those with drafts cost"
    assert costs.of(0) == 1.0
    assert costs.of(4) == pytest.approx(3.0)


def test_what_was_never_tried_is_expected_by_the_cost_of_a_draft() -> None:
    costs = Costs(4)
    assert costs.by_number(0.5).tolist() == [1.0, 1.5, 2.0, 2.5, 3.0]
    trial(costs, 2, 0, 1.4)
    assert costs.by_number(0.5).tolist() == pytest.approx([1.0, 1.2, 1.4, 1.9, 2.4])


def test_another_cost_than_before_makes_all_others_unknown() -> None:
    costs = Costs(4)
    for number in (4, 2, 1):
        trial(costs, number, 0, 1 + number / 4)
    trial(costs, 2, 0, 1.6)
    assert all(costs.known(number) for number in (1, 2, 4))
    trial(costs, 0, 4, 0.2)
    assert [costs.known(number) for number in range(5)] == [True, False, False, False, True]
    assert costs.of(4) == pytest.approx(5.0)
    assert not costs.known(3)
    assert np.all(np.diff(costs.by_number(0.0)) > 0)


def test_a_pace_takes_four_steps() -> None:
    costs = Costs(2)
    for step in range(5):
        assert costs.knows_pace == (step >= 4)
        costs.ran(1.0 + step)
    assert costs.pace == 3.0
    costs.forget_pace()
    assert not costs.knows_pace
