"""The messages of a chat, in the form that chat templates want."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from bateleur.runner.arguments import TEXTS_AND_BYTES, refuse, text
from bateleur.runner.openai.fields import mapping

_ROLES = {"developer": "system"}
"""OpenAI's newer name for what templates know by its older one."""


def messages(name: str, value: Any) -> tuple[dict[str, Any], ...]:
    """Check messages as JSON has them: content becomes text, arguments of tool calls become objects.

    Other fields of a message are handed on, for templates that know them. Raises ValueError that names the place.
    """
    if not isinstance(value, Sequence) or isinstance(value, TEXTS_AND_BYTES) or not value:
        refuse(name, value, "a list of at least one message")
    return tuple(_message(f"{name}[{i}]", each) for i, each in enumerate(value))


def _message(name: str, value: Any) -> dict[str, Any]:
    fields = {key: each for key, each in mapping(name, value).items() if each is not None}
    role = text(f"{name}.role", fields.get("role"))
    fields["role"] = _ROLES.get(role, role)
    if "content" in fields:
        fields["content"] = _content(f"{name}.content", fields["content"])
    elif "tool_calls" in fields:
        fields["content"] = ""
    else:
        raise ValueError(f"{name}.content is absent; a message needs content or tool_calls")
    if "tool_calls" in fields:
        fields["tool_calls"] = _tool_calls(f"{name}.tool_calls", fields["tool_calls"])
    return fields


def _content(name: str, value: Any) -> str:
    """Text as it is; parts of text one below the other. Whatever is no text is refused."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse(name, value, "text, or a list of parts of text")
    return "\n".join(_part(f"{name}[{i}]", each) for i, each in enumerate(value))


def _part(name: str, value: Any) -> str:
    fields = mapping(name, value)
    if fields.get("type") != "text":
        refuse(f"{name}.type", fields.get("type"), "text: models read nothing else")
    if not isinstance(fields.get("text"), str):
        refuse(f"{name}.text", fields.get("text"), "text")
    return str(fields["text"])


def _tool_calls(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        refuse(name, value, "a list of tool calls")
    return [_tool_call(f"{name}[{i}]", each) for i, each in enumerate(value)]


def _tool_call(name: str, value: Any) -> dict[str, Any]:
    call = mapping(name, value)
    function = mapping(f"{name}.function", call.get("function"))
    text(f"{name}.function.name", function.get("name"))
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        arguments = _object(f"{name}.function.arguments", arguments)
    return {**call, "function": {**function, "arguments": mapping(f"{name}.function.arguments", arguments)}}


def _object(name: str, value: str) -> Any:
    try:
        return json.loads(value) if value.strip() else {}
    except (ValueError, RecursionError):
        refuse(name, value, "a JSON object, as text")
