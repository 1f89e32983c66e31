"""The body of `/v1/messages`, and its conversion to a body of chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from bateleur.runner.serve.body import IntegerLike
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
    if isinstance(body, MessagesBody):
        chat |= {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences, "stream": body.stream}
        if messages and messages[-1]["role"] == "assistant":  # the answer continues this text
            chat |= {"continue_final_message": True, "add_generation_prompt": False}
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
