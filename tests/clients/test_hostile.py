"""What nobody should send, each a line of one table: an error in OpenAI's form, and a server that goes on."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

GOOD = {"model": "shipped", "prompt": "def parse(", "max_tokens": 3, "temperature": 0}
MANY = [f"stop number {i}" for i in range(10_000)]
LOOP = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
DEEP: Any = {"type": "string"}
for _ in range(300):
    DEEP = {"type": "object", "properties": {"x": DEEP}, "required": ["x"]}

WRONG_FIELDS: list[tuple[str, Any]] = [
    *(("model", value) for value in (5, [], {}, True)),
    *(("prompt", value) for value in (None, {}, [], "", 5, True, [[]], [1, "a"], ["a", 1], [-1], [10**9], [1.5])),
    *(("prompt", value) for value in ([True], [[[1]]], [None], {"prompt": "x"}, "x" * 100_000, [5] * 100_000)),
    *(("max_tokens", value) for value in (-1, 0, "5", 1.5, True, [])),
    *(("temperature", value) for value in (-1, "hot", [], True, 10**400)),
    *(("top_p", value) for value in (0, -1, 1.1, "x", {})),
    *(("top_k", value) for value in (-2, 1.5, "x")),
    *(("min_p", value) for value in (-0.1, 2)),
    *(("n", value) for value in (0, -1, 10**6, "2", 1.5)),
    *(("seed", value) for value in (2**64, "x", 1.5)),
    *(("stop", value) for value in (5, [5], [None], {}, MANY, "x" * 1_000_000)),
    *(("stop_token_ids", value) for value in (5, [-1], ["a"], [10**9])),
    *(("logprobs", value) for value in (-1, 21, 10**6, "x", 1.5)),
    *(("prompt_logprobs", value) for value in (-1, 21, "x")),
    *(("logit_bias", value) for value in ([], {"x": 1}, {"99999999": 1}, {"5": "a"}, {"5": 1e9}, 5)),
    *(("allowed_token_ids", value) for value in ([], [-1], [10**9], "a", 5)),
    *(("bad_words", value) for value in ([""], 5, [5], {})),
    *(("stream", value) for value in ("yes", 1, [])),
    *(("stream_options", value) for value in (5, {"include_usage": "x"}, {"unknown": 1}, {"include_usage": True})),
    *(("echo", value) for value in ("x", 1)),
    *(("presence_penalty", value) for value in (5, "x")),
    *(("frequency_penalty", value) for value in (-5, [])),
    *(("repetition_penalty", value) for value in (0, -1, "x")),
    *(("min_tokens", value) for value in (-1, 4, "x")),
    *(("priority", value) for value in ("x", 1.5)),
    *(("truncate_prompt_tokens", value) for value in (0, -5, "x")),
    *(("best_of", 3), ("suffix", "x"), ("use_beam_search", True)),
    *(("response_format", value) for value in (5, {}, {"type": "nonsense"}, {"type": "json_schema"})),
    *(("response_format", {"type": "json_schema", "json_schema": {"schema": s}}) for s in (5, {"type": 5}, LOOP, DEEP)),
    *(
        ("structured_outputs", value)
        for value in (5, {}, {"regex": "("}, {"regex": 5}, {"choice": []}, {"choice": [5]})
    ),
    *(
        ("structured_outputs", value)
        for value in ({"grammar": "nonsense ::"}, {"json": "{"}, {"regex": "a", "choice": ["a"]})
    ),
]

ODD_BUT_RIGHT: list[tuple[str, Any]] = [
    ("prompt", "\x00\x01\x1b[31m\u202e\ufeff"),
    ("prompt", "\U0001f600" * 20),
    ("prompt", ["a", "b"]),
    ("seed", -(2**63)),
    ("logit_bias", {}),
    ("stop", []),
    ("prompt", [[1], "a"]),
    ("user", "somebody"),
    ("structured_outputs", {"regex": "(a+)+b{0,50}"}),
    ("structured_outputs", {"choice": [f"word {i}" for i in range(1000)]}),
]

BODIES: list[tuple[str, bytes]] = [
    ("nothing", b""),
    ("half an object", b'{"model": "shipped"'),
    ("null", b"null"),
    ("a list", b"[]"),
    ("a number", b"5"),
    ("a text", b'"prompt"'),
    ("two objects", b"{}{}"),
    ("brackets without end", b"[" * 100_000),
    ("objects without end", b'{"a":' * 100_000),
    ("deep and closed", b"[" * 50_000 + b"]" * 50_000),
    ("NaN", b'{"model": "shipped", "prompt": "x", "temperature": NaN}'),
    ("Infinity", b'{"model": "shipped", "prompt": "x", "temperature": -Infinity}'),
    ("a float too large", b'{"model": "shipped", "prompt": "x", "temperature": 1e999}'),
    ("an integer of 100,000 digits", b'{"model": "shipped", "prompt": "x", "seed": ' + b"9" * 100_000 + b"}"),
    ("no UTF-8", b'{"model": "shipped", "prompt": "\xff\xfe"}'),
    ("UTF-16", '{"model": "shipped", "prompt": "x"}'.encode("utf-16")),
    ("half a surrogate pair", b'{"model": "shipped", "prompt": "\\ud800"}'),
    ("a raw control character", b'{"model": "shipped", "prompt": "\x01"}'),
    ("comments", b'{"model": "shipped" /* what */, "prompt": "x"}'),
    ("single quotes", b"{'model': 'shipped', 'prompt': 'x'}"),
    ("a form", b"model=shipped&prompt=x"),
]


class Talk:
    """One connection, used for many requests."""

    def __init__(self, url: str) -> None:
        self.address = urlsplit(url)
        assert self.address.hostname is not None
        self._http = http.client.HTTPConnection(self.address.hostname, self.address.port, timeout=60)

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
        """Status and JSON of the reply."""
        headers = {"Content-Type": "application/json"} | {name.replace("_", "-"): v for name, v in headers.items()}
        try:
            self._http.request(method, path, body, headers)
            reply = self._http.getresponse()
            return reply.status, json.loads(reply.read() or b"null")
        finally:
            self._http.close()

    def complete(self, **fields: Any) -> tuple[int, Any]:
        return self.ask("POST", "/v1/completions", json.dumps(GOOD | fields).encode())


@pytest.fixture(scope="module")
def talk(server: str) -> Iterator[Talk]:
    """The server, which at the end gives the tokens that it gave at the beginning."""
    talk = Talk(server)
    status, before = talk.complete()
    assert status == 200
    yield talk
    assert talk.ask("GET", "/health")[0] == 200
    assert talk.complete()[1]["choices"] == before["choices"]


def said(reply: Any) -> str:
    """The message of an error in OpenAI's form."""
    assert set(reply) == {"error"}, reply
    assert {"message", "type", "param", "code"} <= set(reply["error"]), reply
    message = reply["error"]["message"]
    assert isinstance(message, str)
    assert message
    assert len(message) < 2_000, "an error does not repeat all that was sent"
    assert "Traceback" not in message
    return message


