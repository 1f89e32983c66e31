"""Runs steps in processes of their own and collects what they find out.

A step leads a session of its own, so that it can be ended together with every process it started. What a step prints
goes to `log.txt`, shortened; its results go through a pipe to `results.jsonl`. Both are written while the step runs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from .plan import ROOT, Step, Wave, paths
from .record import DEADLINE, RESULTS_FD

RESULTS, LOG, SUMMARY = "results.jsonl", "log.txt", "summary.txt"
LEAST_SECONDS = 8.0
"""A step does not begin with less: importing torch takes this long on a busy machine."""
GRACE_SECONDS = 2.0
"""From SIGTERM to SIGKILL."""
LOG_BYTES = 128 << 10
"""Of a step's output, the first and the last so many bytes are kept: 11 MiB for 45 steps."""
LOG_FILE_BYTES = 15 << 20
"""The log file does not grow above this, however often a run is resumed."""
RESULT_BYTES = 256 << 10
"""Results of a step that are kept."""
LINE_BYTES = 8 << 10
"""A longer line of output is broken."""


class StepLog:
    """A step's output in the shared log file: its first and its last `LOG_BYTES`."""

    def __init__(self, file: BinaryIO, lock: threading.Lock, name: str) -> None:
        self._file, self._lock = file, lock
        self._prefix = f"[{name}] ".encode()
        self._written = self._dropped = self._held = 0
        self._tail: deque[bytes] = deque()
        self.last: deque[str] = deque(maxlen=4)
        """The last lines, for a step that ends with an error and without a result."""

    def line(self, text: bytes) -> None:
        """Keep a line."""
        if shown := text.decode(errors="replace").strip():
            self.last.append(shown[:300])
        text = self._prefix + text.rstrip(b"\n") + b"\n"
        if self._written + len(text) <= LOG_BYTES:
            self._written += len(text)
            self._write(text)
            return
        self._tail.append(text)
        self._held += len(text)
        while self._held > LOG_BYTES:
            first = len(self._tail.popleft())
            self._held -= first
            self._dropped += first

    def close(self) -> None:
        """Write what is left."""
        if self._dropped:
            self._write(self._prefix + f"... {self._dropped} bytes are left out ...\n".encode())
        self._write(b"".join(self._tail))

    def _write(self, data: bytes) -> None:
        with self._lock:
            if self._file.tell() + len(data) <= LOG_FILE_BYTES:
                self._file.write(data)
                self._file.flush()


