"""ASGI application in front of replicas: authenticates and forwards requests, and retries them on other replicas."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from bateleur.runner.errors import EngineDead, ReplicaLost
from bateleur.runner.replicas.forwarded_request import ForwardedRequest, SendRequest
from bateleur.runner.serve.body import read_bytes
from bateleur.runner.serve.config import ServeConfig
from bateleur.runner.serve.errors import engine_dead_error, http_error, http_errors
from bateleur.runner.serve.middleware import add_middleware
from bateleur.runner.serve.sse import error_event

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_MAX_LOST_REPLICAS = 3  # replicas that may die with one request before it is refused: the request may be the cause
_TIMEOUT = 20.0  # seconds that a request without a prompt, such as /v1/models, waits for a replica
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Response:
    """The response to a client. Status and headers wait for the first byte of the body, so that a retry is possible."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.head: Message | None = None
        self.started = self.ended = False

    async def send(self, message: Message) -> None:
        """Send an ASGI message of the replica's application to the client."""
        if message["type"] == "http.response.start":
            self.head = message
            return
        more = message.get("more_body", False)
        if more and not message.get("body"):
            return
        if not self.started:
            assert self.head is not None
            self.started = True
            await self._send(self.head)
        self.ended = not more
        await self._send(message)

    async def fail(self, error: HTTPException, path: str) -> None:
        """End an event stream with the error as its last event, in the format of the API at `path`.

        Raises the error if no event stream has started. Does nothing if the response has ended.
        """
        kinds = [value for name, value in (self.head or {}).get("headers", ()) if name == b"content-type"]
        if self.ended:
            return
        if not self.started or not kinds or not kinds[0].startswith(b"text/event-stream"):
            raise error
        await self._send({"type": "http.response.body", "body": error_event(error, path), "more_body": False})


class ReplicaFrontend:
    """Forwards requests to replicas, and their responses to clients.

    If a replica dies before the first byte of the response body, another one gets the request.
    """

    def __init__(
        self, send_request: SendRequest, metrics: Callable[[], Awaitable[Mapping[str, str]]], config: ServeConfig
    ) -> None:
        self._send_request, self._metrics, self.config = send_request, metrics, config
        self.stopping = False  # whether new requests are refused because the server shuts down
        self._running: set[asyncio.Task[None]] = set()
        self._closing = False

    def app(self) -> FastAPI:
        """The ASGI application."""
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)

        @app.get("/metrics")
        async def metrics(request: Request) -> Response:
            with http_errors():
                return Response(merge_metrics(await self._metrics()), media_type=_METRICS_TYPE)

        app.router.routes.append(Route("/{path:path}", _Endpoint(self), methods=None))
        add_middleware(app, self.config, lambda: self.stopping)
        return app

    async def drain(self, timeout: float) -> None:
        """Refuse new requests and wait for running ones. After `timeout` seconds they end with an error."""
        self.stopping = True
        if self._running:
            await asyncio.wait(self._running, timeout=timeout)
        self._closing = True
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. ASGI interface."""
        body = await read_bytes(Request(scope, receive), self.config)
        response = _Response(send)
        task = asyncio.ensure_future(self._forward(ForwardedRequest.of(scope, body), response))
        self._running.add(task)
        try:
            await task
        except asyncio.CancelledError:
            if not self._closing:
                raise
            await response.fail(engine_dead_error(EngineDead("it was closed")), scope["path"])
        except HTTPException as error:
            await response.fail(error, scope["path"])
        finally:
            task.cancel()
            self._running.discard(task)

    async def _forward(self, request: ForwardedRequest, response: _Response) -> None:
        """Send a request to a replica, and to another one if the replica dies before the response starts."""
        try:
            async with asyncio.timeout(None if request.scope["method"] == "POST" else _TIMEOUT):
                for _ in range(_MAX_LOST_REPLICAS):
                    try:
                        with http_errors():
                            return await self._send_once(request, response)
                    except ReplicaLost as error:
                        lost = error
                    if response.started:
                        break
                    response.head = None
                    request = request.excluding(str(lost))
        except TimeoutError as error:
            raise http_error(503, "no replica answered in time", code="no_replica") from error
        text = "the replica died during the response" if response.started else "every replica that got the request died"
        raise http_error(500, text, code="replica_lost") from lost

    async def _send_once(self, request: ForwardedRequest, response: _Response) -> None:
        async with aclosing(self._send_request(request)) as answer:
            async for messages in answer:
                for message in messages:
                    await response.send(message)
        if not response.ended:
            raise ReplicaLost("")


class _Endpoint:
    """ASGI application that calls `ReplicaFrontend.answer`.

    It is an object because Starlette's `Route` calls a function or a method with a `Request`, not as an application.
    """

    def __init__(self, frontend: ReplicaFrontend) -> None:
        self._frontend = frontend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._frontend.answer(scope, receive, send)


def merge_metrics(texts: Mapping[str, str]) -> bytes:
    """Merge metrics by replica (`texts`): each family occurs once, and its samples have the label `replica`."""
    from prometheus_client import generate_latest

    return generate_latest(_MergedMetrics(texts))


@dataclass(eq=False, slots=True)
class _MergedMetrics:
    texts: Mapping[str, str]

    def collect(self) -> Iterator["Metric"]:
        """Yield all metric families, in the order in which replicas first list them."""
        from prometheus_client.parser import text_string_to_metric_families

        families: dict[str, Metric] = {}
        for replica, text in self.texts.items():
            for family in text_string_to_metric_families(text):
                merged = families.setdefault(family.name, family)
                samples = [each._replace(labels={**each.labels, "replica": replica}) for each in family.samples]
                merged.samples = [*(merged.samples if merged is not family else ()), *samples]
        yield from families.values()
