"""Starts the processes of peers (engines, servers and scripts in their environments), and runs engines in rounds.

`bateleur bench` and `benchmarks/` start vLLM, transformers and llama.cpp only here. In interleaved rounds all engines
are loaded, one runs at a time, and each runs every task once per round.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

from bateleur.runner.bench import worker
from bateleur.runner.errors import Unmeasured

_VLLM_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR"}
"""Environment of vLLM's processes. A KV cache of 2 GiB is enough for these measurements."""
_LOG_CHARS = 2000
"""Characters of a server's log that an error message quotes."""


class EngineProcess:
    """An offline engine in its own process (`bateleur.runner.bench.worker`), loaded when the constructor returns.

    name: a key of `worker.ENGINES`. settings: options, as the worker takes them. python: the interpreter, whose
    environment has the engine.

    Raises Unmeasured with the last 8 lines of stderr if the process ends early.
    """

    def __init__(self, name: str, settings: dict[str, Any], python: str = sys.executable) -> None:
        self.name = name
        environment = {**_VLLM_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if name == "vllm" else {}
        if name == "vllm" and (threads := settings.get("num_threads")):  # else vLLM pins a thread to every core
            environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [*_env(environment), python, str(Path(worker.__file__)), name, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._stderr: deque[str] = deque(maxlen=8)
        self._reader = Thread(target=self._read_stderr, daemon=True)
        self._reader.start()
        self.facts: dict[str, Any] = self._read_reply("ready ")

    def request(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send one line to the worker and return its reply."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return self._read_reply("done ")

    def close(self) -> None:
        """Close stdin, so that the worker exits; kill the process after 30 seconds."""
        streams = self._process.stdin, self._process.stdout, self._process.stderr
        assert streams[0] is not None
        with suppress(BrokenPipeError):
            streams[0].close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(5)
        for stream in streams:
            if stream is not None:
                stream.close()

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        self._stderr.extend(self._process.stderr)

    def _read_reply(self, prefix: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # libraries print other lines in between
            if line.startswith(prefix):
                reply: dict[str, Any] = json.loads(line.removeprefix(prefix))
                return reply
        raise self._ended()

    def _ended(self) -> Unmeasured:
        self.close()
        return Unmeasured(f"{self.name} ended with {self._process.returncode}: {''.join(self._stderr).strip()}")


def run_script(python: str, script: Path, *arguments: str) -> str:
    """Run a script in another environment and return its stdout. Raises CalledProcessError if it fails.

    Python gets -P so that modules in the script's folder can't hide those of the environment.
    """
    command = [*_env(_VLLM_ENVIRONMENT), python, "-P", str(script), *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout


@dataclass(slots=True)
class ServerProcess:
    """An OpenAI-compatible server. If `process` is None, it was started elsewhere and is never paused or ended."""

    name: str
    url: str
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None

    @classmethod
    def start(cls, name: str, command: list[str], logs: Path) -> ServerProcess:
        """Run a server command on a free local port, with its output in `logs`."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = logs / f"{name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=file, stderr=file, start_new_session=True
            )
        return cls(name, f"http://127.0.0.1:{port}", process, log)

    def wait_until_healthy(self, timeout: float = 600.0) -> float:
        """Poll /health and return the seconds until it answered. Raises Unmeasured if the server does not start."""
        began = time.perf_counter()
        while time.perf_counter() - began < timeout and (self.process is None or self.process.poll() is None):
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=10):
                    return time.perf_counter() - began
            except (urllib.error.URLError, OSError):
                if self.process is None:
                    raise Unmeasured(f"{self.url} does not answer /health") from None
                time.sleep(0.1)
        log = "" if self.log is None else self.log.read_text(errors="replace")[-_LOG_CHARS:]
        raise Unmeasured(f"{self.name} did not start; the end of its log: {log}")

    def pause(self) -> None:
        """Stop all processes of the server, because an idle server may still use the processor."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the processes of the server after `pause`."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Terminate the server; kill it after 60 seconds."""
        if self.process is None:
            return
        self.resume()
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, number)


def bateleur_command(model: Path, options: dict[str, Any], arguments: str) -> list[str]:
    """Return the command line of `bateleur serve` with these options of `LLM` and further arguments."""
    flags: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is False:
            flags.append(flag.replace("--", "--no-", 1))
        else:
            flags += [flag] if value is True else [flag, str(value)]
    return [sys.executable, "-m", "bateleur.runner", "serve", str(model), *flags, *shlex.split(arguments)]


def vllm_command(python: Path, model: Path, options: dict[str, Any], arguments: str) -> list[str]:
    """Return the command line of vLLM's server with the options that both engines share, and further arguments."""
    shared = [name for name in ("dtype", "max_model_len", "max_num_seqs") if name in options]
    flags = [part for name in shared for part in (f"--{name.replace('_', '-')}", str(options[name]))]
    module = ["-m", "vllm.entrypoints.openai.api_server"]
    command = [str(python), *module, "--model", str(model), *flags, *shlex.split(arguments)]
    return [*_env(_VLLM_ENVIRONMENT), *command]


def _env(variables: dict[str, str]) -> list[str]:
    return ["env", *(f"{name}={value}" for name, value in variables.items())]


TokenIds = list[list[int]]


@dataclass(frozen=True, slots=True)
class Task:
    """Greedy requests: prompts as token ids, and the number of output tokens of each."""

    prompts: TokenIds
    tokens: list[int]

    def first_token_only(self) -> Task:
        """The same prompts with one output token each."""
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
        """Why the speed is not valid: a wrong number of tokens, or tokens that differ between runs. None if valid."""
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
