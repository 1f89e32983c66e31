"""Events: the parts of an answer, in order. `merged` makes those of a stream equal to those of the whole answer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias


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
    """Start of a tool call, followed by its arguments."""

    index: int
    """Index of the call in the answer, from 0."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A part of the arguments of a call. All parts together are a JSON object, unless the answer was truncated."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class End:
    """End of the answer, the last event."""

    finish_reason: str
    """`stop`, `tool_calls`, `length`, `abort` or `error`."""
    stop_reason: int | str | None
    """Stop token id, stop string, or error message."""


Event: TypeAlias = Content | Reasoning | ToolCall | Arguments | End


def merged(events: Sequence[Event]) -> list[Event]:
    """Join adjacent text events of one kind, and drop empty ones."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, ToolCall | End):
            result.append(event)
        elif isinstance(last, type(event)) and getattr(last, "index", 0) == getattr(event, "index", 0):
            result[-1] = replace(last, text=last.text + event.text)
        elif event.text:
            result.append(event)
    return result
