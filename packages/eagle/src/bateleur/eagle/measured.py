"""A number of drafts that pays, found out while running: what steps cost is measured, not told."""

# Legend for shapes: R rows, K draft tokens at most.

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection

import numpy as np

from bateleur.eagle.policy import I32Array, PolicyRows, StepTime, require_probes
from bateleur.eagle.stats import FloatArray

_TRIAL, _SAMPLES = 3, 4
"""Steps of a trial at least, and times that are wanted of a number that is not hopeless. The first step still verifies
the drafts of another number, so its time is nobody's."""
_WINDOW = 8
"""Newest times kept of each number. Their median counts: the shortest would favour what was tried more often."""
_GAIN, _GAIN_LEFT = 1.06, 1.02
"""What drafts must promise beside none to be taken up, and to be gone on with: estimates are no better than that."""
_HOPE = 0.75
"""A number that was never tried gets a trial if it promises this much of the best, and ends one early below it."""
_REST = 8
"""Steps without drafts before anybody asks again whether there should be some."""
_HOLD = 3
"""Steps that go on with a number of drafts without a look at what speaks for it."""
_LOAN = 8
"""Plain steps that trials may lose before their budget has come together, once."""
_DRAFT_COST = 0.4
"""A draft's part of a plain step, before any was measured."""
_MISSED_COST = 0.02
"""A missed token's part of a plain step of one row, before any was measured."""
_SOON = 16
"""Steps from a trial to the next, at first; twice as many after each that changed nothing."""


