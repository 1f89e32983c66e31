"""What stands before replicas: an ASGI application that lets in, reads, sends on, and asks again where one is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from bateleur.runner.errors import EngineDead, ReplicaLost
from bateleur.runner.replicas.call import Ask, Call, call_of
from bateleur.runner.replicas.metrics import CONTENT_TYPE, merged
from bateleur.runner.serve.body import read_bytes
from bateleur.runner.serve.config import ServeConfig
from bateleur.runner.serve.errors import dead, refusal, refusing
from bateleur.runner.serve.gate import guard
from bateleur.runner.serve.sse import last_event

_MOST_LOSSES = 3
"""Replicas that may be lost with one request: it may be what they die of."""
_PATIENCE = 20.0
"""Seconds that a question about the server waits for a replica."""


class Front:
    """Sends what comes to a replica, and what comes back to the client; nothing begins to stream before a first byte.

    ask: has a call answered. metrics: what replicas tell Prometheus, by replica.
    """

    def __init__(
        self, ask: Ask, metrics: Callable[[], Awaitable[Mapping[str, str]]], config: ServeConfig
    ) -> None:
        self._ask, self._metrics, self.config = ask, metrics, config
        self.stopping = False
        """Whether it is about to end, and lets nobody in."""
        self._running: set[asyncio.Task[None]] = set()
        self._closing = False

    def app(self) -> FastAPI:
        """The application."""
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)

        @app.get("/metrics")
        async def told_metrics(request: Request) -> Response:
            with refusing():
                return Response(merged(await self._metrics()), media_type=CONTENT_TYPE)

        app.router.routes.append(Route("/{path:path}", self.pass_on, methods=None))
        guard(app, self)
        return app

    async def drain(self, seconds: float) -> None:
        """Let nobody in, and wait until all have an answer; after so many seconds tell those that they have none."""
        self.stopping = True
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)
        self._closing = True
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    @property
    def pass_on(self) -> _Endpoint:
        """Answers every path that replicas answer."""
        return _Endpoint(self)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        call = call_of(scope, await read_bytes(Request(scope, receive), self.config))
        reply = _Reply(send)
        task = asyncio.ensure_future(self._answered(call, reply))
        self._running.add(task)
        try:
            await task
        except asyncio.CancelledError:
            if not self._closing:
                raise
            await reply.break_off(dead(EngineDead("it was closed")), scope["path"])
        except HTTPException as error:
            await reply.break_off(error, scope["path"])
        finally:
            task.cancel()
            self._running.discard(task)

    async def _answered(self, call: Call, reply: _Reply) -> None:
        patience = None if call.scope["method"] == "POST" else _PATIENCE
        try:
            async with asyncio.timeout(patience):
                for _ in range(_MOST_LOSSES):
                    try:
                        with refusing():
                            return await self._once(call, reply)
                    except ReplicaLost as error:
                        lost = error
                    if reply.began:
                        break
                    reply.forget()
                    call = call.avoiding(str(lost))
        except TimeoutError as error:
            raise refusal(503, "no replica answers", code="no_replica") from error
        said = (
            "the replica that answered was lost" if reply.began else "every replica that was asked was lost"
        )
        raise refusal(500, said, code="replica_lost") from lost

    async def _once(self, call: Call, reply: _Reply) -> None:
        async with aclosing(self._ask(call)) as answers:
            async for messages in answers:
                for message in messages:
                    await reply.send(message)
        if not reply.ended:
            raise ReplicaLost("")


class _Endpoint:
    """An ASGI application, as a route takes it."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._front.answer(scope, receive, send)


class _Reply:
    """What a client gets. The head waits for the first byte of the body, until which another replica may answer."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._head: Message | None = None
        self.began = self.ended = False

    async def send(self, message: Message) -> None:
        """A message of the application."""
        if message["type"] == "http.response.start":
            self._head = message
            return
        more = message.get("more_body", False)
        if more and not message.get("body"):
            return
        await self._begin()
        self.ended = not more
        await self._send(message)

    async def _begin(self) -> None:
        if not self.began:
            assert self._head is not None
            self.began = True
            await self._send(self._head)

    def forget(self) -> None:
        """Another replica begins anew."""
        self._head = None

    async def break_off(self, error: HTTPException, path: str) -> None:
        """Tell a stream why it ends, as its last event. Raises the error where that can't be told so."""
        kinds = [value for name, value in (self._head or {}).get("headers", ()) if name == b"content-type"]
        if self.ended:
            return
        if not self.began or not kinds or not kinds[0].startswith(b"text/event-stream"):
            raise error
        body = last_event(error, path)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
