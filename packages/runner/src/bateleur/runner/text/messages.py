"""Checks messages and tools of a conversation, and converts them to the form that chat templates read."""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bateleur.runner.utils.arguments import TEXTS_AND_BYTES, mapping, refuse, require_unicode, shown, text
from bateleur.runner.utils.log_once import log_once

_log = logging.getLogger(__name__)

Message = Mapping[str, Any]
"""`role`, `content` (text, or parts of text) and further fields, with OpenAI's names."""
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_HALF = re.compile(r"(?i)(\\ud[89ab]..\\ud[c-f]..)|\\ud[89a-f]..")
_MAX_DEPTH = 200
"""Maximum depth of truncated arguments that are completed."""


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """Return a conversation with every content as one text and tool-call arguments as objects.

    Clients repeat the whole conversation, so malformed past messages are read as well as possible, and logged. Raises
    ValueError, naming the place, for a message without a role, a tool call without a function name, and a new user
    message (after the last answer) that is not text.
    """
    listed = _sequence("messages", messages, "a list of messages")
    if not listed:
        refuse("messages", messages, "at least one message")
    checked = []
    for i, each in enumerate(listed):
        checked.append(_mapping(f"messages[{i}]", each))
        text(f"messages[{i}].role", checked[i].get("role"))
    roles = [message["role"] for message in checked]
    past = len(roles) - roles[::-1].index("assistant") if "assistant" in roles else 0
    for i, message in enumerate(checked):
        _normalise(f"messages[{i}]", message, asked=i >= past and message["role"] == "user")
    return checked


def checked_tools(tools: object) -> list[dict[str, Any]] | None:
    """Return the tools that the model may call; None if there are none. Raises ValueError that names a wrong field."""
    if tools is None:
        return None
    listed = _sequence("tools", tools, "a list of tools, or None")
    return [checked_tool(f"tools[{i}]", each) for i, each in enumerate(listed)] or None


def checked_tool(name: str, given: object) -> dict[str, Any]:
    """Return one function that the model may call. Raises ValueError that begins with `name`."""
    tool = _mapping(name, given)
    if tool.get("type") != "function":
        refuse(f"{name}.type", tool.get("type"), "'function'")
    function = _mapping(f"{name}.function", tool.get("function"))
    text(f"{name}.function.name", function.get("name"))
    if function.get("parameters") is not None:
        _mapping(f"{name}.function.parameters", function["parameters"])
    return tool


def is_conversation(messages: object) -> bool:
    """Return whether the argument is one conversation, not a list of conversations."""
    return not isinstance(messages, Sequence) or not messages or isinstance(messages[0], Mapping)


def _normalise(name: str, message: dict[str, Any], *, asked: bool) -> None:
    """Convert the fields of a message for templates, in place. name: its path in errors, such as messages[2].

    asked: whether this is a new user message, after the last answer. Content that is not text then raises ValueError;
    in other messages it is converted and logged.
    """
    content = message.get("content")
    if asked and content is None:
        refuse(f"{name}.content", content, "text, or a list of parts")
    if content is None and isinstance(message.get("refusal"), str):
        content = message["refusal"]
    message["content"] = _content(f"{name}.content", content, message, asked=asked)
    for key in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        if message.get(key) is not None and not isinstance(message[key], str):
            _log_fault(f"{key} that is no text is left out")
            del message[key]
    calls = message.get("tool_calls")
    if calls is None and isinstance(message.get("function_call"), Mapping):  # OpenAI's older form
        calls = [{"type": "function", "function": message.pop("function_call")}]
    if calls is None:
        message.pop("tool_calls", None)
    else:
        listed = _sequence(f"{name}.tool_calls", calls, "a list of tool calls, or None")
        message["tool_calls"] = [_call(f"{name}.tool_calls[{i}]", each) for i, each in enumerate(listed)]


