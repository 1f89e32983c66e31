"""Messages of a conversation, and tools, checked and as templates want them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bateleur.runner.arguments import TEXTS_AND_BYTES, refuse, require_unicode, text

Message = Mapping[str, Any]
"""`role`, `content` (text, or parts of text), and what else the template knows; OpenAI's names."""


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """A conversation with every content as one text, and arguments of tool calls as objects.

    Raises ValueError that names the place, such as messages[2].content, of what is malformed, or is no text.
    """
    listed = _sequence("messages", messages, "a list of messages")
    if not listed:
        refuse("messages", messages, "at least one message")
    return [_message(f"messages[{i}]", each) for i, each in enumerate(listed)]


def checked_tools(tools: object) -> list[dict[str, Any]] | None:
    """Functions that the model may call; none where there are none. Raises ValueError that names the place."""
    if tools is None:
        return None
    checked = []
    for i, each in enumerate(_sequence("tools", tools, "a list of tools, or None")):
        name = f"tools[{i}]"
        tool = _mapping(name, each)
        if tool.get("type") != "function":
            refuse(f"{name}.type", tool.get("type"), "'function'")
        function = _mapping(f"{name}.function", tool.get("function"))
        text(f"{name}.function.name", function.get("name"))
        if function.get("parameters") is not None:
            _mapping(f"{name}.function.parameters", function["parameters"])
        checked.append(tool)
    return checked or None


def is_conversation(messages: object) -> bool:
    """Whether it is one conversation, and not a list of them."""
    return not isinstance(messages, Sequence) or not messages or isinstance(messages[0], Mapping)


def _message(name: str, given: object) -> dict[str, Any]:
    message = _mapping(name, given)
    role = text(f"{name}.role", message.get("role"))
    calls = message.get("tool_calls")
    if message.get("content") is None and role != "assistant":
        refuse(f"{name}.content", message.get("content"), "text, or a list of parts")
    message["content"] = _content(f"{name}.content", message.get("content"))
    for key in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        if message.get(key) is not None and not isinstance(message[key], str):
            refuse(f"{name}.{key}", message[key], "text, or None")
    if calls is None:
        message.pop("tool_calls", None)
    else:
        listed = _sequence(f"{name}.tool_calls", calls, "a list of tool calls, or None")
        message["tool_calls"] = [_call(f"{name}.tool_calls[{i}]", each) for i, each in enumerate(listed)]
    return message


def _content(name: str, content: object) -> str:
    """Parts are joined by newlines, as vLLM does; nothing is an empty text, since some templates know no None."""
    if content is None:
        return ""
    if isinstance(content, str):
        require_unicode(name, content)
        return content
    parts = []
    for i, each in enumerate(_sequence(name, content, "text, or a list of parts")):
        part = _mapping(f"{name}[{i}]", each)
        if part.get("type") != "text":
            refuse(
                f"{name}[{i}].type",
                part.get("type"),
                "'text': models of text alone are served, and no images",
            )
        if not isinstance(part.get("text"), str):
            refuse(f"{name}[{i}].text", part.get("text"), "text")
        require_unicode(f"{name}[{i}].text", part["text"])
        parts.append(part["text"])
    return "\n".join(parts)


def _call(name: str, given: object) -> dict[str, Any]:
    """A call of a tool; its arguments as an object, where OpenAI has them as JSON and templates write them again."""
    call = _mapping(name, given)
    function = _mapping(f"{name}.function", call.get("function"))
    text(f"{name}.function.name", function.get("name"))
    arguments, place = function.get("arguments"), f"{name}.function.arguments"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            refuse(place, function["arguments"], "a JSON object")
    function["arguments"] = _mapping(place, {} if arguments is None else arguments)
    return call | {"function": function}


def _mapping(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        refuse(name, value, "an object: a mapping from names to values")
    return dict(value)


def _sequence(name: str, value: object, rule: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, TEXTS_AND_BYTES):
        refuse(name, value, rule)
    return value
