"""A connection that waits for nobody without end."""

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
    """uvicorn's, which waits for ever for a client that stops in the middle of a head, or stops reading."""

    def __init__(self, *args: Any, timeout_read: float, timeout_write: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._read_timer = _Timer(timeout_read)
        """Closes it while a head is to come."""
        self._write_timer = _Timer(timeout_write)
        """Closes it while nothing is read of a reply."""

    @classmethod
    def factory(cls, *, timeout_read: float, timeout_write: float) -> Any:
        """What uvicorn makes connections with."""
        return partial(cls, timeout_read=timeout_read, timeout_write=timeout_write)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The head of a request is to come."""
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Some of a head or of a body, or of what nobody waits for any more."""
        super().data_received(data)
        self._expect_head()

    def _expect_head(self) -> None:
        waits = self.cycle is None or self.cycle.response_complete
        if waits:
            self._read_timer.set(self.loop, self.transport.abort)
        else:
            self._read_timer.clear()

    def on_response_complete(self) -> None:
        """From here on uvicorn waits for the next request, until its first byte comes."""
        self._read_timer.clear()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client does not read as fast as is written."""
        super().pause_writing()
        self._write_timer.set(self.loop, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read."""
        super().resume_writing()
        self._write_timer.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._read_timer.clear()
        self._write_timer.clear()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is told so in the form of all errors."""
        body = dumps(error_body(msg))
        head = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        for event in (h11.Response(status_code=400, headers=head), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class _Timer:
    """Calls something after so many seconds, unless it is cleared before."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._handle: asyncio.TimerHandle | None = None

    def set(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        """From now on, unless it is set already."""
        if self._handle is None:
            self._handle = loop.call_later(self._seconds, call)

    def clear(self) -> None:
        """Not any more."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
