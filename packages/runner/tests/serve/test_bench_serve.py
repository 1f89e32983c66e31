"""`bateleur bench serve` against a running server."""

import json
from pathlib import Path
from typing import Any

import pytest

from bateleur.runner.cli import main

SHORT = ["--num-prompts", "4", "--random-input-len", "12", "--random-output-len", "4", "--num-iters", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "conversations"])
def test_a_server_is_asked_as_requests_arrive(
    live_server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    output = tmp_path / "figures.json"
    call = ["bench", "serve", "--base-url", live_server, "--served-model-name", "bateleur", *SHORT]
    call += ["--request-rate", "50", "200", "--dataset-name", kind, "--output-json", str(output), "--json"]
    assert main(call) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(output.read_text())
    rows: list[dict[str, Any]] = printed["results"]
    assert [row["requests_per_s"] for row in rows] == [50, 200]
    for row in rows:
        figures = row["server"]
        assert 0 < figures["first_token_ms_p50"] <= figures["first_token_ms_p99"]
        assert figures["per_token_ms_p50"] > 0
        assert figures["tokens_per_s"] > 0
        assert (figures["cached_tokens"] > 0) == (kind == "conversations"), "what is shared is found"


def test_errors_of_the_server_are_shown(live_server: str, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["bench", "serve", "--base-url", live_server, "--served-model-name", "nobody", *SHORT]
    assert main(call) == 1
    assert "404: " in capsys.readouterr().err
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9", *SHORT]) == 1
    assert "http://127.0.0.1:9 does not answer /health" in capsys.readouterr().err