def _content(name: str, content: object, message: dict[str, Any], *, asked: bool) -> str:
    """Return a content as one text. Parts are joined with newlines, as vLLM does.

    name: path of the content in errors. message: receives reasoning, see `_part`. asked: see `_normalise`.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return _unicode(name, content, asked=asked)
    if not asked and (not isinstance(content, Sequence) or isinstance(content, TEXTS_AND_BYTES)):
        _log_fault("a content that is no text and no list of parts is written as JSON")
        return json.dumps(content, ensure_ascii=False, default=shown)
    texts, reasoning = [], list[str]()
    for i, each in enumerate(_sequence(name, content, "text, or a list of parts")):
        part = {"type": "text", "text": each} if isinstance(each, str) and not asked else each
        if (written := _part(f"{name}[{i}]", part, reasoning, asked=asked)) is not None:
            texts.append(_unicode(f"{name}[{i}].text", written, asked=asked))
    if reasoning and message.get("reasoning_content") is None:
        message["reasoning_content"] = "\n".join(reasoning)
    return "\n".join(texts)


def _part(name: str, given: object, reasoning: list[str], *, asked: bool) -> str | None:
    """Return the text of a content part; None for reasoning, which is appended to `reasoning`.

    name: path of the part in errors. asked: whether a part that is not text raises ValueError, see `_normalise`.
    """
    if not asked and not isinstance(given, Mapping):
        _log_fault("a part that is not an object is written as JSON")
        return None if given is None else json.dumps(given, ensure_ascii=False, default=shown)
    part = _mapping(name, given)
    kind = part.get("type")
    if kind in ("thinking", "reasoning"):
        reasoning.append(str(part.get(kind) or part.get("text") or ""))
        return None
    written = part.get("refusal") if kind == "refusal" else part.get("text")
    if kind in _TEXT_PARTS and isinstance(written, str):
        return written
    if asked:
        if kind in _TEXT_PARTS:
            refuse(f"{name}.text", written, "text")
        refuse(f"{name}.type", kind, "'text': this server reads text only, and no images")
    _log_fault(f"a part of the type {shown(kind)} is replaced by its text or its type")
    return written if isinstance(written, str) else f"[{kind}]"


def _unicode(name: str, written: str, *, asked: bool) -> str:
    """Return the text as valid Unicode. Half of a surrogate pair is replaced, or raises ValueError if `asked`.

    name: path of the text in errors. asked: whether it is in a new user message.
    """
    if asked or written.isascii():
        require_unicode(name, written)
        return written
    return written.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _call(name: str, given: object) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, because templates serialise them again.

    name: path of the call in errors. Raises ValueError for a call without a function name.
    """
    call = _mapping(name, given)
    if call.get("type") == "custom" and isinstance(custom := call.pop("custom", None), Mapping):
        call |= {"type": "function", "function": {**custom, "arguments": {"input": custom.get("input")}}}
    function = _mapping(f"{name}.function", call.get("function"))
    text(f"{name}.function.name", function.get("name"))
    function["arguments"] = _arguments(function.get("arguments"))
    return call | {"function": function}


def _arguments(given: object) -> dict[str, Any]:
    """Return the arguments of a call as an object. Truncated JSON is completed, other text is {"arguments": text}."""
    if isinstance(given, str) and "\\ud" in given.lower():
        given = _HALF.sub(lambda found: found[1] or "\\ufffd", given)
    value = given
    for _ in range(2):  # some clients encode twice
        if isinstance(value, str):
            value = _json_value(value) if value.strip() else {}
    if value is None:
        return {}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return dict(value)
    _log_fault("arguments of a past tool call that are no JSON object are read as well as possible")
    for cut in _completions(given) if isinstance(given, str) else ():
        if isinstance(value := _json_value(cut), dict):
            return value
    return {"arguments": given}


def _json_value(written: str) -> Any:
    """Parse JSON text; return the text itself if it is not JSON."""
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return written


def _completions(written: str) -> Iterator[str]:
    """Yield truncated JSON with its strings and brackets closed: first with its last member, then without it."""
    open_ones, quoted, escaped, comma = "", False, False, 0
    for i, char in enumerate(written):
        if quoted:
            quoted, escaped = char != '"' or escaped, char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char in "{[":
            open_ones = "}]"["{[".index(char)] + open_ones
        elif char in "}]":
            open_ones = open_ones[1:]
        elif char == "," and open_ones == "}":
            comma = i
        if len(open_ones) > _MAX_DEPTH:
            return
    yield written[: len(written) - escaped] + '"' * quoted + open_ones
    yield written[:comma] + "}"


def _log_fault(fault: str) -> None:
    log_once(_log, f"malformed message in a conversation: {fault}")


def _mapping(name: str, value: object) -> dict[str, Any]:
    return mapping(name, value, "an object: a mapping from names to values")


def _sequence(name: str, value: object, rule: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, TEXTS_AND_BYTES):
        refuse(name, value, rule)
    return value
