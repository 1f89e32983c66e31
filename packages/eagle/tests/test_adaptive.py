"""`AdaptiveDrafts` on simulated machines: it finds the faster choice, also from bad states, and loses little."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest

from bateleur.eagle import AdaptiveDrafts, PolicyRows, StepTime, adaptive

K = 4


@dataclass
class Machine:
    """Steps of one batch: their seconds with K drafts and without, and the chance that a draft is accepted."""

    plain: float
    drafted: float
    acceptance: float
    rows: int
    noise: np.random.Generator
    last: int = -1
    since: int = 0

    def step(self, drafts: int) -> tuple[float, int]:
        """Seconds and emitted tokens. After a change steps take up to twice as long, and some steps hang."""
        self.since = 0 if drafts != self.last else self.since + 1
        self.last = drafts
        seconds = (self.drafted if drafts else self.plain) * float(self.noise.lognormal(0, 0.1))
        seconds *= 1 + max(0.0, 1 - self.since / 6)
        if self.noise.random() < 0.003:
            seconds *= 30
        accepted = self.noise.random((self.rows, K)) < self.acceptance
        kept = np.cumprod(accepted, 1).sum() if drafts and self.since else 0
        return seconds, self.rows + int(kept)

    def seconds_per_token(self, drafts: int) -> float:
        emitted = 1 + sum(self.acceptance**i for i in range(1, K + 1)) if drafts else 1.0
        return (self.drafted if drafts else self.plain) / (self.rows * emitted)

    @property
    def best(self) -> int:
        return min((0, K), key=self.seconds_per_token)


def rows_of(machine: Machine) -> PolicyRows:
    n = machine.rows
    return PolicyRows(np.arange(n), np.full(n, K), np.full((n, K), 0.5))


def run(policy: AdaptiveDrafts, machine: Machine, num_steps: int) -> tuple[float, int]:
    """Expected loss over `num_steps` steps (1.0 is none), and the last step that ran with the slower choice."""
    rows, took, best, wrong = rows_of(machine), 0.0, 0.0, -1
    for i in range(num_steps):
        drafts = int(policy.lengths(rows)[0])
        seconds, tokens = machine.step(drafts)
        policy.observe(StepTime(machine.rows, drafts * machine.rows, tokens, seconds))
        took += machine.seconds_per_token(drafts) * tokens
        best += machine.seconds_per_token(machine.best) * tokens
        if drafts != machine.best:
            wrong = i
    return took / best, wrong


def machine_of(seed: int) -> Machine:
    random = np.random.default_rng(seed)
    drafted = float(random.uniform(1.1, 3.0))
    return Machine(1e-3, drafted * 1e-3, float(random.uniform(0.2, 0.95)), int(random.choice([1, 3, 16])), random)


def spoil(policy: AdaptiveDrafts, machine: Machine, seed: int) -> None:
    """A state that no run led to: the slower choice, measured as absurdly fast, and the longest wait."""
    random = np.random.default_rng(1000 + seed)
    choice = policy._choice(machine.rows, False)
    choice.drafts = machine.best == 0
    choice.wait = int(random.integers(1, adaptive.LONGEST_WAIT + 1))
    choice.current.num_steps = int(random.integers(0, choice.wait))
    absurd = float(10.0 ** random.uniform(-8, 3))
    choice.current.latest = deque([(absurd, 1)] * int(random.integers(1, 32)), maxlen=choice.current.latest.maxlen)


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 100))])
def test_a_bad_state_does_not_last(seed: int) -> None:
    machine = machine_of(seed)
    fast, slow = sorted(map(machine.seconds_per_token, (0, K)))
    policy = AdaptiveDrafts(K)
    spoil(policy, machine, seed)
    run(policy, machine, 2 * adaptive.LONGEST_WAIT)
    loss, _ = run(policy, machine, 4000)
    assert loss < 1 + 2 * adaptive.MARGIN, f"{slow / fast:.2f} between the choices"


@pytest.mark.parametrize("seed", range(20))
def test_a_fresh_policy_loses_little(seed: int) -> None:
    loss, _ = run(AdaptiveDrafts(K), machine_of(seed), 6000)
    assert loss < 1.1


@pytest.mark.parametrize("seed", range(10))
def test_a_fresh_policy_soon_stops_drafts_that_cost_too_much(seed: int) -> None:
    """Drafts take 1.6 times as long per token: 64 rows on a CPU."""
    machine = Machine(1e-3, 4.4e-3, 0.7, 16, np.random.default_rng(seed))
    loss, _ = run(AdaptiveDrafts(K), machine, 400)
    assert loss < 1.12


def test_it_follows_a_machine_that_changes() -> None:
    """Drafts pay, then another process makes them slow, then they pay again."""
    machine = Machine(1e-3, 1.3e-3, 0.8, 1, np.random.default_rng(0))
    policy = AdaptiveDrafts(K)
    for drafted in (1.3e-3, 9e-3, 1.3e-3):
        machine.drafted = drafted
        run(policy, machine, 2 * adaptive.LONGEST_WAIT)
        loss, _ = run(policy, machine, 2000)
        assert loss < 1.1


def test_a_new_batch_size_starts_with_the_choice_of_the_nearest() -> None:
    policy = AdaptiveDrafts(K)
    run(policy, Machine(1e-3, 9e-3, 0.2, 16, np.random.default_rng(0)), 200)
    assert not policy._choice(16, False).drafts
    near = Machine(1e-3, 9e-3, 0.2, 5, np.random.default_rng(0))
    assert not policy.lengths(rows_of(near)).any()
    assert policy._choice(5, True).drafts, "greedy batches are measured apart"
