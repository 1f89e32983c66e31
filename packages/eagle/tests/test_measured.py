"""The number of drafts that pays, found by a policy that is told nothing but the times of steps."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from bateleur.eagle import AcceptanceEstimates, ByMeasuredCost
from bateleur.eagle.policy import ObservingPolicy, PolicyRows, SleepingPolicy, StepTime

K = 4


def step_time(num_rows: int, verified: int, drafted: int, seconds: float, others: int = 0) -> StepTime:
    return StepTime(np.full(num_rows, verified), np.full(num_rows, drafted), others, seconds)


class Engine:
    """Steps whose cost and acceptance are known here alone."""

    def __init__(self, policy: ByMeasuredCost, seed: int = 0) -> None:
        self.policy, self.random = policy, np.random.default_rng(seed)
        self.estimates = AcceptanceEstimates(64, K)
        self.now: dict[int, int] = {}

    def run(
        self, num_rows: int, steps: int, acceptance: float, cost: Callable[[int, int], float]
    ) -> list[int]:
        """The number of each step."""
        rows, chosen = np.arange(num_rows), []
        for _ in range(steps):
            verified = self.now.get(num_rows, 0)
            kept = (self.random.random((num_rows, K)) < acceptance).cumprod(1)[:, :verified].sum(1)
            self.estimates.update(rows, np.full(num_rows, verified), kept)
            asked = PolicyRows(rows, np.full(num_rows, K), self.estimates.of(rows))
            settled = self.policy.settled(num_rows, greedy=False)
            drafted = int(self.policy.lengths(asked)[0]) if settled is None else settled
            noise = self.random.exponential(0.05) * cost(num_rows, 0)
            self.policy.observe(step_time(num_rows, verified, drafted, cost(num_rows, drafted) + noise))
            self.now[num_rows] = drafted
            chosen.append(drafted)
        return chosen


def best(num_rows: int, acceptance: float, cost: Callable[[int, int], float]) -> int:
    emitted = [sum(acceptance**i for i in range(k + 1)) for k in range(K + 1)]
    return int(np.argmax([emitted[k] / cost(num_rows, k) for k in range(K + 1)]))


def gpu(num_rows: int, k: int) -> float:
    """Flat up to 64 tokens, then as many times more."""
    return 1 + max(0, num_rows * (1 + k) - 64) / 64 + 0.05 * k


def cpu(num_rows: int, k: int) -> float:
    return 1 + 0.25 * num_rows * (1 + k) + 0.2 * k


@pytest.mark.parametrize("cost", [gpu, cpu])
@pytest.mark.parametrize("acceptance", [0.95, 0.6, 0.2])
@pytest.mark.parametrize("num_rows", [1, 4, 32])
def test_finds_what_pays(cost: Callable[[int, int], float], acceptance: float, num_rows: int) -> None:
    chosen = Engine(ByMeasuredCost(K)).run(num_rows, 400, acceptance, cost)
    emitted = np.array([sum(acceptance**i for i in range(k + 1)) for k in range(K + 1)])
    rates = emitted / [cost(num_rows, k) for k in range(K + 1)]
    rate = emitted[chosen].sum() / sum(cost(num_rows, k) for k in chosen)
    assert rate > 0.88 * rates.max()  # what promises less than a tenth is left
    assert chosen[:6] == [0] * 4 + [K] * 2


def test_switches_off_under_load_and_comes_back() -> None:
    engine = Engine(ByMeasuredCost(K, memory=100))
    few = engine.run(2, 100, 0.8, gpu)
    many = engine.run(64, 200, 0.8, gpu)
    assert best(2, 0.8, gpu) == K
    assert best(64, 0.8, gpu) == 0
    assert few.count(K) > 70
    assert many.count(0) > 160
    assert engine.run(2, 20, 0.8, gpu).count(K) > 15


def test_follows_a_text_and_a_machine_that_change() -> None:
    engine = Engine(ByMeasuredCost(K, memory=40, budget=0.1))
    assert engine.run(1, 300, 0.05, cpu)[-100:].count(0) > 50, "a tenth of all time may go to trials"
    assert engine.run(1, 600, 0.98, lambda rows, k: 1 + 0.01 * k)[-100:].count(K) > 70
    assert engine.run(1, 4000, 0.98, lambda rows, k: 1 + 3 * k)[-100:].count(0) > 50


def test_without_probes_it_stays_where_it_is() -> None:
    chosen = Engine(ByMeasuredCost(K, memory=None)).run(1, 200, 0.1, cpu)
    assert set(chosen[60:]) == {0}


def test_steps_of_nobody_teach_nothing() -> None:
    policy = ByMeasuredCost(K)
    assert isinstance(policy, ObservingPolicy)
    for others in (0, 5):
        policy.observe(step_time(0, 0, 0, 1.0, others))
        policy.observe(step_time(1, K + 1, K + 1, 1.0, others))
        policy.observe(step_time(1, K, K - 1, 1.0, others))
    policy.observe(step_time(1, K, K, 1.0, others=5))
    policy.observe(StepTime(np.array([K, 1]), np.array([K, K]), 0, 1.0))
    asked = PolicyRows(np.arange(1), np.array([2]), np.full((1, K), 0.5))
    assert not any(policy.lengths(asked)[0] for _ in range(30)), "none are tried until that was measured"
    assert policy.lengths(PolicyRows(np.arange(0), np.arange(0), np.zeros((0, K)))).shape == (0,)


@pytest.mark.parametrize("acceptance", [0.6, 0.2])
@pytest.mark.parametrize("num_rows", [4, 32])
def test_what_never_pays_costs_its_budget_and_no_more(num_rows: int, acceptance: float) -> None:
    engine = Engine(ByMeasuredCost(K, memory=200, budget=0.01))
    engine.run(num_rows, 400, acceptance, cpu_of_one_core)  # the first trial of each number is paid back
    chosen = engine.run(num_rows, 2000, acceptance, cpu_of_one_core)
    emitted = np.array([sum(acceptance**i for i in range(k + 1)) for k in range(K + 1)])
    verified = [0, *chosen[:-1]]
    spent = sum(cpu_of_one_core(num_rows, k) for k in chosen)
    assert emitted[verified].sum() * cpu_of_one_core(num_rows, 0) > 0.98 * spent
    assert set(chosen) > {0}, "it goes on looking"


def cpu_of_one_core(num_rows: int, k: int) -> float:
    return 1 + 0.5 * num_rows * (1 + k) + 0.6 * k


def test_greedy_rows_have_times_of_their_own() -> None:
    policy = ByMeasuredCost(K, memory=None)
    seen: dict[bool, list[int]] = {True: [], False: []}
    for _ in range(60):
        for greedy, chosen in seen.items():
            asked = PolicyRows(np.arange(1), np.array([K]), np.full((1, K), 0.6), greedy=greedy)
            drafted = int(policy.lengths(asked)[0])
            seconds = 1 + (0.1 if greedy else 2) * drafted
            policy.observe(StepTime(np.array([drafted]), np.array([drafted]), 0, seconds, greedy))
            chosen.append(drafted)
    assert seen[True][-1] >= 2
    assert seen[False][-1] == 0


def test_it_sleeps_where_drafts_do_not_pay_and_wakes_before_it_tries_again() -> None:
    policy = ByMeasuredCost(K, memory=100)
    assert isinstance(policy, SleepingPolicy)
    engine = Engine(policy)
    assert policy.settled(4, greedy=False) is None
    engine.run(4, 30, 0.1, cpu_of_one_core)
    assert not policy.sleeps(4, greedy=True)
    asleep, awake, tried = 0, [0], 0
    for _ in range(4000):
        if policy.sleeps(4, greedy=False):
            asleep += 1
            if awake[-1]:
                awake.append(0)
        else:
            awake[-1] += 1
            tried += engine.run(4, 1, 0.1, cpu_of_one_core)[0] > 0
    assert asleep > 3300
    assert tried >= 4
    assert min(awake[:-1]) >= 4
    forever = ByMeasuredCost(K, memory=None)
    Engine(forever).run(4, 3000, 0.1, cpu_of_one_core)
    assert all(forever.sleeps(4, greedy=False) for _ in range(5000))
    drafting = Engine(ByMeasuredCost(K))
    drafting.run(1, 40, 0.95, gpu)
    assert drafting.policy.settled(1, greedy=False) in (None, K)
    assert not drafting.policy.sleeps(1, greedy=False)


def beside_plain(random: np.random.Generator) -> float:
    """Tokens a second beside no drafts, of 1500 steps of a machine and a text that are drawn.

    Whatever another draft costs to make and to verify, up to one and a half plain steps, and whatever it is worth, with
    a drafter that must first be shown all tokens of steps that had no drafts, but for those that nobody remembers, each
    of which costs `watch` less, on a machine that is now slower by a factor of 1.7 and then faster again, for `phase`
    steps on the average.
    """
    verify, draft, acceptance = random.random(K), random.random() / 2, random.random()
    missed, watch, noise = random.random() / 10, random.random() / 25, random.random() / 10
    rows, phase = int(random.choice([1, 5, 33])), random.choice([math.inf, 400.0, 60.0, 20.0])
    policy, estimates = ByMeasuredCost(K), AcceptanceEstimates(64, K)
    ids, most, spent, plain, verified, hidden = np.arange(rows), np.full(rows, K), 0.0, 0.0, 0, 0
    slow = 1.0
    for _ in range(1500):
        if random.random() < 1 / phase:
            slow = 2.7 - slow
        kept = (random.random((rows, K)) < acceptance).cumprod(1)[:, :verified].sum(1)
        if verified:
            estimates.update(ids, np.full(rows, verified), kept)
        plain += slow * (1 + noise) * (1 + kept.mean())
        shown = 0
        if policy.sleeps(rows, greedy=False):
            hidden, verified = 0, 0
            spent += slow * (1 + random.exponential(noise))
            continue
        settled = policy.settled(rows, greedy=False)
        if settled is None:
            asked = PolicyRows(ids, most, estimates.of(ids), num_missed=hidden)
            settled = int(policy.lengths(asked)[0])
        if proposed := settled:
            shown, hidden = hidden, 0
        else:
            hidden = min(hidden + rows, 200 * rows)
        seconds = 1 + watch + sum(verify[:verified]) + draft * proposed + shown / rows * missed
        seconds *= slow * (1 + random.exponential(noise))
        policy.observe(
            StepTime(np.full(rows, verified), np.full(rows, proposed), 0, seconds, num_missed=shown)
        )
        spent, verified = spent + seconds, proposed
    return plain / spent


def test_it_hardly_ever_loses_more_than_three_percent() -> None:
    ratios = sorted(beside_plain(np.random.default_rng(case)) for case in range(40))
    assert ratios[2] > 0.97
    assert ratios[0] > 0.93
    assert max(ratios) > 1.5


def test_requests_that_begin_and_end_use_up_nothing_that_trials_may_lose() -> None:
    engine = Engine(ByMeasuredCost(K))
    engine.run(1, 20, 0.95, gpu)
    while engine.policy._of(1, False)._trial is not None:
        engine.run(1, 1, 0.95, gpu)
    lost = engine.policy._account.lost
    for verified, drafted in [(0, K), (K, 0), (K, 1), (1, 0)] * 20:
        engine.policy.observe(step_time(1, verified, drafted, 3.0))
    assert engine.policy._account.lost == lost


@pytest.mark.parametrize("bad", [{"num_drafts": 0}, {"num_drafts": 2, "memory": 0}])
def test_numbers_below_1_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        ByMeasuredCost(**bad)
    with pytest.raises(ValueError, match=r"budget=0.0 must be above 0"):
        ByMeasuredCost(2, budget=0.0)
