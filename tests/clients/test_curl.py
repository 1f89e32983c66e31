"""curl, as a page of documentation would have it."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed: run .ci/clients")


def curl(*arguments: str) -> str:
    done = subprocess.run(
        ["curl", "--silent", "--show-error", *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def test_a_completion(server: str) -> None:
    body = {"model": "shipped", "prompt": "def parse(", "max_tokens": 8, "temperature": 0}
    reply = json.loads(curl(f"{server}/v1/completions", "--json", json.dumps(body)))
    assert reply["usage"]["completion_tokens"] == 8
    streamed = curl("--no-buffer", f"{server}/v1/completions", "--json", json.dumps(body | {"stream": True}))
    events = streamed.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == reply["choices"][0]["text"]


def test_a_client_that_hangs_up_leaves_nothing_running(server: str) -> None:
    body = json.dumps(
        {"model": "shipped", "prompt": "def parse(", "max_tokens": 400, "ignore_eos": True, "stream": True}
    )
    with subprocess.Popen(
        ["curl", "--silent", "--no-buffer", f"{server}/v1/completions", "--json", body], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"data: ")
        process.kill()
    for _ in range(100):
        lines = curl(f"{server}/metrics").splitlines()
        if any(line.startswith("bateleur:num_requests_running") and line.endswith(" 0.0") for line in lines):
            break
    else:
        pytest.fail("the request still runs")
    assert any("request_success" in line and "abort" in line for line in lines)


def test_tokens_there_and_back(server: str) -> None:
    ids = json.loads(curl(f"{server}/tokenize", "--json", '{"prompt": "def parse(", "add_special_tokens": false}'))[
        "tokens"
    ]
    reply = json.loads(curl(f"{server}/detokenize", "--json", json.dumps({"tokens": ids})))
    assert reply["prompt"] == "def parse("


def test_the_rest_answers(server: str) -> None:
    assert curl("--output", "/dev/null", "--write-out", "%{http_code}", f"{server}/health") == "200"
    for path in ("health", "metrics", "version", "v1/models", ""):
        head = curl("--head", f"{server}/{path}")
        assert head.startswith("HTTP/1.1 200"), head
    assert json.loads(curl(f"{server}/version"))["version"]
    assert "/v2/models" in json.loads(curl(f"{server}/v2/models"))["error"]["message"]
