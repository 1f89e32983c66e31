"""The body of `/v1/responses`, and its conversion to a body of chat completions."""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from bateleur.runner.serve.body import IntegerLike
from bateleur.runner.utils.arguments import refuse, shown
from bateleur.runner.utils.log_once import log_once

Item = dict[str, Any]
_log = logging.getLogger(__name__)
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "truncate_prompt_tokens": "truncation",
}
"""Names of fields in this API, by their names in chat completions."""
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Schema of a custom tool, which has one text as input."""


class _Conversation(BaseModel):
    """Fields of a body that choose the input, the model, and whether to store the response."""

    model_config = ConfigDict(extra="allow", strict=True)

    input: str | list[Item] = Field(description="Text, or items: messages, calls, tool outputs, reasoning.")
    model: str | None = Field(None, description="Name of the model. Default: the served model.")
    instructions: str | None = Field(None, description="System message, which is not stored.")
    previous_response_id: str | None = Field(None, description="Id of a stored response to continue.")
    store: bool | None = Field(None, description="Store the response. Default: true.")
    background: bool | None = Field(None, description="Return at once. Default: false.")


class ResponsesBody(_Conversation):
    """Body of `/v1/responses`. Fields of chat completions, such as `top_k` and `stop`, are accepted too."""

    stream: bool | None = Field(None, description="Stream events. Default: false.")
    max_output_tokens: IntegerLike | None = Field(None, ge=1, description="Maximum tokens, including reasoning.")
    tools: list[Item] | None = Field(None, description="function and custom tools; others are ignored.")
    tool_choice: str | Item | None = Field(None, description="none, auto, required, or a tool.")
    parallel_tool_calls: bool | None = Field(None, description="Allow several calls. Default: true.")
    text: Item | None = Field(None, description="`format`: text, json_object or json_schema.")
    reasoning: Item | None = Field(None, description="`effort`: none turns thinking off.")
    top_logprobs: IntegerLike | None = Field(None, ge=0, description="Number of most likely tokens to report.")
    include: list[str] | None = Field(None, description="message.output_text.logprobs, or no effect.")
    truncation: str | None = Field(None, description="auto drops the start of an input that is too long.")
    metadata: dict[str, Any] | None = Field(None, description="Returned unchanged.")
    conversation: Any = Field(None, description="Rejected: use previous_response_id.")
    prompt: Any = Field(None, description="Rejected: prompt templates are not stored.")
    stream_options: Item | None = Field(None, description="Accepted without effect.")
    max_tool_calls: IntegerLike | None = Field(None, description="Accepted without effect.")

    @property
    def items(self) -> list[Item]:
        """Input as a list of items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input

    @property
    def custom_tools(self) -> frozenset[str]:
        """Names of the custom tools, which take text instead of arguments."""
        return frozenset(str(each.get("name")) for each in self.tools or () if each.get("type") == "custom")


def chat_body(body: ResponsesBody, earlier: Sequence[Item]) -> dict[str, Any]:
    """Convert a body of the Responses API to one of chat completions. earlier: items of the previous responses."""
    for name in ("conversation", "prompt"):
        if getattr(body, name) is not None:
            refuse(name, getattr(body, name), "absent: use previous_response_id, or send all items as input")
    messages = messages_of([*earlier, *body.items])
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    form: Any = (body.text or {}).get("format")
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}
    chat: dict[str, Any] = {
        **(body.model_extra or {}),
        "model": body.model,
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "tools": [_tool(each) for each in body.tools or ()],
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": form,
        "reasoning_effort": (body.reasoning or {}).get("effort"),
        "stream": True,
    }
    if body.top_logprobs is not None or "message.output_text.logprobs" in (body.include or ()):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.truncation == "auto":
        chat["truncate_prompt_tokens"] = -1
    return chat


def messages_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Convert items to chat messages. Adjacent reasoning, text and calls become one assistant message."""
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        match item.get("type", "message" if "role" in item else None):
            case "message":
                if item.get("role") == "assistant":
                    _assistant(messages, new=("content", "tool_calls"))["content"] = item.get("content")
                else:
                    messages.append({"role": item.get("role"), "content": item.get("content")})
            case "function_call" | "custom_tool_call":
                _assistant(messages).setdefault("tool_calls", []).append(_call(item))
            case "function_call_output" | "custom_tool_call_output":
                call_id = item.get("call_id")
                messages.append({"role": "tool", "tool_call_id": call_id, "content": item.get("output")})
            case "reasoning":
                message = _assistant(messages, new=("content", "tool_calls", "reasoning_content"))
                message["reasoning_content"] = _reasoning(item)
            case None:
                refuse(f"input[{i}].type", None, "the type of an item, such as message")
            case kind:
                log_once(_log, f"items of type {shown(kind)} are ignored: they belong to tools of other servers")
    return messages


def _assistant(messages: list[dict[str, Any]], new: Sequence[str] = ()) -> dict[str, Any]:
    """Return the last message if it is an assistant's and has no field of `new`; else append an assistant message."""
    if not messages or messages[-1]["role"] != "assistant" or any(messages[-1].get(name) for name in new):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _call(item: Item) -> dict[str, Any]:
    arguments = item.get("arguments")
    if item["type"] == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input")})
    function = {"name": item.get("name"), "arguments": arguments}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _reasoning(item: Item) -> str:
    parts = item.get("content") or item.get("summary")
    listed = parts if isinstance(parts, list) else ()
    return "\n".join(str(each.get("text", "")) for each in listed if isinstance(each, Mapping))


def _tool(tool: Item) -> dict[str, Any]:
    kind = tool.get("type")
    if kind == "custom":
        about, form = str(tool.get("description") or ""), tool.get("format")
        if isinstance(form, Mapping) and (grammar := form.get("definition")):
            about += f"\n\nIts input follows this grammar:\n{grammar}"
        function = {"name": tool.get("name"), "description": about, "parameters": _CUSTOM_PARAMETERS}
        return {"type": "function", "function": function}
    if kind != "function" or "function" in tool:
        return tool
    return {"type": "function", "function": {name: tool[name] for name in tool if name != "type"}}


def _tool_choice(choice: str | Item | None) -> Any:
    if not isinstance(choice, dict):
        return choice
    match choice.get("type"):
        case "function" | "custom":
            return {"type": "function", "function": {"name": choice.get("name")}}
        case "allowed_tools":
            tools = choice.get("tools") or []
            if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
                refuse("tool_choice.tools", tools, "a list of objects")
            chosen = [_tool_choice(each) for each in tools if "name" in each]
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": chosen}}
    return "auto"  # a tool that runs on other servers
