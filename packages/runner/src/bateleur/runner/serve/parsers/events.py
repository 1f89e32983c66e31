"""Events: the parts of a model's answer, in the order in which they were written.

Texts of neighbouring events of one kind join. What a stream reports joins to what one report of the whole answer says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool begins. Its arguments follow."""

    index: int
    """Its number among the calls of the answer, from 0."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next part of the arguments of a call, as JSON text.

    All parts together are a JSON object, unless `End` says that the answer was cut.
    """

    index: int
    """Of the call."""
    text: str


@dataclass(frozen=True, slots=True)
class End:
    """The answer ends. Nothing follows."""

    finish_reason: str
    """`stop`, `tool_calls`, `length`, `abort` or `error`."""
    stop_reason: int | str | None
    """The stop token or stop string that ended it, or what went wrong."""


Event: TypeAlias = Content | Reasoning | ToolCall | Arguments | End


def merged(events: Sequence[Event]) -> list[Event]:
    """The same with neighbours of one kind joined, and without empty texts."""
    result: list[Event] = []
    for event in events:
        if isinstance(event, ToolCall | End):
            result.append(event)
            continue
        last = result[-1] if result else None
        if type(last) is type(event) and getattr(last, "index", 0) == getattr(event, "index", 0):
            assert isinstance(last, Content | Reasoning | Arguments)
            result[-1] = replace(last, text=last.text + event.text)
        elif event.text:
            result.append(event)
    return result


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
