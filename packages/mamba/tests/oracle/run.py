"""Runs simulations over all layouts, with preemptions, and a hit at every published boundary."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator

from bateleur.mamba.prefix_retention import PrefixRetention
from bateleur.mamba.spec import CacheLayout, MambaCacheMode, StatePolicy
from oracle.lanes import Case, Kind, Lanes
from oracle.memory import Ints
from oracle.planner import Planner
from oracle.simulation import TOKEN_BYTES, Simulation

BLOCK_SIZES = (4, 9, 16)
MOST_DRAFTS = 7


@dataclass
class Report:
    """Counts of simulated requests and of differences, each of which is a failure."""

    runs: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    failing: list[Case] = field(default_factory=list)
    """Cases with a difference."""
    seconds: float = 0.0

    @property
    def differences(self) -> int:
        """Total number of differences."""
        return sum(self.found.values())

    def add(self, other: Report) -> None:
        """Add the counts of another run, but not its time."""
        self.runs += other.runs
        self.seen += other.seen
        self.found += other.found
        self.failing += other.failing

    def __str__(self) -> str:
        kinds = "".join(f", {kind} {count}" for kind, count in sorted(self.found.items()))
        return (
            f"{self.runs} runs, {self.seen['hits']} hits of {self.seen['published']} published boundaries, "
            f"{self.seen['preempted']} preemptions, {self.seen['rows']} row steps in {self.seconds:.1f} s\n"
            f"differences: {self.differences}{kinds}"
        )


def cases(rng: Generator) -> Iterator[Case]:
    """Yield every valid policy, mode, block size and number of drafts; other values are random."""
    for policy in StatePolicy:
        for drafts in range(MOST_DRAFTS + 1):
            yield _case(policy, MambaCacheMode.NONE, int(rng.choice(BLOCK_SIZES)), drafts, rng)
            for mode in (MambaCacheMode.ALIGN, MambaCacheMode.ALL):
                for block_size in BLOCK_SIZES:
                    if block_size >= 1 + drafts:
                        yield _case(policy, mode, block_size, drafts, rng)


def _case(policy: StatePolicy, mode: MambaCacheMode, block_size: int, drafts: int, rng: Generator) -> Case:
    max_len = int(block_size * rng.integers(4, 7) + rng.integers(block_size))
    ring = int(rng.choice((1 + 2 * drafts, max(16, 1 + 2 * drafts), 4 + 2 * drafts)))
    if mode is MambaCacheMode.NONE:
        block_size = max_len
    layout = CacheLayout(mode, block_size, drafts, max_len, policy, ring)
    kept = [PrefixRetention.of(layout)]
    if mode is MambaCacheMode.ALL:
        kept.append(PrefixRetention(block_size, every=2 * block_size))
        kept.append(PrefixRetention(block_size, last=True))
        kept.append(PrefixRetention(block_size, prompt_end=True))
        kept.append(PrefixRetention(block_size, doubling=True))
    kind = [*Kind][int(rng.integers(len(Kind)))]
    return Case(layout, kept[int(rng.integers(len(kept)))], int(rng.integers(1, 18)), kind)


def simulate(case: Case, num_lanes: int, planner: Planner, rng: Generator) -> Simulation:
    """Run `num_lanes` requests to their ends, and then one request for each cached boundary."""
    most = case.layout.max_model_len
    sim = Simulation(case, num_lanes, planner, rng)
    everyone = np.arange(num_lanes)
    ids = np.arange(num_lanes * most).reshape(num_lanes, -1)
    lanes = Lanes(case.layout, 1 + ids, np.zeros(num_lanes, np.int64), rng)
    again = np.zeros(num_lanes, np.bool_)
    sim.admit(everyone, [b""] * num_lanes)
    while lanes.running.any():
        sim.step(lanes)
        victims = lanes.running & (lanes.computed > 0) & ~again & (rng.random(num_lanes) < 0.03)
        again |= victims
        _preempt(sim, lanes, np.flatnonzero(victims))
    sim.release(everyone)
    names = sorted(name for name in sim.published if len(name) < most * TOKEN_BYTES)
    for first in range(0, len(names), num_lanes):
        _hit(sim, [name for name in names[first : first + num_lanes] if sim.pool.find(name)], 1 + ids.size + ids)
    sim.compare(list(sim.published))
    return sim


def _preempt(sim: Simulation, lanes: Lanes, which: Ints) -> None:
    """Preempt requests, and resume them from their longest cached prefix, or from the start."""
    if not len(which):
        return
    sim.seen["preempted"] += len(which)
    sim.release(which)
    lanes.prompt[which] = lanes.computed[which]
    names = []
    for lane in which.tolist():
        size, most = sim.case.layout.block_size, sim.case.layout.max_hit_tokens(int(lanes.computed[lane]))
        hits = [lanes.truth[lane, :n].tobytes() for n in range(most, 0, -size)]
        hits = [name for name in hits if name in sim.published and sim.pool.find(name)]
        names.append(hits[0] if hits and sim.rng.random() < 0.7 else b"")
    lanes.computed[which] = [len(name) // TOKEN_BYTES for name in names]
    sim.admit(which, names)


def _hit(sim: Simulation, names: list[bytes], ids: Ints) -> None:
    """Run requests that start from published slots, in used rows."""
    if not names:
        return
    truth = ids[: len(names)].copy()
    for row, name in zip(truth, names, strict=True):
        row[: len(name) // TOKEN_BYTES] = np.frombuffer(name, np.int64)
    start = np.array([len(name) // TOKEN_BYTES for name in names])
    lanes, rows = Lanes(sim.case.layout, truth, start, sim.rng), np.arange(len(names))
    sim.admit(rows, names)
    while lanes.running.any():
        sim.step(lanes)
    sim.release(rows)
    sim.seen["hits"] += len(names)


def run(runs: int, seed: int = 0, *, planner: Planner | None = None, num_lanes: int = 0) -> Report:
    """Run at least `runs` requests over all layouts; requests that start from cached prefixes are not counted.

    `planner` is what is tested: the package's by default.
    `num_lanes` is how many requests share a simulation; 0 chooses, so that many runs go round the grid evenly.
    """
    report, begin = Report(), time.perf_counter()
    planner, round_no = planner or Planner(), 0
    while report.runs < runs:
        rng = np.random.default_rng((seed, round_no))
        grid = list(cases(rng))
        lanes = num_lanes or min(max(-(-(runs - report.runs) // len(grid)), 16), 1024)
        for i in rng.permutation(len(grid)).tolist():
            if report.runs >= runs:
                break
            case = grid[i]
            sim = simulate(case, lanes, planner, rng)
            report.runs += lanes
            report.seen += sim.seen
            report.found += sim.found
            if sim.found.total():
                report.failing.append(case)
        round_no += 1
    report.seconds = time.perf_counter() - begin
    return report
