"""Servers in processes of their own, of which one is at work and the others are stopped."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bateleur.runner.errors import Unmeasured

_LAST_WORDS = 2000


@dataclass(slots=True)
class Server:
    """One of them; with `process` None somebody else's, which is never stopped."""

    name: str
    url: str
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None

    @classmethod
    def start(cls, name: str, command: list[str], logs: Path, variables: dict[str, str]) -> Server:
        """Run a command with an address of its own."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = logs / f"{name}.log"
        line = ["env", *(f"{key}={value}" for key, value in variables.items()), *command]
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*line, "--host", "127.0.0.1", "--port", str(port)],
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        return cls(name, f"http://127.0.0.1:{port}", process, log)

    def wait(self, seconds: float = 600.0) -> float:
        """Until it says that it is healthy; how long that took. Unmeasured if it does not come up."""
        began = time.perf_counter()
        while time.perf_counter() - began < seconds and (self.process is None or self.process.poll() is None):
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=10):
                    return time.perf_counter() - began
            except (urllib.error.URLError, OSError):
                if self.process is None:
                    raise Unmeasured(f"{self.url} does not answer /health") from None
                time.sleep(0.1)
        said = "" if self.log is None else self.log.read_text(errors="replace")[-_LAST_WORDS:]
        raise Unmeasured(f"{self.name} did not come up; its last words: {said}")

    def pause(self) -> None:
        """Stop all of its processes: one that is idle may still poll."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End it."""
        if self.process is None:
            return
        self.go_on()
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, number)


def bateleur_command(model: Path, options: dict[str, Any], more: str) -> list[str]:
    """`bateleur serve` with options of `LLM` by name."""
    flags: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is False:
            flags.append(flag.replace("--", "--no-", 1))
        else:
            flags += [flag] if value is True else [flag, str(value)]
    return [sys.executable, "-m", "bateleur.runner", "serve", str(model), *flags, *shlex.split(more)]


def vllm_command(python: Path, model: Path, options: dict[str, Any], more: str) -> list[str]:
    """vLLM's server, with those of the options that mean the same there."""
    shared = [name for name in ("dtype", "max_model_len", "max_num_seqs") if name in options]
    flags = [part for name in shared for part in (f"--{name.replace('_', '-')}", str(options[name]))]
    module = ["-m", "vllm.entrypoints.openai.api_server"]
    return [str(python), *module, "--model", str(model), *flags, *shlex.split(more)]
