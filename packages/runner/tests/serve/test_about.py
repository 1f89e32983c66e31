"""Endpoints about the server, and tokenization endpoints."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest


def test_models_by_every_name(make_client: Callable[..., Any]) -> None:
    client = make_client(served_model_name=["eagle", "bird/of prey"])
    assert [model["id"] for model in client.ask("/v1/models").json()["data"]] == ["eagle", "bird/of prey"]
    model = client.ask("/v1/models/bird/of%20prey").json()
    assert (model["id"], model["object"], model["max_model_len"]) == ("bird/of prey", "model", 256)
    assert client.error(404, "/v1/models/bateleur")["code"] == "model_not_found"
    body = {"prompt": "x", "max_tokens": 1}
    assert client.ask("/v1/completions", body | {"model": "bird/of prey"}).json()["model"] == "eagle"


def test_health_version_and_page(client: Any) -> None:
    for path in ("/health", "/ping"):
        assert client.ask(path).status_code == 200
    assert client.ask("/version").json() == {"version": version("bateleur-runner")}
    page = client.ask("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_metrics_count_what_ran(client: Any) -> None:
    client.ask("/v1/completions", {"prompt": "x", "max_tokens": 2, "ignore_eos": True})
    reply = client.ask("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    told = reply.text.replace(',replica="only"', "")
    assert 'bateleur:num_requests_waiting{model_name="bateleur"} 0.0' in told
    assert "bateleur:generation_tokens_total" in reply.text


@pytest.mark.parametrize("text", ["def f(x):", "", "tab\tand \u00e9\u20ac\U0001f985"])
def test_ids_of_a_text_and_back(client: Any, text: str) -> None:
    bare = {"prompt": text, "add_special_tokens": False, "return_token_strs": True}
    told = client.ask("/tokenize", bare).json()
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["max_model_len"] == 256
    assert client.ask("/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": text}
    special = client.ask("/tokenize", {"prompt": text}).json()["tokens"]
    assert special == [0, *told["tokens"]]


def test_tokenizer_info(client: Any) -> None:
    info = client.ask("/tokenizer_info").json()
    assert info["eos_token"] == "<|endoftext|>"
    assert info["chat_template"] is None


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"prompt": "x", "colour": 1}, None),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [4096]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [10**400]}, "tokens"),
    ],
)
def test_what_is_refused(client: Any, path: str, body: dict[str, Any], param: str | None) -> None:
    assert client.error(400, path, body)["param"] == param


def test_bodies_are_described(make_client: Callable[..., Any]) -> None:
    client = make_client()
    assert "swagger" in client.ask("/docs").text
    paths = client.ask("/openapi.json").json()["paths"]

    def fields(path: str) -> dict[str, Any]:
        schema: dict[str, Any] = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        return schema["properties"]

    assert fields("/v1/chat/completions")["enable_thinking"]["type"] == "boolean"
    assert fields("/v1/chat/completions")["temperature"]["type"] == "number"
    assert "prompt" in fields("/v1/completions")
    assert "previous_response_id" in fields("/v1/responses")
    assert fields("/v1/messages").keys() > fields("/v1/messages/count_tokens").keys()
    bodies = {path for path, methods in paths.items() if "requestBody" in methods.get("post", {})}
    assert {path for path, methods in paths.items() if "post" in methods} - bodies == {
        "/ping",
        "/v1/responses/{response_id}/cancel",
    }
    assert {"/v1/models", "/health", "/tokenize", "/v1/responses/{response_id}/cancel"} <= paths.keys()
    silent = make_client(disable_fastapi_docs=True)
    assert [silent.ask(path).status_code for path in ("/docs", "/openapi.json")] == [404, 404]
