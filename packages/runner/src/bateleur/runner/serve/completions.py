"""`/v1/completions`: continuations of prompts."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from bateleur.runner.engine_thread import OutputReader
from bateleur.runner.serve.body import openapi_body, read_json_object
from bateleur.runner.serve.errors import http_errors
from bateleur.runner.serve.json_text import JSONText
from bateleur.runner.serve.openai.replies import Usage, completion_choice, completion_reply
from bateleur.runner.serve.openai.requests import COMPLETION_FIELDS, CompletionRequest, completion_request
from bateleur.runner.serve.service import Service, new_id, prompt_index
from bateleur.runner.serve.sse import EventStream, chunks


def router(service: Service) -> APIRouter:
    """Create the routes for completions."""
    routes = APIRouter()

    @routes.post("/v1/completions", openapi_extra=openapi_body(COMPLETION_FIELDS, "prompt"))
    async def complete(request: Request) -> Response:
        """Continue prompts."""
        return await completion(service, request, await read_json_object(request, service.config))

    return routes


async def completion(service: Service, request: Request, body: dict[str, Any]) -> Response:
    """Answer a body of `/v1/completions`."""
    with http_errors():
        parsed = completion_request(body, service.defaults, strict=service.config.strict_fields)
        parsed = service.with_server_options(parsed)
    service.adapter_of(parsed.model)
    reply_id, created, model = new_id("cmpl", parsed), int(time.time()), service.reply_model(parsed.model)
    reader = await service.submit(parsed.prompts, parsed, reply_id)
    if parsed.stream:
        head = {"id": reply_id, "object": "text_completion", "created": created, "model": model}
        usage = Usage()
        return EventStream(chunks(_parts(service, parsed, reader, usage), parsed, head, usage))
    outputs = await service.finish(reader, request)
    decode = service.decode
    reply = completion_reply(parsed, outputs, reply_id=reply_id, model=model, created=created, decode=decode)
    return JSONText(reply)


async def _parts(
    service: Service, parsed: CompletionRequest, reader: OutputReader, usage: Usage
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the fields of each chunk: one choice, with new text of one continuation of one prompt."""
    offsets: dict[int, int] = {}  # characters of all tokens so far, per choice; the reported text may be shorter
    async with aclosing(service.outputs(reader)) as outputs:
        async for output in outputs:
            usage.count(output, only_prompt=parsed.only_prompt)
            for completion in output.outputs:
                index = prompt_index(output.request_id) * parsed.params.n + completion.index
                first = index not in offsets
                offset = offsets.setdefault(index, 0)
                choice = completion_choice(
                    parsed, output, completion, index, decode=service.decode, first=first, offset=offset
                )
                if choice["logprobs"]:
                    offsets[index] += sum(map(len, choice["logprobs"]["tokens"]))
                if choice["text"] or choice["finish_reason"] or choice["logprobs"] or parsed.return_token_ids:
                    yield {"choices": [choice]}
