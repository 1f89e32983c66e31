"""`/v1/completions`: prompts are continued."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from bateleur.runner.openai.replies import completion_choice, completion_reply
from bateleur.runner.openai.requests import CompletionRequest, completion_request
from bateleur.runner.outputs import CompletionOutput, RequestOutput
from bateleur.runner.serve.body import read_object
from bateleur.runner.serve.chunks import Chunks
from bateleur.runner.serve.errors import refusing
from bateleur.runner.serve.json_text import JSONText
from bateleur.runner.serve.service import Service, new_id, number_of
from bateleur.runner.serve.sse import EventStream


def router(service: Service) -> APIRouter:
    """The endpoint."""
    routes = APIRouter()

    @routes.post("/v1/completions")
    async def complete(request: Request) -> Response:
        body = await read_object(request, service.config)
        with refusing():
            asked = completion_request(body, service.defaults)
        service.check_model(asked.model)
        reply_id, created = new_id("cmpl", asked), int(time.time())
        reader = await service.submit(asked.prompts, asked, reply_id)
        if asked.stream:
            head = {
                "id": reply_id,
                "object": "text_completion",
                "created": created,
                "model": service.names[0],
            }
            return EventStream(_CompletionChunks(service, asked, head).events(reader))
        outputs = await service.finish(reader, request)
        told = partial(completion_reply, reply_id=reply_id, model=service.names[0], created=created)
        return JSONText(told(asked, outputs, decode=service.decode))

    return routes


class _CompletionChunks(Chunks):
    """Text, by prompt and continuation."""

    def __init__(self, service: Service, asked: CompletionRequest, head: dict[str, Any]) -> None:
        super().__init__(service, asked, head)
        self._body = asked
        self._offsets: dict[int, int] = {}
        """Characters of the tokens told so far, by choice; text may lag behind them, where a stop string may begin."""

    def count(self, output: RequestOutput) -> None:
        """A token that was drawn for nothing is none."""
        self._usage.count(output, only_prompt=self._body.only_prompt)

    def parts(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any] | None:
        """One choice."""
        asked = self._body
        index = number_of(output.request_id) * asked.params.n + completion.index
        first = index not in self._offsets
        offset = self._offsets.setdefault(index, 0)
        told = partial(completion_choice, decode=self._service.decode, first=first, offset=offset)
        choice = told(asked, output, completion, index)
        if choice["logprobs"]:
            self._offsets[index] += sum(map(len, choice["logprobs"]["tokens"]))
        worth = choice["text"] or choice["finish_reason"] or choice["logprobs"] or asked.return_token_ids
        return {"choices": [choice]} if worth else None