class ByMeasuredCost:
    """The same number for every row, the one that emits most per second by the steps so far; none unless that pays.

    Each batch size (up to a factor of two) has its own times, and apart from it that of greedy rows. First comes a step
    without drafts, then a trial of K of them; then of half of K and of the neighbours of the best, where they are
    promising: in between costs are taken to be linear, and what a number emits follows from the rows' acceptance. Then
    another one gets its turn after 16 steps, and after twice as many each time that nothing changed, up to
    `probe_every`: the text, or what else the machine does, may have changed, and a first measurement may have been bad.

    What steps have lost beside the best number is counted, over all batch sizes, and what a trial may lose is known of
    its last, or expected as in the batch size that was tried last; so is what it takes to show a drafter the tokens
    that it has missed. It waits until both are below `budget` of all time, and eight plain steps. So where drafts do
    not pay they are switched off, cost no more than that, and come back.

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
        self.num_drafts, self._probe_every = num_drafts, probe_every
        self._account = _Account(budget)
        self._batches: dict[tuple[int, bool], _Batch] = {}

    def lengths(self, rows: PolicyRows) -> I32Array:
        """See `DraftPolicy`, but for asking twice: each question is a step."""
        if not len(rows):
            return np.zeros(0, np.int32)
        batch = self._of(len(rows), rows.greedy)
        if (held := batch.held()) is not None:
            return np.minimum(held, rows.most).astype(np.int32)
        survival_K = rows.acceptance[:, : self.num_drafts].cumprod(1).mean(0)
        emitted = np.concatenate([[1.0], 1.0 + survival_K.cumsum()])
        missed = rows.num_missed * self._account.missed_cost(batch, len(rows))
        return np.minimum(batch.choose(emitted, missed), rows.most).astype(np.int32)

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
        self._account.total += step.seconds
        if step.num_other_tokens:
            return
        verified, proposed = int(step.num_drafts[0]), int(step.num_proposed[0])
        same = rows == 1 or (np.all(step.num_drafts == verified) and np.all(step.num_proposed == proposed))
        if same and max(verified, proposed) <= self.num_drafts:
            batch.observe(verified, proposed, step)

    def _of(self, num_rows: int, greedy: bool) -> _Batch:
        name = _name(num_rows, greedy)
        if name not in self._batches:
            self._batches[name] = _Batch(self.num_drafts, self._probe_every, self._account)
        return self._batches[name]


class _Account:
    """What all batch sizes share: all time, what trials have lost of it, what drafts cost where they were tried last.

    draft_cost: a draft's part of a plain step.
    """

    def __init__(self, budget: float) -> None:
        self.total = self.lost = 0.0
        self.draft_cost = _DRAFT_COST
        self._budget = budget
        self._missed_cost: float | None = None

    def allows(self, loss: float, plain: float) -> bool:
        """Whether so much more may be lost; `plain`: seconds of a step without drafts."""
        return self.lost + max(loss, 0.0) <= self._budget * self.total + _LOAN * plain

    def missed_cost(self, batch: _Batch, num_rows: int) -> float:
        """Seconds that a missed token takes."""
        if self._missed_cost is not None or not batch.times[0]:
            return self._missed_cost or 0.0
        return _MISSED_COST * batch.median(0) / math.sqrt(num_rows)

    def caught_up(self, seconds: float, num_missed: int) -> None:
        """It took so many seconds to show the drafter so many tokens."""
        self._missed_cost = seconds / num_missed


class _Batch:
    """What is known of one batch size: times by number."""

    def __init__(self, k: int, probe_every: int | None, account: _Account) -> None:
        self.times: list[deque[float]] = [deque(maxlen=_WINDOW) for _ in range(k + 1)]
        self._probe_every, self._account = probe_every, account
        self._emitted = np.ones(k + 1)
        self._best = self._trial = self._left = self._resting = self._hold = 0
        self._since_probe = self._next_probe = 0
        self._wait = min(_SOON, probe_every or _SOON)

    def median(self, number: int) -> float:
        """Seconds of a step with so many drafts, which was measured."""
        times = sorted(self.times[number])
        return (times[(len(times) - 1) // 2] + times[len(times) // 2]) / 2

    def rests(self) -> bool:
        """Whether there are no drafts in the next step, without being asked about its rows."""
        if self._resting:
            self._resting -= 1
            self._since_probe += 1
            return True
        return False

    def held(self) -> int | None:
        """The number that the next step has because the last one had it, if nobody has to look again."""
        if not self._hold:
            return None
        self._hold -= 1
        self._since_probe += 1
        return self._best

    def choose(self, emitted: FloatArray, missed: float) -> int:
        """The number for the next step; `emitted` (K + 1,) tokens of a row by number; `missed`: seconds that the first
        drafts take more.
        """
        self._emitted = emitted
        if self._left and not self._hopeless():
            self._left -= 1
            return self._trial
        self._left = 0
        if not self.times[0]:
            return self._try(0, _TRIAL)
        seconds = self._seconds()
        rates = emitted / seconds
        best = self._known(rates)
        if best != self._best:
            self._wait = min(_SOON, self._probe_every or _SOON)
        self._best = best
        self._since_probe += 1
        number = self._candidate(rates)
        if number is not None:
            loss = (_TRIAL + 1) * (seconds[number] - seconds[best] * emitted[number] / emitted[best])
            if self._account.allows(loss + (0.0 if best else missed), float(seconds[0])):
                self._wait = min(2 * self._wait, self._probe_every or self._wait)
                return self._try(number, _SAMPLES + 1)
        self._resting, self._hold = (0, _HOLD) if best else (_REST, 0)
        return best

    def observe(self, verified: int, proposed: int, step: StepTime) -> None:
        """Learn the time of a step, and count what it lost if it was not one of the best number."""
        if verified == proposed:
            self.times[verified].append(step.seconds)
            if verified and self.times[0]:
                self._account.draft_cost = max(self.median(verified) / self.median(0) - 1, 0) / verified
        if (verified, proposed) == (self._best, self._best) or not self.times[self._best]:
            return
        if self._since_probe > 1:  # a request begins or ends, which is not what a trial has lost
            return
        usual = self.median(self._best) / self._emitted[self._best]
        extra = step.seconds - usual * self._emitted[verified]
        self._account.lost += max(extra, 0.0)
        if step.num_missed:
            self._account.caught_up(max(extra, 0.0), step.num_missed)

    def _hopeless(self) -> bool:
        """Whether the number under trial was measured, and is so slow that no more has to be known."""
        number, best = self._trial, self._best
        if not (number and self.times[number] and self.times[best]):
            return False
        rate = self._emitted[number] / self.median(number)
        return bool(rate < _HOPE * self._emitted[best] / self.median(best))

    def _known(self, rates: FloatArray) -> int:
        """The best of the numbers that were measured, if it is better than none."""
        known = [number for number, times in enumerate(self.times) if times]
        best = max(known, key=lambda number: float(rates[number]))
        return best if rates[best] >= (_GAIN_LEFT if self._best else _GAIN) * rates[0] else 0

    def _candidate(self, rates: FloatArray) -> int | None:
        """The number that is to be tried next, if any."""
        k = len(self.times) - 1
        for number in dict.fromkeys((k, k // 2, self._best - 1, self._best + 1)):
            promising = 0 <= number <= k and rates[number] >= _HOPE * rates[self._best]
            if promising and not self.times[number]:
                return number
        if self._probe_every is None or self._since_probe < self._wait:
            return None
        others = [number for number in range(k + 1) if number != self._best]
        self._next_probe += 1
        promising_first = sorted(others, key=lambda number: -float(rates[number]))
        return promising_first[0] if self._next_probe % 2 else others[self._next_probe // 2 % len(others)]

    def _try(self, number: int, steps: int) -> int:
        self._trial, self._left, self._since_probe = number, steps - 1, 0
        if number:
            self.times[number].clear()  # what it took long ago says little
        return number

    def _seconds(self) -> FloatArray:
        """(K + 1,) of a step by number: measured, between such, or by the cost of a draft."""
        known = [number for number, times in enumerate(self.times) if times]
        usual = [self.median(number) for number in known]
        seconds = np.interp(np.arange(len(self.times)), known, usual)
        beyond = np.arange(len(self.times)) - known[-1]
        return np.asarray(seconds + np.maximum(beyond, 0) * self._account.draft_cost * usual[0])


def _name(num_rows: int, greedy: bool) -> tuple[int, bool]:
    return (num_rows - 1).bit_length(), greedy
