"""The engine on Triton's interpreter, which has to be chosen before Triton is imported: a process of its own."""

import os
import subprocess
import sys
from pathlib import Path


def test_the_engine_on_interpreted_kernels() -> None:
    path = Path(__file__).parent / "interpreted_engine.py"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", str(path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout
