"""`/v1/chat/completions`: answers to conversations, with the checkpoint's chat template."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from bateleur.runner.serve.body import openapi_body, read_json_object
from bateleur.runner.serve.completions import completion
from bateleur.runner.serve.conversation import Answer, answer
from bateleur.runner.serve.errors import http_errors
from bateleur.runner.serve.json_text import JSONText
from bateleur.runner.serve.openai.replies import chat_choice, chat_reply, prompt_fields
from bateleur.runner.serve.openai.requests import CHAT_FIELDS, COMPLETION_FIELDS, chat_request
from bateleur.runner.serve.parsers.events import chat_delta, chat_message
from bateleur.runner.serve.service import Service, new_id
from bateleur.runner.serve.sse import EventStream, chunks


def router(service: Service) -> APIRouter:
    """Create the routes for chat completions."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions", openapi_extra=openapi_body(CHAT_FIELDS, "messages"))
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        return await chat_completion(service, request, await read_json_object(request, service.config))

    @routes.post("/invocations", openapi_extra=openapi_body({**COMPLETION_FIELDS, **CHAT_FIELDS}))
    async def invoke(request: Request) -> Response:
        """SageMaker's endpoint: a chat completion if the body has messages, else a completion."""
        body = await read_json_object(request, service.config)
        reply = completion if body.get("messages") is None else chat_completion
        return await reply(service, request, body)

    return routes


async def chat_completion(service: Service, request: Request, body: dict[str, Any]) -> Response:
    """Answer a body of `/v1/chat/completions`."""
    with http_errors():
        parsed = chat_request(body, service.defaults, strict=service.config.strict_fields)
        parsed = service.with_server_options(parsed)
    reply_id, created, model = new_id("chatcmpl", parsed), int(time.time()), service.reply_model(parsed.model)
    answered = await answer(service, parsed, reply_id)
    if parsed.stream:
        head = {"id": reply_id, "object": "chat.completion.chunk", "created": created, "model": model}
        return EventStream(chunks(_parts(service, answered), answered.parsed, head, answered.usage))
    reports = await answered.whole(request)
    messages = {each.completion.index: chat_message(each.events) for each in reports}
    reply = chat_reply(
        answered.parsed,
        reports[0].output,
        reply_id=reply_id,
        model=model,
        created=created,
        decode=service.decode,
        message=lambda each: messages[each.index],
    )
    reply["usage"] = answered.usage.as_dict()
    for choice, report in zip(reply["choices"], reports, strict=True):
        choice["finish_reason"] = report.finish_reason
    return JSONText(reply)


async def _parts(service: Service, answered: Answer) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the fields of each chunk.

    The first chunk of each choice has the role. The first chunk of the reply also has fields about the prompt.
    """
    begun: set[int] = set()
    parsed = answered.parsed
    async with aclosing(answered.reports()) as reports:
        async for report in reports:
            index, new_fields = report.completion.index, chat_delta(report.events)
            first, beginning = index not in begun, not begun
            begun.add(index)
            delta = {"role": "assistant", "content": "", **new_fields} if first else new_fields
            choice = chat_choice(parsed, report.completion, delta, decode=service.decode, chunk=True)
            choice["finish_reason"] = report.finish_reason
            if delta or choice["finish_reason"] or choice["logprobs"] or parsed.return_token_ids:
                yield {
                    "choices": [choice],
                    **(prompt_fields(parsed, report.output, service.decode) if beginning else {}),
                }
