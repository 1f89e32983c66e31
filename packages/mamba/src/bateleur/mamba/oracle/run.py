"""Many simulations over the whole grid of layouts, with preemptions, and a hit at every boundary that was published."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np
from numpy.random import Generator

from bateleur.mamba.oracle.pages import Ints
from bateleur.mamba.oracle.planner import HostPlanner, Planner
from bateleur.mamba.oracle.simulation import BANKS, Simulation
from bateleur.mamba.oracle.traffic import Case, Lanes
from bateleur.mamba.retention import Retention
from bateleur.mamba.spec import CacheLayout, MambaCacheMode, StatePolicy

BLOCK_SIZES = (4, 9, 16)
MOST_DRAFTS = 7


@dataclass
class Report:
    """What was simulated, and what differed from the truth: each difference is a failure."""

    runs: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    failing: list[Case] = field(default_factory=list)
    """Cases with a difference."""
    seconds: float = 0.0

    @property
    def differences(self) -> int:
        """All kinds together."""
        return sum(self.found.values())

    def add(self, other: Report) -> None:
        """Take in what another run saw; its seconds are its own."""
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
    """Every policy, mode, block size and number of drafts that a layout allows, the rest at random."""
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
    kept = [Retention.of(layout)]
    if mode is MambaCacheMode.ALL:
        kept.append(Retention(block_size, every=2 * block_size))
        kept.append(Retention(block_size, last=True))
        kept.append(Retention(block_size, prompt_end=True))
    return Case(layout, kept[int(rng.integers(len(kept)))], int(rng.integers(1, 18)))


def simulate(case: Case, num_lanes: int, planner: Planner, rng: Generator) -> Simulation:
    """`num_lanes` requests from start to end, and then one that hits each boundary they leave in the cache."""
    layout = case.layout
    sim = Simulation(case, num_lanes, planner, rng)
    everyone = np.arange(num_lanes)
    ids = np.arange(num_lanes * layout.max_model_len).reshape(num_lanes, -1)
    lanes = Lanes(layout, 1 + ids, 1, rng)
    sim.states.admit((1 + everyone).tolist())
    records: list[Ints] = []  # (slot, lane, column) of published pages
    while (lanes.computed < lanes.target).any():
        sim.step(lanes)
        running = (lanes.computed > 0) & (lanes.computed < lanes.target)
        victims = running & (lanes.bank == 0) & (rng.random(num_lanes) < 0.03)
        if victims.any():
            records.append(_published(lanes, np.flatnonzero(victims)))
            _preempt(sim, lanes, np.flatnonzero(victims))
    sim.states.release((1 + everyone).tolist())
    records.append(_published(lanes, everyone))
    slot, lane, column = np.concatenate(records, 1)
    usable = np.flatnonzero((column + 1) * layout.block_size < layout.max_model_len)
    for part in np.array_split(usable, -(-len(usable) // num_lanes) or 1):
        _hit(sim, lanes.truth[lane[part]], column[part], slot[part], 1 + ids.size + ids[: len(part)])
    sim.compare(slot, lanes.truth[lane], column)
    return sim


def _published(lanes: Lanes, which: Ints) -> Ints:
    """(3, n): slot, lane and column of every cached page of lanes `which`."""
    row, column = np.nonzero(lanes.cached[which])
    return np.stack((lanes.slots()[which[row], column], which[row], column))


def _preempt(sim: Simulation, lanes: Lanes, which: Ints) -> None:
    """Take requests from their rows, and begin again with what the cache still holds of them, or with nothing."""
    sim.seen["preempted"] += len(which)
    sim.states.release((1 + which).tolist())
    columns = np.arange(lanes.cached.shape[1])
    lanes.prompt[which] = lanes.computed[which]
    most = np.array([sim.case.layout.max_hit_tokens(n) for n in lanes.computed[which].tolist()])
    hits = lanes.cached[which] & ((columns + 1) * sim.case.layout.block_size <= most[:, None])
    column = np.where(hits, columns, -1).max(1)
    column[sim.rng.random(len(which)) < 0.3] = -1
    slot = lanes.slots()[which, column]
    lanes.restart(which, column, slot)
    lanes.bank[which] = 1
    sim.states.admit((1 + which).tolist(), lanes.computed[which].tolist())


def _hit(sim: Simulation, truth: Ints, column: Ints, slot: Ints, ids: Ints) -> None:
    """Requests that start from published pages, in rows that others have used before."""
    if not len(column):
        return
    layout, rng = sim.case.layout, sim.rng
    start = (column + 1) * layout.block_size
    shared = np.arange(layout.max_model_len) < start[:, None]
    lanes = Lanes(layout, np.where(shared, truth, ids), 1 + (BANKS - 1) * sim.bank_slots, rng)
    lanes.restart(np.arange(len(column)), column, slot)
    lanes.prompt = rng.integers(
        start + 1, np.minimum(start + 2 * layout.block_size, layout.max_model_len) + 1
    )
    most = np.minimum(lanes.prompt + layout.block_size, layout.max_model_len)
    lanes.target = rng.integers(lanes.prompt, most + 1)
    rows = (1 + np.arange(len(column))).tolist()
    sim.states.admit(rows, start.tolist())
    while (lanes.computed < lanes.target).any():
        sim.step(lanes)
    sim.states.release(rows)
    sim.seen["hits"] += len(column)
    sim.inspect(lanes, lanes.cached)


def run(runs: int, seed: int = 0, *, planner: Planner | None = None, num_lanes: int = 0) -> Report:
    """At least `runs` requests, spread over the grid; the requests that hit their prefixes are not counted.

    `planner` is what is tested: the package's by default, in torch and in numpy from one simulation to the next.
    `num_lanes` is how many requests share a simulation; 0 chooses, so that many runs go round the grid evenly.
    """
    report, begin = Report(), time.perf_counter()
    planners = cycle((Planner(), HostPlanner()) if planner is None else (planner,))
    round_no = 0
    while report.runs < runs:
        rng = np.random.default_rng((seed, round_no))
        grid = list(cases(rng))
        lanes = num_lanes or min(max(-(-(runs - report.runs) // len(grid)), 16), 1024)
        for i in rng.permutation(len(grid)).tolist():
            if report.runs >= runs:
                break
            case = grid[i]
            sim = simulate(case, lanes, next(planners), rng)
            report.runs += lanes
            report.seen += sim.seen
            report.found += sim.found
            if sim.found.total():
                report.failing.append(case)
        round_no += 1
    report.seconds = time.perf_counter() - begin
    return report
