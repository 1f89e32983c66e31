"""What steps with drafts cost beside steps without, while the speed of the machine changes.

A shared machine may be twice as fast a second later, by more than there is to gain; so a step says something of a
number of drafts only beside steps of another number of about the same moment. A Kalman filter does that: the logarithm
of a step's time is that of the machine's pace, which walks from step to step, plus that of the number's cost, which
hardly does. While one number runs the pace follows it and costs stay as they are; where numbers alternate, what differs
is their costs. How sure all of this is comes along.
"""

# Legend for shapes: K draft tokens at most.

from __future__ import annotations

import math

import numpy as np

from bateleur.eagle.stats import FloatArray

_WALK = 0.3
"""Variance by which the pace walks in a step, in units of that of a step's own noise."""
_NOISE, _LEAST_NOISE = 0.1**2, 0.02**2
"""Variance of the logarithm of a step's time, before any was seen, and at least."""
_NEWEST, _NEWEST_LEAP = 0.05, 0.02
"""Weight of the newest step in the estimate of it, and in that of the variance by which the pace leaps."""
_SURPRISE = 4.0
"""A time that is off by so many deviations says that the pace is another one, or that a step was held up; and where the
number is another one, that its cost may be."""
_UNKNOWN = 100.0
"""Variance of a pace of which nothing is known."""
_DRAFT_COST = 0.5
"""A draft's part of a plain step, before any was measured."""
_FIRST, _EACH, _OWN = 0.25, 0.35, 0.05
"""Deviations of the logarithm of a cost of which nothing is known: of what the first draft adds, of what K of them add
in proportion, and of each number's own."""


class Costs:
    """Costs of 0 to K drafts in steps without drafts, as logarithms with a covariance.

    mean, covariance: (1 + K,), (1 + K, 1 + K) float64; of the pace, in seconds of a step without drafts, and of the
        costs of 1 to K.
    """

    def __init__(self, k: int, memory: int | None, like: Costs | None = None, likeness: float = 1.0) -> None:
        """Know nothing but that they are `like` others, up to `likeness` of what is not known of any.

        memory: steps in which a cost changes by about a tenth, None for never.
        """
        numbers = np.arange(1, 1 + k)
        apart = np.outer(numbers, numbers) * (_EACH / k) ** 2 + _FIRST**2 + np.eye(k) * _OWN**2
        self.mean, self.covariance = np.zeros(1 + k), np.zeros((1 + k, 1 + k))
        self.mean[1:] = np.log1p(_DRAFT_COST * numbers)
        if like is not None:
            self.mean[1:], apart = like.mean[1:], like.covariance[1:, 1:] + likeness**2 * apart
        self.covariance[1:, 1:] = apart
        self.memory = memory
        self.walk = 0.0 if memory is None else 0.01 / memory
        """Variance by which each cost walks in a step."""
        self._walks = np.arange(1, 1 + k)
        self._noise: float = _NOISE if like is None else like._noise
        self._leaps, self._last = 0.0, 0
        self.forget_pace()

    @property
    def of(self) -> FloatArray:
        """(1 + K,) logarithms of costs; 0 for none."""
        costs: FloatArray = self.mean.copy()
        costs[0] = 0.0
        return costs

    @property
    def pace(self) -> float:
        """Seconds of a step without drafts, now."""
        return math.exp(self.mean[0])

    @property
    def is_paced(self) -> bool:
        """Whether the pace is known at all."""
        return bool(self.covariance[0, 0] < 0.5 * _UNKNOWN)

    def variance(self, running: int) -> FloatArray:
        """(1 + K,) variances of costs beside that of the number that runs."""
        covariance = self.covariance
        own: FloatArray = covariance.diagonal().copy()
        own[0] = 0.0
        if not running:
            return own
        other = covariance[running].copy()
        other[0] = 0.0
        beside: FloatArray = np.maximum(own + covariance[running, running] - 2 * other, 0.0)
        return beside

    def forget_pace(self) -> None:
        """Time has passed, or steps are others."""
        self.covariance[0] = self.covariance[:, 0] = 0.0
        self.covariance[0, 0] = _UNKNOWN

    def passed(self, num_steps: int) -> None:
        """So many steps that nobody told of."""
        self.covariance[0, 0] += num_steps * _WALK * self._noise
        self.covariance[self._walks, self._walks] += num_steps * self.walk

    def learn(self, number: int, seconds: float) -> None:
        """A step that verified and made this number of drafts took so long."""
        covariance, noise = self.covariance, self._noise
        covariance[0, 0] += _WALK * noise + self._leaps
        covariance[self._walks, self._walks] += self.walk
        row = covariance[0] + covariance[number] if number else covariance[0].copy()
        off = math.log(seconds) - self.mean[0] - (self.mean[number] if number else 0.0)
        expected = float(row[0] + row[number] if number else row[0]) + noise
        before, self._last = self._last, number
        leap = off * off if off * off > _SURPRISE**2 * expected else 0.0
        self._leaps += _NEWEST_LEAP * (leap - self._leaps)
        if leap:
            covariance[0, 0] += leap
            row[0] += leap
            expected += leap
            if number != before:  # or else the costs are others
                doubtful = number or before
                covariance[doubtful, doubtful] += leap
                row[doubtful] += leap if number else 0.0
                expected += leap if number else 0.0
        elif expected < 4 * noise:
            self._noise = max(noise + _NEWEST * (off * off / expected - 1) * noise, _LEAST_NOISE)
        self.mean += row * (off / expected)
        covariance -= np.multiply.outer(row, row / expected)
