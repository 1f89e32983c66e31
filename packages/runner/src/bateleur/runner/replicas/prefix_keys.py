"""Keys of the prefixes of a request, before it has token ids: of its text, at lengths that grow by an eighth.

A request of a million characters has about 75 of them, and whatever two requests share, the longest prefix with a key
is at least eight ninths of it. Those of a chat end with its messages, too, so that the next turn of one is told from
other chats that begin alike and differ in the last message alone.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

SHORTEST = 128
"""Bytes of the first prefix: what is shorter is soon read again."""
_MOST_MESSAGES = 64
"""Messages, the first ones, whose ends have keys."""
_OF_TEMPLATES = (
    *("model", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort"),
    *("instructions", "system", "thinking", "reasoning", "previous_response_id"),
)
"""Fields of a conversation that may stand before its messages."""
_MESSAGES = {"/chat/completions": "messages", "/v1/messages": "messages", "/v1/responses": "input"}
"""Paths of conversations, and the fields that hold their messages."""
PATHS = (*_MESSAGES, "/completions")
"""Ends of the paths of requests with a prompt."""


def prefix_keys(path: str, body: Mapping[str, Any]) -> tuple[bytes, ...]:
    """Keys of ever longer prefixes of what a body asks at a path; none where there is no prompt, or a short one.

    Of several prompts the first counts. What is wrong with a body is for others to say.
    """
    try:
        field = next((name for end, name in _MESSAGES.items() if path.endswith(end)), None)
        if field is not None:
            messages = [body[field]] if isinstance(body.get(field), str) else body.get(field)
            head = _bytes([body.get(name) for name in _OF_TEMPLATES])
            return tuple(_keys(head, map(_bytes, messages if isinstance(messages, list) else ())))
        if path.endswith("/completions"):
            return tuple(_keys(_bytes([body.get("model")]), [_prompt(body.get("prompt"))]))
    except RecursionError:
        pass  # nested as no engine reads it
    return ()


def _prompt(prompt: Any) -> bytes:
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if isinstance(first, str | list):
        prompt = first
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass")
    try:
        return array("I", prompt).tobytes()
    except (TypeError, OverflowError):
        return b""


def _bytes(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _keys(head: bytes, parts: Iterable[bytes]) -> Iterator[bytes]:
    """Of the text of all parts. The head is no part of it: it tells apart what shares nothing."""
    state, told = hashlib.blake2b(head, digest_size=16, person=b"prefix"), 0
    length, end = 0, SHORTEST
    for number, part in enumerate(parts):
        at = 0
        while (stop := at + end - length) <= len(part):
            state.update(memoryview(part)[at:stop])
            yield state.digest()
            length = told = end
            at, end = stop, end + (end >> 3)
        state.update(memoryview(part)[at:])
        length += len(part) - at
        if number < _MOST_MESSAGES and max(told + 1, SHORTEST) <= length:
            yield state.digest()
            told = length
