"""Streaming replies as server-sent events."""

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import HTTPException
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from bateleur.runner.serve.errors import detail_of, error_of, http_errors
from bateleur.runner.serve.json_text import dumps


class EventStream(StreamingResponse):
    """Streaming response. named: write the type of each event before it, without [DONE] at the end."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[dict[str, Any], None], *, named: bool = False) -> None:
        self._bytes = _encode(events, named)
        super().__init__(self._bytes, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the end or until the client disconnects."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._bytes.aclose()


def error_event(error: HTTPException, path: str) -> bytes:
    """Encode the last event of a stream that failed, in the format of the API at `path`."""
    body = detail_of(error, path)
    if "/v1/responses" in path:
        body = {**error_of(error), "type": "error"}
    return b"event: error\n" * ("type" in body) + b"data: " + dumps(body) + b"\n\n"


async def _encode(events: AsyncGenerator[dict[str, Any], None], named: bool) -> AsyncGenerator[bytes, None]:
    """Encode events. The last one is an error, or [DONE] unless `named`."""
    try:
        with http_errors():
            async for event in events:
                name = f"event: {event['type']}\n".encode() if named else b""
                yield name + b"data: " + dumps(event) + b"\n\n"
        if not named:
            yield b"data: [DONE]\n\n"
    except HTTPException as error:
        yield error_event(error, "")
    finally:
        await events.aclose()
