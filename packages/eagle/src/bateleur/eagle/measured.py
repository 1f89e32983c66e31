"""A number of drafts that pays, found out while running: what steps cost is measured, not told."""

# Legend for shapes: R rows, K draft tokens at most.

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from bateleur.eagle.costs import Costs
from bateleur.eagle.policy import I32Array, PolicyRows, StepTime, require_steps
from bateleur.eagle.stats import FloatArray, IntArray

_STEPS = 6
"""Steps of a trial: two that change to it, of which nothing is learnt, and four that are compared."""
_ENOUGH = 4
"""Steps of the number that runs before a trial, and after it."""
_SURE = 2
"""Steps of a trial that may end it early."""
_MARGIN = 0.03
"""By how much, as a logarithm, another number must be better to be taken up."""
_HOPE = 2.0
"""A number is tried while it may be the best by so many deviations."""
_UNSEEN = 0.02
"""What steps without drafts gain, as a logarithm, where nobody has to remember them."""
_KNOWN = 0.15
"""Deviation of a cost, as a logarithm, from which on its number may be taken up."""
_SPREAD = 0.5
"""Variance of the logarithm of what a row emits in a step."""
_DOUBT = 0.1
"""The same of what is expected of that, before drafts were verified."""
_NEWEST = 1 / 128
"""Weight of the newest rows in what is typical."""
_REST = 16
"""Steps without drafts before anybody asks again whether there should be some."""
_AWAKE = 12
"""Steps behind sleep before a trial: what they show a drafter is all that it knows then of the rows."""
_FOREVER = 1 << 40
_HOLD = 7
"""Steps that go on with a number of drafts without a look at what speaks for it."""
_LATE = 4
"""Those of them, and of a rest, whose times are learnt: behind a few steps a pace is as well known as behind many."""
_LOAN = 8
"""Plain steps that trials may lose before their budget has come together, once."""
_MOST_LOST = 8
"""Steps of the number that runs that one of a trial may lose; what takes longer is not the trial's doing."""
_MISSED_COST = 0.02
"""A missed token's part of a plain step of one row, before any was measured."""
_MANY_MISSED = 16
"""Missed tokens of a row from which on their cost is seen in a step's time."""
_AWAY = 16
"""Steps of other batch sizes after which what steps took a moment ago is of another moment."""


