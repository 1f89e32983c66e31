"""What importing the package costs, in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys

_PROBE = """
import sys, time, json
import numpy, torch
before, start = set(sys.modules), time.perf_counter()
import bateleur.metadata
seconds = time.perf_counter() - start
new = sorted(set(sys.modules) - before)
print(json.dumps({"seconds": seconds, "new": new, "triton": "triton" in new}))
"""


def test_import_adds_little_to_torch_and_numpy() -> None:
    runs = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout))
    assert min(run["seconds"] for run in runs) < 0.1
    assert len(runs[0]["new"]) < 40, runs[0]["new"]
    assert not runs[0]["triton"]
    assert "bateleur.metadata.ops" not in runs[0]["new"], "operators are defined when a backend is asked for"
