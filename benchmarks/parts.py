"""Parts of a long run, each in a process of its own, so that one that fails leaves the others their time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run(command: list[str], log: Path, seconds: float) -> str:
    """How a part ended: "ok", or what is to be told of it."""
    with log.open("w") as file:
        try:
            line = [sys.executable, *command]
            code = subprocess.run(
                line, stdout=file, stderr=subprocess.STDOUT, check=False, timeout=max(seconds, 0.0)
            ).returncode
        except subprocess.TimeoutExpired:
            return f"cut off after {seconds:.0f} s"
    return "ok" if code == 0 else f"exit {code}"
