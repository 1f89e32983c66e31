"""Runs parts of a benchmark in their own processes, so that a failing part does not stop the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run(command: list[str], log: Path, seconds: float) -> str:
    """Run a command and return "ok", or how it failed."""
    with log.open("w") as file:
        try:
            line = [sys.executable, *command]
            code = subprocess.run(
                line, stdout=file, stderr=subprocess.STDOUT, check=False, timeout=max(seconds, 0.0)
            ).returncode
        except subprocess.TimeoutExpired:
            return f"cut off after {seconds:.0f} s"
    return "ok" if code == 0 else f"exit {code}"
