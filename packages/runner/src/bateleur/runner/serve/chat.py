"""`/v1/chat/completions`: a conversation is answered, by the checkpoint's template."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from bateleur.runner.openai.replies import chat_choice, chat_reply, of_prompt
from bateleur.runner.openai.requests import ChatRequest, chat_request
from bateleur.runner.outputs import CompletionOutput, RequestOutput
from bateleur.runner.serve.body import read_object
from bateleur.runner.serve.chunks import Chunks
from bateleur.runner.serve.errors import refusing
from bateleur.runner.serve.json_text import JSONText
from bateleur.runner.serve.parsers.chat_format import AnswerReader, ChatTurn, turn_of, with_options
from bateleur.runner.serve.parsers.message import chat_delta, chat_message
from bateleur.runner.serve.service import Service, new_id
from bateleur.runner.serve.sse import EventStream


def router(service: Service) -> APIRouter:
    """The endpoint."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await read_object(request, service.config)
        with refusing():
            asked = with_options(chat_request(body, service.defaults), service.config)
        service.check_model(asked.model)
        with refusing():
            long = service.is_long(len(repr((asked.messages, asked.tools))))
            prompts = await service.llm.aside(lambda: asked.prompts_for(service.llm.llm.tokenizer), long=long)
            turn = turn_of(service.chat_format, asked, prompts[0])
        asked = replace(asked, params=turn.params)
        reply_id, created = new_id("chatcmpl", asked), int(time.time())
        reader = await service.submit(prompts, asked, reply_id)
        if asked.stream:
            kind, model = "chat.completion.chunk", service.names[0]
            head = {"id": reply_id, "object": kind, "created": created, "model": model}
            return EventStream(_ChatChunks(service, asked, turn, head).events(reader))
        (output,) = await service.finish(reader, request)
        told = partial(chat_reply, reply_id=reply_id, model=service.names[0], created=created)
        return JSONText(
            told(
                asked,
                output,
                decode=service.decode,
                message=lambda each: chat_message(turn.reader().read(each)),
            )
        )

    return routes


class _ChatChunks(Chunks):
    """What is new of a message, by continuation."""

    def __init__(self, service: Service, asked: ChatRequest, turn: ChatTurn, head: dict[str, Any]) -> None:
        super().__init__(service, asked, head)
        self._body, self._turn = asked, turn
        self._readers: dict[int, AnswerReader] = {}
        self._called: set[int] = set()
        """Continuations that have called a tool."""

    def parts(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any] | None:
        """One choice; the first of a continuation has the role, and the very first what the prompt was."""
        index, asked = completion.index, self._body
        first, beginning = index not in self._readers, not self._readers
        if first:
            self._readers[index] = self._turn.reader()
        said = chat_delta(self._readers[index].read(completion))
        if said.get("tool_calls"):
            self._called.add(index)
        delta = {"role": "assistant", "content": "", **said} if first else said
        choice = chat_choice(asked, completion, delta, decode=self._service.decode, chunk=True)
        if choice["finish_reason"] == "stop" and index in self._called:
            choice["finish_reason"] = "tool_calls"
        if not (delta or choice["finish_reason"] or choice["logprobs"] or asked.return_token_ids):
            return None
        told = of_prompt(asked, output, self._service.decode) if beginning else {}
        return {"choices": [choice], **told}
