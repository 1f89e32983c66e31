"""Engines that take turns: each in a process of its own, all of them loaded, one of them at work."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

from bateleur.runner.bench import VLLM_VARIABLES, worker
from bateleur.runner.errors import Unmeasured

Ids = list[list[int]]


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts as token ids, and how many tokens each of them gets, greedily."""

    prompts: Ids
    tokens: list[int]

    def first(self) -> Task:
        """The same with one token each."""
        return Task(self.prompts, [1] * len(self.prompts))


@dataclass(frozen=True, slots=True)
class Run:
    """One task, done."""

    seconds: float
    cpu_seconds: float
    ids: Ids


@dataclass(slots=True)
class Runs:
    """What an engine did of one task, round after round."""

    all: list[Run] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The median round."""
        return statistics.median(run.seconds for run in self.all)

    @property
    def cpu_seconds(self) -> float:
        """The same, of all threads of the process."""
        return statistics.median(run.cpu_seconds for run in self.all)

    @property
    def ids(self) -> Ids:
        """Of the first round."""
        return self.all[0].ids

    def fault(self, task: Task) -> str | None:
        """Why its speed would mean nothing: other numbers of tokens than were asked for, or others in other rounds."""
        counts = [len(ids) for ids in self.ids]
        if counts != task.tokens:
            return f"{sum(counts)} tokens came of {sum(task.tokens)}"
        changed = sum(run.ids != self.ids for run in self.all)
        return f"{changed} of {len(self.all)} rounds gave other tokens than the first" if changed else None


class Engine:
    """An engine in a process of its own, which is loaded when this returns. See `bateleur.runner.bench.worker`.

    Raises Unmeasured, with the last lines that it wrote, if it ends instead of answering.
    """

    def __init__(self, name: str, settings: dict[str, Any], python: str = sys.executable) -> None:
        self.name = name
        variables = {**VLLM_VARIABLES, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if name == "vllm" else {}
        if name == "vllm" and (threads := settings.get("num_threads")):  # else it binds one to every core
            variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
        named = [f"{key}={value}" for key, value in variables.items()]
        command = ["env", *named, python, str(Path(worker.__file__)), name, json.dumps(settings)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._said: deque[str] = deque(maxlen=8)
        self._listener = Thread(target=self._listen, daemon=True)
        self._listener.start()
        self.facts: dict[str, Any] = self._answer("ready ")

    def run(self, task: Task) -> Run:
        """Let it do a task, and wait until it has."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": task.prompts, "tokens": task.tokens}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return Run(**self._answer("done "))

    def close(self) -> None:
        """Let it end, if it has not."""
        streams = self._process.stdin, self._process.stdout, self._process.stderr
        assert streams[0] is not None
        with suppress(BrokenPipeError):
            streams[0].close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join(5)
        for stream in streams:
            if stream is not None:
                stream.close()

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said.append(line)

    def _answer(self, word: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # libraries print what they like in between
            if line.startswith(word):
                found: dict[str, Any] = json.loads(line.removeprefix(word))
                return found
        raise self._ended()

    def _ended(self) -> Unmeasured:
        self.close()
        return Unmeasured(f"{self.name} ended with {self._process.returncode}: {''.join(self._said).strip()}")


def in_turn(
    engines: list[Engine],
    tasks: list[Task],
    rounds: int,
    warm_ups: int,
    beside: Callable[[], object] = lambda: None,
) -> list[dict[str, Runs]]:
    """Every engine does every task in each round, and the next round begins with another of them.

    Returns what each did of each task; what came before, as warm-up, is left out. beside: is called once a round.
    """
    found = [{engine.name: Runs() for engine in engines} for _ in tasks]
    for index in range(warm_ups + rounds):
        at = index % len(engines)
        for engine in engines[at:] + engines[:at]:
            for task, runs in zip(tasks, found, strict=True):
                run = engine.run(task)
                if index >= warm_ups:
                    runs[engine.name].all.append(run)
        beside()
    return found
