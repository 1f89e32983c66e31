"""How the command begins and ends, as a shell sees it: streams, signals, exit codes, and what is imported when."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FAKE = str(Path(__file__).parent / "fake_llm.py")
ENV = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
"""So that stdout has a buffer, as it has for a user."""
NO_TORCH = "import sys; sys.modules['torch'] = None; from bateleur.runner.cli import main; sys.exit(main())"
"""The command where any import of torch fails."""
SERVES = pytest.mark.skipif(
    find_spec("prometheus_client") is None, reason="the extra serve is not installed, which is said first"
)


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, env=ENV)


@pytest.mark.parametrize(
    ("call", "code", "said"),
    [
        (["--help"], 0, "explain-acceptance"),
        (["--version"], 0, "bateleur 0."),
        *(([command, "--help"], 0, "usage:") for command in ("generate", "serve", "info", "explain-acceptance")),
        (["generate"], 2, "give either a prompt or --prompt-file"),
        (["generate", "x", "--temperature", "-1"], 2, "temperature"),
        (["serve", "--port", "70000"], 2, "port is 70000; it must be an integer in [0, 65535]"),
        pytest.param(["serve", "--host", "no.such.host.invalid"], 2, "no.such.host.invalid:8000", marks=SERVES),
        pytest.param(
            ["serve", "--ssl-keyfile", "/nowhere", "--ssl-certfile", "/x"], 2, "ssl_keyfile is '/nowhere'", marks=SERVES
        ),
        (["serve", "--num-speculative-tokens", "-1"], 2, "num_speculative_tokens is -1"),
        (["generate", "--prompt-file", "/nowhere.jsonl"], 2, "/nowhere.jsonl"),
        (["generate", "--prompt-file", "/dev/null", "--output", "/nowhere/x"], 2, "/nowhere/x"),
    ],
)
def test_what_needs_no_model_needs_no_torch(call: list[str], code: int, said: str) -> None:
    done = run(["-c", NO_TORCH, *call])
    assert done.returncode == code
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "call", [["generate", "x"], pytest.param(["serve", "--port", "0"], marks=SERVES), ["info"], ["explain-acceptance"]]
)
def test_a_line_of_progress_comes_before_torch(call: list[str]) -> None:
    done = run(["-c", NO_TORCH, *call])
    assert done.stderr.startswith("bateleur: loading torch\n")
    assert "import of torch halted" in done.stderr
    assert done.stdout == ""


def test_the_package_is_the_command() -> None:
    done = run(["-m", "bateleur.runner", "--version"])
    assert done.stdout == "bateleur 0.1.0\n"


def test_stdout_carries_the_text_alone() -> None:
    done = run([FAKE, "generate", "x = ", "--max-tokens", "3"])
    assert done.stdout == "x = xxx\n"
    assert re.fullmatch(r"bateleur: 3 tokens, [\d.]+ tokens/s, 1.00 tokens per step\n", done.stderr)


def test_stdout_in_another_encoding_loses_nothing() -> None:
    done = subprocess.run(
        [sys.executable, FAKE, "generate", "\u20ac\u00e9", "--max-tokens", "1"],
        capture_output=True,
        env={**ENV, "PYTHONIOENCODING": "latin-1"},
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout == b"\\u20ac\xe9\\u20ac\n"


@pytest.mark.parametrize("call", [["x", "--max-tokens", "1000000"], ["--prompt-file", "-"]])
def test_a_closed_pipe_ends_it_quietly(call: list[str]) -> None:
    lines = "\n".join(json.dumps({"prompt": "x", "max_tokens": 1}) for _ in range(1000)).encode()
    with subprocess.Popen(
        [sys.executable, FAKE, "generate", *call],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENV,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(lines)
        process.stdin.close()
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("call", [["generate", "x"], ["generate", "--prompt-file", "-"], ["--version"]])
def test_a_full_disk_behind_stdout_is_told_in_one_line(call: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, FAKE, *call],
            input=b'{"prompt": "x"}',
            env=ENV,
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == b"bateleur: [Errno 28] No space left on device: 'stdout'\n"


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(tmp_path: Path) -> None:
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text('{"prompt": "a", "max_tokens": 1}\n{"prompt": "hang"}\n')
    call = [sys.executable, FAKE, "generate", "--prompt-file", str(requests), "--output", str(results)]
    said = []
    with subprocess.Popen(call, stderr=subprocess.PIPE, text=True, env=ENV) as process:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if line == "waiting\n":
                process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    hint = f"bateleur: interrupted; 1 of 2 requests have ended; the same command resumes from {results}\n"
    assert said[-1] == hint
    assert [json.loads(line)["prompt"] for line in results.read_text().splitlines()] == ["a"]
