"""`/v1/completions`: whole and streamed replies."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from scripted_model import marker

PATH = "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


def test_a_reply_is_one_of_openais(client: Any) -> None:
    reply = client.ask(PATH, {"model": "bateleur", "prompt": "def f(", **GREEDY}).json()
    assert reply["object"] == "text_completion"
    assert reply["id"].startswith("cmpl-")
    assert reply["model"] == "bateleur"
    (choice,) = reply["choices"]
    assert choice["index"] == 0
    assert choice["finish_reason"] == "length"
    assert choice["text"]
    usage = reply["usage"]
    assert usage["completion_tokens"] == 6
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6
    assert usage["prompt_tokens_details"].keys() == {"cached_tokens"}


def test_a_reply_is_called_what_its_request_is(client: Any) -> None:
    """Afterwards the name is free again."""
    for _ in range(2):
        reply = client.ask(PATH, {"prompt": "def f(", "request_id": "mine-7", **GREEDY}).json()
        assert reply["id"] == "cmpl-mine-7"
    (last,) = {each["id"] for each in client.stream(PATH, {"prompt": "x", "request_id": "y", **GREEDY})}
    assert last == "cmpl-y"


def test_parts_join_to_the_whole(client: Any) -> None:
    body = {"prompt": ["def f(", [290, 295, 8]], "return_token_ids": True, **GREEDY}
    whole = client.ask(PATH, body).json()
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = client.stream(PATH, body | {"stream_options": options})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12
    assert last["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    written = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert written == sorted(written)
    assert written[-1] == 12
    for index, expected in enumerate(whole["choices"]):
        parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        for name in ("token_ids", "token_texts", "drafted"):
            assert [each for part in parts for each in part[name]] == expected[name], name
        assert "".join(part["text"] for part in parts) == expected["text"]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == expected["finish_reason"]
        assert ["prompt_token_ids" in part for part in parts] == [True] + [False] * (len(parts) - 1)


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"stop": ["\n    never"]}])
def test_log_probabilities_have_the_places_of_the_text(client: Any, more: dict[str, Any]) -> None:
    body = {"prompt": "def f(x):", "logprobs": 2, **GREEDY, **more}
    (choice,) = client.ask(PATH, body).json()["choices"]
    parts = [each["choices"][0] for each in client.stream(PATH, body)]
    told = choice["logprobs"]
    # The first token of an echo has no text.
    assert "".join(told["tokens"]).endswith(choice["text"])
    for name in ("tokens", "text_offset"):
        assert [each for part in parts for each in part["logprobs"][name]] == told[name]
    joined = [each or 0 for part in parts for each in part["logprobs"]["token_logprobs"]]
    assert joined == pytest.approx([each or 0 for each in told["token_logprobs"]], abs=1e-4)
    assert told["text_offset"][0] == 0


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_log_probabilities_of_named_tokens(make_client: Callable[..., Any], path: str) -> None:
    """They replace the most likely ones, also with drafts and next to other requests."""
    client = make_client(max_logprobs=-1, chat_template="{{ messages[0].content }}")
    chat = {"messages": [{"role": "user", "content": "def f(x):"}], "logprobs": True}
    body = GREEDY | {"return_tokens_as_token_ids": True} | ({"prompt": "def f(x):"} if path == PATH else chat)
    count = "logprobs" if path == PATH else "top_logprobs"

    def positions(reply: Any) -> list[tuple[str, dict[str, float]]]:
        told = reply["choices"][0]["logprobs"]
        if path == PATH:
            return list(zip(told["tokens"], told["top_logprobs"], strict=True))
        tops = [{top["token"]: top["logprob"] for top in each["top_logprobs"]} for each in told["content"]]
        return [(each["token"], top) for each, top in zip(told["content"], tops, strict=True)]

    everything = client.ask(path, body | {count: -1}).json()
    reply = client.ask(path, body | {"logprob_token_ids": [7, 300, 7], count: 1}).json()
    for (token, known), (drawn, named) in zip(positions(everything), positions(reply), strict=True):
        assert drawn == token
        assert named == pytest.approx({name: known[name] for name in ("token_id:7", "token_id:300", token)})
    assert client.error(400, path, body | {"logprob_token_ids": [99999]})["param"] == "logprob_token_ids"
    few = make_client(max_logprobs=1).error(400, PATH, {"prompt": "x", "logprob_token_ids": [1, 2]})
    assert few["param"] == "logprob_token_ids"


def test_usage_has_cached_tokens(client: Any) -> None:
    body = {"prompt": list(range(100, 180)), **GREEDY}
    client.ask(PATH, body)
    assert client.ask(PATH, body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64


def test_what_is_refused_names_its_field(client: Any) -> None:
    cases: list[tuple[dict[str, Any], str | None, str]] = [
        ({}, "prompt", "prompt is absent; it must be text, token ids, or a list of these"),
        ({"prompt": ""}, "prompt", "prompt is empty; at least one token is needed"),
        ({"prompt": "x", "temperature": -1}, "temperature", "temperature is -1; it must be a finite number >= 0"),
        ({"prompt": [1, 99999]}, "prompt", "prompt[1] is 99999; it must be a token id, "),
        ({"prompt": "x" * 50_000}, "prompt", "prompt has 50000 characters, in tokens of at most "),
        ({"prompt": ["x"] * 99}, None, "99 sequences are asked for at once; "),
        ({"prompt": ["x"] * 2000}, "prompt", "prompt has 2000 entries for n = 1 answers each; "),
        ({"prompt": [1] * 256}, "prompt", "prompt has 256 tokens; this model's maximum context length is 256 tokens"),
        ({"prompt": "x", "logprobs": 21}, "logprobs", "logprobs is 21; it must be at most max_logprobs = 20"),
    ]
    for body, param, message in cases:
        error = client.error(400, PATH, body)
        assert error["param"] == param
        assert error["message"].startswith(message)
        assert error["type"] == "invalid_request_error"


def test_parameters_that_leave_no_token_are_the_clients_mistake(client: Any) -> None:
    body = {"prompt": "x", "allowed_token_ids": [5], "structured_outputs": {"choice": ["yes"]}}
    error = client.error(400, PATH, body)
    assert error["message"] == "no token is left that the request's own parameters allow"
    (event, end) = client.ask(PATH, body | {"stream": True}).text.split("\n\n")
    assert (json.loads(event.removeprefix("data: ")), end) == ({"error": error}, "")


def test_another_model_is_not_found(client: Any) -> None:
    error = client.error(404, PATH, {"prompt": "x", "model": "gpt-5"})
    assert (error["param"], error["code"]) == ("model", "model_not_found")


def parts_of(client: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a streamed choice."""
    return [each["choices"][0] for each in client.stream(PATH, body)]


