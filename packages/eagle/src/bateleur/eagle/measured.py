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


class ByMeasuredCost:
    """The same number for every row, the one that emits most per second by the steps so far.

    Each batch size (up to a factor of two) has its own times. K drafts, none, and half of K are tried first, for three
    steps each, and then the neighbours of the best; in between costs are taken to be linear. What a number emits
    follows from the rows' acceptance. From then on the best one is used, and every `probe_every` steps another one gets
    a trial, in turn: the text, or what else the machine does, may have changed. So where drafts do not pay they are
    switched off, but for the trials, and they come back.

    Times differ from run to run, and with them the lengths; see `ObservingPolicy`.
    """

    def __init__(self, num_drafts: int, *, probe_every: int | None = 128) -> None:
        """`num_drafts` is K. `probe_every`: steps; None for never. `ValueError` for a number below 1."""
        if num_drafts < 1:
            raise ValueError(f"num_drafts={num_drafts} must be at least 1")
        require_probes(probe_every)
        self.num_drafts = num_drafts
        self._probe_every = probe_every
        self._batches: dict[int, _Batch] = {}

    def lengths(self, rows: PolicyRows) -> I32Array:
        """See `DraftPolicy`, but for asking twice: each question is a step."""
        if not len(rows):
            return np.zeros(0, np.int32)
        survival_K = rows.acceptance[:, : self.num_drafts].cumprod(1).mean(0)
        emitted = np.concatenate([[1.0], 1.0 + survival_K.cumsum()])
        chosen = self._of(len(rows)).choose(emitted, self._probe_every)
        return np.minimum(chosen, rows.most).astype(np.int32)

    def numbers(self, most: int) -> Collection[int]:
        """See `UniformPolicy`: those that are tried first."""
        return (self.num_drafts // 2,)

    def observe(self, step: StepTime) -> None:
        """See `ObservingPolicy`. A step counts if it verified and drafted one number for all rows, and did no more."""
        rows = len(step.num_drafts)
        if not rows or step.num_other_tokens:
            return
        drafts = int(step.num_drafts[0])
        same = np.all(step.num_drafts == drafts) and np.all(step.num_proposed == drafts)
        if same and drafts <= self.num_drafts:
            self._of(rows).times[drafts].append(step.seconds)

    def _of(self, num_rows: int) -> _Batch:
        size = (num_rows - 1).bit_length()
        if size not in self._batches:
            self._batches[size] = _Batch(self.num_drafts)
        return self._batches[size]


class _Batch:
    """What is known of one batch size."""

    def __init__(self, k: int) -> None:
        self.times: list[deque[float]] = [deque(maxlen=_WINDOW) for _ in range(k + 1)]
        self._first = dict.fromkeys((k, 0, k // 2))
        self._trial, self._left = k, 0
        self._since_probe = self._next_probe = 0

    def choose(self, emitted: FloatArray, probe_every: int | None) -> int:
        """The number for the next step; `emitted` (K + 1,) tokens of a row by number."""
        if self._left:
            self._left -= 1
            return self._trial
        for number in self._first:
            if not self.times[number]:
                return self._try(number)
        best = int((emitted / self._seconds()).argmax())
        for number in (best - 1, best + 1):
            if 0 <= number < len(self.times) and not self.times[number]:
                return self._try(number)
        self._since_probe += 1
        if probe_every is None or self._since_probe < probe_every:
            return best
        self._since_probe = 0
        others = [number for number in range(len(self.times)) if number != best]
        self._next_probe += 1
        return self._try(others[self._next_probe % len(others)])

    def _try(self, number: int) -> int:
        self._trial, self._left = number, _TRIAL - 1
        return number

    def _seconds(self) -> FloatArray:
        known = [number for number, times in enumerate(self.times) if times]
        usual = [float(np.median(self.times[number])) for number in known]
        return np.interp(np.arange(len(self.times)), known, usual)
