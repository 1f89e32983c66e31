"""Libraries of agents hold a conversation with a tool: asked, called, answered."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "agents"
PYTHON = Path(__file__).parents[2] / ".agents" / "bin" / "python"
ANSWER = "It is 5 degrees."


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("use_*.py")), ids=lambda script: script.stem)
def test_a_tool_is_called_and_its_result_is_read(agent_server: str, script: Path) -> None:
    if not PYTHON.is_file():
        pytest.skip("libraries of agents are not installed: run .ci/clients")
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # litellm asks GitHub for prices
    done = subprocess.run(
        [PYTHON, script, agent_server], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.endswith(ANSWER)]
    assert len(lines) == done.stdout.count("\n") >= 3, done.stdout
