"""What docs/serving.md shows runs as printed, against a live server."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
HOST = "http://127.0.0.1:8000"


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
def test_python_runs(server: str, block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block.replace(HOST, server), "serving.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed: run .ci/clients")
@pytest.mark.parametrize("line", re.findall(r"```console\n(.*?)\n```", PAGE, re.DOTALL))
def test_commands_answer(server: str, line: str) -> None:
    done = subprocess.run(shlex.split(line.replace(HOST, server)), capture_output=True, check=True, timeout=60)
    reply = json.loads(done.stdout)
    if "error" in reply:
        shown = re.search(r"^    (\{\"error\".*?\}\})$", PAGE, re.DOTALL | re.MULTILINE)
        assert shown is not None
        assert reply == json.loads(shown[1])
    else:
        assert reply["choices"][0]["text"]
