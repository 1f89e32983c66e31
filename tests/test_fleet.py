"""The simulation of a fleet of replicas: requests are served, and prefixes are found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
if str(ROOT / "benchmarks") not in sys.path:
    sys.path.append(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def kind() -> Any:
    from fleet_costs import StepTable
    from fleet_replica import Kind

    from bateleur.runner.assets import shipped_model

    costs = StepTable((1, 4), (0.002, 0.004), (16, 64), (0.005, 0.010), "made up")
    return Kind.of(str(shipped_model()), costs, 48 << 20, 8, 2048)


def test_steps_lie_between_measured_ones(kind: Any) -> None:
    costs = kind.costs
    assert costs.seconds(0, 0) == 0
    assert costs.seconds(1, 0) == 0.002
    assert costs.seconds(2, 0) == pytest.approx(0.002 + 0.002 / 3)
    assert costs.seconds(8, 0) == pytest.approx(0.004 + 4 * 0.002 / 3)
    assert costs.seconds(1, 40) == pytest.approx(0.002 + 0.0075)


def test_a_replica_takes_the_time_of_its_steps(kind: Any) -> None:
    from fleet_replica import Replica

    replica = Replica(kind)
    replica.add(7, list(range(1, 151)), 3, now=1.0)
    seconds = replica.begin()
    assert seconds == kind.costs.seconds(0, 150)
    assert replica.end(1.0 + seconds) == []
    assert replica.counts.first_token_s == [pytest.approx(seconds)]
    for last in (False, True):
        assert replica.begin() == 0.002
        answered = replica.end(2.0)
        assert [turn.session for turn in answered] == ([7] if last else [])
    assert len(answered[0].request.token_ids) == 153
    assert replica.begin() is None
    again = [*answered[0].request.token_ids, *range(900, 960)]
    replica.step = None
    replica.add(7, again, 1, now=3.0)
    replica.begin()
    assert replica.counts.cached_tokens == 128, "a state is kept at multiples of 64 tokens"
    assert replica.counts.prompt_tokens == 150 + len(again)


def test_every_turn_is_served_and_prefixes_are_found_where_they_are(kind: Any) -> None:
    from fleet import ROUTERS, simulate
    from fleet_trace import Traffic

    traffic = Traffic(sessions_per_s=6.0, system_prompts=4, system_tokens=200, think_s=1.0)
    found = {name: simulate(kind, name, 3, traffic, 4.0, seed=3) for name in ROUTERS}
    assert len({row["requests"] for row in found.values()}) == 1, "who serves a turn does not change the trace"
    assert found["by prefix"]["requests"] > 50
    assert found["by prefix"]["hit_rate"] > found["round robin"]["hit_rate"] + 0.1
    assert found["by prefix"]["busy_s"] < found["round robin"]["busy_s"]
    alone = [simulate(kind, name, 1, traffic, 2.0, seed=3) for name in ROUTERS]
    assert len({(row["hit_rate"], row["busy_s"]) for row in alone}) == 1, "of one replica nobody can choose"


def test_a_trace_is_the_same_each_time_and_unequal_in_popularity() -> None:
    from itertools import islice

    from fleet_trace import Traffic, sessions

    traffic = Traffic(sessions_per_s=2.0, system_prompts=10)
    first, again = (list(islice(sessions(traffic, 5), 400)) for _ in range(2))
    assert [(when, each.history, each.turn()) for when, each in first] == [
        (when, each.history, each.turn()) for when, each in again
    ]
    popular = np.unique([len(each.history) for _, each in first], return_counts=True)[1]
    assert popular.max() > 3 * popular.min()
    assert 150 < first[-1][0] < 250
