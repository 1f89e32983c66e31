"""The number of drafts that pays, found by a policy that is told nothing but the times of steps."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from bateleur.eagle import AcceptanceEstimates, ByMeasuredCost
from bateleur.eagle.policy import DozingPolicy, ObservingPolicy, PolicyRows, SleepingPolicy, StepTime
from bateleur.eagle.trials import Batch
from eagle_doubles.machine import Engine as Sleeper
from eagle_doubles.machine import Work

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
            if not self.policy.dozes:
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
    assert chosen[:9] == [0] * 7 + [1] * 2, "one draft is tried first, and soon"


def test_switches_off_under_load_and_comes_back() -> None:
    engine = Engine(ByMeasuredCost(K, memory=100))
    few = engine.run(2, 100, 0.8, gpu)
    many = engine.run(64, 200, 0.8, gpu)
    assert best(2, 0.8, gpu) == K
    assert best(64, 0.8, gpu) == 0
    assert few.count(K) > 40
    assert many.count(0) > 160
    assert engine.run(2, 20, 0.8, gpu).count(K) > 12


def test_follows_a_text_and_a_machine_that_change() -> None:
    engine = Engine(ByMeasuredCost(K, memory=40, budget=0.1))
    assert engine.run(1, 300, 0.05, cpu)[-100:].count(0) > 50, "a tenth of all time may go to trials"
    assert engine.run(1, 600, 0.98, lambda rows, k: 1 + 0.01 * k)[-100:].count(K) > 70
    assert engine.run(1, 4000, 0.98, lambda rows, k: 1 + 3 * k)[-100:].count(0) > 50


def test_what_has_proved_itself_is_seldom_compared_and_soon_given_up() -> None:
    """A comparison costs what two changes take. A machine on which drafts stop to pay is slower, and that is seen."""
    engine = Engine(ByMeasuredCost(K))
    pays = engine.run(1, 24_000, 0.9, lambda rows, k: 1 + 0.1 * k)
    assert 10 < pays[4000:].count(0) < 40
    assert engine.run(1, 5000, 0.9, lambda rows, k: 1 + 2.0 * k)[3000:].count(0) > 1900


def test_without_probes_it_stays_where_it_is() -> None:
    chosen = Engine(ByMeasuredCost(K, memory=None)).run(1, 2000, 0.1, cpu)
    assert set(chosen[1000:]) == {0}


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
    assert isinstance(policy, DozingPolicy)
    engine = Sleeper(Work((1.0, 2.1, 2.9, 3.4, 3.9), acceptance=0.2), policy, 0)
    engine.run(8000)
    steps = "".join("z" if number < 0 else str(number) for number in engine.numbers)
    assert steps.count("z") > 0.9 * len(steps)
    awake = [phase for phase in steps.split("z") if phase]
    assert len(awake) > 2
    assert all(phase.startswith("0" * 12) for phase in awake), "the drafter is shown some steps first"
    assert sum(phase.strip("0") != "" for phase in awake) > 2
    forever = Sleeper(Work((1.0, 2.1, 2.9, 3.4, 3.9), acceptance=0.2), ByMeasuredCost(K, memory=None), 0)
    forever.run(8000)
    assert set(forever.numbers[-3000:]) == {-1}


def test_a_nap_is_as_many_steps_of_which_each_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where others come in between, and where somebody who does not sleep asks in the middle of one."""

    def run() -> tuple[list[object], ByMeasuredCost]:
        policy, random, told = ByMeasuredCost(K), np.random.default_rng(3), list[object]()
        estimates = AcceptanceEstimates(64, K)
        for _ in range(160):
            rows, greedy, stay = int(random.choice([1, 3, 4])), bool(random.random() < 0.5), 0
            for stay in range(int(random.integers(1, 320))):
                asleep = policy.sleeps(rows, greedy=greedy)
                number = 0
                if not asleep or (stay % 50 == 49 and random.random() < 0.5):
                    settled = policy.settled(rows, greedy=greedy)
                    ids = np.arange(rows)
                    asked = PolicyRows(ids, np.full(rows, K), estimates.of(ids), greedy=greedy)
                    number = int(policy.lengths(asked)[0]) if settled is None else settled
                told.append((asleep, number, policy.dozes))
                if not policy.dozes:
                    made, cost = np.full(rows, number), 1 + (0.05 if greedy else 1) * number
                    seconds = cost * (1 + random.exponential(0.05))
                    policy.observe(StepTime(made, made, 0, seconds, greedy, asleep=asleep))
        return told, policy

    told, policy = run()
    assert sum(dozes for _, _, dozes in told) > 0.4 * len(told)
    assert sum(dozes for _, number, dozes in told if number) > 0.1 * len(told)
    monkeypatch.setattr(Batch, "may_nap", 0)
    one_by_one, other = run()
    assert told == one_by_one
    for rows, greedy in ((1, True), (1, False), (4, True), (4, False)):
        mine, theirs = policy._of(rows, greedy), other._of(rows, greedy)
        assert (mine._left, mine.lost) == (theirs._left, theirs.lost)
        assert mine.total == pytest.approx(theirs.total)
    assert policy._shared == other._shared


