"""A live server on the loopback address, with the shipped model and its draft head."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bateleur.runner.assets import shipped_draft, shipped_model
from scripted_model import CHAT, write_scripted_model

OPTIONS = (
    *("--port", "0", "--device", "cpu", "--dtype", "float32", "--num-threads", "1"),
    *("--max-model-len", "512", "--max-num-seqs", "8", "--draft", str(shipped_draft()), "--enable-prefix-caching"),
    *("--served-model-name", "shipped"),
)
TEMPLATE = """{% for tool in tools or [] %}# tool: {{ tool["function"]["name"] }}
{% endfor %}{% for message in messages %}# {{ message["role"] }}: {{ message["content"] }}
{% endfor %}{% if add_generation_prompt %}# assistant: {% endif %}"""


ONE_SYSTEM_MESSAGE = (
    "{% if messages | selectattr('role', 'equalto', 'system') | list | length > 1 %}"
    "{{ raise_exception('one system message') }}{% endif %}"
)


@contextmanager
def serving(log: Path, *options: str) -> Iterator[str]:
    """A server in a process of its own, and its address, such as http://127.0.0.1:40123; it must end with status 0."""
    with log.open("w") as errors:
        command = [sys.executable, "-m", "bateleur.runner", "serve", *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "http://" in line, (line, log.read_text())
    yield line[line.index("http://") :].split()[0].rstrip("/")
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 0, log.read_text()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the shipped model."""
    with serving(tmp_path_factory.mktemp("server") / "log", *OPTIONS) as url:
        yield url


@pytest.fixture(scope="session")
def chat_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the same with a chat template, whose calls of tools are written as Hermes writes them."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(shipped_model(), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    parsers = ("--tool-call-parser", "hermes", "--enable-auto-tool-choice")
    with serving(folder.parent / "log", str(folder), *OPTIONS, *parsers) as url:
        yield url


@pytest.fixture(scope="session")
def agent_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a model that calls a tool and then answers; its template takes one system message."""
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    turns = [f"<think>\nI look.\n</think>\n\n{call}", "<think>\nGood.\n</think>\n\nIt is 5 degrees."]
    report, compact = '{"city": "Oslo", "degrees": 5}', '{"city":"Oslo","degrees":5}'
    folder = tmp_path_factory.mktemp("agents")
    thought = "<think>\nI look.\n</think>\n\n"
    forced = [
        f'{thought}[{{"name":"weather","arguments":{{"city":"Oslo"}}}}]',
        f'{thought}[{{"name":"final_result","arguments":{compact}}}]',
    ]
    texts: dict[str, Any] = {"weather": turns, "report": report, "default": "Hello."}
    texts |= {"study": [turns[0], f"{thought}{report}"], "forced": forced}
    write_scripted_model(folder / "model", texts, chat_template=ONE_SYSTEM_MESSAGE + CHAT)
    options = ("--port", "0", "--device", "cpu", "--num-threads", "1", "--max-num-seqs", "8")
    named = ("--served-model-name", "scripted", "--tool-call-parser", "hermes")
    with serving(folder / "log", str(folder / "model"), *options, *named) as url:
        yield url


@pytest.fixture(scope="session")
def clients() -> Path:
    """The environment with clients that `.ci/clients` makes."""
    folder = Path(__file__).parents[2] / ".clients" / "bin"
    if not (folder / "lm_eval").is_file():
        pytest.skip("lm-eval is not installed: run .ci/clients")
    return folder
