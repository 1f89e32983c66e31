"""`/v1/responses`: OpenAI's Responses API, with stored responses."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import Response

from bateleur.runner.outputs import CompletionOutput
from bateleur.runner.serve.body import openapi_model, read_model
from bateleur.runner.serve.conversation import Answer, answer, render_prompt
from bateleur.runner.serve.errors import error_of, http_error, http_errors
from bateleur.runner.serve.json_text import JSONText, dumps
from bateleur.runner.serve.openai.replies import chat_logprobs
from bateleur.runner.serve.openai.requests import ChatRequest, chat_request
from bateleur.runner.serve.parsers.events import Content
from bateleur.runner.serve.responses.body import NAMES, Item, ResponsesBody, chat_body
from bateleur.runner.serve.responses.writer import ResponseWriter
from bateleur.runner.serve.service import Service
from bateleur.runner.serve.sse import EventStream
from bateleur.runner.utils.arguments import refuse

_CANCEL_SECONDS = 10
"""Seconds for an aborted request to end; a client that does not read its stream may delay the end."""
_ABORT_SECONDS = 0.1
"""Seconds after which an abort is repeated."""
_RUNNING = ("queued", "in_progress")


def router(service: Service) -> APIRouter:
    """Create the routes of the Responses API."""
    routes, responses, body = APIRouter(), _Responses(service), openapi_model(ResponsesBody)
    routes.post("/v1/responses", openapi_extra=body)(responses.create)
    routes.post("/v1/responses/input_tokens", openapi_extra=body)(responses.count)
    routes.get("/v1/responses/{response_id}")(responses.retrieve)
    routes.delete("/v1/responses/{response_id}")(responses.delete)
    routes.post("/v1/responses/{response_id}/cancel")(responses.cancel)
    routes.get("/v1/responses/{response_id}/input_items")(responses.inputs)
    return routes


def _page(items: list[Item], limit: str, order: str, after: str | None) -> Item:
    """Return up to `limit` items after the id `after`, asc or desc, as OpenAI's list object. ValueError if invalid."""
    if not (limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= 100):
        refuse("limit", limit, "1 to 100")
    if order not in ("asc", "desc"):
        refuse("order", order, "asc or desc")
    ordered = items if order == "asc" else items[::-1]
    ids = [each["id"] for each in ordered]
    if after is not None and after not in ids:
        refuse("after", after, "the id of an input item")
    start = 0 if after is None else ids.index(after) + 1
    end = min(start + int(limit), len(ids))
    first, last = (ids[start], ids[end - 1]) if start < end else (None, None)
    more = {"has_more": end < len(ids), "first_id": first, "last_id": last}
    return {"object": "list", "data": ordered[start:end], **more}


@dataclass(slots=True)
class StoredResponse:
    """A stored response, its input items, and all items of its conversation."""

    response: Item
    inputs: list[Item]
    """Input items of this response, without those of previous responses."""
    items: list[Item]
    """All items of the conversation, including the output once the response has ended."""
    num_bytes: int
    """Size as JSON, including previous responses."""