def test_what_it_sleeps_through_is_what_costs_are_beside() -> None:
    """Steps that a drafter is shown take a third more; beside these, drafts would pay."""
    work = Work((1.0, 1.9, 2.2, 2.6, 3.0), 0.5, 0.05, 1, watch=0.3, asked=0.2)
    engine = Sleeper(work, ByMeasuredCost(K), 0)
    assert engine.run(8000) > 0.97
    batch = engine.policy._of(1, False)
    assert batch.tried
    assert np.exp(batch.costs.of)[1] == pytest.approx(1.9, rel=0.12)


def test_times_of_a_processor_that_has_not_settled_are_not_learnt() -> None:
    """Behind drafts plain steps of 4 rows took a third more for ten steps, and drafts seemed to cost that much less."""
    costs = (1.0, 2.1, 2.9, 3.4, 3.9)
    for seed in range(4):
        work = Work(costs, 0.85, rows=4, change=0.6, settles=10, plain=6e-4)
        engine = Sleeper(work, ByMeasuredCost(K, budget=0.05), seed)
        engine.run(4000)
        assert np.exp(engine.policy._of(4, False).costs.of)[K] == pytest.approx(costs[K], rel=0.15)
        assert np.mean(np.array(engine.numbers[1000:]) <= 0) > 0.6


def test_what_pays_for_many_rows_runs_at_once_for_fewer() -> None:
    """The last of a queue had no drafts for as long as it takes to find out, or until there were others again. Whether
    drafts pay for them is looked at soon, all the same.
    """
    engine = Engine(ByMeasuredCost(K))
    assert engine.run(4, 300, 0.95, gpu).count(K) > 200
    fewer = engine.run(1, 40, 0.95, gpu)
    assert fewer[:5] == [K] * 5
    assert 0 < fewer.count(0) < 6
    assert K not in engine.run(32, 20, 0.95, gpu), "what more rows cost is another question"
    other = Engine(ByMeasuredCost(K))
    other.run(4, 300, 0.95, gpu)
    for _ in range(4):
        other.run(1, 40, 0.6, lambda rows, k: 1 + 0.8 * k)
        other.run(4, 100, 0.95, gpu)
    assert other.run(1, 40, 0.6, lambda rows, k: 1 + 0.8 * k).count(0) == 40


def test_requests_of_a_few_tokens_are_enough_to_find_out() -> None:
    """Their last steps verify and make unlike numbers; each of these began the time anew that a processor settles in,
    so that nothing was learnt before the budget was used up.
    """
    ratios = []
    for seed in range(6):
        policy = ByMeasuredCost(K)
        policy.stops = True
        work = Work((1.0, 1.6, 2.0, 2.3, 2.6), 0.85, rows=1, change=0.5, settles=10, plain=4.5e-4)
        engine = Sleeper(work, policy, seed, lengths=(16, 32))
        ratios.append(engine.run(6000))
    assert np.mean(ratios) > 1.08


@pytest.mark.parametrize("rows", [8, 64])
def test_steps_of_a_moment_get_a_second_trial(rows: int) -> None:
    """What a change costs was expected of a trial, and put the second off by 4096 steps."""
    work = Work((1.0, 1.6, 2.0, 2.3, 2.6), 0.85, rows=rows, plain=4.5e-4)
    assert np.mean([Sleeper(work, ByMeasuredCost(K), seed).run(6000) for seed in range(4)]) > 1.22


