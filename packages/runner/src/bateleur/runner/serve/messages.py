"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API, by conversion to chat completions."""

import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from bateleur.runner.serve.body import IntegerLike, openapi_model, read_model
from bateleur.runner.serve.conversation import Answer, answer, render_prompt
from bateleur.runner.serve.errors import anthropic_error, http_error, http_errors
from bateleur.runner.serve.json_text import JSONText
from bateleur.runner.serve.openai.requests import ChatRequest, chat_request
from bateleur.runner.serve.parsers.events import Arguments, Content, End, Event, Reasoning, ToolCall
from bateleur.runner.serve.service import Service
from bateleur.runner.serve.sse import EventStream
from bateleur.runner.utils.arguments import refuse

Block = dict[str, Any]
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
NAMES = {
    "messages": "messages",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "enable_thinking": "thinking.type",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""Names of fields in this API, by their names in chat completions."""
_IGNORED = ["metadata", "service_tier", "container", "context_management", "mcp_servers", "betas", "inference_geo"]
"""Fields of Anthropic's API without effect."""
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class CountTokensBody(BaseModel):
    """Body of `/v1/messages/count_tokens`."""

    model_config = ConfigDict(extra="allow", strict=True)

    messages: list[dict[str, Any]] = Field(description="Messages with the roles user and assistant.")
    model: str | None = Field(None, description="Name of the model. Default: the served model.")
    system: str | list[Block] | None = Field(None, description="System message: text or text blocks.")
    tools: list[Block] | None = Field(None, description="Tools with name and input_schema; others are ignored.")
    tool_choice: Block | None = Field(None, description="type: auto, any, tool (with name) or none.")
    thinking: Block | None = Field(None, description="type: enabled (budget_tokens), adaptive, disabled.")
    output_config: Block | None = Field(None, description="effort; format: JSON schema of the text.")
    output_format: Block | None = Field(None, description="Older name of output_config.format.")


class MessagesBody(CountTokensBody):
    """Body of `/v1/messages`. Fields of chat completions, such as `seed` and `min_p`, are accepted too."""

    thread: Block | None = Field(None, description="Rejected: send the whole conversation.")
    max_tokens: IntegerLike | None = Field(None, ge=1, description="Maximum tokens of the answer.")
    stream: bool | None = Field(None, description="Stream events. Default: false.")
    stop_sequences: list[str] | None = Field(None, description="Stop strings.")


def chat_body(body: CountTokensBody) -> dict[str, Any]:
    """Convert a body of the Messages API to one of chat completions. Raises ValueError for unsupported values."""
    chat = {name: value for name, value in (body.model_extra or {}).items() if name not in _IGNORED}
    system = [{"role": "system", "content": body.system}] if body.system else []
    messages = [*system, *(each for message in body.messages for each in _messages(message))]
    form: Any = (body.output_config or {}).get("format") or body.output_format
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.get("schema")}}
    chat |= {
        "model": body.model,
        "messages": messages,
        "tools": [_tool(each) for each in body.tools or ()],
        "response_format": form,
        "reasoning_effort": (body.output_config or {}).get("effort"),
    }
    if body.tool_choice is not None:
        chat |= _choice(body.tool_choice)
    if body.thinking is not None:
        chat["enable_thinking"] = body.thinking.get("type") != "disabled"
        chat["thinking_token_budget"] = body.thinking.get("budget_tokens")
    if messages and messages[-1]["role"] == "assistant":  # the answer continues this text
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body, MessagesBody):
        chat |= {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences, "stream": body.stream}
    return chat


def _messages(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield one message as chat messages. Tool results become separate messages before the user's text."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        yield {"role": role, "content": content}
        return
    blocks = [each for each in content if isinstance(each, Mapping)]
    for block in blocks:
        if block.get("type") == "tool_result":
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _parts(block.get("content"))}
    calls = [
        {
            "id": each.get("id"),
            "type": "function",
            "function": {"name": each.get("name"), "arguments": each.get("input")},
        }
        for each in blocks
        if each.get("type") == "tool_use"
    ]
    rest = _parts([block for block in blocks if block.get("type") not in ("tool_result", "tool_use")])
    if rest or calls or not blocks:
        yield {"role": role, "content": rest, **({"tool_calls": calls} if calls else {})}


def _parts(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    parts = []
    for block in content:
        source = block.get("source") if isinstance(block, Mapping) else None
        if isinstance(source, Mapping) and isinstance(source.get("data"), str) and source.get("type") == "text":
            parts.append({"type": "text", "text": source["data"]})
        elif not isinstance(block, Mapping) or block.get("type") != "redacted_thinking":
            parts.append(block)
    return parts


def _tool(tool: Block) -> dict[str, Any]:
    """Convert a tool to chat completions' form. Tools that run on Anthropic's servers stay as they are."""
    if tool.get("type") not in (None, "custom", "function"):
        return tool
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _choice(choice: Block) -> dict[str, Any]:
    kind = choice.get("type")
    if kind == "tool":
        chosen: Any = {"type": "function", "function": {"name": choice.get("name")}}
    else:
        chosen = _TOOL_CHOICES.get(str(kind)) or refuse("tool_choice.type", kind, "auto, any, tool or none")
    parallel = choice.get("disable_parallel_tool_use")
    return {"tool_choice": chosen, **({"parallel_tool_calls": not parallel} if parallel is not None else {})}


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

    def begin(self, usage: Block) -> Iterator[Block]:
        self.message["usage"] = usage
        yield {"type": "message_start", "message": {**self.message, "content": []}}
        yield {"type": "ping"}

    def write(self, events: Sequence[Event]) -> Iterator[Block]:
        """Add events of the answer. Raises HTTPException at the end of an aborted request."""
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
                case End("abort", _):  # no stop reason of this API means that
                    raise http_error(503, "the request was aborted before its answer was complete", code="aborted")
                case End(reason, stop):
                    yield from self._close()
                    default = "stop_sequence" if isinstance(stop, str) else "end_turn"
                    self.message["stop_reason"] = _STOP_REASONS.get(reason, default)
                    self.message["stop_sequence"] = stop if isinstance(stop, str) else None

    def end(self, usage: Block) -> Iterator[Block]:
        self.message["usage"] = usage
        delta = {name: self.message[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": delta, "usage": usage}
        yield {"type": "message_stop"}

    def _text(self, kind: str, text: str) -> Iterator[Block]:
        if self._open is None or self._open["type"] != kind:
            yield from self._begin({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        assert self._open is not None
        self._open[kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _begin(self, block: Block) -> Iterator[Block]:
        yield from self._close()
        self._open, self._json = block, ""
        self.message["content"].append(block)
        yield {"type": "content_block_start", "index": self._index, "content_block": dict(block)}

    def _close(self) -> Iterator[Block]:
        if self._open is None:
            return
        if self._open["type"] == "tool_use":
            with suppress(ValueError):  # truncated arguments; the stop reason shows that
                self._open["input"] = json.loads(self._json)
        elif self._open["type"] == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    def _delta(self, delta: Block) -> Block:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    @property
    def _index(self) -> int:
        return len(self.message["content"]) - 1


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
        parsed = chat_request(chat_body(body), service.defaults, strict=service.config.strict_fields, names=NAMES)
        if parsed.params.n > 1:
            refuse("n", parsed.params.n, "1: a message has one answer")
        return parsed


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
