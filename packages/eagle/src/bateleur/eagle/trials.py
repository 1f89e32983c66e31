"""What is known of the drafts of one batch size, and the trials by which more is found out."""

# Legend for shapes: K draft tokens at most.

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bateleur.eagle.costs import Costs
from bateleur.eagle.policy import StepTime
from bateleur.eagle.stats import FloatArray

_STEPS, _AFTER = 10, 6
"""Steps of a trial, and of what runs behind it: two that change to it, of which nothing is learnt, and more."""
_SETTLED, _MOST_UNSETTLED = 8e-3, 12
"""Seconds behind a change to another number from which on times are its own, and steps that it takes at most; so much
longer is a phase. A processor must learn other branches, and get other memory at hand: of one row, plain steps of 0.45
ms took 0.89, 0.66, 0.60, 0.55, 0.53, 0.52, 0.48, 0.49 and 0.46 ms behind drafts, and drafts took as long to settle."""
_SURE = 2
"""Steps of a trial that may end it early."""
_LATE = 4
"""The last steps of what runs, whose times are learnt: behind a change a pace is as well known as behind many steps."""
_HOLD, _MOST_HELD = 32, 128
"""Steps that go on with a number of drafts without a look at what speaks for it: at first, and each time twice as many,
for a look takes time, and those behind it some more."""
_REST, _LONG = 32, 4096
"""Steps without drafts that go on without a look, at least and at most."""
_AWAKE, _WATCH = 12, 0.1
"""Steps behind sleep before the first drafts: what they show a drafter is all that it knows then of the rows. Each
takes about so much of a plain step more."""
_MARGIN = 0.03
"""By how much, as a logarithm, another number must be better to be taken up."""
_FEED = 0.05
"""Part of a step that drafts take beside steps of decoding, of which alone times are learnt: a drafter is shown
prompts, and requests end in the middle of what was drafted."""
_HOPE = 2.0
"""A number is tried while it may be the best by so many deviations."""
_KNOWN = 0.15
"""Deviation of a cost, as a logarithm, from which on its number may be taken up."""
_SPREAD, _DOUBT = 0.5, 0.1
"""Variance of the logarithm of what a row emits in a step, and of what is expected of that before drafts were seen."""
_NEWEST = 1 / 128
"""Weight of the newest rows in what is typical."""
_HOPEFUL = 0.7
"""Chance that a draft is accepted, before any was verified."""
_LOAN, _LOAN_OF_FEW = 6, 24
"""Plain steps, beyond those of a change, that trials may lose before their budget has come together, once; and of few
rows all that they may, for these take many steps: a pause of the machine in the first trial would put off the second by
thousands."""
_MOST_LOST = 4
"""Steps of the number that runs that one of a trial may lose; what takes longer is not the trial's doing."""
_MISSED_COST, _MANY_MISSED, _MOST_RISE = 0.02, 8, 2.0
"""A missed token's part of a plain step of one row, before any was measured; missed tokens of a row from which on it is
seen in a step's time; and how many times as much it may be the next time, since a first call may take anything."""
_COMPARE, _SELDOM, _MOST_SELDOM = 64, 4, 4
"""Steps after which what was taken up is compared with no drafts; each time so many times as many, up to so many
memories: of one row a comparison takes some twenty steps without drafts, and as many behind it that settle."""
_SLOWER = 1.3
"""How many times as long steps have to take as when they were compared last, for that to be of another machine: then
they are compared behind one memory."""
_AWAY, _STAY = 16, 64
"""Steps of other batch sizes after which what steps took a moment ago is of another moment; and steps of a batch size
before the first trial, for of one that is passed through nothing would be learnt before it ends."""


@dataclass(slots=True)
class Shared:
    """What all batch sizes share: steps so far, and a missed token's part of a plain step of one row."""

    num_steps: int = 0
    missed_cost: float = _MISSED_COST


