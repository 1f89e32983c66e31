"""Server-sent events: a reply in parts, as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import HTTPException
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from bateleur.runner.serve.errors import refusing
from bateleur.runner.serve.json_text import dumps

DONE = b"data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """A reply whose events come as they are made; whoever makes them is told at once when nobody listens any more."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[dict[str, Any], None]) -> None:
        self._bytes = _encoded(events)
        super().__init__(self._bytes, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it, or as much as somebody reads."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._bytes.aclose()


async def _encoded(events: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    """An error is the last event; else an event that says so is."""
    try:
        with refusing():
            async for event in events:
                yield b"data: " + dumps(event) + b"\n\n"
        yield DONE
    except HTTPException as error:
        yield b"data: " + dumps(error.detail) + b"\n\n"
    finally:
        await events.aclose()
