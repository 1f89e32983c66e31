"""`/v1/completions`: prompts are continued."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from bateleur.runner.engine_thread import Reader
from bateleur.runner.openai.replies import completion_choice, completion_reply
from bateleur.runner.openai.requests import CompletionRequest, completion_request
from bateleur.runner.outputs import CompletionOutput, RequestOutput
from bateleur.runner.serve.body import read_object
from bateleur.runner.serve.errors import refusing
from bateleur.runner.serve.json_text import JSONText
from bateleur.runner.serve.service import Service, new_id, number_of, raise_failure
from bateleur.runner.serve.sse import EventStream
from bateleur.runner.serve.usage import Usage


def router(service: Service) -> APIRouter:
    """The endpoint."""
    routes = APIRouter()

    @routes.post("/v1/completions")
    async def complete(request: Request) -> Response:
        body = await read_object(request, service.config)
        with refusing():
            asked = completion_request(body, service.defaults)
        service.check_model(asked.model)
        reply_id, created = new_id("cmpl"), int(time.time())
        reader = await service.submit(asked.prompts, asked, reply_id)
        if asked.stream:
            return EventStream(_Chunks(service, asked, reply_id, created).events(reader))
        outputs = await service.finish(reader, request)
        told = partial(completion_reply, reply_id=reply_id, model=service.names[0], created=created)
        return JSONText(told(asked, outputs, decode=service.decode))

    return routes


class _Chunks:
    """A reply in parts: one for each continuation that has grown in a step."""

    def __init__(self, service: Service, asked: CompletionRequest, reply_id: str, created: int) -> None:
        self._service, self._asked = service, asked
        self._head = {"id": reply_id, "object": "text_completion", "created": created}
        self._head["model"] = service.names[0]
        self._usage = Usage()
        self._offsets: dict[int, int] = {}
        """Characters told so far, by choice."""

    async def events(self, reader: Reader) -> AsyncGenerator[dict[str, Any], None]:
        """Every chunk, with the usage behind them if it is asked for."""
        try:
            while outputs := await reader.read():
                for output in outputs:
                    raise_failure(output)
                    self._usage.count(output, only_prompt=self._asked.only_prompt)
                    for completion in output.outputs:
                        if (choice := self._choice(output, completion)) is not None:
                            yield self._chunk([choice])
            if self._asked.include_usage:
                yield self._chunk([]) | {"usage": self._usage.told()}
        finally:
            self._service.llm.leave(reader)

    def _choice(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any] | None:
        """What is new of a continuation, if anything is to be told of it."""
        asked = self._asked
        index = number_of(output.request_id) * getattr(asked.params, "n", 1) + completion.index
        first = index not in self._offsets
        offset = self._offsets.setdefault(index, 0)
        told = partial(completion_choice, decode=self._service.decode, first=first, offset=offset)
        choice = told(asked, output, completion, index)
        self._offsets[index] += len(choice["text"])
        worth = choice["text"] or choice["finish_reason"] or choice["logprobs"] or asked.return_token_ids
        return choice if worth else None

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "choices": choices}
        if self._asked.continuous_usage:
            return chunk | {"usage": self._usage.told()}
        return chunk | ({"usage": None} if self._asked.include_usage else {})