class Batch:
    """The rows of one batch size, as phases: some steps with the same number of drafts, and then another look.

    One number runs; a trial is a phase with another, behind which the number that runs has one, unless the other is
    the better one by then. Where steps can be slept through, those without drafts are, and what drafts cost is told
    beside such steps. A phase with drafts begins behind some steps that show the drafter the rows.
    """

    def __init__(
        self,
        costs: Costs,
        budget: float,
        shared: Shared,
        like: Batch | None = None,
        *,
        stops: bool = False,
        fewer: bool = False,
    ) -> None:
        """budget: part of all time that trials may lose. like: rows that probably emit as much. stops: all
        drafts or none, see `ByMeasuredCost`. fewer: than those; what pays for them pays for these.
        """
        k = len(costs.mean) - 1
        self.costs, self._budget, self._shared = costs, budget, shared
        self._loan = _LOAN_OF_FEW if stops else _LOAN
        self.tried = self.may_sleep = False
        """Whether there was a trial, and whether steps may be slept through."""
        self.total = self.lost = self._plain = 0.0
        """Seconds: all, those that trials have lost, and those of a step without drafts when this phase began."""
        self._eligible = np.isin(np.arange(1 + k), (0, k) if stops else (0, 1, k // 2, k))
        """None, one, half of K and K: what lies between gains less than it takes to find out."""
        self._first = k if stops else 1
        self._feed: FloatArray = np.where(np.arange(1 + k) > 0, _FEED, 0.0)
        unseen: FloatArray = np.log((_HOPEFUL ** np.arange(1 + k)).cumsum())
        self._typical: FloatArray = unseen if like is None else np.copy(like._typical)
        """(1 + K,) logarithm of the tokens of a row by number, of all rows that had drafts."""
        self._promised: FloatArray = self._typical
        self._drafted = 0
        self._doubt = _DOUBT
        """Variance of what is promised of K drafts."""
        self._most = np.log1p(np.arange(1 + k))
        self._part = (self._most / self._most[-1]) ** 2
        self._running = self._now = self._warm = 0
        """The number that runs, that of this phase, and the steps of showing rows before that begins."""
        self._left, self._held = _AFTER, _HOLD
        self._trial: int | None = None
        self._extra: float | None = None
        """Seconds that steps take more than without a trial, if that is a trial's doing."""
        self._measured, self._last = 0, -1
        """Steps of the trial that were learnt; the number of the last step, -1 if that says nothing."""
        self._behind, self._behind_for = 0, 0.0
        """Steps behind a change of the number, and their seconds."""
        self._num_rows = 0
        self._seen = self._came = shared.num_steps
        self._compare_at, self._compare_after = shared.num_steps, _COMPARE
        self._compared = math.inf
        """Seconds of a step without drafts when what runs was compared last."""
        if fewer and like is not None and like._running:
            self._running = self._now = k if stops else like._running

    def settled(self) -> int | None:
        """The number of drafts that the next step has, if nobody has to look again."""
        if self._warm:
            self._warm -= 1
            return 0
        if not self._left:
            return None
        self._left -= 1
        return self._now

    def sleeps(self) -> bool:
        """Whether nobody need remember the next step. Whoever asks may sleep."""
        self.may_sleep = True
        if self._now:
            return False
        if not self._left:
            self._turn(self._typical, 0.0)
            if self._now:
                return False
        self._left -= 1
        return True

    def choose(self, promised: FloatArray, missed: float) -> int:
        """The number for the next step; `promised` (1 + K,) logarithm of the tokens of a row by number, by what these
        rows accepted; `missed`: plain steps that the first drafts take more.
        """
        self._promised = promised
        if not self._left and not self._warm:
            self._turn(0.5 * (promised + self._typical), 0.0 if self._now else missed)
        number = self.settled()
        assert number is not None, "a phase has steps"
        return number

    def _turn(self, expected: FloatArray, missed: float) -> None:
        """The phase is over: begin another."""
        scores = np.where(self._eligible, expected - self.costs.of - self._feed, -np.inf)
        trial, self._trial = self._trial, None
        if trial == 0:
            self._compared = self.costs.pace
        best = (
            self._known(scores) if self._running or trial is None else 0
        )  # which is looked at on both sides
        self._held = min(2 * self._held, _MOST_HELD)
        if best != self._running:
            self._held = _HOLD
            if not self._running:
                self._compare_after = _COMPARE
                self._compare_at = self._shared.num_steps + _COMPARE
                self._compared = self.costs.pace
            self._running = best
            self._begin(best, self._held if best else _REST)
        elif trial is not None:
            if self._measured < _SURE:  # it cost something all the same
                self.lost += _STEPS * self.costs.pace
            self._begin(best, _AFTER)
        elif not self.costs.is_paced:
            self._begin(best, _AFTER)
        elif (wait := self._consider(scores, missed)) > 0:
            self._begin(best, self._held if best else int(min(max(wait, _REST), _LONG)))

    def _begin(self, number: int, steps: int) -> None:
        if number and not self._now and self.may_sleep:
            self._warm = _AWAKE
        if number != self._now:
            self._behind, self._behind_for = 0, 0.0
        self._now, self._left, self._plain = number, steps, self.costs.pace
        unseen = self._warm + (2 if self._trial is not None else max(steps - _LATE, 0))
        self.costs.passed(unseen)
        self._doubt += steps * self.costs.walk
        if steps > _REST:
            self.costs.forget_pace()

    def _known(self, scores: FloatArray) -> int:
        """The best of the numbers whose costs are known, if it is better than the one that runs."""
        known = self.costs.variance(0) <= _KNOWN**2
        best = int(np.where(known, scores, -np.inf).argmax())
        return best if scores[best] > scores[self._running] + _MARGIN else self._running

    def _hopes(self, scores: FloatArray) -> FloatArray:
        """(1 + K,) what each number may be worth; no draft is worth more than a token."""
        most = self._most - self.costs.of + _HOPE * np.sqrt(self.costs.variance(self._running))
        hopes: FloatArray = np.minimum(scores + _HOPE * np.sqrt(self._variance()), most)
        return hopes

    def _variance(self) -> FloatArray:
        """(1 + K,) of scores. While drafts run, a trial says nothing of what they emit."""
        variance = self.costs.variance(self._running)
        if not self._running:
            variance += self._doubt * self._part
        return variance

    def _consider(self, scores: FloatArray, missed: float) -> float:
        """Begin a trial of the number that promises most, if it may be the best and its loss is within the budget, or
        of none, if that was long ago; or return after how many steps.

        The first is of the fewest drafts: they cost least, and tell of others.
        """
        hopes, best = self._hopes(scores), self._running
        hopes[best] = -np.inf
        overdue = best > 0 and self._is_overdue()
        number = 0 if overdue else int(hopes.argmax()) if self.tried else self._first
        wait = (
            0.0 if overdue else max(self._until_paid(number, scores, missed), self._until_hope(hopes, scores))
        )
        self._was_away()
        if self._came > _STAY and not overdue:  # before, nothing is known of any other
            wait = max(wait, self._came + _STAY - self._shared.num_steps)
        if wait <= 0:
            self._trial, self._measured, self.tried, self._extra = number, 0, True, 0.0
            if not number:
                most = _MOST_SELDOM * (self.costs.memory or 1 << 40)
                self._compare_after = min(_SELDOM * self._compare_after, most)
                self._compare_at = self._shared.num_steps + self._compare_after
            self._begin(number, _STEPS)
        return wait

    def _is_overdue(self) -> bool:
        """Whether what runs has to be compared with no drafts again."""
        left = self._compare_at - self._shared.num_steps
        if left < 0 or self.costs.memory is None:
            return left < 0
        return left < self._compare_after - self.costs.memory and self.costs.pace > _SLOWER * self._compared

    def _until_paid(self, number: int, scores: FloatArray, missed: float) -> float:
        """Steps until a trial of this number may lose what it is expected to; 0 or less is now."""
        costs, best, plain = self.costs, self._running, self.costs.pace
        worse = 1 - math.exp(-max(float(scores[best] - scores[number]), 0.0))
        loss = (self._unsettled(number) + _STEPS / 2) * math.exp(costs.of[number]) * worse  # most end early
        if self.may_sleep and not (number and best):  # it falls asleep, or wakes
            missed_cost = self._shared.missed_cost * math.sqrt(self._num_rows)
            loss += _AWAKE * (_WATCH + (worse if best else missed_cost))
        loan = max(self._loan, _LOAN + self._unsettled(0))
        missing = self.lost + (loss + missed - loan) * plain - self._budget * self.total
        return missing / (self._budget * plain)

    def _unsettled(self, number: int) -> float:
        """Steps that a change to this number takes, beyond the first two."""
        return min(_SETTLED / (math.exp(self.costs.of[number]) * self.costs.pace), _MOST_UNSETTLED)

    def _until_hope(self, hopes: FloatArray, scores: FloatArray) -> float:
        """Steps until costs and texts may have changed so much that another number is the best."""
        least = scores[self._running] + _MARGIN
        if hopes.max() > least:
            return 0.0
        walk = self.costs.walk * (1 if self._running else 2)
        missing = ((least - scores) / _HOPE) ** 2 - self._variance()
        missing[self._running] = np.inf
        return float(missing.min()) / walk if walk else math.inf

    def dozes(self, number: int) -> bool:
        """Whether the time of a step with so many drafts, or one that is slept through, teaches nothing; then it is
        told of here alone.
        """
        if self._left <= _LATE or self._last != number or self._trial is not None or self._extra is not None:
            return False
        if self._was_away():
            return False
        self._pass(1, number)
        return True

    @property
    def may_nap(self) -> int:
        """Steps behind one that dozed that would be like it, and doze, too."""
        return max(self._left - _LATE - 1, 0)

    def napped(self, steps: int, number: int) -> None:
        """So many did, with that number of drafts or asleep."""
        self._left -= steps
        self._pass(steps, number)

    def _pass(self, steps: int, number: int) -> None:
        seconds = steps * self._plain * math.exp(self.costs.mean[number] if number else 0.0)
        self._shared.num_steps += steps
        self._seen = self._shared.num_steps
        self.total += seconds
        self._behind, self._behind_for = self._behind + steps, self._behind_for + seconds

    def broke_off(self) -> None:
        """A step that says nothing."""
        self._last = -1

    def observe(self, rows: int, verified: int, proposed: int, step: StepTime) -> None:
        """Learn the time of a step, and count what it lost if a trial is to blame."""
        away = self._was_away()
        if away or abs(rows - self._num_rows) * 8 > self._num_rows:
            self._begin_anew(rows)
        if away or self._warm:
            self._behind, self._behind_for = 0, 0.0
        self._seen = self._shared.num_steps
        if verified:
            self._doubt = 1 / (1 / self._doubt + rows / _SPREAD)
            self._drafted += 1
            self._typical += (self._promised - self._typical) * max(1 / self._drafted, _NEWEST)
        even = verified == proposed and (verified > 0 or step.asleep or not self.may_sleep)
        if (self._left < _LATE or self._trial is not None) and not self._warm:
            self._hear(verified, step.seconds, is_own=even and self._last in (verified, -1))
        self._behind, self._behind_for = self._behind + 1, self._behind_for + step.seconds
        self._last = verified if even else -2
        if self._extra is not None:
            if even and verified == self._running and self._trial is None:
                self.lost, self._extra = self.lost + max(self._extra, 0.0), None
            else:
                self._extra += self._lost(rows, verified, proposed, step)

    def _hear(self, number: int, seconds: float, *, is_own: bool) -> None:
        """Of a step that goes on with the number of the one before, `is_own`, learn the time; not before the processor
        has settled, until when the phase goes on.
        """
        if self._behind < _MOST_UNSETTLED and self._behind_for < _SETTLED:
            self._left += self._behind > 0
        elif is_own:
            self.costs.learn(number, seconds)
            if number == self._trial:
                self._measured += 1
                self._end_early()

    def _was_away(self) -> bool:
        """Whether there were other batch sizes for some time; then it comes now."""
        away = self._shared.num_steps - self._seen > _AWAY
        if away:
            self._came = self._shared.num_steps
        return away

    def _begin_anew(self, rows: int) -> None:
        """These are others, or it is another time."""
        self.costs.forget_pace()
        self._num_rows, self._last = rows, -1
        self.lost, self._extra = self.lost + max(self._extra or 0.0, 0.0), None
        self._trial, self._warm = None, 0
        self._now, self._left = self._running, max(self._left if not self._now else 0, _AFTER)

    def _end_early(self) -> None:
        """End a trial that can't win any more."""
        scores = 0.5 * (self._promised + self._typical) - self.costs.of - self._feed
        hope = self._hopes(scores)[self._now]
        if self._measured >= _SURE and hope <= scores[self._running]:
            self._left = 0

    def _lost(self, rows: int, verified: int, proposed: int, step: StepTime) -> float:
        """Seconds that a step of a trial took more than what runs would have taken for as many tokens."""
        costs, best, promised = self.costs, self._running, self._promised
        pace = costs.pace * math.exp(costs.of[best])
        extra = step.seconds - pace * math.exp(promised[verified] - promised[best])
        if step.num_missed >= _MANY_MISSED * rows:
            each = math.expm1(costs.of[proposed]) / 2
            found = max(extra / costs.pace - each, 0.0) / step.num_missed * math.sqrt(rows)
            self._shared.missed_cost = min(found, _MOST_RISE * self._shared.missed_cost)
        catching_up = self._shared.missed_cost * step.num_missed / math.sqrt(rows) * costs.pace
        return min(extra, _MOST_LOST * pace + catching_up)