def test_names_of_tokens_do_not_change_text_offsets(client: Any) -> None:
    body = {"prompt": "def f(x):", "logprobs": 1, **GREEDY}
    (choice,) = client.ask(PATH, body).json()["choices"]
    for parts in (parts_of(client, body), parts_of(client, body | {"return_tokens_as_token_ids": True})):
        assert [at for part in parts for at in part["logprobs"]["text_offset"]] == choice["logprobs"]["text_offset"]


@pytest.mark.parametrize(("text", "stop"), [("accents", None), ("default", "Hello hello.!")])
def test_a_stream_has_prompt_logprobs_if_its_text_begins_late(scripted: Any, text: str, stop: str | None) -> None:
    """The first token has no text: it is a part of a character, or it may begin a stop string."""
    body = {"prompt": marker(text), "stop": stop, "prompt_logprobs": 0, "max_tokens": 20}
    (choice,) = scripted.ask(PATH, body).json()["choices"]
    first, *later = parts_of(scripted, body)
    assert len(first["prompt_logprobs"]) == 2
    assert first["prompt_logprobs"] == choice["prompt_logprobs"]
    assert all("prompt_logprobs" not in part for part in later)


@pytest.mark.parametrize(
    ("prompt", "more", "echoed", "offsets"),
    [
        ("abcd", {"truncate_prompt_tokens": 4}, "cd", [0, 1, 2]),
        ("abcd", {"truncate_prompt_tokens": 6}, "abcd", [0, 1, 2, 3, 4]),
        ("abcd", {"truncate_prompt_tokens": 99}, "abcd", [0, 1, 2, 3, 4]),
        ("x\u00e9", {"truncate_prompt_tokens": 3}, "\ufffd", [0, 1]),
        ("\u00e9x", {}, "\u00e9x", [0, 0, 1, 2]),
        ("ab", {"logprobs": None, "logprob_token_ids": [5]}, "ab", [0, 1, 2]),
    ],
)
def test_text_tokens_and_offsets_of_an_echo_agree(
    scripted: Any, prompt: str, more: dict[str, Any], echoed: str, offsets: list[int]
) -> None:
    """A truncated prompt is echoed as far as it is kept. A character of several tokens belongs to the last one."""
    body = {"prompt": prompt + marker("default"), "max_tokens": 2, "echo": True, "logprobs": 0} | more
    for choice in (scripted.ask(PATH, body).json()["choices"][0], parts_of(scripted, body)[0]):
        assert choice["text"].startswith(echoed + marker("default") + "Hell")
        assert choice["logprobs"]["text_offset"][: len(offsets)] == offsets
        assert choice["logprobs"]["tokens"][len(offsets) - 1] == "<|im_start|>"


def test_offsets_of_an_echo_leave_out_a_token_that_is_not_in_the_text(client: Any) -> None:
    body = {"prompt": "def f(", "echo": True, "logprobs": 0, "max_tokens": 1, "temperature": 0}
    (choice,) = client.ask(PATH, body).json()["choices"]
    told = choice["logprobs"]
    assert told["tokens"][:3] == ["<|endoftext|>", "def", " f"]
    assert told["text_offset"][:3] == [0, 0, 3]
    ids = client.ask("/tokenize", {"prompt": "def f("}).json()["tokens"]
    (choice,) = client.ask(PATH, body | {"prompt": ids}).json()["choices"]
    assert choice["text"].startswith("<|endoftext|>def f(")
    assert choice["logprobs"]["text_offset"][:3] == [0, 13, 16]


def test_an_echo_has_requested_prompt_logprobs_too(scripted: Any) -> None:
    body = {"prompt": marker("default"), "echo": True, "logprobs": 0, "max_tokens": 0, "prompt_logprobs": 1}
    (choice,) = scripted.ask(PATH, body).json()["choices"]
    assert len(choice["prompt_logprobs"]) == 2
    assert [len(each) for each in choice["logprobs"]["top_logprobs"][1:]] == [1]
