"""Steps of an engine by what they cost, on a machine as noisy as a shared one, for policies that are told times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bateleur.eagle import AcceptanceEstimates, ByMeasuredCost
from bateleur.eagle.policy import PolicyRows, StepTime


@dataclass(frozen=True)
class Work:
    """What decoding costs and emits; costs in plain steps.

    costs: of a step that verifies and makes 0 to K drafts. acceptance: chance that a draft is accepted if all before it
    are; requests differ by `spread`. watch: what a step without drafts costs more that a
    drafter will see, and `asked` what one costs more before which the rows are looked at. missed: cost of a token that
    the drafter must be shown later, beside a step of one row. late: part of acceptance in the first steps behind sleep.
    change: what a step takes more with another number of drafts than the last, and of the `settles` steps from it on
    each one less. noise: deviation. plain: seconds of a plain step.
    """

    costs: Sequence[float]
    acceptance: float = 0.56
    spread: float = 0.09
    rows: int = 4
    watch: float = 0.09
    asked: float = 0.09
    missed: float = 0.02
    late: float = 0.95
    change: float = 0.1
    settles: int = 1
    noise: float = 0.036
    plain: float = 1.0


class Machine:
    """Seconds of a step: noise with a heavy tail on a speed that wanders, and now and then leaps."""

    def __init__(self, random: np.random.Generator, noise: float) -> None:
        self.random, self.noise, self.slow = random, noise, 0.0

    def seconds(self, cost: float) -> float:
        random = self.random
        self.slow = (
            0.985 * self.slow + random.normal(0, 0.02) + (random.random() < 0.004) * random.normal(0, 0.2)
        )
        return cost * float(np.exp(self.slow + self.noise * np.clip(random.standard_t(3), -3, 8)))


class Engine:
    """Runs requests, one behind the other in every row; costs without noise are counted."""

    def __init__(
        self,
        work: Work,
        policy: ByMeasuredCost,
        seed: int,
        *,
        may_sleep: bool = True,
        lengths: tuple[int, int] = (64, 192),
    ) -> None:
        """lengths: of requests, in tokens."""
        self.lengths = lengths
        self.work, self.policy, self.may_sleep = work, policy, may_sleep
        self.random = np.random.default_rng(seed)
        self.machine, self.k = Machine(self.random, work.noise), len(work.costs) - 1
        self.estimates = AcceptanceEstimates(work.rows, self.k)
        self.rows, self.verified = np.arange(work.rows), np.zeros(work.rows, np.int64)
        self.hidden, self.awake, self.last, self.alike = 0, 1 << 20, 0, 1 << 20
        mean = work.acceptance
        scale = mean * (1 - mean) / work.spread**2 - 1
        self.beta = mean * scale, (1 - mean) * scale
        self.accepts = self.random.beta(*self.beta, work.rows)
        self.left = self.random.integers(*lengths, work.rows)
        self.numbers: list[int] = []
        """Drafts that each step verified; -1 asleep."""

    def run(self, tokens: int) -> float:
        """Speed beside plain decoding, for so many tokens of each row."""
        spent, total = 0.0, 0
        while total < tokens * self.work.rows:
            total += self._emit()
            spent += self._sleep() if self._sleeps() else self._draft()
        return total / self.work.rows / spent

    def _emit(self) -> int:
        late = self.work.late if self.awake < 16 else 1.0
        kept = (self.random.random((len(self.rows), self.k)) < late * self.accepts[:, None]).cumprod(1)
        kept = (kept * (np.arange(self.k) < self.verified[:, None])).sum(1)
        if self.verified.any():
            self.estimates.update(self.rows, self.verified, kept)
        emitted = np.minimum(kept + 1, self.left)
        self.left -= emitted
        for row in np.flatnonzero(self.left == 0):
            self.estimates.admit(int(row))
            self.accepts[row], self.left[row] = (
                self.random.beta(*self.beta),
                self.random.integers(*self.lengths),
            )
        return int(emitted.sum())

    def _sleeps(self) -> bool:
        return self.may_sleep and self.policy.sleeps(len(self.rows), greedy=False)

    def _sleep(self) -> float:
        verified = self.verified
        self.verified = np.zeros_like(verified)
        cost = (1 + self.work.costs[verified.max()]) / 2 + self._change(0)
        self.numbers.append(-1)
        self.hidden, self.awake = 0, 0
        seconds = self.machine.seconds(cost * self.work.plain)
        if not self.policy.dozes:
            self.policy.observe(StepTime(verified, self.verified, 0, seconds, asleep=True))
        return float(cost)

    def _draft(self) -> float:
        work, size, verified = self.work, len(self.rows), self.verified
        most, settled = np.clip(self.left - 2, 0, self.k), self.policy.settled(size, greedy=False)
        if settled is None:
            asked = PolicyRows(self.rows, most, self.estimates.of(self.rows), num_missed=self.hidden)
            proposed = self.policy.lengths(asked).astype(np.int64)
        else:
            proposed = np.minimum(settled, most)
        number = int(proposed.max())
        shown, self.hidden = (self.hidden, 0) if number else (0, self.hidden + size)
        cost = (work.costs[verified.max()] + work.costs[number]) / 2 + shown / np.sqrt(size) * work.missed
        cost += work.asked * (settled is None) + work.watch * (not verified.any() and not number)
        cost += self._change(number)
        seconds = self.machine.seconds(cost * work.plain)
        if not self.policy.dozes:
            self.policy.observe(StepTime(verified, proposed, 0, seconds, num_missed=shown))
        self.numbers.append(int(verified.max()))
        self.verified, self.awake = proposed, self.awake + 1
        return float(cost)

    def _change(self, number: int) -> float:
        """What this step takes more, since those before it had another number."""
        self.alike = self.alike + 1 if number == self.last else 0
        self.last = number
        return self.work.change * max(1 - self.alike / self.work.settles, 0.0)
