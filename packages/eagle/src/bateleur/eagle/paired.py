"""What steps with drafts cost beside steps without, from times of one moment.

The speed of a shared machine changes from moment to moment, by more than there is to gain: so two times are compared
only where one was taken between others like the second one, and a pair between which the speed has changed is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from bateleur.eagle.stats import FloatArray

_PACE = 8
"""Newest times of the number that runs, whose median is the pace."""
_ENOUGH = 4
"""Of these before a trial, and after it."""
_WINDOW = 12
"""Newest costs kept of each number, of three trials."""
_SAME_SPEED = 1.25
"""By how much the pace before and after a trial may differ."""
_OTHER_COST = 1.3
"""A trial that differs by so much from those before it is of another time: these say nothing any more."""


def middle(times: Sequence[float]) -> float:
    """The median: the shortest would favour what was tried more often."""
    ordered = sorted(times)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


class Trial:
    """Steps of another number of drafts between steps of the one that runs.

    pace: seconds of these before it. times: seconds of steps that verified and made `number` drafts.
    """

    def __init__(self, number: int, pace: float) -> None:
        self.number, self.pace = number, pace
        self.times: list[float] = []
        self._after: list[float] = []

    def ended(self, seconds: float) -> bool:
        """A step of the number that runs came behind it; whether these were enough."""
        self._after.append(seconds)
        return len(self._after) == _ENOUGH

    @property
    def is_fair(self) -> bool:
        """Whether the speed was the same before it and after it."""
        after = middle(self._after)
        return max(after, self.pace) <= _SAME_SPEED * min(after, self.pace)

    def ratios(self) -> list[float]:
        """What its steps took beside those of the number that runs."""
        pace = (middle(self._after) * self.pace) ** 0.5
        return [seconds / pace for seconds in self.times]


class Costs:
    """Costs by number of drafts, 1 for none, and the pace of the number that runs."""

    def __init__(self, k: int) -> None:
        """Know nothing of 1 to k drafts."""
        self._costs: list[deque[float]] = [deque(maxlen=_WINDOW) for _ in range(k + 1)]
        self._costs[0].append(1.0)
        self._recent: deque[float] = deque(maxlen=_PACE)

    @property
    def knows_pace(self) -> bool:
        """Whether there were enough steps of the number that runs."""
        return len(self._recent) >= _ENOUGH

    @property
    def pace(self) -> float:
        """Seconds of a step of the number that runs, now."""
        return middle(self._recent)

    def ran(self, seconds: float) -> None:
        """A step of the number that runs took so long."""
        self._recent.append(seconds)

    def forget_pace(self) -> None:
        """Another number runs from now on, or steps are others."""
        self._recent.clear()

    def known(self, number: int) -> bool:
        """Whether it was measured."""
        return bool(self._costs[number])

    def of(self, number: int) -> float:
        """The cost of a number that was measured."""
        return middle(self._costs[number])

    def by_number(self, draft_cost: float) -> FloatArray:
        """(k + 1,) costs: measured, between such, or beyond them by the cost of a draft."""
        known = [number for number, costs in enumerate(self._costs) if costs]
        numbers = np.arange(len(self._costs))
        costs = np.interp(numbers, known, [self.of(number) for number in known])
        return np.asarray(costs + np.maximum(numbers - known[-1], 0) * draft_cost)

    def learn(self, trial: Trial, running: int) -> bool:
        """A fair trial beside steps of `running` drafts is over; one of none says what these cost.

        Whether that was another cost than before: then those of other numbers are not known any more.
        """
        ratios = trial.ratios()
        if not ratios:
            return False
        number, costs = trial.number, [ratio * self.of(running) for ratio in ratios]
        if not number:
            number, costs = running, [1 / ratio for ratio in ratios]
        new, old = middle(costs), self.of(number) if self.known(number) else middle(costs)
        changed = max(new, old) > _OTHER_COST * min(new, old)
        for other, kept in enumerate(self._costs):
            if changed and (other == number or other not in (0, running)):
                kept.clear()
        self._costs[number].extend(costs)
        return changed
