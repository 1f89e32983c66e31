"""A number of drafts that pays, found out while running: what steps cost is measured, not told."""

# Legend for shapes: R rows, K draft tokens at most.

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from bateleur.eagle.costs import Costs
from bateleur.eagle.policy import I32Array, PolicyRows, StepTime, require_steps
from bateleur.eagle.stats import IntArray
from bateleur.eagle.trials import Batch, Shared

_FEW_ROWS = 4
"""With which a trial of all drafts costs little."""
_NEARLY = 0.93
"""Part of the drafts of a number for all rows from which on a step is one of that number."""


class ByMeasuredCost:
    """The same number for every row, the one that emits most per second by the steps so far; none unless that pays.

    Each batch size (up to a factor of two) has its own costs, and apart from it that of greedy rows; see `Costs`, which
    also says how sure they are. One of which nothing is known yet is taken to be like the nearest, and begins with the
    drafts that more rows have. Steps behind a change are not learnt from, as long as a processor takes to settle. What
    a number emits follows from the rows' acceptance. The number that runs is the best by what is known, and one that
    may be better still is tried, a few steps at a time: one that is clearly worse gets no trial before so much time has
    passed that it might not be any more, since the text, or what else the machine does, changes; by about a tenth in
    `memory` steps.

    What trials of a batch size have lost beside the best number is counted; so is what it takes to show a drafter the
    tokens that it has missed. One waits until that and what it may lose are below `budget` of all time, and 6 plain
    steps more than a change takes; or 24 of few rows of a drafter that stops. So where drafts do not pay they are
    switched off, cost no more than that, and come back.

    Times differ from run to run, and with them the lengths; see `ObservingPolicy`.
    """

    def __init__(self, num_drafts: int, *, memory: int | None = 1000, budget: float = 0.0025) -> None:
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
        self._budget, self._shared = budget, Shared()
        self.dozes = False
        """See `DozingPolicy`."""
        self.stops = False
        """Whether the drafter itself makes no more drafts than are likely to be right: then few rows get all of them or
        none. For whoever knows the drafter to say, before anything is asked."""
        self._batches: dict[tuple[int, bool], Batch] = {}
        self._nap: _Nap | None = None

    def lengths(self, rows: PolicyRows) -> I32Array:
        """See `DraftPolicy`, but for asking twice: each question is a step."""
        if not len(rows):
            return np.zeros(0, np.int32)
        batch = self._of(len(rows), rows.greedy)
        survival_K = rows.acceptance[:, : self.num_drafts].cumprod(1).mean(0)
        emitted = np.concatenate([[1.0], 1.0 + survival_K.cumsum()])
        missed = rows.num_missed * self._shared.missed_cost / math.sqrt(len(rows))
        return np.minimum(batch.choose(np.log(emitted), missed), rows.most).astype(np.int32)

    def settled(self, num_rows: int, *, greedy: bool) -> int | None:
        """See `SettledPolicy`."""
        nap = self._nap
        if self.dozes and nap is not None and nap.number and nap.goes_on(num_rows, greedy):
            return nap.number
        self.dozes = False
        if not num_rows:
            return None
        batch = self._of(num_rows, greedy)
        settled = batch.settled()
        if settled is not None and batch.dozes(settled):
            self.dozes = True
            if settled:
                self._nap = _Nap(batch, num_rows, greedy, settled)
        return settled

    def sleeps(self, num_rows: int, *, greedy: bool) -> bool:
        """See `SleepingPolicy`."""
        nap = self._nap
        if self.dozes and nap is not None:
            if nap.number and nap.is_of(num_rows, greedy):
                return False
            if not nap.number and nap.goes_on(num_rows, greedy):
                return True
        batch = self._of(num_rows, greedy)
        asleep = batch.sleeps()
        self.dozes = asleep and batch.dozes(0)
        if self.dozes:
            self._nap = _Nap(batch, num_rows, greedy, 0)
        return asleep

    def numbers(self, most: int) -> Collection[int]:
        """See `UniformPolicy`: steps of one draft are padded to it."""
        return (self.num_drafts // 2,)

    def observe(self, step: StepTime) -> None:
        """See `ObservingPolicy`. A number is measured by steps that verify and draft it for nearly all rows."""
        rows = len(step.num_drafts)
        if not rows:
            return
        batch, self._shared.num_steps = self._of(rows, step.greedy), self._shared.num_steps + 1
        batch.total += step.seconds
        verified, proposed = (_common(numbers) for numbers in (step.num_drafts, step.num_proposed))
        if (
            step.num_other_tokens
            or not step.seconds > 0
            or not 0 <= verified <= self.num_drafts
            or not 0 <= proposed <= self.num_drafts
        ):
            batch.broke_off()
        else:
            batch.observe(rows, verified, proposed, step)

    def _of(self, num_rows: int, greedy: bool) -> Batch:
        """What is known of so many rows, at first what is of the nearest batch size of which anything is. The end of a
        nap: whoever asks wants to know all.
        """
        if self._nap is not None:
            self._nap.end()
            self._nap = None
        name = _name(num_rows, greedy)
        if name not in self._batches:
            apart = {
                other: abs(other[0] - name[0]) + 0.4 * (other[1] != greedy)
                for other, batch in self._batches.items()
                if batch.tried
            }
            nearest = min(apart, key=lambda other: apart[other], default=None)
            like = None if nearest is None else self._batches[nearest]
            costs = Costs(
                self.num_drafts,
                self._memory,
                None if like is None else like.costs,
                1.0 if nearest is None else min(apart[nearest], 1.0),
            )
            # Of many rows all drafts take several plain steps, and one tells first that they do not pay.
            whole = self.stops and num_rows <= _FEW_ROWS
            fewer = nearest is not None and name[0] < nearest[0]
            self._batches[name] = Batch(costs, self._budget, self._shared, like, stops=whole, fewer=fewer)
        return self._batches[name]


class _Nap:
    """Steps of as many rows with the same number of drafts, or asleep, that teach nothing: their batch size is told of
    them at the end.
    """

    def __init__(self, batch: Batch, num_rows: int, greedy: bool, number: int) -> None:
        """number: of drafts; 0 asleep."""
        self.number = number
        self._batch, self._num_rows, self._greedy = batch, num_rows, greedy
        self._left = self._most = batch.may_nap

    def is_of(self, num_rows: int, greedy: bool) -> bool:
        """Whether such a step might belong to it."""
        return num_rows == self._num_rows and greedy == self._greedy and self._left > 0

    def goes_on(self, num_rows: int, greedy: bool) -> bool:
        """Whether the next step belongs to it."""
        if not self.is_of(num_rows, greedy):
            return False
        self._left -= 1
        return True

    def end(self) -> None:
        """Tell of the steps."""
        self._batch.napped(self._most - self._left, self.number)


def _common(numbers: IntArray) -> int:
    """The number that all rows have, or nearly all, since some are near their end; -1 where they differ."""
    most = int(numbers[0]) if len(numbers) == 1 else int(numbers.max())
    return most if int(numbers.min()) == most or numbers.sum() >= _NEARLY * most * len(numbers) else -1


def _name(num_rows: int, greedy: bool) -> tuple[int, bool]:
    return (num_rows - 1).bit_length(), greedy
