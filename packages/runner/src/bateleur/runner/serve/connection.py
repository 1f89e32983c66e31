"""HTTP connections with read and write timeouts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from bateleur.runner.serve.json_text import dumps
from bateleur.runner.serve.openai.replies import error_body


class Connection(H11Protocol):
    """uvicorn's connection, closed if the client stops in a request's headers or stops reading the reply."""

    def __init__(self, *args: Any, timeout_read: float, timeout_write: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._read_timer = _Timer(timeout_read)
        """Runs while the head of a request is awaited."""
        self._write_timer = _Timer(timeout_write)
        """Runs while the client does not read the reply."""

    @classmethod
    def factory(cls, *, timeout_read: float, timeout_write: float) -> Any:
        """Return the connection factory for uvicorn."""
        return partial(cls, timeout_read=timeout_read, timeout_write=timeout_write)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the read timer for the headers of the first request."""
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Process received bytes and update the read timer."""
        super().data_received(data)
        self._expect_head()

    def _expect_head(self) -> None:
        waits = self.cycle is None or self.cycle.response_complete
        if waits:
            self._read_timer.set(self.loop, self.transport.abort)
        else:
            self._read_timer.clear()

    def on_response_complete(self) -> None:
        """Stop the read timer: uvicorn's keep-alive timeout applies until the next request."""
        self._read_timer.clear()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Start the write timer: the client reads too slowly."""
        super().pause_writing()
        self._write_timer.set(self.loop, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the write timer."""
        super().resume_writing()
        self._write_timer.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop both timers."""
        self._read_timer.clear()
        self._write_timer.clear()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with an error in OpenAI's format."""
        body = dumps(error_body(msg))
        head = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=400, headers=head), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class _Timer:
    """Calls a function after a number of seconds, unless cleared before."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._handle: asyncio.TimerHandle | None = None

    def set(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        """Start the timer if it does not run."""
        if self._handle is None:
            self._handle = loop.call_later(self._seconds, call)

    def clear(self) -> None:
        """Stop the timer."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
