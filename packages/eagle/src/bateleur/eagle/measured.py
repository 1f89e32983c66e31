"""A number of drafts that pays, found out while running: what steps cost is measured, not told."""

# Legend for shapes: R rows, K draft tokens at most.

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from bateleur.eagle.paired import Costs, Trial
from bateleur.eagle.policy import I32Array, PolicyRows, StepTime, require_probes
from bateleur.eagle.stats import FloatArray, IntArray

_STEPS = 5
"""Steps of a trial: one that makes the first drafts, and four that verify and make as many."""
_GAIN, _GAIN_LEFT = 1.06, 1.02
"""What drafts must promise beside none to be taken up, and to be gone on with: estimates are no better than that."""
_HOPE = 0.75
"""A number that was never tried gets a trial if it promises this much of the best, and ends one early below it."""
_SURE = 2
"""Steps of a trial that say so: one may have been held up."""
_REST = 16
"""Steps without drafts before anybody asks again whether there should be some."""
_AWAKE = 12
"""Steps behind sleep before a trial: what they show a drafter is all that it knows then of the rows."""
_FOREVER = 1 << 40
_HOLD = 3
"""Steps that go on with a number of drafts without a look at what speaks for it."""
_LOAN = 8
"""Plain steps that trials may lose before their budget has come together, once."""
_MOST_LOST = 8
"""Steps of the number that runs that one of a trial may lose; what takes longer is not the trial's doing."""
_DRAFT_COST = 0.4
"""A draft's part of a plain step, before any was measured."""
_MISSED_COST = 0.02
"""A missed token's part of a plain step of one row, before any was measured."""
_SOON = 16
"""Steps from a trial to the next, at first; twice as many after each that changed nothing."""
_AWAY = 16
"""Steps of other batch sizes after which what steps took a moment ago is of another moment."""


