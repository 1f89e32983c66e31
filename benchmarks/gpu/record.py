"""Results of one step: JSON lines that the runner collects.

A line has `name`, `status` ("ok", "failed", "skipped" or "figure"), `why` if the status needs a reason, `key` if the
line belongs in the summary's key figures, and `facts`: numbers and texts by name.
"""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any, TextIO

RESULTS_FD = "BATELEUR_GPU_RESULTS_FD"
"""Environment variable with the file descriptor that a step writes its results to. Without it they go to stdout."""
DEADLINE = "BATELEUR_GPU_DEADLINE"
"""Environment variable with the time at which a step is ended, in seconds of `time.time()`."""
DIGITS = 6
"""Significant digits of a number in a result."""


class Record:
    """Writes results of a step to `stream`, one JSON object a line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @classmethod
    def to_runner(cls) -> Record:
        """Return a record that writes to the runner."""
        fd = os.environ.get(RESULTS_FD)
        return cls(sys.stdout if fd is None else os.fdopen(int(fd), "w", buffering=1, closefd=False))

    def figure(self, name: str, *, key: bool = False, **facts: Any) -> None:
        """Write a measurement. `key`: show it among the summary's key figures."""
        self._write(name, "figure", key=key, facts=facts)

    def check(self, name: str, ok: bool, why: str = "", *, key: bool = False, **facts: Any) -> None:
        """Write whether something holds, and if it does not, why."""
        self._write(name, "ok" if ok else "failed", why="" if ok else why, key=key, facts=facts)

    def skip(self, name: str, why: str) -> None:
        """Write that something did not run, and the reason."""
        self._write(name, "skipped", why=why)

    def _write(
        self, name: str, status: str, why: str = "", key: bool = False, facts: dict[str, Any] | None = None
    ) -> None:
        line: dict[str, Any] = {"name": name, "status": status}
        if why:
            line["why"] = why[:600]
        if key:
            line["key"] = True
        if facts:
            line["facts"] = plain(facts)
        self._stream.write(json.dumps(line) + "\n")
        self._stream.flush()


def plain(value: Any) -> Any:
    """Return `value` as JSON can hold it: numbers with `DIGITS` digits, and NaN and infinities as text."""
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(value)
    return value if isinstance(value, bool | int | str) or value is None else str(value)