class Runner:
    """Runs waves of steps before `end`, a time of `time.monotonic()`, into the folder `output`.

    A folder that holds an earlier run is continued: `ended` has the steps that need not run again.

    Raises ValueError if the earlier run had other sizes (`quick`).
    """

    def __init__(self, output: Path, end: float, quick: bool) -> None:
        output.mkdir(parents=True, exist_ok=True)
        self.output, self._end, self._lock = output, end, threading.Lock()
        self.lines = read_results(output / RESULTS)
        earlier = {line["quick"] for line in self.lines if line.get("event") == "run"}
        if earlier - {quick}:
            kind = "with" if earlier.pop() else "without"
            raise ValueError(f"output={output}: holds a run {kind} --quick; choose another folder, or delete this one")
        self.lines = latest(self.lines)
        (output / RESULTS).write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        self._results = (output / RESULTS).open("a")
        self._log = (output / LOG).open("ab")
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._stopped = False
        self._keep(event="run", quick=quick, time=time.strftime("%Y-%m-%d %H:%M:%S"), command=" ".join(sys.argv[1:]))

    @property
    def ended(self) -> set[str]:
        """Steps that ran to their end, or to their own time limit."""
        ends = (line for line in latest(self.lines) if line.get("event") == "end")
        return {line["step"] for line in ends if not line["unfinished"]}

    def left(self) -> float:
        """Return the seconds that are left for all steps."""
        return self._end - time.monotonic()

    def run(self, waves: Sequence[Wave], skip: set[str]) -> None:
        """Run all steps except `skip`."""
        for wave in waves:
            steps = [step for step in wave.steps if step.name not in skip]
            with ThreadPoolExecutor(max(1, min(len(steps), os.cpu_count() or 1))) as pool:
                for done in [pool.submit(self._one, step) for step in steps]:
                    done.result()

    def stop(self) -> None:
        """Kill the steps that run, and begin no other."""
        self._stopped = True
        for process in [*self._processes.values()]:
            end_session(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the files."""
        self._results.close()
        self._log.close()

    # --- one step -------------------------------------------------------------------------------------------

    def _one(self, step: Step) -> None:
        left = self.left() - GRACE_SECONDS - 1.0
        seconds = min(step.seconds, left)
        if self._stopped or left < LEAST_SECONDS:
            print(f"{step.name:<40}     not begun: no time is left", flush=True)
            return
        began = time.monotonic()
        self._keep(event="begin", step=step.name)
        log = StepLog(self._log, self._lock, step.name)
        reader, writer = os.pipe()
        process = subprocess.Popen(
            [sys.executable, *step.command],
            cwd=ROOT,
            env=environment(seconds) | {RESULTS_FD: str(writer)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(writer,),
        )
        os.close(writer)
        self._processes[process.pid] = process
        if self._stopped:
            end_session(process.pid, signal.SIGKILL)
        assert process.stdout is not None
        found = Results(self, step.name)
        threads = [
            threading.Thread(target=read_lines, args=(process.stdout.fileno(), log.line), daemon=True),
            threading.Thread(target=read_lines, args=(reader, found.line), daemon=True),
        ]
        for thread in threads:
            thread.start()
        late = False
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = True
            end_session(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
        # Processes that the step started and did not wait for may hold its pipes open.
        end_session(process.pid, signal.SIGKILL)
        code = process.wait()
        for thread in threads:
            thread.join(GRACE_SECONDS)
        del self._processes[process.pid]
        process.stdout.close()
        os.close(reader)
        log.close()
        self._conclude(step, found, code, seconds, late, time.monotonic() - began, log.last)

    def _conclude(
        self, step: Step, found: Results, code: int, seconds: float, late: bool, took: float, last: deque[str]
    ) -> None:
        if self._stopped or (late and seconds < step.seconds):
            how = "stopped" if self._stopped else "no time was left"
            return self._ended(step, f"cut off after {took:.0f} s: {how}", took, unfinished=True)
        if late:
            why = f"did not end within its limit of {step.seconds:.0f} s"
            self.take(step.name, {"name": "time limit", "status": "failed", "why": why})
        elif code != 0 and not found.failed:
            how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
            why = f"{how}: {' | '.join(last)}"
            self.take(step.name, {"name": "exit", "status": "failed", "why": why})
        if found.dropped:
            why = f"{found.dropped} results were dropped: no JSON, or above {RESULT_BYTES} bytes in all"
            self.take(step.name, {"name": "results", "status": "failed", "why": why})
        self._ended(step, "time limit" if late else "ended", took, unfinished=False)

    def _ended(self, step: Step, how: str, took: float, *, unfinished: bool) -> None:
        self._keep(event="end", step=step.name, how=how, took=round(took, 1), unfinished=unfinished)
        failed = any(line.get("status") == "failed" for line in latest(self.lines) if line.get("step") == step.name)
        word = "FAILED" if failed else how if unfinished else "ok"
        print(f"{step.name:<40}{took:6.1f} s  {max(self.left(), 0):5.0f} s left  {word}", flush=True)

    def take(self, step: str, line: dict[str, Any]) -> None:
        """Keep a result, and print it if it is a failure."""
        self._keep(step=step, **line)
        if line["status"] == "failed":
            print(f"  {step}: {line['name']}: {line.get('why', '')[:200]}", flush=True)

    def _keep(self, **line: Any) -> None:
        with self._lock:
            self.lines.append(line)
            self._results.write(json.dumps(line) + "\n")
            self._results.flush()


class Results:
    """Receives the results of a step."""

    def __init__(self, runner: Runner, step: str) -> None:
        self._runner, self._step = runner, step
        self._size = self.dropped = self.failed = 0

    def line(self, text: bytes) -> None:
        """Keep a line that is a result; one that is not counts as dropped."""
        try:
            line = json.loads(text)
            good = isinstance(line, dict) and {"name", "status"} <= line.keys()
        except ValueError:
            good = False
        if not good or self._size + len(text) > RESULT_BYTES:
            self.dropped += 1
            return
        self._size += len(text)
        self.failed += line["status"] == "failed"
        self._runner.take(self._step, line)


def environment(seconds: float) -> dict[str, str]:
    """Return the environment of a step that may take `seconds`."""
    found = dict(os.environ)
    found["PYTHONPATH"] = os.pathsep.join([*paths(), *filter(None, [found.get("PYTHONPATH")])])
    found |= {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", DEADLINE: f"{time.time() + seconds:.1f}"}
    found.setdefault("OMP_NUM_THREADS", "1")
    return found


def read_lines(fd: int, take: Callable[[bytes], None]) -> None:
    """Call `take` with each line of a pipe until all writers have closed it; a line of `LINE_BYTES` is broken."""
    rest = b""
    while True:
        try:
            data = os.read(fd, 1 << 16)
        except OSError:  # closed by the runner, which waits no longer
            return
        if not data:
            break
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            take(line)
        while len(rest) > LINE_BYTES:
            take(rest[:LINE_BYTES])
            rest = rest[LINE_BYTES:]
    if rest:
        take(rest)


def end_session(leader: int, sign: signal.Signals) -> None:
    """Send a signal to every process of a session, whatever group it is in."""
    with suppress(ProcessLookupError):
        os.killpg(leader, sign)
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name in parentheses: state, parent, group, session.
            session = int(path.read_text().rpartition(")")[2].split()[3])
            if session == leader:
                os.kill(int(path.parent.name), sign)
        except (OSError, IndexError):  # it has ended meanwhile
            continue


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the lines of an earlier run; the last one may be cut short."""
    found: list[dict[str, Any]] = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found


def latest(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of each step's last attempt, and the lines that belong to no step."""
    found: list[dict[str, Any]] = []
    for line in lines:
        if line.get("event") == "begin":
            found = [each for each in found if each.get("step") != line["step"]]
        found.append(line)
    return found