def name_of(case: tuple[str, Any]) -> str:
    shown = str(case[1])
    return f"{case[0]}={shown if len(shown) < 40 else f'{shown[:30]}... ({len(shown)})'}"


@pytest.mark.parametrize(("field", "value"), WRONG_FIELDS, ids=map(name_of, WRONG_FIELDS))
def test_a_wrong_field_is_named(talk: Talk, field: str, value: Any) -> None:
    status, reply = talk.complete(**{field: value})
    message = said(reply)
    assert status == (404 if field == "model" and isinstance(value, str) else 400), message
    named = (field, "structured_outputs") if field == "response_format" else (field,)
    assert any(each in message for each in named), message
    assert (reply["error"]["param"] or field).startswith(named), reply


@pytest.mark.parametrize(("field", "value"), ODD_BUT_RIGHT, ids=map(name_of, ODD_BUT_RIGHT))
def test_what_is_odd_but_right_is_answered(talk: Talk, field: str, value: Any) -> None:
    status, reply = talk.complete(**{field: value})
    assert status == 200, reply
    assert reply["choices"]


@pytest.mark.parametrize(("name", "body"), BODIES, ids=[name for name, _ in BODIES])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_body_that_is_no_request_is_refused(talk: Talk, path: str, name: str, body: bytes) -> None:
    status, reply = talk.ask("POST", path, body)
    said(reply)
    assert status == 400, reply


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("GET", "/nothing/here", 404),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/%2e%2e/%2e%2e/etc/passwd", 404),
        ("GET", "/v1/models/another", 404),
        ("GET", "/v1/models/%00", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/" + "x" * 20_000, 404),
    ],
)
def test_a_place_that_is_not_there(talk: Talk, method: str, path: str, status: int) -> None:
    found, reply = talk.ask(method, path)
    said(reply)
    assert found == status


def test_a_body_that_is_too_long_is_refused_before_it_is_read(talk: Talk) -> None:
    status, reply = talk.ask("POST", "/v1/completions", b'{"prompt": "' + b"x" * 17 * 2**20 + b'"}')
    assert "max_body_bytes" in said(reply)
    assert status == 413


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
RAW: list[tuple[str, bytes, bytes]] = [
    ("garbage", b"\x00\x01\x02\r\n\r\n", b"400"),
    ("a TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\r\n\r\n", b"400"),
    ("no HTTP", b"HELLO\r\n\r\n", b"400"),
    ("a negative length", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", b"400"),
    ("a length that is none", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n", b"400"),
    (
        "two lengths",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"400",
    ),
    (
        "a chunk that is none",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"400",
    ),
    ("a head without end", b"GET / HTTP/1.1\r\n" + b"X-Many: " + b"y" * 300_000, b"4"),
    ("a length of 10 GB", HEAD + b"Content-Length: 10000000000\r\n\r\n{", b"413"),
]


@pytest.mark.parametrize(("name", "sent", "status"), RAW, ids=[name for name, _, _ in RAW])
def test_what_is_no_http_is_refused(talk: Talk, name: str, sent: bytes, status: bytes) -> None:
    with socket.create_connection((talk.address.hostname, talk.address.port), timeout=20) as connection:
        try:
            connection.sendall(sent)
            line = connection.recv(200)
        except ConnectionError:
            return  # it hung up before all was sent
    assert not line or line.split()[1].startswith(status), line


def test_connections_that_say_nothing_hold_up_nobody(talk: Talk) -> None:
    address = (talk.address.hostname, talk.address.port)
    idle = [socket.create_connection(address, timeout=20) for _ in range(200)]
    try:
        for each in idle[:100]:
            each.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        assert talk.complete()[0] == 200
    finally:
        for each in idle:
            each.close()


def test_a_client_that_leaves_in_the_middle_of_its_body(talk: Talk) -> None:
    for _ in range(20):
        with socket.create_connection((talk.address.hostname, talk.address.port), timeout=20) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
    assert talk.complete()[0] == 200
