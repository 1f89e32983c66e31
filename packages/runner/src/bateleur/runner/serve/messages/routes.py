"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, suppress
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import Response

from bateleur.runner.serve.body import openapi_model, read_model
from bateleur.runner.serve.conversation import Answer, answer, render_prompt
from bateleur.runner.serve.errors import anthropic_error, http_error, http_errors
from bateleur.runner.serve.json_text import JSONText
from bateleur.runner.serve.messages.body import NAMES, Block, CountTokensBody, MessagesBody, chat_body
from bateleur.runner.serve.openai.requests import ChatRequest, chat_request
from bateleur.runner.serve.parsers.events import Arguments, Content, End, Event, Reasoning, ToolCall
from bateleur.runner.serve.service import Service
from bateleur.runner.serve.sse import EventStream

StreamEvent = dict[str, Any]
"""Body of one server-sent event."""
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


def router(service: Service) -> APIRouter:
    """Create the routes of the Messages API."""
    routes = APIRouter()

    @routes.post("/v1/messages", openapi_extra=openapi_model(MessagesBody))
    async def create(request: Request) -> Response:
        """Answer a conversation in Anthropic's format."""
        parsed = await _read(service, request, MessagesBody)
        message_id = f"msg_{uuid4().hex}"
        answered = await answer(service, parsed, message_id)
        writer = _MessageWriter(message_id, service.reply_model(parsed.model))
        if parsed.stream:
            return EventStream(_events(answered, writer), named=True)
        (report,) = await answered.whole(request)
        for _ in writer.write(report.events):
            pass
        return JSONText(writer.message | {"usage": _usage(answered)})

    @routes.post("/v1/messages/count_tokens", openapi_extra=openapi_model(CountTokensBody))
    async def count(request: Request) -> Response:
        """Count the tokens of a conversation."""
        _, prompt = await render_prompt(service, await _read(service, request, CountTokensBody))
        return JSONText({"input_tokens": len(prompt["prompt_token_ids"])})

    return routes


async def _read(service: Service, request: Request, model: type[CountTokensBody]) -> ChatRequest:
    body = await read_model(request, service.config, model)
    if isinstance(body, MessagesBody) and body.thread is not None:
        message = "thread must be absent: this server stores no conversations; send all messages"
        raise http_error(400, message, param="thread", code="thread_unsupported_request")
    with http_errors(NAMES):
        return chat_request(chat_body(body), service.defaults, strict=service.config.strict_fields, names=NAMES)


async def _events(answered: Answer, writer: _MessageWriter) -> AsyncGenerator[dict[str, Any], None]:
    begun = False
    try:
        with http_errors():
            async with aclosing(answered.reports()) as reports:
                async for report in reports:
                    if not begun:
                        begun = True
                        for event in writer.begin(_usage(answered)):
                            yield event
                    for event in writer.write(report.events):
                        yield event
        for event in writer.end(_usage(answered)):
            yield event
    except HTTPException as error:
        yield anthropic_error(error)


def _usage(answered: Answer) -> Block:
    """Return Anthropic's `usage`. `input_tokens` excludes prefix cache hits."""
    usage = answered.usage.as_dict()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


class _MessageWriter:
    """Builds a message from the events of an answer, and yields stream events for every change."""

    def __init__(self, message_id: str, model: str) -> None:
        self.message: Block = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {},
        }
        self._open: Block | None = None
        self._json = ""

    def begin(self, usage: Block) -> Iterator[StreamEvent]:
        self.message["usage"] = usage
        yield {"type": "message_start", "message": {**self.message, "content": []}}
        yield {"type": "ping"}

    def write(self, events: Sequence[Event]) -> Iterator[StreamEvent]:
        for event in events:
            match event:
                case Reasoning(text):
                    yield from self._text("thinking", text)
                case Content(text):
                    yield from self._text("text", text)
                case ToolCall(_, call_id, name):
                    yield from self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})
                case Arguments(_, text):
                    self._json += text
                    yield self._delta({"type": "input_json_delta", "partial_json": text})
                case End(reason, stop):
                    yield from self._close()
                    default = "stop_sequence" if isinstance(stop, str) else "end_turn"
                    self.message["stop_reason"] = _STOP_REASONS.get(reason, default)
                    self.message["stop_sequence"] = stop if isinstance(stop, str) else None

    def end(self, usage: Block) -> Iterator[StreamEvent]:
        self.message["usage"] = usage
        delta = {name: self.message[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": delta, "usage": usage}
        yield {"type": "message_stop"}

    def _text(self, kind: str, text: str) -> Iterator[StreamEvent]:
        if self._open is None or self._open["type"] != kind:
            yield from self._begin({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        assert self._open is not None
        self._open[kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _begin(self, block: Block) -> Iterator[StreamEvent]:
        yield from self._close()
        self._open, self._json = block, ""
        self.message["content"].append(block)
        yield {"type": "content_block_start", "index": self._index, "content_block": dict(block)}

    def _close(self) -> Iterator[StreamEvent]:
        if self._open is None:
            return
        if self._open["type"] == "tool_use":
            with suppress(ValueError):  # truncated arguments; the stop reason shows that
                self._open["input"] = json.loads(self._json)
        elif self._open["type"] == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    def _delta(self, delta: Block) -> StreamEvent:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    @property
    def _index(self) -> int:
        return len(self.message["content"]) - 1
