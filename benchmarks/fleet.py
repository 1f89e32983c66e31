"""Simulates a fleet of replicas that serve conversations, for several request routers.

    uv run python benchmarks/fleet.py --output benchmarks/results/fleet-simulated.json

Each replica has the real scheduler and prefix caches, sized as for the shipped model. Only the model is missing: a step
takes the time that `fleet_costs.py` measured on a CPU. Hit rates, queues and load balance are therefore those of the
real code. Seconds are those of the table, not of a GPU. Conversations come from `fleet_trace.py`, equally many per
replica.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from fleet_costs import StepTable
from fleet_replica import Kind, Replica, Turn
from fleet_trace import Session, Traffic, sessions

from bateleur.runner.assets import shipped_model
from bateleur.runner.replicas.prefix_routing import PrefixRouting, prefix_keys

COSTS = Path(__file__).parent / "results" / "fleet-costs-cpu.json"
REPLICAS = (1, 4, 16, 64, 256, 1000)


class Router(Protocol):
    """Chooses the replica of a request."""

    def choose(self, prompt: Sequence[int], loads: Mapping[str, float]) -> str:
        """Choose a replica. loads: unfinished requests by replica."""


class RoundRobin:
    """Chooses replicas in rotation."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, prompt: Sequence[int], loads: Mapping[str, float]) -> str:
        self._turn += 1
        return list(loads)[self._turn % len(loads)]


class LeastLoaded:
    """Chooses the replica with the fewest unfinished requests, a random one of several."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def choose(self, prompt: Sequence[int], loads: Mapping[str, float]) -> str:
        least = min(loads.values())
        return str(self._rng.choice([name for name, load in loads.items() if load == least]))


class ByPrefix:
    """Routes by prefix as `bateleur serve --replicas` does."""

    def __init__(self) -> None:
        self._routing = PrefixRouting()

    def choose(self, prompt: Sequence[int], loads: Mapping[str, float]) -> str:
        return self._routing.choose(prefix_keys("/v1/completions", {"prompt": prompt}), loads).replica


ROUTERS: dict[str, Callable[[], Router]] = {
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    "by prefix": ByPrefix,
}


@dataclass(slots=True)
class Fleet:
    """The replicas and the queue of future events."""

    replicas: dict[str, Replica]
    router: Router
    talking: dict[int, Session]
    events: list[tuple[float, int, Callable[[float], None]]]
    num_events: int = 0

    def at(self, when: float, what: Callable[[float], None]) -> None:
        """Schedule an event. Events at the same time keep their order."""
        self.num_events += 1
        heapq.heappush(self.events, (when, self.num_events, what))

    def speak(self, session: Session, now: float) -> None:
        """Send the session's next turn, if it has one."""
        said = session.turn()
        if said is None:
            self.talking.pop(session.number, None)
            return
        self.talking[session.number] = session
        prompt, answer = said
        loads = {name: float(len(each.unfinished)) for name, each in self.replicas.items()}
        replica = self.replicas[self.router.choose(prompt, loads)]
        replica.add(session.number, prompt, answer, now)
        if replica.step is None:
            self.begin(replica, now)

    def begin(self, replica: Replica, now: float) -> None:
        """Start a replica's next step, if it has work."""
        seconds = replica.begin()
        if seconds is not None:
            self.at(now + seconds, lambda then: self.end(replica, then))

    def end(self, replica: Replica, now: float) -> None:
        """End a step: answered sessions schedule their next turn, and the replica starts another step."""
        for turn in replica.end(now):
            self._answered(turn, now)
        self.begin(replica, now)

    def _answered(self, turn: Turn, now: float) -> None:
        session = self.talking[turn.session]
        session.history = turn.request.token_ids
        self.at(now + session.pause(), lambda then: self.speak(session, then))


def simulate(kind: Kind, router: str, count: int, traffic: Traffic, seconds: float, seed: int) -> dict[str, Any]:
    """Simulate so many seconds of arrivals, and serve the requests that arrived by then to their end."""
    fleet = Fleet({f"replica {i}": Replica(kind) for i in range(count)}, ROUTERS[router](), {}, [])
    began = time.perf_counter()
    for when, session in sessions(traffic, seed):
        if when > seconds:
            break
        fleet.at(when, lambda now, session=session: fleet.speak(session, now))  # type: ignore[misc]
    now = 0.0
    while fleet.events:
        now, _, what = heapq.heappop(fleet.events)
        what(now)
    counts = [replica.counts for replica in fleet.replicas.values()]
    first = np.concatenate([each.first_token_s for each in counts if each.first_token_s])
    busy = np.array([each.busy_s for each in counts])
    asked = sum(each.prompt_tokens for each in counts)
    return {
        "router": router,
        "replicas": count,
        "requests": sum(each.requests for each in counts),
        "hit_rate": sum(each.cached_tokens for each in counts) / asked,
        "first_token_ms": {f"p{p}": float(np.percentile(first, p)) * 1e3 for p in (50, 90, 99)},
        "busy_s": float(busy.mean()),
        "spread": float(busy.max() / busy.mean()),
        "preemptions": sum(each.preemptions for each in counts),
        "ended_s": now,
        "wall_s": time.perf_counter() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=list(REPLICAS))
    parser.add_argument("--sessions-per-s", type=float, default=2.0, help="new sessions per second and replica")
    parser.add_argument("--seconds", type=float, default=10.0, help="simulated seconds with new sessions")
    parser.add_argument("--cache-mb", type=int, default=96, help="MB of KV cache per replica")
    parser.add_argument("--rows", type=int, default=16, help="concurrent requests per replica")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--costs", type=Path, default=COSTS)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    costs, traffic = StepTable.read(args.costs), Traffic(sessions_per_s=args.sessions_per_s)
    kind = Kind.of(str(shipped_model()), costs, args.cache_mb << 20, args.rows, traffic.longest)
    print(f"steps: {costs.source}; a replica has {kind.plan.num_blocks * kind.plan.block_size} tokens of keys")
    results = []
    for count in args.replicas:
        spoken = replace(traffic, sessions_per_s=traffic.sessions_per_s * count)
        for router in ROUTERS:
            found = simulate(kind, router, count, spoken, args.seconds, args.seed)
            results.append(found)
            first = found["first_token_ms"]
            print(
                f"{count:5} {router:13} hits {found['hit_rate']:.3f}  first token p50 {first['p50']:8.1f} "
                f"p99 {first['p99']:8.1f} ms  busy {found['busy_s']:6.1f} s x {found['spread']:.2f}  "
                f"{found['requests']} requests in {found['wall_s']:.0f} s"
            )
    if args.output is not None:
        result = {
            "date": date.today().isoformat(),
            "command": " ".join(["python", *sys.argv]),
            "kind": "simulated",
            "costs": costs.source,
            "cache_tokens": kind.plan.num_blocks * kind.plan.block_size,
            "state_pages": kind.plan.num_state_slots,
            "seconds": args.seconds,
            "sessions_per_s": args.sessions_per_s,
            "results": results,
        }
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
