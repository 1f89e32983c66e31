"""A live server on the loopback address, with the shipped model and its draft head."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

OPTIONS = (
    *("--port", "0", "--device", "cpu", "--dtype", "float32"),
    *("--max-model-len", "512", "--max-num-seqs", "8", "--draft", "auto", "--enable-prefix-caching"),
    *("--served-model-name", "shipped"),
)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address, such as http://127.0.0.1:40123. It must end with status 0."""
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as errors:
        command = [sys.executable, "-m", "bateleur.runner", "serve", *OPTIONS]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "http://" in line, (line, log.read_text())
    yield line[line.index("http://") :].split()[0].rstrip("/")
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 0, log.read_text()


@pytest.fixture(scope="session")
def clients() -> Path:
    """The environment with clients that `.ci/clients` makes."""
    folder = Path(__file__).parents[2] / ".clients" / "bin"
    if not (folder / "lm_eval").is_file():
        pytest.skip("lm-eval is not installed: run .ci/clients")
    return folder
