"""What stands before replicas, with replicas that are lost on purpose."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
import pytest

from bateleur.runner.errors import EngineDead, QueueFull, ReplicaLost
from bateleur.runner.replicas import frontend as frontend_module
from bateleur.runner.replicas.config import ReplicaConfig
from bateleur.runner.replicas.forwarded_request import ForwardedRequest
from bateleur.runner.replicas.frontend import ReplicaFrontend, merge_metrics
from bateleur.runner.serve.config import ServeConfig

JSON, STREAM = b"application/json", b"text/event-stream; charset=utf-8"
Script = Callable[[ForwardedRequest], list[Any]]
"""What a replica sends, an exception where it is lost, and a number of seconds where it takes its time."""


def head(kind: bytes, status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]}


def body(data: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


class Replicas:
    """Answers the first call by the first script, and so on; `calls` are those that came, `left` those that ended."""

    def __init__(self, *scripts: list[Any]) -> None:
        self._scripts = list(scripts)
        self.calls: list[ForwardedRequest] = []
        self.left = 0

    async def ask(self, call: ForwardedRequest) -> AsyncGenerator[list[Any], None]:
        self.calls.append(call)
        try:
            for each in self._scripts.pop(0):
                if isinstance(each, Exception):
                    raise each
                if isinstance(each, float):
                    await asyncio.sleep(each)
                else:
                    yield [each]
        finally:
            self.left += 1


def front_of(replicas: Replicas, **options: Any) -> ReplicaFrontend:
    async def metrics() -> dict[str, str]:
        raise EngineDead("no replica")

    return ReplicaFrontend(replicas.ask, metrics, ServeConfig(**options))


async def asked(front: ReplicaFrontend, path: str = "/v1/completions", **options: Any) -> httpx.Response:
    transport = httpx.ASGITransport(front.app(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        return await client.request(options.pop("method", "POST"), path, **options)


def ask(*scripts: list[Any], **options: Any) -> tuple[httpx.Response, Replicas]:
    replicas = Replicas(*scripts)
    return asyncio.run(asked(front_of(replicas), **options)), replicas


WHOLE = [head(JSON), body(b'{"text": "all of it"}', more=False)]
EVENTS = [head(STREAM), body(b"data: 1\n\n", more=True), body(b"data: 2\n\n", more=True)]
END = body(b"", more=False)
LOST = ReplicaLost("first")


@pytest.mark.parametrize("before", [[], [head(JSON)], [head(STREAM), body(b"", more=True)], [head(JSON, 503)]])
def test_what_had_not_begun_is_asked_of_another(before: list[Any]) -> None:
    reply, replicas = ask([*before, LOST], WHOLE, json={"prompt": "x"})
    assert (reply.status_code, reply.json()) == (200, {"text": "all of it"})
    assert [call.excluded for call in replicas.calls] == [frozenset(), {"first"}]
    assert replicas.calls[0].body == replicas.calls[1].body == b'{"prompt":"x"}'
    assert replicas.left == 2


def test_an_answer_without_an_end_is_lost() -> None:
    reply, _ = ask([head(JSON)], WHOLE)
    assert reply.json() == {"text": "all of it"}


def test_what_had_begun_ends_with_an_error() -> None:
    reply, replicas = ask([*EVENTS, LOST], WHOLE)
    assert reply.status_code == 200
    *events, last, rest = reply.text.split("\n\n")
    assert (events, rest) == (["data: 1", "data: 2"], "")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == ("replica_lost", "server_error")
    assert len(replicas.calls) == 1


@pytest.mark.parametrize(
    ("path", "last"),
    [
        (
            "/v1/messages",
            {"type": "error", "error": {"type": "api_error", "message": "the replica died during the response"}},
        ),
        (
            "/v1/responses",
            {"type": "error", "code": "replica_lost", "param": None, "message": "the replica died during the response"},
        ),
    ],
)
def test_an_error_has_the_form_of_the_events_before_it(path: str, last: dict[str, Any]) -> None:
    reply, _ = ask([*EVENTS, LOST], path=path)
    name, _, told = reply.text.split("\n\n")[-2].partition("\ndata: ")
    assert (name, json.loads(told)) == ("event: error", last)


def test_a_stream_that_ends_is_passed_on() -> None:
    reply, _ = ask([*EVENTS, END, LOST])
    assert reply.text == "data: 1\n\ndata: 2\n\n"


def test_what_kills_every_replica_is_not_asked_for_ever() -> None:
    reply, replicas = ask([LOST], [LOST], [LOST], WHOLE)
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "replica_lost")
    assert len(replicas.calls) == 3


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(QueueFull("all wait"), 429, "rate_limit_exceeded"), (EngineDead("it was closed"), 503, "engine_dead")],
)
def test_other_refusals_are_told(error: Exception, status: int, code: str) -> None:
    reply, replicas = ask([error], WHOLE)
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert len(replicas.calls) == 1


def test_questions_about_the_server_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend_module, "_TIMEOUT", 0.05)
    reply, replicas = ask([30.0], method="GET", path="/health")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_replica")
    assert replicas.left == 1
    reply, _ = ask([0.2, *WHOLE])
    assert reply.status_code == 200
    assert asyncio.run(asked(front_of(Replicas()), "/metrics", method="GET")).status_code == 503


def test_who_hangs_up_leaves_the_replica() -> None:
    replicas = Replicas([*EVENTS, 30.0])

    async def call() -> None:
        task = asyncio.ensure_future(asked(front_of(replicas)))
        while not replicas.calls:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(call())
    assert replicas.left == 1


def test_an_end_waits_and_then_says_so() -> None:
    """Who comes is refused; what ends in time ends well; what does not is told, as an event where it had begun."""
    replicas = Replicas([0.1, *WHOLE], [*EVENTS, 30.0], [30.0])
    front = front_of(replicas)

    async def run() -> list[httpx.Response]:
        running = [asyncio.ensure_future(asked(front)) for _ in range(3)]
        while len(replicas.calls) < 3:
            await asyncio.sleep(0.01)
        ended = asyncio.ensure_future(front.drain(0.3))
        await asyncio.sleep(0.01)
        late = await asked(front)
        await ended
        return [late, *[await each for each in running]]

    late, in_time, begun, silent = asyncio.run(run())
    assert (late.status_code, late.json()["error"]["code"]) == (503, "stopping")
    assert in_time.status_code == 200
    assert begun.text.startswith("data: 1")
    assert json.loads(begun.text.split("\n\n")[2].removeprefix("data: "))["error"]["code"] == "engine_dead"
    assert (silent.status_code, silent.json()["error"]["code"]) == (503, "engine_dead")
    assert replicas.left == 3


def test_what_can_not_be_told_breaks_the_connection() -> None:
    """Half of a reply that is no stream of events must not look whole."""
    replicas = Replicas([head(JSON), body(b'{"half', more=True), LOST])
    with pytest.raises(RuntimeError, match="response already started"):
        asyncio.run(_raising(front_of(replicas)))


async def _raising(front: ReplicaFrontend) -> None:
    transport = httpx.ASGITransport(front.app())
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        await client.post("/v1/completions")


def test_a_call_is_data() -> None:
    """Of what a server says of a request nothing is left that is not."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/under/v1/completions",
        "root_path": "/under",
        "headers": [(b"a", b"b")],
        "client": ["127.0.0.1", 7],
        "app": object(),
        "state": {},
    }
    call = ForwardedRequest.of(scope, json.dumps({"prompt": "x" * 1000}).encode())
    assert call.prefixes
    assert not {"app", "state"} & call.scope.keys()
    assert call.scope["client"] == ("127.0.0.1", 7)
    assert call.excluding("a").excluding("b").excluded == {"a", "b"}
    assert ForwardedRequest.of(scope, b"{").prefixes == ForwardedRequest.of(scope, b"[]").prefixes == ()


def test_metrics_of_replicas_stand_side_by_side() -> None:
    text = '# HELP x_total What.\n# TYPE x_total counter\nx_total{m="1"} %d\n'
    told = merge_metrics({"a": text % 1, "b": text % 2}).decode()
    assert told == (
        '# HELP x_total What.\n# TYPE x_total counter\nx_total{m="1",replica="a"} 1.0\nx_total{m="1",replica="b"} 2.0\n'
    )


def test_bounds_of_replicas() -> None:
    assert ReplicaConfig().is_single
    assert not ReplicaConfig(max_replicas=2).is_single
    assert not ReplicaConfig(ray_address="auto").is_single
    assert ReplicaConfig(replicas=2, max_replicas=4).upper_limit == 4
    with pytest.raises(ValueError, match="max_replicas is 2; it must be at least replicas = 3"):
        ReplicaConfig(replicas=3, max_replicas=2)
