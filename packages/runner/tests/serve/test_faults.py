"""Errors that clients get when the engine fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bateleur.runner import AsyncLLM
from bateleur.runner.serve.app import build_app

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def frail() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(device="cpu", max_model_len=128, max_num_seqs=2)
    yield llm
    asyncio.run(llm.close())


@pytest.fixture
def asking(client_of: Any, frail: AsyncLLM) -> Any:
    return client_of(build_app(frail))


def events(reply: Any) -> list[Any]:
    return [json.loads(event.removeprefix("data: ")) for event in reply.text.split("\n\n") if event]


def test_logits_that_are_not_numbers_fail_their_request(
    asking: Any, frail: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = frail.llm.engine.model
    logits = type(model).logits
    monkeypatch.setattr(type(model), "logits", lambda *args: torch.full_like(logits(*args), torch.nan))
    error = asking.error(500, PATH, {"prompt": "x"})
    assert error["message"] == "the model's logits are not numbers (NaN)"
    assert (error["type"], error["code"]) == ("server_error", "generation_failed")
    reply = asking.ask(PATH, {"prompt": "x", "stream": True})
    assert reply.status_code == 200
    assert events(reply) == [{"error": error}]
    assert asking.ask("/health").status_code == 200


def test_an_abort_of_a_request_that_ended_in_a_failed_step(
    asking: Any, frail: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its output is not taken yet when the abort comes; the next step returns it."""
    registry, aborted = frail.llm.engine.registry, list[str]()
    report = registry.report

    def failing(request: Any) -> None:
        report(request)
        if request.finish_reason is not None and not aborted:
            aborted.append(request.request_id)
            frail._thread.abort(aborted)
            raise OSError("the step failed")

    monkeypatch.setattr(registry, "report", failing)
    reply = asking.ask(PATH, {"prompt": "x", "max_tokens": 3, "ignore_eos": True})
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["finish_reason"] == "length"
    assert aborted
    assert asking.ask("/health").status_code == 200


def test_an_internal_error_hides_its_message(asking: Any, frail: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(prompts: Any, *args: Any, **options: Any) -> None:
        raise KeyError("a secret")

    monkeypatch.setattr(frail, "submit", broken)
    error = asking.error(500, PATH, {"prompt": "x"})
    assert (error["type"], error["message"]) == ("server_error", "an error inside the server: KeyError")


def test_a_dead_engine_fails_running_and_new_requests(
    asking: Any, frail: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> None:
        raise OSError("the device is gone")

    monkeypatch.setattr(frail.llm.engine, "step", gone)
    reply = asking.ask(PATH, {"prompt": "x", "stream": True})
    (told,) = events(reply)
    assert told["error"]["message"] == "the engine died of OSError: the device is gone"
    for path, body in (("/health", None), (PATH, {"prompt": "x"}), (PATH, {"prompt": "x", "stream": True})):
        error = asking.error(503, path, body)
        assert (error["code"], error["type"]) == ("engine_dead", "service_unavailable_error")
        assert error["message"] == "the engine died of OSError: the device is gone"
    assert asking.ask("/metrics").status_code == 200
