"""Interleaved rounds: all engines are loaded, one runs at a time, and each runs every task once per round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bateleur.runner.bench.peers import EngineProcess

TokenIds = list[list[int]]


@dataclass(frozen=True, slots=True)
class Task:
    """Greedy requests: prompts as token ids, and the number of output tokens of each."""

    prompts: TokenIds
    tokens: list[int]

    def first_token_only(self) -> Task:
        """Return a task with the same prompts and one output token each."""
        return Task(self.prompts, [1] * len(self.prompts))


@dataclass(frozen=True, slots=True)
class TaskRun:
    """Time and output token ids of one run of a task."""

    seconds: float
    cpu_seconds: float
    """CPU time of all threads of the process."""
    ids: TokenIds


@dataclass(slots=True)
class TaskRuns:
    """All runs of a task by one engine."""

    runs: list[TaskRun] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Median time of a run."""
        return statistics.median(run.seconds for run in self.runs)

    @property
    def cpu_seconds(self) -> float:
        """Median CPU time of a run."""
        return statistics.median(run.cpu_seconds for run in self.runs)

    @property
    def ids(self) -> TokenIds:
        """Output token ids of the first run."""
        return self.runs[0].ids

    def fault(self, task: Task) -> str | None:
        """Return why the speed is not valid; None if it is valid.

        It is not if a run has a wrong number of tokens, or tokens that differ between runs.
        """
        if (counts := [len(ids) for ids in self.ids]) != task.tokens:
            return f"returned {sum(counts)} tokens instead of {sum(task.tokens)}"
        changed = sum(run.ids != self.ids for run in self.runs)
        return f"tokens of {changed} of {len(self.runs)} rounds differ from the first" if changed else None


def run_task(engine: EngineProcess, task: Task) -> TaskRun:
    """Run a task once. Raises Unmeasured if the process ends."""
    return TaskRun(**engine.request({"prompts": task.prompts, "tokens": task.tokens}))


def run_interleaved(
    engines: Sequence[EngineProcess],
    tasks: Sequence[Task],
    rounds: int,
    warm_ups: int,
    after_round: Callable[[], object] = lambda: None,
) -> list[dict[str, TaskRuns]]:
    """Run every task on every engine in each round, starting each round with the next engine.

    Returns for each task its runs by engine name, without the warm-up rounds.
    """
    found = [{engine.name: TaskRuns() for engine in engines} for _ in tasks]
    for index in range(warm_ups + rounds):
        start = index % len(engines)
        for engine in [*engines[start:], *engines[:start]]:
            for task, runs in zip(tasks, found, strict=True):
                run = run_task(engine, task)
                if index >= warm_ups:
                    runs[engine.name].runs.append(run)
        after_round()
    return found
