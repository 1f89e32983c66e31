"""The first `bateleur generate` on a machine: compilation is announced, cached, and no part of the printed rate."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bateleur.metadata import native

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native.unavailable_reason() is not None, reason=str(native.unavailable_reason())),
]
SCRIPT = """
import sys
from bateleur.metadata import native
from bateleur.runner.cli import console, main

compiled, end_step = native._compiled, console.DecodeRate.end_step

def report(source):
    console.print_status(f"loads {source.name}")
    return compiled(source)

def report_first(rate):
    had = rate._num_first_tokens
    end_step(rate)
    if rate._num_first_tokens and not had:
        console.print_status("first token")

native._compiled, console.DecodeRate.end_step = report, report_first
sys.exit(main(sys.argv[1:]))
"""
ANNOUNCED = "bateleur: compiling CPU kernels once, about 7 s"


def generate(home: Path, *options: str) -> list[str]:
    """Run `bateleur generate` with an empty or a filled cache in `home`; return the lines on stderr."""
    call = [sys.executable, "-c", SCRIPT, "generate", "def f(x):", "--max-tokens", "40", "--ignore-eos", *options]
    done = subprocess.run(call, env=os.environ | {"HOME": str(home)}, capture_output=True, text=True, check=True)
    return done.stderr.splitlines()


@pytest.mark.parametrize("draft", ["auto", "none"])
def test_kernels_are_compiled_before_the_first_token(tmp_path: Path, draft: str) -> None:
    options = ("--device", "cpu", "--max-model-len", "128", "--draft", draft)
    first, second = generate(tmp_path, *options), generate(tmp_path, *options)
    assert first.count(ANNOUNCED) == 1
    assert ANNOUNCED not in second
    loads = [index for index, line in enumerate(first) if line.startswith("bateleur: loads ")]
    assert first.index(ANNOUNCED) < loads[1]
    assert max(loads) < first.index("bateleur: first token")
