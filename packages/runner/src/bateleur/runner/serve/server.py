"""The server process: signals, shutdown, and connections with timeouts."""

import asyncio
import gc
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from bateleur.runner.async_llm import AsyncLLM
from bateleur.runner.serve.app import build_app
from bateleur.runner.serve.config import ServeConfig
from bateleur.runner.serve.json_text import dumps
from bateleur.runner.serve.openai.replies import error_body
from bateleur.runner.serve.service import Service

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ABORT_SECONDS = 5
"""Seconds for aborted requests to send their last event before connections are closed."""


def run(llm: AsyncLLM, config: ServeConfig, listener: socket.socket, ready: Callable[[], None]) -> bool:
    """Serve until a signal arrives and requests end. Returns False if the engine failed.

    ready: called when the server accepts connections.
    """
    app = build_app(llm, config)
    service: Service = app.state.service

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        gc.collect()
        gc.freeze()  # a full collection would pause every stream for about 0.25 s (measured)
        yield
        gc.unfreeze()
        await llm.close()

    app.router.lifespan_context = lifespan
    connection: Any = partial(Connection, timeout_read=config.timeout_read, timeout_write=config.timeout_write)
    settings = uvicorn.Config(
        app,
        http=connection,
        ws="none",
        lifespan="on",
        log_level=config.uvicorn_log_level,
        server_header=False,
        root_path=config.root_path,
        timeout_keep_alive=config.timeout_keep_alive,
        timeout_graceful_shutdown=config.shutdown_timeout + _ABORT_SECONDS,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=None if config.ssl_ca_certs is None else str(config.ssl_ca_certs),
        ssl_cert_reqs=2 if config.ssl_ca_certs is not None else 0,
        h11_max_incomplete_event_size=config.h11_max_incomplete_event_size,
    )
    Server(settings, service, ready).run([listener])
    return llm.error is None


class Server(uvicorn.Server):
    """uvicorn's server with a graceful shutdown and exit code 0."""

    def __init__(self, config: uvicorn.Config, service: Service, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._service, self._ready = service, ready

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running requests; abort them after `shutdown_timeout`, so that every stream gets a last event."""
        end = asyncio.create_task(self._abort_after_timeout())
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()

    async def _abort_after_timeout(self) -> None:
        await asyncio.sleep(self._service.config.shutdown_timeout)
        await self._service.llm.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections, then call `ready`."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Shut down gracefully at the first signal; the second one ends the process."""
        before = {each: signal.signal(each, self._handle_signal) for each in _SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        self._service.stopping = self.should_exit = True
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)


class Connection(H11Protocol):
    """uvicorn's connection. Timers close it if a request's headers are late (read) or a reply is not read (write)."""

    def __init__(self, *args: Any, timeout_read: float, timeout_write: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._seconds = {"read": timeout_read, "write": timeout_write}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        """Running timers by name: "read" for a request's headers, "write" while the client does not read the reply."""

    def _run_timer(self, name: str, wanted: bool) -> None:
        """Start (if `wanted`) or stop the timer `name`, "read" or "write", which closes the connection when it ends."""
        if not wanted and name in self._timers:
            self._timers.pop(name).cancel()
        elif wanted and name not in self._timers:
            self._timers[name] = self.loop.call_later(self._seconds[name], self.transport.abort)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the read timer, which closes the connection if the first request's headers do not arrive in time."""
        super().connection_made(transport)
        self._run_timer("read", True)

    def data_received(self, data: bytes) -> None:
        """Process received bytes. Start the read timer if a request's headers are incomplete, otherwise stop it."""
        super().data_received(data)
        self._run_timer("read", self.cycle is None or self.cycle.response_complete)

    def on_response_complete(self) -> None:
        """Stop the read timer of request headers: uvicorn's keep-alive timeout applies until the next request."""
        self._run_timer("read", False)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Start the write timer, which closes the connection: the client reads the reply too slowly."""
        super().pause_writing()
        self._run_timer("write", True)

    def resume_writing(self) -> None:
        """Stop the write timer: the client reads the reply again."""
        super().resume_writing()
        self._run_timer("write", False)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers that would close the connection: for a request's headers, and for an unread reply."""
        for name in ("read", "write"):
            self._run_timer(name, False)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with an error in OpenAI's format."""
        body = dumps(error_body(msg))
        head = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=400, headers=head), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
