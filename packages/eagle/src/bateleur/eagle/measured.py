"""A number of drafts that pays, found out while running: what steps cost is measured, not told."""

# Legend for shapes: R rows, K draft tokens at most.

from __future__ import annotations

from collections import deque
from collections.abc import Collection

import numpy as np

from bateleur.eagle.policy import I32Array, PolicyRows, StepTime, require_probes
from bateleur.eagle.stats import FloatArray

_TRIAL = 3
"""Steps of a trial. The first still verifies the drafts of another number, so its time is nobody's."""
_WINDOW = 8
"""Newest times kept of each number. Their median counts: the shortest would favour what was tried more often."""
_GAIN, _GAIN_LEFT = 1.1, 1.04
"""What drafts must promise beside none to be taken up, and to be gone on with: estimates are no better than that."""
_HOPE = 0.75
"""A number that was never tried gets a trial if it promises this much of the best."""
_REST = 8
"""Steps without drafts before anybody asks again whether there should be some."""
_LOAN = 8
"""Plain steps that the trials of a batch size may lose before its budget has come together, once."""
_DRAFT_COST = 0.4
"""A draft's part of a plain step, before any was measured."""


class ByMeasuredCost:
    """The same number for every row, the one that emits most per second by the steps so far; none unless that pays.

    Each batch size (up to a factor of two) has its own times, and apart from it that of greedy rows. First comes a step
    without drafts, then a trial of K of them; then of half of K and of the neighbours of the best, where they are
    promising: in between costs are taken to be linear, and what a number emits follows from the rows' acceptance. After
    `probe_every` steps another one gets its turn: the text, or what else the machine does, may have changed. A trial
    takes three steps.

    What trials have lost beside the best number is counted, and what the next one may lose is known of its last, or
    expected as in the batch size that was tried last: it waits until both are below `budget` of all time, and eight
    plain steps. So where
    drafts do not pay they are switched off, cost no more than that, and come back.

    Times differ from run to run, and with them the lengths; see `ObservingPolicy`.
    """

    def __init__(self, num_drafts: int, *, probe_every: int | None = 128, budget: float = 0.01) -> None:
        """Know nothing yet.

        num_drafts: K. probe_every: steps; None for never. budget: part of all time, above 0. `ValueError` for what is
        not.
        """
        if num_drafts < 1:
            raise ValueError(f"num_drafts={num_drafts} must be at least 1")
        require_probes(probe_every)
        if not budget > 0:
            raise ValueError(f"budget={budget} must be above 0")
        self.num_drafts = num_drafts
        self._probe_every, self._budget, self._draft_cost = probe_every, budget, _DRAFT_COST
        self._batches: dict[tuple[int, bool], _Batch] = {}

    def lengths(self, rows: PolicyRows) -> I32Array:
        """See `DraftPolicy`, but for asking twice: each question is a step."""
        if not len(rows):
            return np.zeros(0, np.int32)
        survival_K = rows.acceptance[:, : self.num_drafts].cumprod(1).mean(0)
        emitted = np.concatenate([[1.0], 1.0 + survival_K.cumsum()])
        batch = self._of(len(rows), rows.greedy)
        chosen = batch.choose(emitted, self._probe_every, self._budget, self._draft_cost)
        return np.minimum(chosen, rows.most).astype(np.int32)

    def rests(self, num_rows: int, *, greedy: bool) -> bool:
        """See `RestingPolicy`."""
        batch = self._batches.get(_name(num_rows, greedy))
        return batch is not None and batch.rests()

    def numbers(self, most: int) -> Collection[int]:
        """See `UniformPolicy`: that which is tried besides K and none."""
        return (self.num_drafts // 2,)

    def observe(self, step: StepTime) -> None:
        """See `ObservingPolicy`. A number is measured by steps that verify and draft it for all rows, no more."""
        rows = len(step.num_drafts)
        if not rows:
            return
        batch = self._of(rows, step.greedy)
        batch.total += step.seconds
        if step.num_other_tokens:
            return
        verified, proposed = int(step.num_drafts[0]), int(step.num_proposed[0])
        same = np.all(step.num_drafts == verified) and np.all(step.num_proposed == proposed)
        if not same or max(verified, proposed) > self.num_drafts:
            return
        if verified == proposed:
            batch.times[verified].append(step.seconds)
            if verified and batch.times[0]:
                self._draft_cost = max(batch.median(verified) / batch.median(0) - 1, 0) / verified
        batch.account(verified, proposed, step.seconds)

    def _of(self, num_rows: int, greedy: bool) -> _Batch:
        name = _name(num_rows, greedy)
        if name not in self._batches:
            self._batches[name] = _Batch(self.num_drafts)
        return self._batches[name]


class _Batch:
    """What is known of one batch size: times by number, all time in `total`, and what trials lost of it."""

    def __init__(self, k: int) -> None:
        self.times: list[deque[float]] = [deque(maxlen=_WINDOW) for _ in range(k + 1)]
        self.total = self._lost = 0.0
        self._emitted = np.ones(k + 1)
        self._best = self._trial = self._left = self._resting = 0
        self._since_probe = self._next_probe = 0

    def median(self, number: int) -> float:
        """Seconds of a step with so many drafts, which was measured."""
        return float(np.median(self.times[number]))

    def rests(self) -> bool:
        """Whether there are no drafts in the next step, without being asked about its rows."""
        if self._resting:
            self._resting -= 1
            self._since_probe += 1
            return True
        return False

    def choose(self, emitted: FloatArray, probe_every: int | None, budget: float, draft_cost: float) -> int:
        """The number for the next step; `emitted` (K + 1,) tokens of a row by number."""
        self._emitted = emitted
        if self._left:
            self._left -= 1
            return self._trial
        if not self.times[0]:
            return self._try(0)
        seconds = self._seconds(draft_cost)
        rates = emitted / seconds
        self._best = best = self._known(rates)
        self._since_probe += 1
        number = self._candidate(rates, probe_every)
        if number is not None:
            loss = (_TRIAL + 1) * (seconds[number] - seconds[best] * emitted[number] / emitted[best])
            if self._lost + max(loss, 0.0) <= budget * self.total + _LOAN * seconds[0]:
                self._next_probe += 1
                return self._try(number)
        self._resting = _REST if best == 0 else 0
        return best

    def account(self, verified: int, proposed: int, seconds: float) -> None:
        """Count what a step lost that was not one of the best number."""
        if self.times[self._best] and (verified, proposed) != (self._best, self._best):
            usual = self.median(self._best) / self._emitted[self._best]
            self._lost += max(seconds - usual * self._emitted[verified], 0.0)

    def _known(self, rates: FloatArray) -> int:
        """The best of the numbers that were measured, if it is better than none."""
        known = [number for number, times in enumerate(self.times) if times]
        best = max(known, key=lambda number: float(rates[number]))
        return best if rates[best] >= (_GAIN_LEFT if self._best else _GAIN) * rates[0] else 0

    def _candidate(self, rates: FloatArray, probe_every: int | None) -> int | None:
        """The number that is to be tried next, if any."""
        k = len(self.times) - 1
        for number in dict.fromkeys((k, k // 2, self._best - 1, self._best + 1)):
            promising = 0 <= number <= k and rates[number] >= _HOPE * rates[self._best]
            if promising and not self.times[number]:
                return number
        if probe_every is None or self._since_probe < probe_every:
            return None
        others = [number for number in range(k + 1) if number != self._best]
        return others[self._next_probe % len(others)]

    def _try(self, number: int) -> int:
        self._trial, self._left, self._since_probe = number, _TRIAL - 1, 0
        return number

    def _seconds(self, draft_cost: float) -> FloatArray:
        """(K + 1,) of a step by number: measured, between such, or by the cost of a draft."""
        known = [number for number, times in enumerate(self.times) if times]
        usual = [self.median(number) for number in known]
        seconds = np.interp(np.arange(len(self.times)), known, usual)
        beyond = np.arange(len(self.times)) - known[-1]
        return np.asarray(seconds + np.maximum(beyond, 0) * draft_cost * usual[0])


def _name(num_rows: int, greedy: bool) -> tuple[int, bool]:
    return (num_rows - 1).bit_length(), greedy