class ByMeasuredCost:
    """The same number for every row, the one that emits most per second by the steps so far; none unless that pays.

    Each batch size (up to a factor of two) has its own costs, and apart from it that of greedy rows; see `Costs`, which
    also says how sure they are. One of which nothing is known yet is taken to be like the nearest. What a number emits
    follows from the rows' acceptance. The number that runs is the best by what is known, and one that may be better
    still is tried, a few steps at a time: one that is clearly worse gets no trial before so much time has passed that
    it might not be any more, since the text, or what else the machine does, changes; by about a tenth in `memory`
    steps.

    What trials have lost beside the best number is counted, over all batch sizes; so is what it takes to show a drafter
    the tokens that it has missed. One waits until that and what it may lose are below `budget` of all time, and eight
    plain steps. So where drafts do not pay they are switched off, cost no more than that, and come back.

    Times differ from run to run, and with them the lengths; see `ObservingPolicy`.
    """

    def __init__(self, num_drafts: int, *, memory: int | None = 1000, budget: float = 0.005) -> None:
        """Know nothing yet.

        num_drafts: K. memory: steps; None for a machine and a text that do not change. budget: part of all time, above
        0. `ValueError` for what is not.
        """
        if num_drafts < 1:
            raise ValueError(f"num_drafts={num_drafts} must be at least 1")
        require_steps("memory", memory)
        if not budget > 0:
            raise ValueError(f"budget={budget} must be above 0")
        self.num_drafts, self._memory = num_drafts, memory
        self._account = _Account(budget)
        self._batches: dict[tuple[int, bool], _Batch] = {}

    def lengths(self, rows: PolicyRows) -> I32Array:
        """See `DraftPolicy`, but for asking twice: each question is a step."""
        if not len(rows):
            return np.zeros(0, np.int32)
        batch = self._of(len(rows), rows.greedy)
        survival_K = rows.acceptance[:, : self.num_drafts].cumprod(1).mean(0)
        emitted = np.concatenate([[1.0], 1.0 + survival_K.cumsum()])
        missed = rows.num_missed * self._account.missed_cost / math.sqrt(len(rows))
        return np.minimum(batch.choose(np.log(emitted), missed), rows.most).astype(np.int32)

    def settled(self, num_rows: int, *, greedy: bool) -> int | None:
        """See `SettledPolicy`."""
        batch = self._batches.get(_name(num_rows, greedy))
        return None if batch is None else batch.settled()

    def sleeps(self, num_rows: int, *, greedy: bool) -> bool:
        """See `SleepingPolicy`."""
        batch = self._batches.get(_name(num_rows, greedy))
        return batch is not None and batch.sleeps()

    def numbers(self, most: int) -> Collection[int]:
        """See `UniformPolicy`: steps of one draft are padded to it."""
        return (self.num_drafts // 2,)

    def observe(self, step: StepTime) -> None:
        """See `ObservingPolicy`. A number is measured by steps that verify and draft it for all rows, no more."""
        rows = len(step.num_drafts)
        if not rows:
            return
        batch, self._account.num_steps = self._of(rows, step.greedy), self._account.num_steps + 1
        self._account.total += step.seconds
        verified, proposed = (_common(numbers) for numbers in (step.num_drafts, step.num_proposed))
        if (
            step.num_other_tokens
            or not 0 <= verified <= self.num_drafts
            or not 0 <= proposed <= self.num_drafts
        ):
            batch.broke_off()
        else:
            batch.observe(rows, verified, proposed, step)

    def _of(self, num_rows: int, greedy: bool) -> _Batch:
        name = _name(num_rows, greedy)
        if name not in self._batches:
            self._batches[name] = _Batch(self._new_costs(*name), self._account)
        return self._batches[name]

    def _new_costs(self, size: int, greedy: bool) -> Costs:
        """Those of the nearest batch size, as far as they are known."""
        apart = {
            name: abs(name[0] - size) + 0.4 * (name[1] != greedy)
            for name, batch in self._batches.items()
            if batch.tried
        }
        if not apart:
            return Costs(self.num_drafts, self._memory)
        nearest = min(apart, key=lambda name: apart[name])
        return Costs(self.num_drafts, self._memory, self._batches[nearest].costs, min(apart[nearest], 1.0))


class _Account:
    """What all batch sizes share: all time, what trials have lost of it, what a missed token costs beside a plain step
    of one row.
    """

    def __init__(self, budget: float) -> None:
        self.total = self.lost = 0.0
        self.num_steps = 0
        self.missed_cost = _MISSED_COST
        self._budget = budget

    def steps_until(self, loss: float, plain: float) -> float:
        """Steps without drafts after which so much more may be lost; 0 or less is now. `plain`: seconds of such."""
        missing = self.lost + max(loss, 0.0) - self._budget * self.total - _LOAN * plain
        return missing / (self._budget * plain)


class _Batch:
    """What is known of one batch size, and what is done about it."""

    def __init__(self, costs: Costs, account: _Account) -> None:
        self.costs, self._account = costs, account
        self.tried = False
        self._promised = np.zeros(len(costs.mean))
        k = len(costs.mean) - 1
        self._eligible = np.isin(np.arange(1 + k), (0, 1, k // 2, k))
        """None, one, half of K and K: what lies between gains less than it takes to find out."""
        self._typical = np.zeros(len(costs.mean))
        """The same of the rows of late steps with drafts."""
        self._doubt = _DOUBT
        """Variance of what is promised."""
        self._best = self._asleep = self._hold = 0
        self._plain = 0.0
        """Seconds of a step without drafts when it fell asleep."""
        self._trial: int | None = None
        self._left = self._measured = 0
        self._last = -1
        """The number of the last step, if it was one that can be measured."""
        self._enough = 0
        """Steps of the number that runs since the last trial."""
        self._num_rows = self._seen = self._drafted = self._compared = 0

    def settled(self) -> int | None:
        """The number that the next step has because the last one had it, if nobody has to look again."""
        if not self._hold:
            return None
        self._hold -= 1
        return self._best

    def sleeps(self) -> bool:
        """Whether nobody need remember the next step."""
        if not self._asleep:
            return False
        self._asleep -= 1
        self._account.total += self._plain
        self._account.num_steps += 1
        self._seen = self._account.num_steps
        return True

    def choose(self, promised: FloatArray, missed: float) -> int:
        """The number for the next step; `promised` (1 + K,) logarithm of the tokens of a row by number; `missed`: plain
        steps that the first drafts take more.
        """
        self._promised = promised
        scores = np.where(self._eligible, self._expected(promised) - self.costs.of, -np.inf)
        scores[0] = _UNSEEN
        if self._left and self._trial is not None:
            if self._measured < _SURE or self._hopes(scores)[self._trial] > scores[self._best]:
                self._left -= 1
                return self._trial
            self._left = 0
        if self._trial is None and self._enough >= _ENOUGH:
            if (best := self._known(scores)) != self._best:
                self._compared = self._compared if self._best else self._account.num_steps
                self._best, self._enough = best, 0
                return best
            wait = self._consider(scores, missed)
            if self._trial is not None:
                return self._trial
            if self._best:
                self._hold = _HOLD
            else:
                self._rest(wait)
        return self._best

    def _expected(self, promised: FloatArray) -> FloatArray:
        """(1 + K,) between what these rows promise, by a few steps of their own, and what others did."""
        return 0.5 * (promised + self._typical) if self._drafted else promised

    def _hopes(self, scores: FloatArray) -> FloatArray:
        """(1 + K,) what each number may be worth. While drafts run, a trial says nothing of what they emit."""
        hopes: FloatArray = scores + _HOPE * np.sqrt(self._variance())
        return hopes

    def _variance(self) -> FloatArray:
        variance = self.costs.variance(self._best)
        if not self._best:
            variance[1:] += self._doubt
        return variance

    def _known(self, scores: FloatArray) -> int:
        """The best of the numbers whose costs are known, if it is better than the one that runs."""
        known = self.costs.variance(0) <= _KNOWN**2
        best = int(np.where(known, scores, -np.inf).argmax())
        return best if scores[best] > scores[self._best] + _MARGIN else self._best

    def _consider(self, scores: FloatArray, missed: float) -> float:
        """Begin a trial of the number that promises most, if it may be the best, or of none, if that was long ago; or
        return after how many steps.
        """
        costs, account, best = self.costs, self._account, self._best
        hopes = self._hopes(scores)
        hopes[best] = -np.inf
        overdue = best > 0 and costs.memory is not None and account.num_steps - self._compared > costs.memory
        number = 0 if overdue else int(hopes.argmax())
        plain, gap, least = costs.pace, float(scores[best] - scores[number]), scores[best] + _MARGIN
        loss = _STEPS * math.exp(costs.of[number]) * (1 - math.exp(-gap)) + (0.0 if best else missed)
        wait = account.steps_until(loss * plain, plain)
        if not overdue and hopes[number] <= least:
            walk = costs.walk * (1 if best else 2)
            missing = ((least - scores) / _HOPE) ** 2 - self._variance()
            missing[best] = np.inf
            wait = max(wait, float(missing.min()) / walk if walk else _FOREVER)
        if wait <= 0:
            self._trial, self._left, self._measured, self.tried = number, _STEPS - 1, 0, True
            self._compared = self._compared if number else account.num_steps
        return wait

    def _rest(self, wait: float) -> None:
        """No drafts for about so many steps; asleep, but for the last of them, unless other rows would have some."""
        self._hold = _REST
        worth = float((self._typical - self.costs.of)[self._eligible].max())
        if wait > _AWAKE + _REST and worth <= _UNSEEN + _MARGIN:
            self._hold, self._asleep = 0, min(int(wait), _FOREVER) - _AWAKE
            self._plain = self.costs.pace
            self.costs.passed(self._asleep)
            self._doubt += self._asleep * self.costs.walk
            self._forget_pace()

    def _forget_pace(self) -> None:
        self.costs.forget_pace()
        self._last, self._enough = -1, 0

    def broke_off(self) -> None:
        """A step that says nothing."""
        self._last = -1

    def observe(self, rows: int, verified: int, proposed: int, step: StepTime) -> None:
        """Learn the time of a step, and count what it lost if a trial is to blame."""
        account, costs = self._account, self.costs
        if account.num_steps - self._seen > _AWAY or abs(rows - self._num_rows) * 8 > self._num_rows:
            self._forget_pace()
            self._num_rows, self._trial, self._left = rows, None, 0
        self._seen = account.num_steps
        if verified:
            self._doubt = 1 / (1 / self._doubt + rows / _SPREAD)
            self._drafted += 1
            self._typical += (self._promised - self._typical) * max(1 / self._drafted, _NEWEST)
        self._doubt += costs.walk
        even = verified == proposed
        if even and self._last in (verified, -1) and self._hold < _LATE:
            costs.learn(verified, step.seconds)
            self._measured += verified == self._trial
            self._enough += verified == self._best
        self._last = verified if even else -2
        if self._trial is not None:
            if even and verified == self._best and not self._left:
                self._trial, self._enough = None, 0
            else:
                self._lose(rows, verified, proposed, step)

    def _lose(self, rows: int, verified: int, proposed: int, step: StepTime) -> None:
        account, costs, best = self._account, self.costs, self._best
        usual = costs.pace * math.exp(costs.of[best] - self._promised[best])
        extra = max(step.seconds - usual * math.exp(self._promised[verified]), 0.0)
        pace = costs.pace * math.exp(costs.of[best])
        account.lost += extra if step.num_missed else min(extra, _MOST_LOST * pace)
        if step.num_missed >= _MANY_MISSED * rows:
            each = math.expm1(costs.of[proposed]) / 2
            catching_up = max(extra / costs.pace - each, 0.0)
            account.missed_cost = catching_up / step.num_missed * math.sqrt(rows)


def _common(numbers: IntArray) -> int:
    """The number that all rows have; -1 where they differ."""
    first = int(numbers[0])
    return first if len(numbers) == 1 or np.count_nonzero(numbers == first) == len(numbers) else -1


def _name(num_rows: int, greedy: bool) -> tuple[int, bool]:
    return (num_rows - 1).bit_length(), greedy
