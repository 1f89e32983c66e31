"""Server-sent events: a reply in parts, as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import HTTPException
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from bateleur.runner.serve.errors import detail_of, error_of, http_errors
from bateleur.runner.serve.json_text import dumps
from bateleur.runner.serve.openai.replies import Usage
from bateleur.runner.serve.openai.requests import APIRequest

DONE = b"data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """A reply whose events are sent as they are made; their generator is closed at once when the client leaves.

    named: each event is preceded by its type, and nothing follows the last one; else they end with `DONE`.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[dict[str, Any], None], *, named: bool = False) -> None:
        self._bytes = _encode(events, named)
        super().__init__(self._bytes, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it, or as much as somebody reads."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._bytes.aclose()


def error_event(error: HTTPException, path: str) -> bytes:
    """The event that ends a stream of a path because of an error, if the path's own events can't be continued."""
    told = detail_of(error, path)
    if "/v1/responses" in path:
        told = {**error_of(error), "type": "error"}
    return b"event: error\n" * ("type" in told) + b"data: " + dumps(told) + b"\n\n"


async def _encode(events: AsyncGenerator[dict[str, Any], None], named: bool) -> AsyncGenerator[bytes, None]:
    """An error is the last event; else an event that says so is."""
    try:
        with http_errors():
            async for event in events:
                name = f"event: {event['type']}\n".encode() if named else b""
                yield name + b"data: " + dumps(event) + b"\n\n"
        if not named:
            yield DONE
    except HTTPException as error:
        yield error_event(error, "")
    finally:
        await events.aclose()


async def chunks(
    parts: AsyncGenerator[dict[str, Any], None], parsed: APIRequest, head: dict[str, Any], usage: Usage
) -> AsyncGenerator[dict[str, Any], None]:
    """Every chunk, and the usage behind them if it is asked for.

    parts: fields of each chunk, `choices` and others. head: fields of every chunk. usage: is counted by `parts`.
    """
    async with aclosing(parts):
        async for part in parts:
            chunk = {**head, **part}
            if parsed.include_usage:
                chunk["usage"] = usage.as_dict() if parsed.continuous_usage else None
            yield chunk
    if parsed.include_usage:
        yield {**head, "choices": [], "usage": usage.as_dict()}
