"""A server in its own process: well-behaved and misbehaving clients."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import httpx
import pytest

LONG = {"prompt": "def f(", "max_tokens": 400, "ignore_eos": True}


def counted(client: httpx.Client, name: str) -> float:
    """A metric of the engine."""
    found = re.search(rf"^bateleur:{name}\S* (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


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


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_is_aborted(live_server: str, stream: bool) -> None:
    with httpx.Client(base_url=live_server) as client:
        aborted = counted(client, 'request_success_total{finished_reason="abort",')
        place = connected(live_server)
        body = json.dumps(LONG | {"stream": stream, "n": 3}).encode()
        place.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        place.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        if stream:
            assert place.recv(100).startswith(b"HTTP/1.1 200 OK")
        else:
            eventually(lambda: counted(client, "num_requests_running") == 3)
        place.close()
        eventually(lambda: counted(client, 'request_success_total{finished_reason="abort",') == aborted + 3)
        assert counted(client, "num_requests_running") == 0


def connected(address: str) -> socket.socket:
    where = urlsplit(address)
    assert where.hostname is not None
    assert where.port is not None
    return socket.create_connection((where.hostname, where.port), timeout=20)


def received(place: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    parts = []
    try:
        while part := place.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        parts.append(b"")
    return b"".join(parts)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        (b"", b"", b""),
        (b"POST /v1/compl", b"", b""),
        (HEAD + b"Content-Length: 100\r\n\r\n{", b"408", b"the body was not received within 1 seconds"),
        (HEAD + b"Content-Length: 99999999999\r\n\r\n{", b"413", b"max_body_bytes = 16777216"),
        (HEAD + b"Content-Length: -1\r\n\r\n{", b"400", b"Invalid HTTP request received."),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 100_000, b"400", b"Invalid HTTP request received."),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"400", b"Invalid HTTP request received."),
    ],
)
def test_half_a_request_is_not_waited_for(live_server: str, sent: bytes, status: bytes, said: bytes) -> None:
    with connected(live_server) as place:
        place.sendall(sent)
        reply = received(place)
    if not status:
        assert reply == b""
        return
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == status
    assert said in json.loads(body)["error"]["message"].encode()


def test_a_whole_address_is_asked_for_as_its_path_is(live_server: str) -> None:
    with connected(live_server) as place:
        place.sendall(b"GET http://anywhere:1/v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert received(place).startswith(b"HTTP/1.1 200 ")
