"""Events as the message of a chat completion, whole or in deltas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bateleur.runner.serve.parsers.answer import AnswerParser
from bateleur.runner.serve.parsers.arguments import new_call_id
from bateleur.runner.serve.parsers.events import Arguments, Content, Event, Reasoning, ToolCall
from bateleur.runner.serve.parsers.think import Think
from bateleur.runner.serve.parsers.tool_format import ToolFormat


def chat_delta(events: Sequence[Event]) -> dict[str, Any]:
    """What events add to a message, as the `delta` of a chunk; empty if they add nothing."""
    content = "".join(each.text for each in events if isinstance(each, Content))
    reasoning = "".join(each.text for each in events if isinstance(each, Reasoning))
    calls: list[dict[str, Any]] = []
    for each in events:
        if isinstance(each, ToolCall):
            function = {"name": each.name, "arguments": ""}
            calls.append({"index": each.index, "id": each.id, "type": "function", "function": function})
        elif isinstance(each, Arguments):
            if not calls or calls[-1]["index"] != each.index:
                calls.append({"index": each.index, "function": {"arguments": ""}})
            calls[-1]["function"]["arguments"] += each.text
    delta: dict[str, Any] = {}
    if reasoning:
        delta = {"reasoning": reasoning, "reasoning_content": reasoning}  # both names are in use
    if content:
        delta["content"] = content
    return delta | ({"tool_calls": calls} if calls else {})


def chat_message(events: Sequence[Event]) -> dict[str, Any]:
    """All events of an answer as a message, but for its role."""
    delta = chat_delta(events)
    for call in delta.get("tool_calls", ()):
        del call["index"]
    return {"content": None if "tool_calls" in delta else "", **delta}


class Message:
    """Reads an answer of text, without token ids, as the message of a chat completion."""

    def __init__(
        self,
        *,
        reasoning: Think | None = None,
        calls: ToolFormat | None = None,
        make_id: Callable[[], str] = new_call_id,
    ) -> None:
        """`reasoning` and `calls`: what is looked for in the text. `make_id`: names calls."""
        self._parser = AnswerParser(reasoning=reasoning, calls=calls, make_id=make_id)

    def feed(self, text: str) -> dict[str, Any]:
        """What the next piece of text adds to the message."""
        return chat_delta(self._parser.feed(text))

    def end(self, text: str = "") -> dict[str, Any]:
        """What the last piece of text adds to the message."""
        return chat_delta(self._parser.feed(text) + self._parser.finish())

    def whole(self, text: str) -> dict[str, Any]:
        """The message of a whole text."""
        return chat_message(self._parser.feed(text) + self._parser.finish())
