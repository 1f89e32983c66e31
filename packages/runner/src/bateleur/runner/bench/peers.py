"""Starts the processes of peers (engines, servers and scripts in their environments), and runs engines in rounds.

`bateleur bench` and `benchmarks/` start vLLM, transformers and llama.cpp only here. In interleaved rounds all engines
are loaded, one runs at a time, and each runs every task once per round.
"""

import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self, cast

from bateleur.runner.bench import worker
from bateleur.runner.errors import Unmeasured

_VLLM_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR"}
"""Environment of vLLM's processes. A KV cache of 2 GiB is enough for these measurements."""
_LOG_CHARS = 2000  # characters of a server's log that an error message quotes


class EngineProcess:
    """An offline engine in its own process (`bateleur.runner.bench.worker`), loaded when the constructor returns.

    name: a key of `worker.ENGINES`. settings: options, as the worker takes them. python: an interpreter whose
    environment has the engine. Raises Unmeasured with the last 8 lines of stderr if the process ends early.
    """

    def __init__(self, name: str, settings: dict[str, Any], python: str = sys.executable) -> None:
        self.name = name
        environment = {**_VLLM_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if name == "vllm" else {}
        if environment and (threads := settings.get("num_threads")):  # else vLLM pins a thread to every core
            environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (until `close`)
        command = [*_env(environment), python, str(Path(worker.__file__)), name, json.dumps(settings)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self._stdin, self._stdout = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
        self.facts: dict[str, Any] = self._read_reply("ready ")

    def request(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send `message` (prompts and numbers of tokens) to the worker; return times and ids, see `bench.worker`."""
        try:
            self._stdin.write(json.dumps(message) + "\n")
            self._stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return self._read_reply("done ")

    def close(self) -> None:
        """Close stdin, so that the worker exits; kill the process after 30 seconds."""
        self._stop()
        self._log.close()

    def _stop(self) -> None:
        with suppress(BrokenPipeError):
            self._stdin.close()
        _wait_or(self._process.kill, self._process, 30)
        self._stdout.close()

    def _read_reply(self, prefix: str) -> dict[str, Any]:
        for line in self._stdout:  # libraries print other lines in between
            if line.startswith(prefix):
                reply: dict[str, Any] = json.loads(line.removeprefix(prefix))
                return reply
        raise self._ended()

    def _ended(self) -> Unmeasured:
        self._stop()
        self._log.seek(0)
        lines = "".join(self._log.readlines()[-8:]).strip()
        self._log.close()
        return Unmeasured(f"{self.name} ended with {self._process.returncode}: {lines}")


def run_script(python: str, script: Path, *arguments: str) -> str:
    """Run a script in another environment and return its stdout. Raises CalledProcessError if it fails."""
    # -P: modules in the script's folder can't hide those of the environment.
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
    def start(cls, name: str, command: list[str], logs: Path) -> Self:
        """Run a server command on a free local port. Its output goes to a file in the folder `logs`."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = logs / f"{name}.log"
        with log.open("wb") as file:
            line = [*command, "--host", "127.0.0.1", "--port", str(port)]
            process = subprocess.Popen(line, stdout=file, stderr=file, start_new_session=True)
        return cls(name, f"http://127.0.0.1:{port}", process, log)

    def wait_until_healthy(self) -> float:
        """Poll /health and return the seconds until it answered. Raises Unmeasured if it does not in 10 minutes."""
        began = time.perf_counter()
        while time.perf_counter() - began < 600.0 and (self.process is None or self.process.poll() is None):
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=10):
                    return time.perf_counter() - began
            except OSError:
                if self.process is None:
                    raise Unmeasured(f"{self.url} does not answer /health") from None
                time.sleep(0.1)
        log = "" if self.log is None else self.log.read_text(errors="replace")[-_LOG_CHARS:]
        raise Unmeasured(f"{self.name} did not start; the end of its log: {log}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the server. SIGSTOP pauses it, as even an idle server may use the CPU."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Terminate the server; kill it after 60 seconds."""
        if self.process is None:
            return
        self.signal(signal.SIGCONT)
        self.process.terminate()
        _wait_or(lambda: self.signal(signal.SIGKILL), self.process, 60)


def bateleur_command(model: Path, options: dict[str, Any], arguments: str) -> list[str]:
    """Return the command line of `bateleur serve` with these options of `LLM` and further arguments."""
    command = [sys.executable, "-m", "bateleur.runner", "serve", str(model)]
    return [*command, *_flags(options), *shlex.split(arguments)]


def vllm_command(python: Path, model: Path, options: dict[str, Any], arguments: str) -> list[str]:
    """Return the command line of vLLM's server with the options that both engines share, and further arguments."""
    shared = {name: each for name, each in options.items() if name in ("dtype", "max_model_len", "max_num_seqs")}
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    return [*_env(_VLLM_ENVIRONMENT), *command, *_flags(shared), *shlex.split(arguments)]


def _flags(options: dict[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        flags += [f"--no-{flag}"] if value is False else [f"--{flag}", *([] if value is True else [str(value)])]
    return flags


def _wait_or(kill: Callable[[], object], process: subprocess.Popen[Any], seconds: float) -> None:
    """Wait for the end of a process. Call `kill` if it takes longer than `seconds`."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        kill()
        process.wait()


def _env(variables: dict[str, str]) -> list[str]:
    return ["env", *(f"{name}={value}" for name, value in variables.items())]


TokenIds = list[list[int]]


@dataclass(frozen=True, slots=True)
class Task:
    """Greedy requests: prompts as token ids, and the number of output tokens of each."""

    prompts: TokenIds
    tokens: list[int]

    def first_token_only(self) -> Self:
        """Return a task with the same prompts and one output token each."""
        return type(self)(self.prompts, [1] * len(self.prompts))


@dataclass(frozen=True, slots=True)
class TaskRun:
    """Time and output token ids of one run of a task."""

    seconds: float
    cpu_seconds: float  # CPU time of all threads of the process
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
    """Run every task on every engine in each round. Returns for each task its runs by engine, without the warm-ups.

    warm_ups: number of additional rounds at the start. after_round: called after each round.
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