class ResponseStore:
    """Least-recently-used cache of responses by id, limited in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self.outputs: dict[str, Item] = {}
        """Output items of the stored responses, by id."""

    def get(self, response_id: str) -> StoredResponse | None:
        """Return the response with this id, or None."""
        if response_id in self._stored:
            self._stored.move_to_end(response_id)
        return self._stored.get(response_id)

    def put(self, response: Item, inputs: list[Item], previous: StoredResponse | None) -> None:
        """Store a response that has started or ended. inputs: its input items. previous: the response it continues."""
        self.drop(response["id"])
        output: list[Item] = response["output"]
        items = [*(previous.items if previous else ()), *inputs, *output]
        size = len(dumps((response, inputs))) + (previous.num_bytes if previous else 0)
        self._stored[response["id"]] = StoredResponse(response, inputs, items, size)
        self._num_bytes += size
        self.outputs |= {each["id"]: each for each in output}
        while self._num_bytes > self._max_bytes:
            self.drop(next(iter(self._stored)))

    def drop(self, response_id: str) -> None:
        """Remove a response if it is stored."""
        if (stored := self._stored.pop(response_id, None)) is not None:
            self._num_bytes -= stored.num_bytes
            for each in stored.response["output"]:
                self.outputs.pop(each["id"], None)


@dataclass(slots=True)
class _Running:
    response: Item
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    status: int = 200
    """HTTP status, if the response fails."""
    task: asyncio.Task[Item] | None = None
    """Task that generates a background response."""


class _Responses:
    """The endpoints of the Responses API, and the responses of one server."""

    def __init__(self, service: Service) -> None:
        self._service, self._store = service, ResponseStore(service.config.response_store_bytes)
        self._running: dict[str, _Running] = {}

    def _stored(self, response_id: str) -> StoredResponse:
        """Return a stored response. Raises HTTPException if it does not exist."""
        stored = self._store.get(response_id)
        if stored is None:
            message = (
                f"response {response_id[:100]!r} is not stored: --response-store-bytes limits the store, and "
                "each of --replicas has its own store; send the whole conversation as input instead"
            )
            raise http_error(404, message, param="previous_response_id", code="response_not_found")
        return stored

    def _resolved(self, item: Item) -> Item:
        """Return the item, or the stored item for an `item_reference`. Raises HTTPException if that is not stored."""
        if item.get("type") != "item_reference":
            return item
        found = self._store.outputs.get(str(item.get("id")))
        if found is None:
            message = f"input has a reference to the item {str(item.get('id'))[:100]!r}, which is not stored"
            raise http_error(404, message, param="input", code="item_not_found")
        return found

    async def _read(self, request: Request) -> tuple[ResponsesBody, ChatRequest, StoredResponse | None]:
        body = await read_model(request, self._service.config, ResponsesBody)
        with http_errors():
            if body.background and (body.stream or body.store is False):
                raise ValueError("background is True; it must be False with stream or without store")
            if isinstance(body.input, list):
                body.input = [self._resolved(each) for each in body.input]
        previous = None if body.previous_response_id is None else self._stored(body.previous_response_id)
        if previous is not None and previous.response["status"] in _RUNNING:
            message = "previous_response_id is a response that is still running"
            raise http_error(400, message, param="previous_response_id")
        with http_errors(NAMES):
            chat, strict = chat_body(body, previous.items if previous else []), self._service.config.strict_fields
            parsed = chat_request(chat, self._service.defaults, strict=strict, names=NAMES)
            if parsed.params.n > 1:
                refuse("n", parsed.params.n, "1: a response has one answer")
            return body, self._service.with_server_options(parsed), previous

    async def create(self, request: Request) -> Response:
        """Create a response."""
        body, parsed, previous = await self._read(request)
        response = _response(self._service, body, parsed)
        answered = await answer(self._service, parsed, response["id"])
        running = _Running(response)
        events = self._events(answered, body, previous, running)
        if body.stream:
            return EventStream(events, named=True)
        if body.background:
            self._running[response["id"]] = running
            self._store.put(response, body.items, previous)
            running.task = asyncio.create_task(_last_event_of(events))
            return JSONText(response)
        last = await self._service.cancel_on_disconnect(_last_event_of(events), request)
        if last["type"] == "response.failed":
            raise http_error(running.status, response["error"]["message"], code=response["error"]["code"])
        return JSONText(response)

    async def count(self, request: Request) -> Response:
        """Count the tokens of an input."""
        _, parsed, _ = await self._read(request)
        _, prompt = await render_prompt(self._service, parsed)
        return JSONText({"object": "response.input_tokens", "input_tokens": len(prompt["prompt_token_ids"])})

    async def retrieve(self, request: Request, response_id: str, stream: str = "false") -> Response:
        """Return a stored response. stream: must be false."""
        with http_errors():
            if stream.lower() not in ("false", "0", ""):
                refuse("stream", stream, "false: only the request that creates a response streams it")
        return JSONText(self._stored(response_id).response)

    async def delete(self, request: Request, response_id: str) -> Response:
        """Delete a stored response. Aborts it if it is running; status 409 if it does not end soon."""
        self._stored(response_id)
        try:
            await self._cancel(response_id)
        except TimeoutError:
            raise http_error(409, f"response {response_id} is still running; delete it when it has ended") from None
        self._store.drop(response_id)
        return JSONText({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request, response_id: str) -> Response:
        """Abort a running response. Returns it as it is if it does not end soon."""
        running = self._running.get(response_id)
        with suppress(TimeoutError):
            return JSONText(await self._cancel(response_id))
        assert running is not None, "only a running response takes time"
        return JSONText(running.response)

    async def _cancel(self, response_id: str) -> Item:
        """Abort the response if it is running. Returns it. Raises TimeoutError if it does not end soon."""
        running = self._running.get(response_id)
        if running is None:
            return self._stored(response_id).response
        async with asyncio.timeout(_CANCEL_SECONDS):
            while not running.ended.is_set():  # the answer may be another request, after the reasoning
                await self._service.llm.abort(f"{response_id}-0")
                with suppress(TimeoutError):
                    await asyncio.wait_for(running.ended.wait(), _ABORT_SECONDS)
        return running.response

    async def inputs(
        self, request: Request, response_id: str, limit: str = "20", order: str = "desc", after: str | None = None
    ) -> Response:
        """Return a page of the input items of a stored response, newest first unless `order` is asc."""
        inputs = self._stored(response_id).inputs
        items = [{**each, "id": str(each.get("id") or f"item_{i}")} for i, each in enumerate(inputs)]
        with http_errors():
            return JSONText(_page(items, limit, order, after))

    async def _events(
        self, answered: Answer, body: ResponsesBody, previous: StoredResponse | None, running: _Running
    ) -> AsyncGenerator[dict[str, Any], None]:
        writer, response = ResponseWriter(running.response, body.custom_tools), running.response
        self._running[response["id"]] = running
        reasons = answered.prepared.phase != "none"
        try:
            async with aclosing(answered.reports()) as reports:
                for event in writer.begin():
                    yield event
                with http_errors():
                    async for report in reports:
                        logprobs, answer_start = self._logprobs(answered.parsed, report.completion)
                        answer_start = answer_start if reasons else 0
                        for event in writer.write(report.events, logprobs, answer_start=answer_start):
                            yield event
                        reasons &= not (answer_start or any(isinstance(each, Content) for each in report.events))
            for event in writer.end(_usage(answered)):
                yield event
        except HTTPException as error:
            running.status = error.status_code
            for event in writer.fail(error_of(error)):
                yield event
        finally:
            if response["status"] in _RUNNING:  # the client disconnected
                response["status"] = "cancelled"
            if body.store is not False:
                self._store.put(response, body.items, previous)
            del self._running[response["id"]]
            running.ended.set()

    def _logprobs(self, parsed: ChatRequest, completion: CompletionOutput) -> tuple[list[Any], int]:
        """Return the requested log probabilities of an output, and the index of the first token after its reasoning.

        The index is 0 if the output does not end the reasoning.
        """
        if (num_top := parsed.num_top_logprobs) is None:
            return [], 0
        ids, as_ids = completion.token_ids, parsed.return_tokens_as_token_ids
        content = chat_logprobs(ids, completion.logprobs or (), num_top, as_ids=as_ids)["content"]
        chat_format = self._service.chat_format
        end = None if chat_format.reasoning_parser is None else chat_format.reasoning_end_id
        return content, 0 if end is None or end not in ids else ids.index(end) + 1


async def _last_event_of(events: AsyncGenerator[dict[str, Any], None]) -> Item:
    last: Item = {}
    async with aclosing(events):
        async for event in events:
            last = event
    return last


def _response(service: Service, body: ResponsesBody, parsed: ChatRequest) -> Item:
    params = parsed.params
    return {
        "id": f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": service.reply_model(parsed.model),
        "output": [],
        "parallel_tool_calls": parsed.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
        "safety_identifier": None,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}, **(body.text or {})},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": None,
        "metadata": body.metadata or {},
    }


def _usage(answered: Answer) -> Item:
    usage = answered.usage.as_dict()
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
