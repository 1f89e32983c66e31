"""The server as a process: its signals, its end."""

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
"""Seconds in which aborted requests are told so, before their connections are cut."""


def run(llm: AsyncLLM, config: ServeConfig, place: socket.socket, ready: Callable[[], None]) -> bool:
    """Answer at this socket until a signal comes and what runs has ended; whether the engine lived to see it.

    ready: called when it answers.
    """
    app = build_app(llm, config)
    service: Service = app.state.service

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        gc.collect()
        gc.freeze()  # looking through what stays here anyway would stop every stream for a quarter of a second
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
    Server(settings, service, ready).run([place])
    return llm.error is None


class Server(uvicorn.Server):
    """uvicorn's, with an end that lets nobody in, and exit code 0."""

    def __init__(self, config: uvicorn.Config, service: Service, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._service, self._ready = service, ready

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """What has not ended in time is aborted, so that every stream has an end that says so."""
        end = asyncio.create_task(self._abort_after_timeout())
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()

    async def _abort_after_timeout(self) -> None:
        await asyncio.sleep(self._service.config.shutdown_timeout)
        await self._service.llm.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Say when it is done."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The first signal ends it in order, a second one at once."""
        before = {each: signal.signal(each, self._end) for each in _SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._service.stopping = self.should_exit = True
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
