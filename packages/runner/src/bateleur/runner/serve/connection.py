"""HTTP connections with read and write timeouts."""

from __future__ import annotations

import asyncio
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
        self._seconds = {"read": timeout_read, "write": timeout_write}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        """Running timers: for the head of a request, and while the client does not read the reply."""

    @classmethod
    def factory(cls, *, timeout_read: float, timeout_write: float) -> Any:
        """Return the connection factory for uvicorn."""
        return partial(cls, timeout_read=timeout_read, timeout_write=timeout_write)

    def _run_timer(self, name: str, wanted: bool) -> None:
        """Start or stop a timer, after which the connection is closed."""
        if not wanted and name in self._timers:
            self._timers.pop(name).cancel()
        elif wanted and name not in self._timers:
            self._timers[name] = self.loop.call_later(self._seconds[name], self.transport.abort)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the read timer for the headers of the first request."""
        super().connection_made(transport)
        self._run_timer("read", True)

    def data_received(self, data: bytes) -> None:
        """Process received bytes and update the read timer."""
        super().data_received(data)
        self._run_timer("read", self.cycle is None or self.cycle.response_complete)

    def on_response_complete(self) -> None:
        """Stop the read timer: uvicorn's keep-alive timeout applies until the next request."""
        self._run_timer("read", False)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Start the write timer: the client reads too slowly."""
        super().pause_writing()
        self._run_timer("write", True)

    def resume_writing(self) -> None:
        """Stop the write timer."""
        super().resume_writing()
        self._run_timer("write", False)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop both timers."""
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
