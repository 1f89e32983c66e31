"""Draft policy by measured time: K drafts for every request or none, whichever takes less time per token."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from bateleur.eagle.policy import I32Array, PolicyRows, StepTime

SETTLE_STEPS = 8
"""Steps after a change that are not measured: caches are cold, and the head has seen few tokens of the rows."""
TRIAL_STEPS = 16
"""Measured steps of a trial."""
EARLY_STEPS, EARLY_RATIO = 4, 1.25
"""A trial ends after so many measured steps if one choice takes at least this multiple of the other's time per token.
"""
FIRST_WAIT, CLEAR_WAIT, LONGEST_WAIT = 8, 128, 2048
"""Measured steps before the first trial, before the next trial after the choice changed by at least `EARLY_RATIO`, and
at most between trials. The wait doubles each time the current choice wins, and grows fourfold if the other choice is
slower by `EARLY_RATIO`."""
MARGIN = 0.05
"""By how much faster the other choice must be to replace the current one."""
OUTLIER = 3.0
"""Steps longer than this multiple of the median are ignored: garbage collection, or another process."""


@dataclass(slots=True)
class _Phase:
    """Times of the steps since the choice between drafts and no drafts last changed.

    num_steps: all these steps. latest: (seconds, tokens) of each of the latest ones that were measured.
    """

    num_steps: int = 0
    latest: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=2 * TRIAL_STEPS))

    def add(self, seconds: float, num_tokens: int) -> None:
        self.num_steps += 1
        if self.num_steps > SETTLE_STEPS:
            self.latest.append((seconds, num_tokens))

    def seconds_per_token(self) -> float:
        limit = OUTLIER * float(np.median([seconds for seconds, _ in self.latest]))
        kept = [each for each in self.latest if each[0] <= limit]
        return sum(seconds for seconds, _ in kept) / max(1, sum(tokens for _, tokens in kept))


@dataclass(slots=True)
class _Choice:
    """The choice for one batch size, drafts or no drafts, and trials of the other choice.

    drafts: whether the current choice is to use drafts.
    wait: total number of measured steps with the current choice before a trial.
    current: times of the steps with the current choice since the last trial.
    trial: times of the steps of the running trial; None if no trial is running.
    """

    drafts: bool = True
    wait: int = FIRST_WAIT
    current: _Phase = field(default_factory=_Phase)
    trial: _Phase | None = None

    @property
    def runs_drafts(self) -> bool:
        return self.drafts if self.trial is None else not self.drafts

    def observe(self, seconds: float, num_tokens: int) -> None:
        if self.trial is None:
            self.current.add(seconds, num_tokens)
            if self.current.num_steps >= SETTLE_STEPS + self.wait:
                self.trial = _Phase()
            return
        trial = self.trial
        trial.add(seconds, num_tokens)
        if len(trial.latest) < EARLY_STEPS:
            return
        ratio = trial.seconds_per_token() / self.current.seconds_per_token()
        if len(trial.latest) < TRIAL_STEPS and 1 / EARLY_RATIO < ratio < EARLY_RATIO:
            return
        clear = ratio >= EARLY_RATIO or ratio <= 1 / EARLY_RATIO
        if ratio < 1 - MARGIN:
            self.drafts, self.wait = not self.drafts, CLEAR_WAIT if clear else FIRST_WAIT
        else:
            self.wait = min((4 if clear else 2) * self.wait, LONGEST_WAIT)
        self.current, self.trial = _Phase(), None


class AdaptiveDrafts:
    """Draft policy: `num_drafts` drafts for every request, or none, whichever took less time per token at this batch
    size.

    Batch sizes are grouped by powers of two, greedy batches separately from sampled ones. A new group starts with the
    choice of the nearest one. The other choice is tried now and then. A trial takes at most 24 steps. The wait between
    trials grows from 8 to 2,048 steps while the current choice wins. Only the latest steps are measured, so a wrong
    choice lasts until the next trial.
    """

    reads_acceptance = False

    def __init__(self, num_drafts: int) -> None:
        if num_drafts < 1:
            raise ValueError(f"num_drafts={num_drafts}: must be at least 1; use FixedDrafts(0) for no drafts")
        self.num_drafts = num_drafts
        self._choices: dict[tuple[int, bool], _Choice] = {}

    def lengths(self, rows: PolicyRows) -> I32Array:
        """Return the number of drafts of each request, (R,) int32: `num_drafts` capped at its `max_drafts`, or 0."""
        number = self.num_drafts if self._choice(len(rows), rows.greedy).runs_drafts else 0
        return np.minimum(number, rows.max_drafts).astype(np.int32)

    def draft_counts(self, max_drafts: int) -> Collection[int]:
        """Return the two possible numbers of drafts a request: 0, and `num_drafts` capped at `max_drafts`."""
        return (0, min(self.num_drafts, max_drafts))

    def observe(self, step: StepTime) -> None:
        """Record the time of a step that ended, unless it had prompt tokens or another number of drafts than chosen."""
        choice = self._choice(step.num_rows, step.greedy)
        expected = self.num_drafts * step.num_rows if choice.runs_drafts else 0
        if step.num_other_tokens or abs(step.num_drafts - expected) > 0.1 * expected:
            return
        choice.observe(step.seconds, step.num_tokens)

    def _choice(self, num_rows: int, greedy: bool) -> _Choice:
        size = max(num_rows - 1, 0).bit_length()
        if (size, greedy) not in self._choices:
            known = [other for other, kind in self._choices if kind == greedy]
            nearest = min(known, key=lambda other: abs(other - size), default=None)
            drafts = nearest is None or self._choices[nearest, greedy].drafts
            self._choices[size, greedy] = _Choice(drafts)
        return self._choices[size, greedy]