class ByMeasuredCost:
    """The same number for every row, the one that emits most per second by the steps so far; none unless that pays.

    Each batch size (up to a factor of two) has its own costs, and apart from it that of greedy rows. A cost is what
    steps take beside steps without drafts, in pairs of one moment (see `Costs`): a machine that is shared may run twice
    as fast a second later. First comes a trial of K drafts between steps without; then of half of K and of the
    neighbours of the best, where they are promising: in between costs are taken to be linear, and what a number emits
    follows from the rows' acceptance. Whatever is taken up is soon compared with what it displaced. Then another one
    gets its turn after 16 steps, and after twice as many each time that nothing changed, up to `probe_every`: the text,
    or what else the machine does, may have changed.

    What trials have lost beside the best number is counted, over all batch sizes, and what a trial may lose is known of
    its last, or expected as in the batch size that was tried last; so is what it takes to show a drafter the tokens
    that it has missed. It waits until both are below `budget` of all time, and eight plain steps. So where drafts do
    not pay they are switched off, cost no more than that, and come back.

    Times differ from run to run, and with them the lengths; see `ObservingPolicy`.
    """

    def __init__(self, num_drafts: int, *, probe_every: int | None = 512, budget: float = 0.005) -> None:
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
        missed = rows.num_missed * self._account.missed_cost / math.sqrt(len(rows))
        return np.minimum(batch.choose(emitted, missed), rows.most).astype(np.int32)

    def rests(self, num_rows: int, *, greedy: bool) -> bool:
        """See `RestingPolicy`."""
        batch = self._batches.get(_name(num_rows, greedy))
        return batch is not None and batch.rests()

    def sleeps(self, num_rows: int, *, greedy: bool) -> bool:
        """See `SleepingPolicy`."""
        batch = self._batches.get(_name(num_rows, greedy))
        return batch is not None and batch.sleeps()

    def numbers(self, most: int) -> Collection[int]:
        """See `UniformPolicy`: that which is tried besides K and none."""
        return (self.num_drafts // 2,)

    def observe(self, step: StepTime) -> None:
        """See `ObservingPolicy`. A number is measured by steps that verify and draft it for all rows, no more."""
        rows = len(step.num_drafts)
        if not rows:
            return
        batch, self._account.num_steps = self._of(rows, step.greedy), self._account.num_steps + 1
        self._account.total += step.seconds
        if step.num_other_tokens:
            return
        verified, proposed = (_common(numbers) for numbers in (step.num_drafts, step.num_proposed))
        if 0 <= verified <= self.num_drafts and 0 <= proposed <= self.num_drafts:
            batch.observe(rows, verified, proposed, step)

    def _of(self, num_rows: int, greedy: bool) -> _Batch:
        name = _name(num_rows, greedy)
        if name not in self._batches:
            self._batches[name] = _Batch(self.num_drafts, self._probe_every, self._account)
        return self._batches[name]


class _Account:
    """What all batch sizes share: all time, what trials have lost of it, what drafts cost where they were tried last.

    draft_cost: a draft's part of a plain step. missed_cost: that of a missed token, of one row.
    """

    def __init__(self, budget: float) -> None:
        self.total = self.lost = 0.0
        self.num_steps = 0
        self.draft_cost, self.missed_cost = _DRAFT_COST, _MISSED_COST
        self._budget = budget

    def allows(self, loss: float, plain: float) -> bool:
        """Whether so much more may be lost; `plain`: seconds of a step without drafts."""
        return self.steps_until(loss, plain) <= 0

    def steps_until(self, loss: float, plain: float) -> float:
        """Steps without drafts after which it may be lost; 0 or less is now."""
        missing = self.lost + max(loss, 0.0) - self._budget * self.total - _LOAN * plain
        return missing / (self._budget * plain)


class _Batch:
    """What is known of one batch size, and what is done about it."""

    def __init__(self, k: int, probe_every: int | None, account: _Account) -> None:
        self.costs = Costs(k)
        self._probe_every, self._account = probe_every, account
        self._emitted = np.ones(k + 1)
        self._best = self._left = self._resting = self._asleep = self._hold = 0
        self._plain = 0.0
        """Seconds of a step without drafts when it fell asleep."""
        self._rival: int | None = None
        """What the best number has displaced, before they were compared again."""
        self._trial: Trial | None = None
        self._tried: set[int] = set()
        self._since_probe = self._next_probe = self._num_rows = self._seen = 0
        self._wait = self._soon = min(_SOON, probe_every or _SOON)

    def rests(self) -> bool:
        """Whether there are no drafts in the next step, without being asked about its rows."""
        if self._resting:
            self._resting -= 1
            self._since_probe += 1
            return True
        return False

    def sleeps(self) -> bool:
        """Whether nobody need remember the next step."""
        if not self._asleep:
            return False
        self._asleep -= 1
        self._since_probe += 1
        self._account.total += self._plain
        self._account.num_steps += 1
        self._seen = self._account.num_steps
        return True

    def held(self) -> int | None:
        """The number that the next step has because the last one had it, if nobody has to look again."""
        if not self._hold:
            return None
        self._hold -= 1
        self._since_probe += 1
        return self._best

    def choose(self, emitted: FloatArray, missed: float) -> int:
        """The number for the next step; `emitted` (K + 1,) tokens of a row by number; `missed`: plain steps that the
        first drafts take more.
        """
        self._emitted = emitted
        if self._left and self._trial is not None:
            if not self._hopeless(self._trial):
                self._left -= 1
                return self._trial.number
            self._left = 0
        self._since_probe += 1
        if self._trial is None and self.costs.knows_pace:
            costs = self.costs.by_number(self._account.draft_cost)
            rates, wait = emitted / costs, float(self._until_probe)
            if (best := self._known(rates)) != self._best:
                self._change_to(best)
                return self._best
            if (number := self._candidate(rates)) is not None:
                plain = self.costs.pace / float(costs[best])
                loss = _STEPS * (costs[number] - costs[best] * emitted[number] / emitted[best]) * plain
                if self._account.allows(loss + (0.0 if best else missed) * plain, plain):
                    return self._try(number)
                wait = self._account.steps_until(loss, plain)
            if best:
                self._hold = _HOLD
            else:
                self._rest(wait)
        return self._best

    def _rest(self, wait: float) -> None:
        """No drafts for about so many steps; asleep, but for the last of them."""
        self._resting = _REST
        if wait > _AWAKE + _REST:
            self._resting, self._asleep = 0, int(wait) - _AWAKE
            self._plain = self.costs.pace
            self.costs.forget_pace()

    @property
    def _until_probe(self) -> int:
        """Steps before one more trial of a number that was measured."""
        return _FOREVER if self._probe_every is None else self._wait - self._since_probe

    def observe(self, rows: int, verified: int, proposed: int, step: StepTime) -> None:
        """Learn the time of a step, and count what it lost if a trial is to blame."""
        account, costs, away = self._account, self.costs, self._account.num_steps - self._seen > _AWAY
        other_size = abs(rows - self._num_rows) * 8 > self._num_rows
        if away or other_size:  # what was known is of another moment, or not to be compared
            costs.forget_pace()
            self._num_rows, self._trial, self._left = rows, None, 0
        self._seen = account.num_steps
        trial = self._trial
        if verified == proposed == self._best:
            costs.ran(step.seconds)
            if trial is not None and not self._left and trial.ended(step.seconds):
                self._trial = None
                self._judge(trial)
        elif trial is not None:
            usual = trial.pace / self._emitted[self._best]
            extra = max(step.seconds - usual * self._emitted[verified], 0.0)
            account.lost += extra if step.num_missed else min(extra, _MOST_LOST * trial.pace)
            if verified == proposed == trial.number:
                trial.times.append(step.seconds)
            elif step.num_missed >= _SOON * rows:
                plain = trial.pace / costs.of(self._best)
                catching_up = max(extra / plain - account.draft_cost * proposed, 0.0)
                account.missed_cost = catching_up / step.num_missed * math.sqrt(rows)

    def _judge(self, trial: Trial) -> None:
        if trial.times and not trial.is_fair:  # again, as soon as more may be lost
            self._tried.discard(trial.number)
            self._since_probe = self._wait = max(self._soon, self._wait // 2)
            return
        if self.costs.learn(trial, self._best):
            self._tried.clear()
            self._rival = None
        if trial.number and self.costs.known(trial.number):
            self._account.draft_cost = max(self.costs.of(trial.number) - 1, 0) / trial.number

    def _hopeless(self, trial: Trial) -> bool:
        """Whether the number under trial is so slow, even at its fastest, that no more has to be known."""
        if not trial.number or len(trial.times) < _SURE:
            return False
        rate = self._emitted[trial.number] / min(trial.times)
        return bool(rate < _HOPE * self._emitted[self._best] / trial.pace)

    def _known(self, rates: FloatArray) -> int:
        """The best of the numbers that were measured, if it is better than none and clearly than the one that runs."""
        known = [number for number in range(len(rates)) if self.costs.known(number)]
        best = max(known, key=lambda number: float(rates[number]))
        if rates[self._best] * _GAIN_LEFT >= rates[best]:
            best = self._best
        return best if rates[best] >= (_GAIN_LEFT if self._best else _GAIN) * rates[0] else 0

    def _change_to(self, best: int) -> None:
        self._rival, self._best = self._best, best
        self._wait, self._since_probe = max(self._soon, self._wait // 2), 0
        self.costs.forget_pace()

    def _candidate(self, rates: FloatArray) -> int | None:
        """The number that is to be tried next, if any."""
        k = len(rates) - 1
        for number in dict.fromkeys((k, k // 2, self._best - 1, self._best + 1)):
            promising = 0 <= number <= k and rates[number] >= _HOPE * rates[self._best]
            if promising and not self.costs.known(number) and number not in self._tried:
                return number
        if self._probe_every is None or self._since_probe < self._wait:
            return None
        if self._rival is not None:
            return self._rival
        others = [number for number in range(k + 1) if number != self._best]
        self._next_probe += 1
        promising_first = sorted(others, key=lambda number: -float(rates[number]))
        return promising_first[0] if self._next_probe % 2 else others[self._next_probe // 2 % len(others)]

    def _try(self, number: int) -> int:
        self._tried.add(number)
        if number == self._rival:
            self._rival = None
        else:
            self._wait = min(2 * self._wait, self._probe_every or self._wait)
        self._trial, self._left, self._since_probe = Trial(number, self.costs.pace), _STEPS - 1, 0
        return number


def _common(numbers: IntArray) -> int:
    """The number that all rows have; -1 where they differ."""
    first = int(numbers[0])
    return first if len(numbers) == 1 or np.count_nonzero(numbers == first) == len(numbers) else -1


def _name(num_rows: int, greedy: bool) -> tuple[int, bool]:
    return (num_rows - 1).bit_length(), greedy