def test_a_step_that_took_no_time_says_nothing() -> None:
    """As clocks have them that count in hundredths of a second."""
    policy = ByMeasuredCost(K)
    asked = PolicyRows(np.arange(1), np.array([K]), np.full((1, K), 0.9))
    for _ in range(60):
        drafted = int(policy.lengths(asked)[0])
        policy.observe(step_time(1, drafted, drafted, 0.0))
    assert not policy._of(1, False).costs.is_paced


def test_a_batch_of_which_a_row_is_near_its_end_is_measured() -> None:
    """Of 64 some always are."""
    engine = Sleeper(Work((1.0, 1.1, 1.2, 1.3, 1.4), 0.8, rows=64), ByMeasuredCost(K), 0)
    engine.run(200)
    costs = engine.policy._of(64, False).costs
    assert np.exp(costs.of)[K] == pytest.approx(1.4, rel=0.1)
    assert costs.variance(0)[K] < 0.15**2


def test_a_trial_takes_nothing_from_that_of_another_batch_size() -> None:
    policy = ByMeasuredCost(K)
    policy._of(1, False).lost = 1e6
    Sleeper(Work((1.0, 2.1, 2.9, 3.4, 3.9), rows=4), policy, 1).run(60)
    assert policy._of(4, False).tried


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
            before, hidden, verified = verified, 0, 0
            seconds = slow * (1 + random.exponential(noise))
            if not policy.dozes:
                drafts = np.full(rows, before)
                policy.observe(StepTime(drafts, np.zeros(rows), 0, seconds, asleep=True))
            spent += seconds
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
        if not policy.dozes:
            drafts = np.full(rows, verified), np.full(rows, proposed)
            policy.observe(StepTime(*drafts, 0, seconds, num_missed=shown))
        spent, verified = spent + seconds, proposed
    return plain / spent


def test_of_a_drafter_that_stops_few_rows_get_all_drafts_or_none() -> None:
    """More are tried with one first, since all of them would take several plain steps."""
    policy = ByMeasuredCost(K)
    policy.stops = True
    assert set(Engine(policy).run(2, 400, 0.8, cpu)) == {0, K}
    policy = ByMeasuredCost(K)
    policy.stops = True
    chosen = Engine(policy).run(32, 60, 0.8, gpu)
    assert next(number for number in chosen if number) == 1


@pytest.mark.parametrize("seed", [2, 9, 20])
def test_a_pause_of_the_machine_in_the_first_trial_does_not_put_off_the_next_for_long(seed: int) -> None:
    """With a loan of 6 plain steps these slept through half of their steps and more, waiting for the budget."""
    policy = ByMeasuredCost(K)
    policy.stops = True
    work = Work((1.0, 1.6, 2.0, 2.3, 2.6), 0.9, 0.05, 1, noise=0.15, late=1.0)
    assert Sleeper(work, policy, seed).run(12000) > 1.45


def test_a_batch_size_that_rows_pass_through_gets_no_trial() -> None:
    """As the last rows of a queue do: it would end before anything is learnt. One that stays gets its trial."""
    engine = Engine(ByMeasuredCost(K))
    engine.run(8, 300, 0.35, cpu)
    for _ in range(12):
        assert not any(engine.run(2, 40, 0.35, cpu))
        engine.run(8, 200, 0.35, cpu)
    assert any(engine.run(2, 200, 0.35, cpu))


def test_it_hardly_ever_loses_more_than_three_percent() -> None:
    ratios = sorted(beside_plain(np.random.default_rng(case)) for case in range(40))
    assert ratios[2] > 0.97
    assert ratios[0] > 0.93
    assert max(ratios) > 1.5


def test_requests_that_begin_and_end_use_up_nothing_that_trials_may_lose() -> None:
    engine = Engine(ByMeasuredCost(K))
    engine.run(1, 20, 0.95, gpu)
    batch = engine.policy._of(1, False)
    while batch._extra is not None:
        engine.run(1, 1, 0.95, gpu)
    lost = batch.lost
    for verified, drafted in [(0, K), (K, 0), (K, 1), (1, 0)] * 20:
        engine.policy.observe(step_time(1, verified, drafted, 3.0))
    assert batch.lost == lost


@pytest.mark.parametrize("bad", [{"num_drafts": 0}, {"num_drafts": 2, "memory": 0}])
def test_numbers_below_1_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        ByMeasuredCost(**bad)
    with pytest.raises(ValueError, match=r"budget=0.0 must be above 0"):
        ByMeasuredCost(2, budget=0.0)
