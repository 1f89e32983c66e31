"""A server in a process of its own, over a socket."""

from __future__ import annotations

import json

import httpx


def test_it_answers_over_a_socket(live_server: str) -> None:
    with httpx.Client(base_url=live_server) as client:
        assert client.get("/health").status_code == 200
        (model,) = client.get("/v1/models").json()["data"]
        assert model["id"] == "bateleur"
        body = {"prompt": "def f(", "max_tokens": 5, "temperature": 0}
        whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
            events = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert events.pop() == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == whole
