"""`/v1/completions`, `/v1/chat/completions`, and SageMaker's `/invocations`, which accepts both bodies."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response

from bateleur.runner.engine_thread import OutputReader
from bateleur.runner.serve.body import openapi_body, read_json_object
from bateleur.runner.serve.conversation import Answer, answer
from bateleur.runner.serve.errors import http_errors
from bateleur.runner.serve.json_text import JSONText
from bateleur.runner.serve.openai import replies, requests
from bateleur.runner.serve.openai.requests import CHAT_FIELDS, COMPLETION_FIELDS, APIRequest, CompletionRequest
from bateleur.runner.serve.service import Service, prompt_index
from bateleur.runner.serve.sse import EventStream


def router(service: Service) -> APIRouter:
    """Create the routes for completions and chat completions."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions", openapi_extra=openapi_body(CHAT_FIELDS, "messages"))
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        return await _chat(service, request, await read_json_object(request, service.config))

    @routes.post("/v1/completions", openapi_extra=openapi_body(COMPLETION_FIELDS, "prompt"))
    async def complete(request: Request) -> Response:
        """Continue prompts."""
        return await _complete(service, request, await read_json_object(request, service.config))

    @routes.post("/invocations", openapi_extra=openapi_body({**COMPLETION_FIELDS, **CHAT_FIELDS}))
    async def invoke(request: Request) -> Response:
        """SageMaker's endpoint: a chat completion if the body has messages, else a completion."""
        body = await read_json_object(request, service.config)
        return await (_complete if body.get("messages") is None else _chat)(service, request, body)

    return routes


async def _chat(service: Service, request: Request, body: dict[str, Any]) -> Response:
    with http_errors():
        parsed = requests.chat_request(body, service.defaults, strict=service.config.strict_fields)
        parsed = service.with_server_options(parsed)
    kind = "chat.completion.chunk" if parsed.stream else "chat.completion"
    reply_id = f"chatcmpl-{parsed.request_id or uuid4().hex}"
    head = replies.reply_head(reply_id, kind, service.reply_model(parsed.model))
    answered = await answer(service, parsed, head["id"])
    if parsed.stream:
        return EventStream(_chunks(_chat_parts(service, answered), answered.parsed, head, answered.usage))
    reports = await answered.whole(request)
    events = [each.events for each in reports]
    return JSONText(
        replies.chat_reply(answered.parsed, reports[0].output, events, head, answered.usage, service.decode)
    )


async def _chat_parts(service: Service, answered: Answer) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the fields of each chunk. The first chunk of all also has fields about the prompt."""
    begun: set[int] = set()
    parsed = answered.parsed
    async with aclosing(answered.reports()) as reports:
        async for report in reports:
            first = report.completion.index not in begun
            choice = replies.chat_choice(parsed, report.completion, report.events, service.decode, first=first)
            if choice["delta"] or choice["finish_reason"] or choice["logprobs"] or parsed.return_token_ids:
                of_prompt = {} if begun else replies.prompt_fields(parsed, report.output, service.decode)
                yield {"choices": [choice], **of_prompt}
            begun.add(report.completion.index)


async def _complete(service: Service, request: Request, body: dict[str, Any]) -> Response:
    with http_errors():
        parsed = requests.completion_request(body, service.defaults, strict=service.config.strict_fields)
        parsed = service.with_server_options(parsed)
    service.adapter_of(parsed.model)
    reply_id = f"cmpl-{parsed.request_id or uuid4().hex}"
    head = replies.reply_head(reply_id, "text_completion", service.reply_model(parsed.model))
    reader = await service.submit(parsed.prompts, parsed, head["id"])
    if parsed.stream:
        usage = replies.Usage()
        return EventStream(_chunks(_completion_parts(service, parsed, reader, usage), parsed, head, usage))
    return JSONText(replies.completion_reply(parsed, await service.finish(reader, request), head, service.decode))


async def _completion_parts(
    service: Service, parsed: CompletionRequest, reader: OutputReader, usage: replies.Usage
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the fields of each chunk: one choice, with new text of one continuation of one prompt."""
    offsets: dict[int, int] = {}  # by choice that was sent: `text_offset` of its next token
    async with aclosing(service.outputs(reader)) as outputs:
        async for output in outputs:
            usage.count(output, only_prompt=parsed.only_prompt)
            for completion in output.outputs:
                index = prompt_index(output.request_id) * parsed.params.n + completion.index
                first, at = index not in offsets, offsets.get(index, 0)
                choice = replies.completion_choice(
                    parsed, output, completion, index, service.decode, first=first, offset=at
                )
                if choice["text"] or choice["finish_reason"] or choice["logprobs"] or parsed.return_token_ids:
                    offsets[index] = replies.next_offset(choice, completion, at)
                    yield {"choices": [choice]}


async def _chunks(
    parts: AsyncGenerator[dict[str, Any], None], parsed: APIRequest, head: dict[str, Any], usage: replies.Usage
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield a chunk per part: `head` and the part's fields; then the usage if requested. `parts` updates `usage`."""
    async with aclosing(parts):
        async for part in parts:
            chunk = {**head, **part}
            if parsed.include_usage:
                chunk["usage"] = usage.as_dict() if parsed.continuous_usage else None
            yield chunk
    if parsed.include_usage:
        yield {**head, "choices": [], "usage": usage.as_dict()}
