"""API keys, CORS, limits on requests, and the errors for rejected requests."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from bateleur.runner import AsyncLLM
from bateleur.runner.serve.address import bound_socket, client_url
from bateleur.runner.serve.config import ServeConfig
from bateleur.runner.serve.middleware import AccessMiddleware

PATH = "/v1/completions"
JSON = {"content-type": "application/json"}


def test_a_key_is_asked_for_under_v1_alone(make_client: Callable[..., Any]) -> None:
    client = make_client(api_key=["first", "second"])
    for given in (None, "Bearer", "Bearer third", "Basic first", "first", "Bearer first second", "Bearer f\u00efrst"):
        headers = {} if given is None else {"authorization": given.encode()}
        reply = client.ask("/v1/models", headers=headers)
        assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer"), given
        assert reply.json()["error"]["code"] == "invalid_api_key"
    for key in ("Bearer first", "bearer second"):
        assert client.ask("/v1/models", headers={"authorization": key}).status_code == 200
    assert client.ask("/v1/models", headers={"x-api-key": "second"}).status_code == 200
    assert client.ask("/v1/models", headers={"x-api-key": "third"}).status_code == 401
    assert client.ask("/health").status_code == 200


def test_other_origins_are_let_in_where_it_is_said(client: Any, make_client: Callable[..., Any]) -> None:
    asks = {"origin": "http://there", "access-control-request-method": "POST"}
    assert client.error(405, PATH, method="OPTIONS", headers=asks)["message"].startswith(
        "this path does not support the"
    )
    assert "access-control-allow-origin" not in client.ask("/health", headers=asks).headers
    opened = make_client(allowed_origins=["http://there"], api_key=["secret"])
    reply = opened.ask(PATH, method="OPTIONS", headers=asks)
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, "http://there")
    refused = opened.ask("/v1/models", headers=asks)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "http://there")


def test_a_server_that_is_about_to_end_takes_no_requests(make_client: Callable[..., Any]) -> None:
    client = make_client()
    client.service.stopping = True
    assert client.error(503, PATH, {"prompt": "x"})["code"] == "stopping"
    assert client.ask("/health").status_code == 200


HALF_A_NAME = b'{"input": "x", "\\ud800": 1}'


@pytest.mark.parametrize(
    ("status", "path", "options", "said"),
    [
        (404, "/v2", {}, "this path does not exist: GET /v2"),
        (405, PATH, {}, f"this path does not support the method: GET {PATH}"),
        (415, PATH, {"content": b"{}"}, "Content-Type is absent"),
        (415, PATH, {"data": {"a": "b"}, "method": "POST"}, "Content-Type is 'application/x-www-form-urlencoded'"),
        (400, PATH, {"content": b"", "headers": JSON}, "the body is not JSON: Expecting value, line 1, column 1"),
        (400, PATH, {"content": b"[1]", "headers": JSON}, "the body is an array; it must be an object"),
        (400, PATH, {"content": b'{"n": NaN}', "headers": JSON}, "the body holds NaN, which is not JSON"),
        (400, PATH, {"content": b'{"n": 1e999}', "headers": JSON}, "the body holds 1e999, which is too large a number"),
        (400, PATH, {"content": b'"\xff"', "headers": JSON}, "the body is not UTF-8: byte 1"),
        (400, PATH, {"content": b'\xef\xbb\xbf{"prompt": 5}', "headers": JSON}, "prompt is 5; it must be text"),
        (400, "/v1/responses", {"content": HALF_A_NAME, "headers": JSON}, "the body has a field whose name is half of"),
        (400, PATH, {"content": b"[" * 10**5, "headers": JSON}, "the body is nested too deeply"),
        (400, PATH, {"content": b"9" * 5000, "headers": JSON}, "the body holds a number with too many digits"),
        (413, PATH, {"content": b" " * 2001, "headers": JSON}, "the body has more than max_body_bytes = 2000 bytes"),
    ],
)
def test_what_is_no_request(
    make_client: Callable[..., Any], status: int, path: str, options: dict[str, Any], said: str
) -> None:
    assert (
        make_client(max_body_bytes=2000 if status == 413 else 10**6)
        .error(status, path, **options)["message"]
        .startswith(said)
    )


def test_a_body_is_counted_and_timed_as_it_comes(make_client: Callable[..., Any]) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 100

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(20)

    client = make_client(max_body_bytes=2000, timeout_read=0.05)
    assert client.ask(PATH, content=endless(), headers=JSON).status_code == 413
    assert client.ask(PATH, content=slow(), headers=JSON).status_code == 408


def test_a_full_queue_says_when_to_come_again(client: Any, engine: AsyncLLM) -> None:
    taken = engine._admission_limit.take([None] * 16, 1)
    reply = client.ask(PATH, {"prompt": "x"})
    for name in taken:
        engine._admission_limit.release(name)
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
    assert reply.json()["error"]["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"port": 65536}, "port is 65536"),
        ({"root_path": "x"}, "root_path is 'x'"),
        ({"ssl_keyfile": "k"}, "ssl_certfile is None"),
        ({"ssl_ca_certs": "k"}, "ssl_ca_certs is"),
        ({"api_key": [""]}, "api_key holds an invalid key"),
        ({"api_key": ["a\u00e9"]}, "api_key holds an invalid key"),
        ({"timeout_read": 0}, "timeout_read is 0"),
    ],
)
def test_options_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ServeConfig(**options)


def test_the_socket_of_a_killed_server_is_replaced(tmp_path: Path) -> None:
    config = ServeConfig(uds=tmp_path / "socket")
    with bound_socket(config) as place:
        assert client_url(place, config) == f"unix:{tmp_path}/socket"
        os.link(tmp_path / "socket", tmp_path / "left")
        place.listen()
        with pytest.raises(OSError, match="socket"), bound_socket(config):
            pass
    assert not (tmp_path / "socket").exists()
    with bound_socket(ServeConfig(uds=tmp_path / "left")):
        pass


def test_a_token_does_not_wait_until_the_head_of_its_reply_is_acknowledged() -> None:
    """Accepted connections have Nagle's algorithm off; with it, first tokens were 40 ms late."""
    seen: list[int] = []

    async def meet(place: socket.socket) -> None:
        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            seen.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(accepted, sock=place):
            reader, writer = await asyncio.open_connection(*place.getsockname())
            await reader.read()
            writer.close()

    with bound_socket(ServeConfig(port=0)) as place:
        asyncio.run(meet(place))
    assert seen == [1]


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("http://h:1/v1/models", None),
        ("/v1/models/", None),
        ("/health/", "/health"),
        ("https://h", "/"),
        ("/http://v1", "/http://v1"),
    ],
)
def test_a_url_as_target_is_treated_as_its_path(target: str, path: str | None) -> None:
    """path: the path that the app receives; None if the request is rejected without an API key."""
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["path"])

    async def ignore(message: Message) -> None:
        assert message.get("status", 401) == 401

    async def nothing() -> Message:
        return {"type": "http.disconnect"}

    gate = AccessMiddleware(app, ["k"], lambda: False)
    asyncio.run(gate({"type": "http", "path": target, "method": "GET", "headers": []}, nothing, ignore))
    assert seen == ([] if path is None else [path])


def test_unknown_fields_are_refused_if_the_server_is_strict(make_client: Callable[..., Any]) -> None:
    body = {"prompt": "x", "max_tokens": 1, "session_id": "a"}
    assert make_client().ask(f"{PATH}/", body).status_code == 200
    error = make_client(strict_fields=True).error(400, PATH, body)
    assert (error["code"], error["message"][:12]) == ("unknown_parameter", "'session_id'")
