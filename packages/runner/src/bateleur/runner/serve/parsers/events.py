"""Events: the parts of a model's answer, in the order in which they were written.

Texts of neighbouring events of one kind join. What a stream reports joins to what one report of the whole answer says.
"""

from __future__ import annotations

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
