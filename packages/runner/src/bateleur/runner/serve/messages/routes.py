"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import Response

from bateleur.runner.serve.body import openapi_model, read_json_object, validate
from bateleur.runner.serve.conversation import Answer, answer, render_prompt
from bateleur.runner.serve.errors import anthropic_error, http_error, http_errors
from bateleur.runner.serve.json_text import JSONText
from bateleur.runner.serve.messages.body import NAMES, Block, CountTokensBody, MessagesBody, chat_body
from bateleur.runner.serve.messages.writer import MessageWriter
from bateleur.runner.serve.openai.requests import ChatRequest, chat_request
from bateleur.runner.serve.service import Service
from bateleur.runner.serve.sse import EventStream


def router(service: Service) -> APIRouter:
    """Create the routes of the Messages API."""
    routes = APIRouter()

    @routes.post("/v1/messages", openapi_extra=openapi_model(MessagesBody))
    async def create(request: Request) -> Response:
        """Answer a conversation in Anthropic's format."""
        parsed = await _read(service, request, MessagesBody)
        message_id = f"msg_{uuid4().hex}"
        answered = await answer(service, parsed, message_id)
        writer = MessageWriter(message_id, service.reply_model(parsed.model))
        if parsed.stream:
            return EventStream(_events(answered, writer), named=True)
        (report,) = await answered.whole(request)
        for _ in writer.write(report.events):
            pass
        return JSONText(writer.message | {"usage": _usage(answered)})

    @routes.post("/v1/messages/count_tokens", openapi_extra=openapi_model(CountTokensBody))
    async def count(request: Request) -> Response:
        """Count the tokens of a conversation."""
        parsed = await _read(service, request, CountTokensBody)
        _, prompt = await render_prompt(service, parsed)
        return JSONText({"input_tokens": len(prompt["prompt_token_ids"])})

    return routes


async def _read(service: Service, request: Request, model: type[CountTokensBody]) -> ChatRequest:
    value = await read_json_object(request, service.config)
    with http_errors():
        body = validate(model, value)
    if isinstance(body, MessagesBody) and body.thread is not None:
        message = "thread must be absent: this server stores no conversations; send all messages"
        raise http_error(400, message, param="thread", code="thread_unsupported_request")
    with http_errors(NAMES):
        chat = chat_body(body)
        return chat_request(chat, service.defaults, strict=service.config.strict_fields, names=NAMES)


async def _events(answered: Answer, writer: MessageWriter) -> AsyncGenerator[dict[str, Any], None]:
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
