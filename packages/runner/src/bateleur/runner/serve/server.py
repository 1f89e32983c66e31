"""The server process: signals and shutdown."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from bateleur.runner.async_llm import AsyncLLM
from bateleur.runner.serve.app import build_app
from bateleur.runner.serve.config import ServeConfig
from bateleur.runner.serve.connection import Connection
from bateleur.runner.serve.service import Service

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ABORT_SECONDS = 5
"""Seconds for aborted requests to send their last event before connections are closed."""


def run(llm: AsyncLLM, config: ServeConfig, listener: socket.socket, ready: Callable[[], None]) -> bool:
    """Serve until a signal arrives and requests end. ready: called at the start. Returns False if the engine failed."""
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
    settings = uvicorn.Config(
        app,
        http=Connection.factory(timeout_read=config.timeout_read, timeout_write=config.timeout_write),
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
        """Wait for running requests; abort the rest after the timeout, so that every stream gets a last event."""
        end = asyncio.create_task(self._abort_after_timeout())
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()

    async def _abort_after_timeout(self) -> None:
        await asyncio.sleep(self._service.config.shutdown_timeout)
        await self._service.llm.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then call `ready`."""
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
